"""agent.on_hack: what becomes of an episode to which the guard of its task objected."""

from pathlib import Path
from typing import Any

import pytest

from tests.agents_kit import said
from tests.unit.test_agent_rollout import run
from vime.agents.sandbox import SandboxSpec
from vime.hooks import Args
from vime.sample import Sample, Status

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
