"""The tools for real: in a sandbox, against a search server, in Chromium, on an X server, over MCP."""

import asyncio
import io
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from PIL import Image

from examples.search.server import serve
from vime.agents.interaction import Call, perform
from vime.agents.sandbox import SandboxSpec, open_sandbox
from vime.agents.tools import Context, Observation, Tool, make, mcp
from vime.errors import VimeError

Do = Callable[..., Awaitable[tuple[Call, Observation]]]


def with_tools(tools: list[Tool], test: Callable[[Do, Context], Awaitable[None]], spec: SandboxSpec | None = None) -> None:
    async def go() -> None:
        box = await open_sandbox(spec) if spec else None
        try:
            async with Context(box) as ctx:

                async def do(tool: str, **args: Any) -> tuple[Call, Observation]:
                    call = Call("c", tool, args)
                    return call, await perform(call, {t.name: t for t in tools}, ctx)

                await test(do, ctx)
        finally:
            if box:
                await box.stop()

    asyncio.run(asyncio.wait_for(go(), 100))


def test_shell_editor_and_python_share_a_sandbox(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)  # the agent is another user
    (tmp_path / "a.py").write_text("x = 1\ny = 1\nprint(x + y)\n")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub/b.txt").write_text("no newline")
    (tmp_path / "run.sh").write_text("echo hi\n")
    (tmp_path / "run.sh").chmod(0o755)
    (tmp_path / "big.txt").write_text("first\n" + "line\n" * 300_000)

    async def test(do: Do, ctx: Context) -> None:
        async def says(text: str, status: str, tool: str, **args: Any) -> None:
            call, seen = await do(tool, **args)
            assert (call.status, text in seen.text) == (status, True), seen.text

        await says("2", "ok", "shell", command="python3 a.py")
        await do("shell", command="cd sub; export V=7")
        await says("sub\n7", "ok", "shell", command="pwd; echo $V")
        await says("[exit code 3]", "ok", "shell", command="(exit 3)")
        await says("stopped: it took too long", "timeout", "shell", command="echo begun; sleep 60")
        await says("7", "ok", "shell", command="echo $V")
        call, seen = await do("shell", command="seq 100000")
        assert call.truncated and "characters left out" in seen.text and seen.text.startswith("1\n2\n") and "99999" in seen.text

        await says("     1\tx = 1\n     2\ty = 1", "ok", "editor", command="view", path="a.py")
        await says("     2\ty = 1\n     3\tprint(x + y)", "ok", "editor", command="view", path="/work/a.py", view_range=(2, -1))
        await says("sub/b.txt", "ok", "editor", command="view", path=".")
        await says("it occurs 2 times", "error", "editor", command="str_replace", path="a.py", old_str=" = 1", new_str=" = 5")
        await says("it occurs 0 times", "error", "editor", command="str_replace", path="a.py", old_str="nope", new_str="")
        await says("x = 5", "ok", "editor", command="str_replace", path="a.py", old_str="x = 1", new_str="x = 5")
        await says("6", "ok", "shell", command="python3 /work/a.py")
        await says("as it was", "ok", "editor", command="undo", path="a.py")
        await says("was not changed", "error", "editor", command="undo", path="a.py")
        await says("2", "ok", "shell", command="python3 /work/a.py")
        await says("     1\t# top\n     2\tx = 1", "ok", "editor", command="insert", path="a.py", insert_line=0, new_str="# top")
        await says("     2\tlast", "ok", "editor", command="insert", path="sub/b.txt", insert_line=1, new_str="last")
        await says("must be 0 to 4", "error", "editor", command="insert", path="a.py", insert_line=9, new_str="")
        await says("written", "ok", "editor", command="create", path="new/deep.txt", file_text="hé\n")
        await says("exists", "error", "editor", command="create", path="a.py", file_text="")
        await says("hé", "ok", "shell", command="cat /work/new/deep.txt")
        await do("editor", command="undo", path="new/deep.txt")
        await says("No such file", "ok", "editor", command="view", path="new/deep.txt")
        await says("there is no file", "error", "editor", command="insert", path="gone", insert_line=0, new_str="")
        await says("command: Input should be 'view'", "error", "editor", command="delete", path="a.py")

        await says("echo ho", "ok", "editor", command="str_replace", path="run.sh", old_str="hi", new_str="ho")
        await says("ho", "ok", "shell", command="/work/run.sh")  # it stays a program
        for do_this in ({"command": "str_replace", "old_str": "first", "new_str": ""}, {"command": "view"}):
            await says("more than this tool can read", "error", "editor", path="big.txt", **do_this)
        await says("1500006", "ok", "shell", command="wc -c /work/big.txt")  # and is not cut
        await do("shell", command="cd /work; rm sub/b.txt; mkdir sub/b.txt")
        await says("Is a directory", "error", "editor", command="undo", path="sub/b.txt")

        await says("[0, 1, 4]", "ok", "python", code="print([i * i for i in range(3)])")
        await says("ZeroDivisionError", "ok", "python", code="1 / 0")

    with_tools(make(["shell", "editor", "python"], {"shell": {"timeout_s": 0.5}}), test, SandboxSpec(base=str(tmp_path)))
    assert (tmp_path / "a.py").read_text().startswith("x = 1"), "the base stays as it is"


def test_a_tool_that_needs_a_sandbox_says_so() -> None:
    async def test(do: Do, ctx: Context) -> None:
        with pytest.raises(VimeError, match="the task opened none"):
            await do("shell", command="ls")

    with_tools(make(["shell"], {}), test)


DOCUMENTS = [
    {"id": "7", "title": "Frost", "text": "Water freezes at zero degrees."},
    {"id": "8", "title": "Steam", "text": "Water boils at a hundred degrees. " + "x" * 500},
    {"id": "9", "text": "Nothing about it."},
]


def test_search_and_open() -> None:
    async def with_server() -> None:
        runner, url = await serve(DOCUMENTS)
        tools = {t.name: t for t in make(["search", "open"], {"search": {"url": url, "k": 2}, "open": {"url": url, "max_chars": 100}})}
        async with Context() as ctx:

            async def do(tool: str, **args: str) -> tuple[Call, Observation]:
                call = Call("c", tool, args)
                return call, await perform(call, tools, ctx)

            call, seen = await do("search", query="when does water FREEZE, freezes?")
            assert seen.text.splitlines()[0] == "[7] Frost: Water freezes at zero degrees." and call.metadata == {"results": 2}
            call, seen = await do("search", query="zebra")
            assert (call.status, seen.text, call.metadata) == ("ok", "nothing found", {"results": 0})
            call, seen = await do("open", id="8")
            assert call.truncated and seen.text.startswith("Water boils")
            call, seen = await do("open", id="70")
            assert (call.status, seen.text) == ("error", "open failed: ValueError: no such document")
            await runner.cleanup()
            with pytest.raises(VimeError, match="is it running"):
                await do("search", query="water")

    asyncio.run(with_server())


async def site(folder: Path) -> tuple[web.AppRunner, int]:
    async def away(request: web.Request) -> web.Response:
        raise web.HTTPFound(f"http://{request.query['to']}/")

    app = web.Application()
    app.add_routes([web.get("/away", away), web.static("/", folder)])
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return runner, runner.addresses[0][1]


def is_png(data: bytes, size: tuple[int, int]) -> bool:
    image = Image.open(io.BytesIO(data))
    return image.format == "PNG" and image.size == size


@pytest.mark.skipif(not shutil.which("chromium"), reason="no chromium")
def test_the_browser_goes_where_it_may(tmp_path: Path) -> None:
    inside, outside = tmp_path / "in", tmp_path / "out"
    for folder in (inside, outside):
        folder.mkdir()
    (outside / "index.html").write_text("secret")
    (inside / "a.html").write_text(
        '<title>First</title><h1>Hi</h1><a href="b.html">next</a><input id="q" onchange="document.title = this.value"><div style="height: 3000px">'
    )
    (inside / "b.html").write_text("second")

    async def test(do: Do, ctx: Context) -> None:
        (one, port), (two, other) = await site(inside), await site(outside)
        tool.hosts.append(f"localhost:{port}")
        try:
            for root in (f"file://{inside}", f"http://localhost:{port}"):
                call, seen = await do("browser", action="goto", url=f"{root}/a.html")
                assert call.status == "ok" and "First" in seen.text and 'heading "Hi"' in seen.text and is_png(seen.images[0], (400, 300))
                _, seen = await do("browser", action="type", target="#q", text="hey")
                assert "textbox: hey" in seen.text
                _, seen = await do("browser", action="press", text="Enter")
                assert "\nhey\n" in seen.text
                _, lower = await do("browser", action="scroll", dy=100)
                assert is_png(lower.images[0], (400, 300))
                _, seen = await do("browser", action="click", target="text=next")
                assert "second" in seen.text
                _, seen = await do("browser", action="back")
                assert "Hi" in seen.text
            away = [
                f"file://{outside}/index.html",
                f"file://{inside}/../out/index.html",
                "file:///etc/passwd",
                f"http://localhost:{other}/index.html",
            ]
            away += [
                f"http://127.0.0.1:{port}/b.html",
                f"http://localhost:{port}/away?to=127.0.0.1:{other}",
                f"http://localhost:{port}/away?to=localhost:{other}",
                f"http://localhost:{port}/away?to=[::1]:{other}",
            ]
            for url in [*away, "chrome://version", "view-source:file:///etc/passwd"]:
                call, seen = await do("browser", action="goto", url=url)
                assert call.status == "error" and "secret" not in seen.text, url
            call, _ = await do("browser", action="click", x=5, y=5)
            assert call.status == "ok"
            real = tool.allows
            tool.allows = lambda url: real(url) and "b.html" not in url  # a link leads where it may not go, past the route
            await ctx.state["page"].context.unroute_all()
            await do("browser", action="goto", url=f"http://localhost:{port}/a.html")
            call, seen = await do("browser", action="click", target="text=next")
            assert call.status == "error" and "second" not in seen.text and ctx.state["page"].url == "about:blank"
        finally:
            await one.cleanup()
            await two.cleanup()

    (tool,) = tools = make(["browser"], {"browser": {"files": str(inside), "width": 400, "height": 300}})
    with_tools(tools, test)


WINDOW = """\
import sys, tkinter
root = tkinter.Tk()
root.geometry("400x300+0+0")
tkinter.Button(root, text="press", command=lambda: open(sys.argv[1], "a").write("pressed\\n")).place(x=0, y=0, width=100, height=100)
field = tkinter.Entry(root)
field.place(x=0, y=150)
field.bind("<Return>", lambda e: open(sys.argv[1], "a").write(field.get() + "\\n"))
root.mainloop()
"""


@pytest.mark.skipif(not (shutil.which("Xvfb") and shutil.which("xdotool")), reason="no Xvfb or no xdotool")
def test_the_desktop_is_seen_and_used(tmp_path: Path) -> None:
    pytest.importorskip("tkinter")
    (tmp_path / "window.py").write_text(WINDOW)
    done = tmp_path / "done"

    async def test(do: Do, ctx: Context) -> None:
        _, first = await do("desktop", action="look")
        assert is_png(first.images[0], (640, 480))
        for _ in range(20):
            await do("desktop", action="click", x=50, y=50)
            if done.exists():
                break
        assert "pressed" in done.read_text()
        await do("desktop", action="click", x=50, y=160)
        await do("desktop", action="type", text="hello there")
        call, seen = await do("desktop", action="key", text="Return")
        assert call.status == "ok" and done.read_text().endswith("hello there\n") and is_png(seen.images[0], (640, 480))

    window = [sys.executable, str(tmp_path / "window.py"), str(done)]
    with_tools(make(["desktop"], {"desktop": {"command": window, "width": 640, "height": 480}}), test)


def test_tools_of_mcp_servers_and_ours_in_one(tmp_path: Path) -> None:
    """`vime mcp` over stdio is a server, the client is one of ours; the same over HTTP; the sandbox is behind both."""
    uvicorn = pytest.importorskip("uvicorn")
    tmp_path.chmod(0o755)
    (tmp_path / "a.txt").write_text("of the base")
    root = Path(__file__).parents[2]

    async def go() -> None:
        async with Context() as ctx:
            command = f"env PYTHONPATH={root} {sys.executable} -m vime.cli mcp shell submit --base {tmp_path}"
            tools = {t.name: t for t in await mcp.connect({"box": command}, ctx)}
            assert set(tools) == {"box_shell", "box_submit"}
            assert tools["box_shell"].schema()["function"]["parameters"]["required"] == ["command"]
            for asked, status, said in (({"command": "cat a.txt"}, "ok", "of the base"), ({}, "error", "command: Field required")):
                call = Call("c", "box_shell", asked)
                seen = await perform(call, tools, ctx)
                assert call.status == status and said in seen.text
        served = uvicorn.Server(uvicorn.Config(mcp.server([Shot()], Context()).streamable_http_app(), port=0, log_level="error"))
        serving = asyncio.create_task(served.serve())
        while not served.started:
            await asyncio.sleep(0.02)
        url = f"http://127.0.0.1:{served.servers[0].sockets[0].getsockname()[1]}/mcp"
        async with Context() as ctx:
            (shot,) = await mcp.connect({"far": url}, ctx)
            seen = await perform(Call("c", "far_shot", {}), {shot.name: shot}, ctx)
            assert (seen.text, seen.images) == ("here", [b"\x89PNG"])
        served.should_exit = True
        await serving
        async with Context() as ctx:
            with pytest.raises(VimeError, match=r"MCP server 'gone' .*: Connect"):
                await mcp.connect({"gone": url}, ctx)

    asyncio.run(asyncio.wait_for(go(), 100))


@pytest.mark.parametrize("at", ["'no end", "", "/no/such/program", "true", f"{sys.executable} -c 'import time; time.sleep(600)'"])
def test_an_mcp_server_that_is_none_is_named(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp, "ANSWER", 0.5)

    async def go() -> None:
        async with Context() as ctx:
            with pytest.raises(VimeError, match="MCP server 'odd' "):
                await mcp.connect({"odd": at}, ctx)

    asyncio.run(asyncio.wait_for(go(), 30))


@pytest.mark.parametrize("options", ["{", "[]", "3", '{"submit": 3}'])
def test_options_of_vime_mcp_are_an_object(options: str) -> None:
    with pytest.raises(VimeError, match=r"--args .* is not JSON"):
        mcp.command(["submit"], options, None)


class Shot(Tool):
    name, description = "shot", "A picture."

    async def run(self, args: Any, ctx: Context) -> Observation:
        return Observation("here", [b"\x89PNG"])
