"""`vime gateway`, and the Gateway of a rollout worker."""

import asyncio
import os
import re
import signal

import pytest

from tests.agents_kit import ScriptedEngine, gateway, model_folder, post
from vime.agents.gateway import command, opened
from vime.cli import main, parser
from vime.config import validate
from vime.errors import VimeError
from vime.rollout.generate import Link, Slots, link
from vime.rollout.http import EngineClient


def test_serves_until_it_is_ended(tmp_path, capsys):
    folder, secret = model_folder(tmp_path / "m"), tmp_path / "s"
    secret.write_text("old")
    secret.chmod(0o644)

    async def go():
        engine = await ScriptedEngine(folder, ["hi"]).start()
        args = parser().parse_args(
            ["gateway", "--engine", engine.url, "--model", folder, "--parser", "text", "--secret", str(secret), "--max-requests", "1"]
        )
        serving = asyncio.create_task(command._serve(args))
        said = ""
        while "reasoning turns" not in said:
            assert not serving.done()
            said += capsys.readouterr().out
            await asyncio.sleep(0.01)
        key, control = secret.read_text(), re.search(r"control (http://\S+),", said)[1]
        assert secret.stat().st_mode & 0o777 == 0o600 and key not in said and len(key) > 40
        status, made = await post(f"{control}/sessions", {}, key)
        assert status == 200
        url = re.search(r"OPENAI_BASE_URL=(\S+)", said)[1]
        body = {"messages": [{"role": "user", "content": "a"}]}
        assert [(await post(f"{url}/chat/completions", body | {"seed": k}, made["token"]))[0] for k in (1, 2)] == [200, 400]
        os.kill(os.getpid(), signal.SIGTERM)
        await serving
        await engine.stop()

    asyncio.run(go())


def test_faults_are_one_line(tmp_path, capsys):
    folder = model_folder(tmp_path / "m")
    for args in (
        ["--engine", "http://127.0.0.1:1", "--model", folder],
        ["--engine", "http://127.0.0.1:1", "--model", folder, "--parser", "nonsense"],
    ):
        assert main(["gateway", *args]) == 1
        assert capsys.readouterr().err.count("\n") == 1

    async def go():  # a server that says nonsense of itself, and ports that are none
        engine = await ScriptedEngine(folder).start()
        args = ["gateway", "--engine", engine.url, "--model", folder, "--parser", "text", "--secret", str(tmp_path / "s")]
        for context, more, said in (
            ("abc", [], "how long a context"), (-1, [], "how long a context"), (9, ["--port", "99999"], "port 99999"), (9, ["--control-port", "-1"], "control_port -1"),
        ):  # fmt: skip
            engine.context = context
            with pytest.raises(VimeError, match=said):
                await command._serve(parser().parse_args([*args, *more]))
        await engine.stop()

    asyncio.run(go())


def test_a_worker_has_one_that_listens(tmp_path):
    folder = model_folder(tmp_path / "m")
    cfg = validate({"model": folder, "data": {"prompts": "p.jsonl"}, "gateway": {"parser": "text"}}, "test")

    async def go():
        engine = await ScriptedEngine(folder, ["hi"]).start()
        link.set(Link(EngineClient("http://127.0.0.1:1"), Slots(1), asyncio.Event()))
        with pytest.raises(VimeError):
            await opened(cfg)
        link.set(Link(EngineClient(engine.url), Slots(1), asyncio.Event()))
        one, two = await asyncio.gather(opened(cfg), opened(cfg))
        assert one is two and one.port and one.context == cfg.rollout.max_context_len
        assert (await one.session().turn([{"role": "user", "content": "a"}])).message["content"] == "hi"
        asked = engine.requests[0]["sampling_params"]
        assert asked["temperature"] == cfg.rollout.temperature and asked["max_tokens"] == cfg.rollout.max_response_len
        await one.close()
        await engine.stop()

    asyncio.run(go())


def test_a_taken_port_is_named(tmp_path):
    folder = model_folder(tmp_path / "m")

    async def go():
        async with gateway(ScriptedEngine(folder), folder) as g:
            with pytest.raises(VimeError, match=f"control_port {g.port}"):
                await g.start(control_port=g.port)

    asyncio.run(go())
