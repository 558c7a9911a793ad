"""The plug-ins of the examples: their tools, and the contract."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples.calculator.agent import calculate
from examples.near.rewards import near
from vime.sample import Sample
from vime.testing import check

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
