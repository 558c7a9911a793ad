"""[agent] from a rollout worker down to the tokens: a scripted engine over HTTP is all that is not the product's."""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.agents_kit import ScriptedEngine, model_folder, said
from vime import config, train
from vime.agents import rollout
from vime.data.tokenizer import Tokenizer
from vime.errors import VimeError
from vime.hooks import Args
from vime.rollout.worker import GroupReport, RolloutWorker
from vime.sample import Sample, SampleMeta, Status

HERE = "tests.unit.test_agent_rollout"
CALL = said("", [("calculator", {"expression": "12*7"})])


def sums(args: Args) -> Any:
    from examples.tools.task import Arithmetic

    return Arithmetic(args)


class Graded:
    """A task that looks at what happened; its prompt says what its only tool does."""

    def __init__(self, args: Args):
        self.args = args

    async def setup(self, sample: Sample) -> tuple[None, list[dict[str, Any]], list[Any]]:
        from tests.unit.test_agent_loop import Echo

        return None, [{"role": "user", "content": sample.prompt}], [Echo()]

    async def grade(self, sample: Sample, sandbox: Any, episode: Any) -> dict[str, Any]:
        return {"score": float(len(episode.calls)), "failed": float(episode.status == "failed")}


def worker(folder: Path, url: str, **changes: Any) -> RolloutWorker:
    tree: dict[str, Any] = {
        "model": model_folder(folder / "model"), "data": {"prompts": "-", "apply_chat_template": False}, "gateway": {"parser": "hermes"},
        "agent": {"task": f"{HERE}:sums", "max_turns": 4} | changes.pop("agent", {}),
        "rollout": {"max_context_len": 2048, "max_response_len": 256, "abort_timeout": 5.0} | changes.pop("rollout", {}),
    }  # fmt: skip
    return RolloutWorker(config.validate(tree | changes, "test"), url, 0)


def group(n: int = 1, prompt: str = "12 times 7", label: str = "84") -> list[Sample]:
    return [Sample(index=i, rollout_id=i, prompt=prompt, label=label, tokens=[1, 2], metadata={"own": [i]}) for i in range(n)]


def run(folder: Path, script: Any, samples: list[Sample], *, stop_after: float = 0.0, context: int = 1 << 20, **changes: Any) -> Any:
    async def go() -> tuple[GroupReport, list[Sample], ScriptedEngine]:
        engine = ScriptedEngine(model_folder(folder / "model"), script, context)
        await engine.start()
        w = worker(folder, engine.url, **changes)
        try:
            work = asyncio.ensure_future(w.run_group(samples, 0))
            if stop_after:
                while not engine.requests:
                    await asyncio.sleep(0.01)
                await w.interrupt(0)
            return *(await work), engine
        finally:
            await w.close()
            await engine.stop()

    return asyncio.run(asyncio.wait_for(go(), 60))


def test_an_episode_becomes_a_sample_with_the_tokens_that_were_sampled(tmp_path: Path) -> None:
    text = Tokenizer(model_folder(tmp_path / "model"))
    asked = lambda body: text.decode(body["token_ids"], skip_special_tokens=False).count("assistant")  # noqa: E731
    report, done, engine = run(tmp_path, lambda body, n: CALL if asked(body) == 1 else "84", group(3))
    assert [s.reward for s in done] == [1.0] * 3 and all(s.status is Status.COMPLETED for s in done)
    for s in done:
        trained = [t for t, m in zip(s.tokens[s.prompt_length :], s.loss_mask) if m]
        assert trained == engine.encode(CALL) + engine.encode("84")
        numbers = [round(-lp * 1e6) for lp, m in zip(s.rollout_log_probs, s.loss_mask) if m]
        assert [engine.sampled[n] for n in numbers] == trained
        assert 0 < sum(s.loss_mask) < s.response_length, "the observation is context"
        assert s.metadata["own"] == [s.index] and s.metadata["agent"]["status"] == "answered"
        steps = s.metadata["agent"]["steps"]
        assert [len(x["calls"]) for x in steps] == [1, 0] and steps[0]["calls"][0]["status"] == "ok"
        assert [x["tokens"] for x in steps] == [len(engine.encode(CALL)), len(engine.encode("84"))]
        assert s.non_generation_time > 0
    assert [m.metrics["agent/turns"] for m in report.metas] == [2.0] * 3 and report.metas[0].metrics["agent/trainable_fraction"] == 1.0
    shown = train.rollout_metrics(report.metas, 0, 1.0)
    assert shown["agent/turns"] == 2.0 and shown["agent/call_ok"] == 1.0 and shown["agent/end_answered"] == 1.0
    json.dumps([s.to_dict() for s in done])


def test_metrics_count_an_episode_that_lacks_one_as_zero() -> None:
    metas = [
        SampleMeta(i, 0, i // 2, 1, 1, 1, 0.0, Status.COMPLETED, False, (0,), False, {"agent/call_error": 4.0} if i < 2 else {"agent/turns": 2.0})
        for i in range(4)
    ]
    shown = train.rollout_metrics(metas, 0, 1.0)
    assert (shown["agent/call_error"], shown["agent/turns"]) == (2.0, 1.0)
    assert not [
        k for k in train.rollout_metrics([SampleMeta(0, 0, 0, 1, 1, 1, 0.0, Status.COMPLETED, False, (0,))], 0, 1.0) if k.startswith("agent/")
    ]


@pytest.mark.parametrize(
    ("said_first", "changes", "status", "ends"),
    [
        (CALL, {"agent": {"max_turns": 1}}, Status.TRUNCATED, "max_turns"),
        ("a" * 300, {"agent": {"max_turn_len": 8}}, Status.TRUNCATED, "context"),
        (CALL, {"rollout": {"max_context_len": 523, "max_response_len": 90}}, Status.TRUNCATED, "context"),
        ("<tool_call>{nope</tool_call>", {"agent": {"max_turns": 2}}, Status.TRUNCATED, "max_turns"),
        ({"text": CALL, "delay": 30}, {"agent": {"wall_s": 0.3}}, Status.TRUNCATED, "wall"),
    ],
)
def test_how_an_episode_ended_is_the_samples_status(tmp_path: Path, said_first: Any, changes: dict[str, Any], status: Status, ends: str) -> None:
    report, (s,), engine = run(tmp_path, lambda body, n: said_first, group(), **changes)
    assert s.status is status and s.metadata["agent"]["status"] == ends
    assert report.metas[0].metrics[f"agent/end_{ends}"] == 1.0
    assert s.remove_sample == (ends == "wall") and sum(s.loss_mask) == (0 if ends == "wall" else len(engine.sampled))
    assert s.reward in (0.0, 0.5)


def test_a_broken_environment_is_no_reward_of_zero(tmp_path: Path) -> None:
    """It is graded as failed, is not trained on, and is counted."""
    broken = said("", [("echo", {"text": "a", "mode": "broken"})])
    report, (s,), _ = run(tmp_path, lambda body, n: broken, group(), agent={"task": f"{HERE}:Graded"}, reward={"key": "score"})
    assert s.status is Status.FAILED and s.remove_sample and s.reward == {"score": 1.0, "failed": 1.0}
    assert s.metadata["agent"]["error"] == "the sandbox is gone" and report.metas[0].trained_tokens == 0
    assert report.metas[0].metrics["agent/end_failed"] == 1.0


def test_what_a_tool_raises_reaches_the_sample(tmp_path: Path) -> None:
    script = [said("", [("echo", {"text": "a", "mode": "raise"})]), "sorry"]
    _, (s,), _ = run(tmp_path, script, group(), agent={"task": f"{HERE}:Graded"}, reward={"key": "score"})
    (call,) = s.metadata["agent"]["steps"][0]["calls"]
    assert (call["status"], call["exception"], s.status) == ("error", "KeyError: 'lost'", Status.COMPLETED)
    assert s.metadata["agent_metrics"]["agent/call_error"] == 1.0


def test_an_interrupted_episode_begins_again(tmp_path: Path) -> None:
    report, done, _ = run(tmp_path, lambda body, n: {"text": CALL, "delay": 30}, group(2), stop_after=0.1)
    assert report.interrupted and report.metas == []
    assert [(s.tokens, s.response_length, s.metadata) for s in done] == [([1, 2], 0, {"own": [i]}) for i in range(2)]


def test_a_server_that_fails_costs_a_redo(tmp_path: Path) -> None:
    report, (s,), _ = run(tmp_path, [CALL, 503, CALL, "84"], group())
    assert report.retries == 1 and s.reward == 1.0 and sum(s.loss_mask) > 0


def test_what_a_task_raises_stops_the_run_and_names_the_sample(tmp_path: Path) -> None:
    with pytest.raises(VimeError, match=r"custom_generate 'vime.agents.rollout:generate' failed on sample 0 .*needs more than this"):
        run(tmp_path, [], group(), agent={"task": f"{HERE}:Raises"})


class Raises:
    def __init__(self, args: Args):
        pass

    async def setup(self, sample: Sample) -> Any:
        raise KeyError("needs more than this")


@pytest.mark.parametrize(
    ("agent", "match"),
    [
        ({"task": f"{HERE}:sms"}, "did you mean 'sums'"), ({"task": f"{HERE}:sums", "tools": ["shel"]}, "did you mean 'shell'"),
        ({"task": f"{HERE}:sums", "sandbox": {"memory": 3}}, "did you mean 'memory_mb'"),
    ],
)  # fmt: skip
def test_a_wrong_agent_is_refused_before_the_start(tmp_path: Path, agent: dict[str, Any], match: str) -> None:
    with pytest.raises(VimeError, match=match):
        rollout.check(worker(tmp_path, "http://127.0.0.1:9", agent=agent).cfg)
