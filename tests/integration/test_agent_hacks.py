"""agent.on_hack: what becomes of an episode to which the guard of its task objected."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.agents_kit import said
from tests.unit.test_agent_rollout import run
from vime.agents import harness
from vime.agents.guard import Guard
from vime.agents.interaction import Episode
from vime.agents.rollout import black_box
from vime.agents.sandbox import SandboxSpec, open_sandbox
from vime.agents.tools import Context
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


@pytest.mark.parametrize(("path", "status"), [("tests/test_op.py", "blocked"), ("op.py", "answered")])
def test_a_harness_where_the_tree_lies_in_the_sandbox_alone(monkeypatch: pytest.MonkeyPatch, path: str, status: str) -> None:
    """As with the image of an instance: what was there before the agent is learnt from the sandbox itself."""

    async def acts(name: str, prompt: str, box: Any, token: str, model: str, timeout: float) -> harness.HarnessResult:
        await box.write(path, b"assert True\n")
        return harness.HarnessResult("completed", 0, 0.1, "")

    async def go() -> Episode:
        async with await open_sandbox(SandboxSpec()) as box, Context(box) as ctx:
            await box.write("tests/test_op.py", b"def test_op(): assert False\n")
            await box.write("op.py", b"")
            ctx.guard = Guard("code_repair", box)
            return await black_box(AgentConfig(agent="codex"), "m", "t", [{"role": "user", "content": "repair"}], [], ctx)

    monkeypatch.setattr(harness, "run", acts)
    episode = asyncio.run(go())
    assert (episode.status, episode.hacked) == (status, status == "blocked")
