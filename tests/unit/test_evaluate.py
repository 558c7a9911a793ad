"""`vime eval` against an endpoint that follows a script: reports, resuming, what is tried again and what is not."""

import asyncio
import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from vime import evaluate
from vime.agents import endpoint
from vime.errors import VimeError
from vime.sections import EndpointConfig

Answer = Callable[[dict[str, Any]], tuple[int, Any]]


class Server:
    """/v1/chat/completions as `answer` says, in a thread of its own."""

    def __init__(self, answer: Answer):
        self.answer, self.asked, self.url = answer, list[dict[str, Any]](), ""
        self.loop, ready = asyncio.new_event_loop(), threading.Event()

        async def start() -> None:
            app = web.Application()
            app.add_routes([web.post("/v1/chat/completions", self.chat)])
            self.runner = web.AppRunner(app)
            await self.runner.setup()
            await web.TCPSite(self.runner, "127.0.0.1", 0).start()
            self.url = f"http://127.0.0.1:{self.runner.addresses[0][1]}/v1"
            ready.set()

        def run() -> None:
            self.loop.run_until_complete(start())
            self.loop.run_forever()

        self.thread = threading.Thread(target=run)
        self.thread.start()
        ready.wait(20)

    async def chat(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.asked.append(body | {"key": request.headers.get("Authorization")})
        status, said = self.answer(body)
        return web.json_response(said, status=status)

    def close(self) -> None:
        asyncio.run_coroutine_threadsafe(self.runner.cleanup(), self.loop).result(20)
        self.loop.call_soon_threadsafe(self.loop.stop)
        self.thread.join(20)
        self.loop.close()


def said(content: str, call: dict[str, Any] | None = None) -> tuple[int, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": content}
    if call:
        message["tool_calls"] = [{"id": "c", "type": "function", "function": {"name": "calculator", "arguments": json.dumps(call)}}]
    return 200, {"id": "r", "choices": [{"message": message, "finish_reason": "stop"}], "usage": {"completion_tokens": 7}}


def calculates(body: dict[str, Any]) -> tuple[int, Any]:
    """Asks the calculator, repeats what it said; it takes every sign for a plus."""
    last = body["messages"][-1]
    if last["role"] == "tool":
        return said(last["content"])
    a, _, b = last["content"].split()
    return said("", {"expression": f"{a}+{b}"})


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Answer], Server]]:
    monkeypatch.setattr(endpoint, "WAIT", (0.01, 0.01))
    monkeypatch.setenv("THE_KEY", "k1")
    started: list[Server] = []

    def start(answer: Answer) -> Server:
        started.append(Server(answer))
        return started[-1]

    yield start
    for s in started:
        s.close()


def file(folder: Path, url: str, rows: list[tuple[str, str]], more: str = "") -> str:
    (folder / "rows.jsonl").write_text("".join(json.dumps({"prompt": p, "label": label}) + "\n" for p, label in rows))
    path = folder / "eval.toml"
    path.write_text(f"""
name = "sums"
out = "{folder}"
n_samples = 2
{more}
[model]
url = "{url}"
name = "m"
key_env = "THE_KEY"
sampling = {{ temperature = 0.5 }}
[data]
prompts = "{folder}/rows.jsonl"
[agent]
task = "examples.tools.task:Arithmetic"
""")
    return str(path)


ROWS = [("12 plus 7", "19"), ("12 minus 7", "5"), ("1 plus 1", "2")]


def test_a_report_and_its_table_and_no_episode_twice(tmp_path: Path, serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(calculates)
    path = file(tmp_path, server.url, ROWS)
    assert evaluate.command(path, []) == 0
    report = [json.loads(line) for line in (tmp_path / "sums.jsonl").read_text().splitlines()]
    assert sorted((r["index"], r["row"], r["reward"]) for r in report) == [(0, 0, 1), (1, 0, 1), (2, 1, 0), (3, 1, 0), (4, 2, 1), (5, 2, 1)]
    assert all(r["status"] == "answered" and [s["tokens"] for s in r["steps"]] == [7, 7] for r in report)
    assert all(a["key"] == "Bearer k1" and a["temperature"] == 0.5 and a["model"] == "m" for a in server.asked)
    assert server.asked[0]["tools"][0]["function"]["name"] == "calculator"
    shown = capsys.readouterr().out
    assert "0.667" in shown and "4 of 6" in shown and "calls   ok 6" in shown
    # an interrupted report: one line is gone, another cut off
    lines = (tmp_path / "sums.jsonl").read_text().splitlines()
    (tmp_path / "sums.jsonl").write_text("\n".join(lines[:4]) + "\n" + lines[4][:30])
    asked = len(server.asked)
    assert evaluate.command(path, []) == 0
    assert len(server.asked) - asked == 4, "two turns of two episodes"
    assert "6 episodes, 4 of them in" in capsys.readouterr().out
    assert sorted(evaluate.read(tmp_path / "sums.jsonl")) == [0, 1, 2, 3, 4, 5]


def test_an_overload_is_waited_for_and_a_refusal_is_not(tmp_path: Path, serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    fails = [503, 429, 500]

    def answer(body: dict[str, Any]) -> tuple[int, Any]:
        if body["messages"][0]["content"].startswith("1 "):
            return 401, {"error": "no such key"}
        return (fails.pop(), {}) if fails else calculates(body)

    server = serve(answer)
    assert evaluate.command(file(tmp_path, server.url, ROWS[1:], "parallel = 1"), []) == 1
    shown = capsys.readouterr().out
    assert "episode 2: " in shown and "401" in shown and "no such key" in shown and "$THE_KEY" in shown
    assert sum(a["messages"][0]["content"].startswith("1 ") for a in server.asked) == 2, "once for each episode"
    assert sorted(evaluate.read(tmp_path / "sums.jsonl")) == [0, 1]


def test_nothing_is_waited_for_after_the_last_try(serve: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server, waited, sleep = serve(lambda body: (503, {})), list[float](), asyncio.sleep

    def counted(seconds: float) -> Any:
        waited.append(seconds)
        return sleep(seconds)

    async def go() -> None:
        async with aiohttp.ClientSession() as http:
            await endpoint.ask(http, EndpointConfig(url=server.url, name="m", retries=2), [], [])

    monkeypatch.setattr(endpoint.asyncio, "sleep", counted)
    with pytest.raises(VimeError, match="503"):
        asyncio.run(go())
    assert len(server.asked) == 3 and waited.count(0.01) == 2


def test_a_full_context_ends_the_episode(tmp_path: Path, serve: Any) -> None:
    server = serve(lambda body: (400, {"error": {"message": "This model's maximum context length is 10 tokens"}}))
    assert evaluate.command(file(tmp_path, server.url, ROWS[:1]), []) == 0
    assert [r["status"] for r in evaluate.read(tmp_path / "sums.jsonl").values()] == ["context", "context"]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("model.url=", "model.url: String should match"), ("agent.tols=['shell']", "agent.tols: unknown key; did you mean 'tools'"),
        ("data.prompts='gone.jsonl'", "cannot be read"),
        ("data.input_key='promt'", "JSON object with 'promt'"), ("agent.task='examples.tools.task:Arithmetics'", "did you mean 'Arithmetic'"),
        ("agent.tools=['shel']", "did you mean 'shell'"),
    ],
)  # fmt: skip
def test_wrong_files_are_refused(tmp_path: Path, change: str, match: str) -> None:
    with pytest.raises(VimeError, match=match):
        evaluate.command(file(tmp_path, "http://127.0.0.1:9/v1", ROWS), [change])


@pytest.mark.parametrize(
    "answer",
    [
        [],
        {"choices": None},
        {"choices": [{"message": None}]},
        {"choices": [{"message": "x"}]},
        {"choices": [{"message": {}}], "usage": {"completion_tokens": "x"}},
    ],
)
def test_an_endpoint_that_answers_nonsense_is_named(answer: Any, tmp_path: Path, serve: Any, capsys: pytest.CaptureFixture[str]) -> None:
    server = serve(lambda body: (200, answer))
    assert evaluate.command(file(tmp_path, server.url, ROWS[:1]), ["n_samples=1", "model.retries=1"]) == 1
    assert "chat/completions: " in capsys.readouterr().out and len(server.asked) == 2, "once more, it may only be ill"


def test_a_message_without_a_role_is_the_assistants(tmp_path: Path, serve: Any) -> None:
    server = serve(lambda body: (200, {"choices": [{"message": {"content": "19"}}]}))
    assert evaluate.command(file(tmp_path, server.url, ROWS[:1]), ["n_samples=1"]) == 0
    assert json.loads((tmp_path / "sums.jsonl").read_text())["messages"][-1] == {"role": "assistant", "content": "19"}


@pytest.mark.parametrize("text", [b"nonsense\n", b"[1]\n", b'{"a": 1}\n', b"\xff\n"])
def test_a_report_or_rows_that_are_none_are_named(text: bytes, tmp_path: Path, serve: Any) -> None:
    path = file(tmp_path, "http://127.0.0.1:1/v1", ROWS)
    (tmp_path / "sums.jsonl").write_bytes(text)
    with pytest.raises(VimeError, match=r"sums[.]jsonl: .* move it away"):
        evaluate.command(path, [])
    assert (tmp_path / "sums.jsonl").read_bytes() == text
    (tmp_path / "rows.jsonl").write_bytes(text)
    with pytest.raises(VimeError, match="cannot be read"):
        evaluate.command(path, [])
    with pytest.raises(VimeError, match="FileExists"):
        evaluate.command(path, ["out=/dev/null", "data.prompts=/dev/null"])
