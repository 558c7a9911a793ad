"""[agent] agent = a harness: an episode of Claude Code, from the rollout worker to a graded sample."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.agents_kit import ScriptedEngine, model_folder
from tests.e2e.test_harness import PROMPT, RIGHT, folder, installed, pytestmark, repo, scripted  # noqa: F401 (fixtures)
from vime import config
from vime.agents import rollout
from vime.agents.sandbox import SandboxSpec
from vime.errors import VimeError
from vime.hooks import Args
from vime.rollout.worker import RolloutWorker
from vime.sample import Sample, Status


class Fix:
    def __init__(self, args: Args):
        self.base = args.base

    async def setup(self, sample: Sample) -> Any:
        return SandboxSpec(base=self.base), [{"role": "user", "content": sample.prompt}], []

    async def grade(self, sample: Sample, sandbox: Any, episode: Any) -> float:
        return float(RIGHT in (await sandbox.read("/work/calc.py")).decode())


def made(folder: str, repo: str, **agent: Any) -> config.Config:  # noqa: F811
    tree: dict[str, Any] = {
        "model": folder, "data": {"prompts": "-", "apply_chat_template": False}, "gateway": {"parser": "hermes"}, "args": {"base": repo},
        "agent": {"task": f"{__name__}:Fix", "agent": "claude_code", "wall_s": 60} | agent,
        "rollout": {"max_context_len": 1 << 18, "max_response_len": 1000},
    }  # fmt: skip
    return config.validate(tree, "test")


@pytest.mark.parametrize(("agent", "status", "reward"), [({}, Status.COMPLETED, 1.0), ({"max_turns": 1}, Status.TRUNCATED, 0.0)])
def test_an_episode_of_claude_code(installed: Any, folder: str, repo: str, agent: dict[str, Any], status: Status, reward: float) -> None:  # noqa: F811
    installed("claude_code")

    async def go() -> tuple[Any, list[Sample], ScriptedEngine]:
        engine = ScriptedEngine(folder)
        engine.script = scripted("claude_code", lambda: engine.rust)
        await engine.start()
        cfg = made(folder, repo, **agent)
        rollout.check(cfg)
        worker = RolloutWorker(cfg, engine.url, 0)
        try:
            return *await worker.run_group([Sample(prompt=PROMPT, tokens=[1])], 0), engine
        finally:
            await worker.close()
            await engine.stop()

    report, samples, engine = asyncio.run(go())
    assert {(s.status, s.reward) for s in samples} == {(status, reward)}
    assert sum(sum(s.loss_mask) for s in samples) > 0 and report.metas[0].metrics["agent/trainable_fraction"] == 1.0
    assert all(engine.sampled[round(-lp * 1e6)] == t for s in samples
               for t, lp, m in zip(s.tokens[s.prompt_length :], s.rollout_log_probs, s.loss_mask) if m)  # fmt: skip
    (step,) = samples[0].metadata["agent"]["steps"]
    assert step["calls"][0]["tool"] == "claude_code" and step["finish_reason"] == ("completed" if reward else "budget")


@pytest.mark.parametrize(("agent", "match"), [({"agent": "claude_cod"}, "did you mean 'claude_code'"), ({"tools": ["shell"]}, "has its own")])
def test_a_harness_that_is_not_there_is_refused(tmp_path: Path, installed: Any, agent: dict[str, Any], match: str) -> None:  # noqa: F811
    installed("claude_code")
    with pytest.raises(VimeError, match=match):
        rollout.check(made(model_folder(tmp_path / "m"), "-", **agent))
