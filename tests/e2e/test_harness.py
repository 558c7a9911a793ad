"""Real harnesses, in a sandbox without network, through the real Gateway, to the end of an edit-and-test task: every sampled token is trained."""

import asyncio
import json
import shutil
import subprocess

import pytest

from tests.agents_kit import ScriptedEngine, check, gateway, model_folder, said
from vime.agents import harness
from vime.agents.gateway import Gateway
from vime.agents.sandbox import SandboxSpec, open_sandbox
from vime.errors import VimeError
from vime.rollout.http import EngineClient
from vime.sections import GatewayConfig

NAMES = ["claude_code", "codex", "opencode", "mini_swe_agent"]
TEST = "from calc import add\nassert add(2, 3) == 5\nprint('all good')\n"
WRONG, RIGHT = "return a - b", "return a + b"
PROMPT = "test_calc.py fails. Fix calc.py and run the test."
pytestmark = pytest.mark.skipif(not shutil.which("bwrap"), reason="needs bubblewrap")


@pytest.fixture(scope="session")
def installed():
    """Installs a harness the first time it is asked for, into the folder that `vime harness install` uses."""

    def ready(name):
        try:
            harness.program(name)
        except VimeError:
            if not shutil.which("npm") and name != "mini_swe_agent":
                pytest.skip("needs npm")
            harness.install(name)

    return ready


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model") / "m", "qwen3")


@pytest.fixture
def repo(tmp_path):
    base = tmp_path / "repo"
    base.mkdir()
    (base / "calc.py").write_text(f"def add(a, b):\n    {WRONG}\n")
    (base / "test_calc.py").write_text(TEST)
    subprocess.run(
        "git init -q && git -c user.name=a -c user.email=a@b add -A && git -c user.name=a -c user.email=a@b commit -qm first",
        shell=True,
        cwd=base,
        check=True,
    )
    return str(base)


def policy(name):
    """What the model says, turn by turn: it looks, edits, runs the test and ends; in the words of each harness's tools."""
    run, edit, look = "python3 test_calc.py", f"sed -i 's/{WRONG}/{RIGHT}/' calc.py", "cat calc.py"
    shell = {"codex": ("exec_command", "cmd"), "opencode": ("bash", "command"), "mini_swe_agent": ("bash", "command")}
    if name == "claude_code":
        calls = [
            ("Read", {"file_path": "/work/calc.py"}),
            ("Edit", {"file_path": "/work/calc.py", "old_string": WRONG, "new_string": RIGHT}),
            ("Bash", {"command": f"cd /work && {run}", "description": "run the test"}),  # the client strips the cd, and adds defaults to Edit
        ]
    else:
        tool, key = shell[name]
        calls = [(tool, {key: c} | ({"description": c} if name == "opencode" else {})) for c in (look, edit, run)]
    if name == "mini_swe_agent":
        calls.append(("bash", {"command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"}))
    turns = [said("Next.", [call], reasoning="Let me think.") for call in calls]
    return [*turns, said("Done: add() adds now.", reasoning="It passes.")]


def scripted(name, rust):
    """By how many tool results a request holds; a request without tools is for a title."""

    def answer(body, n):
        text = rust().decode(body["token_ids"], skip_special_tokens=False)
        if "<tools>" not in text:
            return said("A title")
        return policy(name)[min(text.count("<tool_response>"), len(policy(name)) - 1)]

    return answer


async def perform(name, folder, repo, *, script=None, timeout=60, **caps):
    engine = ScriptedEngine(folder)
    engine.script = script or scripted(name, lambda: engine.rust)
    async with gateway(engine, folder, **caps) as g:
        session = g.session()
        async with await open_sandbox(harness.fitted(SandboxSpec(base=repo, disk_mb=1024), name, g.port)) as box:
            done = await harness.run(name, PROMPT, box, session.token, "scripted", timeout=timeout)
            listed = (await box.exec(["ps", "axo", "args"])).output
            calc = (await box.read("calc.py")).decode()
        metrics = session.metrics()
        rows = session.finish()
        return done, engine, rows, metrics, calc, listed


@pytest.mark.parametrize("name", NAMES)
def test_a_harness_finishes_the_task_and_all_of_it_is_trained(name, installed, folder, repo):
    installed(name)
    done, engine, rows, metrics, calc, listed = asyncio.run(perform(name, folder, repo))
    assert (done.state, done.code) == ("completed", 0), done.log_tail
    assert RIGHT in calc and WRONG not in calc
    texts = [engine.rust.decode(r["token_ids"]) for r in engine.requests]
    assert any("all good" in t for t in texts), "the test was run"
    assert metrics["agent/trainable_fraction"] == 1.0, metrics
    trained = check(engine, [r for r in rows if r.kind == "main"])
    assert len(trained) == sum(n for first, (k, n) in engine.spans.items() if "<tools>" in texts[k]), "each token of the task, once"
    assert len(listed.splitlines()) == 3, f"process 1 and ps itself: {listed}"


def test_time_runs_out(installed, folder, repo):
    installed("claude_code")
    slow = lambda body, n: {"text": policy("claude_code")[0], "delay": 30}  # noqa: E731
    done, _, _, _, calc, listed = asyncio.run(perform("claude_code", folder, repo, script=slow, timeout=2))
    assert (done.state, done.code) == ("timeout", None) and 2 <= done.seconds < 30
    assert WRONG in calc and len(listed.splitlines()) == 3, listed


@pytest.mark.parametrize(("name", "caps"), [("claude_code", {"max_tokens": 100}), ("codex", {"max_requests": 2})])
def test_the_budget_runs_out(name, caps, installed, folder, repo):
    installed(name)
    done, _, _, metrics, _, _ = asyncio.run(perform(name, folder, repo, **caps))
    assert done.state == "budget", done
    assert metrics["agent/trainable_fraction"] == 1.0 and metrics["agent/turns"] <= 2


def test_failures_have_a_state(installed, folder, repo, monkeypatch):
    installed("claude_code")
    done, *_ = asyncio.run(perform("claude_code", folder, repo, script=lambda body, n: 400))
    assert done.state == "failed" and "400" in done.log_tail
    monkeypatch.setitem(harness.table(), "claude_code", harness.known("claude_code") | {"program": "bin/none"})
    with pytest.raises(VimeError, match=r"claude-code@.*not installed.*vime harness install claude_code"):
        harness.program("claude_code")


async def unfitted(repo):
    async with await open_sandbox(SandboxSpec(base=repo)) as box:
        await harness.run("claude_code", PROMPT, box, "t", "m")


def test_a_sandbox_without_the_harness_is_refused(installed, repo):
    installed("claude_code")
    with pytest.raises(VimeError, match=r"does not show .*fitted"):
        asyncio.run(unfitted(repo))


def test_the_table_is_whole():
    for name, how in harness.table().items():
        assert {"packages", "program", "argv", "failed"} <= set(how), name
        text = json.dumps(how)
        assert all(f"${w}" in text for w in ("base_url", "token", "model", "prompt")), name
        assert all(("@" in p[1:]) or ("==" in p) for p in how["packages"]), f"{name}: the tested version is pinned"
    assert "installed" in harness.command("list", None, None) or "-" in harness.command("list", None, None)


@pytest.fixture(scope="module")
def babbler(tmp_path_factory):
    """A real vLLM server over a model of random weights, with tokenizer and template of a model that has tools."""
    import torch
    from transformers import AutoTokenizer, Qwen3Config, Qwen3ForCausalLM

    from vime.config import validate
    from vime.rollout.engine import Engine

    path = model_folder(tmp_path_factory.mktemp("babbler") / "m", "qwen3")
    tokenizer = AutoTokenizer.from_pretrained(path)
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32}
    config = Qwen3Config(vocab_size=len(tokenizer), max_position_embeddings=16384, eos_token_id=tokenizer.eos_token_id, **sizes)
    Qwen3ForCausalLM(config).save_pretrained(path)
    tree = {"model": path, "data": {"prompts": "-"}, "rollout": {"max_context_len": 16384, "concurrency": 4}, "reward": {"function": "exact"}}
    engine = Engine(validate(tree, "test"), 0, str(tmp_path_factory.mktemp("server")))
    try:
        yield engine.start(), path
    finally:
        engine.stop()


def test_a_harness_in_front_of_a_real_server(babbler, installed, repo):
    """The model babbles, mini-swe-agent tells it so, until the budget of requests is spent; the rows have the server's tokens and logprobs."""
    installed("mini_swe_agent")
    url, path = babbler

    async def go():
        g = await Gateway.open(url, path, GatewayConfig(parser="hermes", max_requests=2))
        client = EngineClient(url)
        try:
            await g.start()
            session = g.session(sampling={"temperature": 1.0})
            async with await open_sandbox(harness.fitted(SandboxSpec(base=repo), "mini_swe_agent", g.port)) as box:
                done = await harness.run("mini_swe_agent", PROMPT, box, session.token, g.model, timeout=300)
            assert done.state == "budget", done
            metrics, rows = session.metrics(), session.finish()
            assert metrics["agent/turns"] == 2 and metrics["agent/trainable_fraction"] == 1.0, metrics
            assert sum(sum(r.loss_mask) for r in rows) == metrics["agent/sampled_tokens"] > 0
            for row in rows:
                scored = (await client.prompt_logprobs(row.tokens))[row.prompt_length - 1 :]
                assert len(scored) == len(row.loss_mask)
                for mask, lp, other in zip(row.loss_mask, row.logprobs, scored):
                    assert (lp == pytest.approx(other, abs=1e-3)) if mask else lp == 0.0
        finally:
            await client.close()
            await g.close()

    asyncio.run(go())
