"""agent.on_hack: what becomes of an episode to which the guard of its task objected."""

import asyncio
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from tests.agents_kit import said
from tests.unit.test_agent_rollout import run
from vime.agents import harness, rollout
from vime.agents.sandbox import SandboxSpec, open_sandbox
from vime.agents.tools import Context, Observation, Tool
from vime.hooks import Args
from vime.sample import Sample, Status
from vime.sections import AgentConfig

BLOCKED = "sed -i 's/==/!=/' tests/test_op.py"
UNSEEN = "for i in t e s t s; do x=$x$i; done; echo > $x/test_op.py"  # nobody can tell before it runs what it writes


class Repair:
    policy = "code_repair"

    def __init__(self, args: Args):
        self.base = Path(args.base)

    async def setup(self, sample: Sample) -> tuple[SandboxSpec, list[dict[str, Any]], list[Any]]:
        return SandboxSpec(base=str(self.base)), [{"role": "user", "content": sample.prompt}], []

    async def grade(self, sample: Sample, sandbox: Any, episode: Any) -> float:
        return 1.0


def shell(command: str) -> str:
    return said("", [("shell", {"command": command})])


@pytest.mark.parametrize(("on_hack", "reward", "removed"), [("zero", 0.0, False), ("mask", 0.0, True), ("penalty", -0.5, False)])
@pytest.mark.parametrize("script", [[shell(BLOCKED), "done"], [shell("echo hm"), shell(BLOCKED), "done"], [shell(UNSEEN)]])
def test_a_hack(tmp_path: Path, script: list[str], on_hack: str, reward: float, removed: bool) -> None:
    base = tmp_path / "base"
    (base / "tests").mkdir(parents=True)
    (base / "op.py").write_text("def op(a, b): return a + b\n")
    (base / "tests/test_op.py").write_text("from op import op\ndef test_op(): assert op(3, 2) == 1\n")
    agent = {"task": f"{__name__}:Repair", "tools": ["shell"], "on_hack": on_hack, "hack_penalty": 0.5}
    report, (s,), _ = run(tmp_path, list(script), [Sample(prompt="repair op", tokens=[1])], agent=agent, args={"base": str(base)})
    assert (s.reward, s.remove_sample) == (reward, removed)
    call = s.metadata["agent"]["steps"][-2 if script[-1] == "done" else -1]["calls"][0]
    assert call["status"] == "blocked" and call["metadata"]["rule"]
    assert report.metas[0].metrics["agent/hacked"] == 1.0 and report.metas[0].metrics["agent/call_blocked"] == 1.0
    assert s.status is (Status.COMPLETED if script[-1] == "done" else Status.TRUNCATED)
    assert ("not run: " in s.response or "not allowed" in s.response) == (script[-1] == "done")


def test_no_hack(tmp_path: Path) -> None:
    base = tmp_path / "base"
    (base / "tests").mkdir(parents=True)
    (base / "tests/test_op.py").write_text("def test_op(): assert True\n")
    agent = {"task": f"{__name__}:Repair", "tools": ["shell"], "on_hack": "penalty"}
    _, (s,), _ = run(tmp_path, [shell("cat tests/test_op.py"), "done"], [Sample(prompt="look", tokens=[1])], agent=agent, args={"base": str(base)})
    assert s.reward == 1.0 and s.metadata["agent_metrics"]["agent/hacked"] == 0.0


class Careless(Tool):
    name, description = "careless", "Fails after it has done something."

    class Args(BaseModel):
        pass

    async def run(self, args: Any, ctx: Context) -> Observation:
        await ctx.box.write("tests/test_op.py", b"def test_op(): pass\n")
        raise RuntimeError("broken")


def test_what_a_failing_call_did_is_seen_at_the_end(tmp_path: Path) -> None:
    base = tmp_path / "base"
    (base / "tests").mkdir(parents=True)
    (base / "tests/test_op.py").write_text("def test_op(): assert False\n")
    agent = {"task": f"{__name__}:Repair", "tools": [f"{__name__}:Careless"]}
    _, (s,), _ = run(tmp_path, [said("", [("careless", {})]), "done"], [Sample(prompt="repair", tokens=[1])], agent=agent, args={"base": str(base)})
    assert (s.reward, s.status, s.metadata["agent_metrics"]["agent/hacked"]) == (0.0, Status.TRUNCATED, 1.0)
    (call,) = s.metadata["agent"]["steps"][0]["calls"]
    assert call["status"] == "blocked" and "broken" in call["exception"]


class InPlace:
    """Its tree lies in the sandbox alone, as with the image of an instance."""

    policy = "code_repair"

    async def setup(self, sample: Sample) -> tuple[SandboxSpec, list[dict[str, Any]], list[Any]]:
        return SandboxSpec(), [{"role": "user", "content": "repair"}], []

    async def grade(self, sample: Sample, sandbox: Any, episode: Any) -> float:
        return 1.0


@pytest.mark.parametrize(("path", "reward"), [("tests/test_op.py", 0.0), ("op.py", 1.0)])
def test_a_harness_where_the_tree_lies_in_the_sandbox_alone(monkeypatch: pytest.MonkeyPatch, path: str, reward: float) -> None:
    """What was there before the agent is learnt from the sandbox itself."""

    async def acts(name: str, prompt: str, box: Any, token: str, model: str, timeout: float) -> harness.HarnessResult:
        await box.write(path, b"assert True\n")
        return harness.HarnessResult("completed", 0, 0.1, "")

    async def begun(spec: SandboxSpec) -> Any:
        box = await open_sandbox(spec)
        await box.write("tests/test_op.py", b"def test_op(): assert False\n")
        await box.write("op.py", b"")
        return box

    monkeypatch.setattr(harness, "run", acts)
    monkeypatch.setattr(rollout, "open_sandbox", begun)
    a = AgentConfig(agent="codex")
    episode, got = asyncio.run(rollout.run_episode(partial(rollout.black_box, a, "m", "t"), InPlace(), [], Sample(), a))
    assert (got, episode.hacked, episode.status) == (reward, not reward, "answered" if reward else "blocked")
