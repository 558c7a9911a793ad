"""The plug-ins of the examples: their tools, and the contract."""

import asyncio
import copy
import string
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.calculator.agent import calculate
from examples.near.rewards import near
from vime import config, model
from vime.rollout.generate import Link, link
from vime.rollout.http import Choice, EngineClient
from vime.rollout.worker import RolloutWorker
from vime.sample import Sample, Status
from vime.testing import URL, check

expressions = st.recursive(
    st.integers(0, 999).map(str), lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({t[0]} {t[1]}{t[2]})"), max_leaves=8
)


@given(expressions)
def test_the_calculator_calculates(expression: str) -> None:
    assert calculate(expression) == eval(expression)


@pytest.mark.parametrize("text", ["", "1+", "2**99", "__import__('os')", "a+1", "1.5+2", "(" * 5000, "'x'*9", "True+1", "9999999999999+1"])
def test_the_calculator_executes_nothing(text: str) -> None:
    with pytest.raises(ValueError, match="not arithmetic"):
        calculate(text)


def test_near() -> None:
    assert near(None, Sample(response="abcd", label="abce")) == {"near": 0.75, "exact": 0.0}
    assert near(None, Sample(response="", label="")) == {"near": 0.0, "exact": 1.0}


def test_the_examples_keep_the_contract() -> None:
    check("rollout.custom_generate", "examples.calculator.agent:generate", args={"max_calls": 2})
    check("reward.function", "examples.near.rewards:near", args={}, reward={"key": "near"})


class Script(EngineClient):
    """A policy that says these turns. Once, after `cut` tokens of its own, it is aborted, and is asked to go on."""

    def __init__(self, turns: list[list[int]], cut: int):
        super().__init__(URL)
        self.left, self.cut = [list(t) for t in turns], cut

    async def generate(
        self, token_ids: list[int], sampling_params: dict[str, Any], session_id: str | None = None, timeout: float = 600
    ) -> list[Choice]:
        n = min(len(self.left[0]), sampling_params["max_tokens"])
        reason = "length" if n < len(self.left[0]) else "stop"
        if 0 <= self.cut <= n:
            n, reason, self.cut = self.cut, "abort", -1
        said, self.left[0] = self.left[0][:n], self.left[0][n:]
        self.cut -= n if self.cut > 0 else 0
        if reason == "stop":
            del self.left[0]
        return [Choice(said, [-1.0] * n, [0] * n, reason, None)]


TURNS = {
    "calculator": (["<calc>2*3=", " so 6"], "<calc>2*3=6</calc> so 6", {"calls": 1, "answer": "6"}, 1.1, {"max_calls": 3}),
    "calculator, last call": (["<calc>2*3=", " so 6"], "<calc>2*3=6</calc> so 6", {"calls": 1, "answer": "6"}, 1.1, {"max_calls": 1}),
    "calculator, one call too many": (["<calc>1+1=", "<calc>2*3="], "<calc>1+1=2</calc><calc>2*3=", {"calls": 1, "answer": "3"}, 0.1, {"max_calls": 1}),
    "calculator, not asked": (["6"], "6", {"calls": 0, "answer": "6"}, 1.0, {"max_calls": 3}),
}


@pytest.mark.parametrize("case", TURNS)
def test_an_agent_that_is_interrupted_anywhere_ends_as_if_it_had_not_been(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model, "CHARS", string.printable)
    model._char_tokenizer().save_pretrained(tmp_path)
    turns, response, metadata, reward, own = TURNS[case]
    name = case.partition(",")[0]
    rollout = {"max_response_len": 90, "max_context_len": 128}
    agent = {"rollout": rollout | {"custom_generate": f"examples.{name}.agent:generate"}, "reward": {"function": f"examples.{name}.agent:reward"}}
    cfg = config.validate({"model": str(tmp_path), "data": {"prompts": "-"}, "args": own} | agent, "test")

    async def run(cut: int) -> tuple[Sample, int]:
        worker = RolloutWorker(cfg, URL, 0)
        said = [[*model.encode(t), *([] if t.endswith("=") else [model.EOS])] for t in turns]
        link.set(Link(Script(said, cut), worker.slots, asyncio.Event()))
        sample, again = Sample(tokens=model.encode("abcd>"), prompt="abcd>", label="6"), -1
        while sample.status in (Status.PENDING, Status.ABORTED):
            again += 1
            (sample,) = await worker._custom(str(cfg.rollout.custom_generate), copy.deepcopy(sample), {"temperature": 1.0, "max_tokens": 90}, "")
        assert await worker._score_all([sample])
        return sample, again

    whole, _ = asyncio.run(run(-1))
    assert whole.response == response and whole.reward == reward
    assert {k: v for k, v in whole.metadata.items() if k != "start"} == metadata
    own_tokens = sum(whole.loss_mask)
    for cut in range(own_tokens + 1):
        sample, again = asyncio.run(run(cut))
        assert again == 1 and sample.to_dict() == whole.to_dict(), f"interrupted after {cut} tokens"
