"""Evaluation's statistics against brute force."""

from itertools import combinations
from statistics import fmean, stdev

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.observe.evals import eval_metrics, pass_at_k, standard_error
from vime.sample import SampleMeta, Status


@given(solved=st.lists(st.booleans(), min_size=1, max_size=8), data=st.data())
def test_pass_at_k_is_the_share_of_subsets_that_hold_a_solved_sample(solved: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(solved)))
    brute = fmean(any(subset) for subset in combinations(solved, k))
    assert pass_at_k(len(solved), sum(solved), k) == pytest.approx(brute, abs=1e-12)


@given(st.lists(st.lists(st.floats(-5, 5), min_size=3, max_size=3), min_size=2, max_size=6))
def test_standard_error_of_equal_clusters_is_that_of_their_means(clusters: list[list[float]]) -> None:
    means = [fmean(c) for c in clusters]
    assert standard_error(clusters) == pytest.approx(stdev(means) / len(means) ** 0.5, abs=1e-9)


def test_standard_error_by_hand() -> None:
    assert standard_error([[1.0, 0.0], [1.0]]) == pytest.approx((2 * ((-1 / 3) ** 2 + (1 / 3) ** 2)) ** 0.5 / 3)
    assert standard_error([[1.0, 0.0]]) != standard_error([[1.0, 0.0]])  # NaN: one prompt says nothing about others


def meta(group: int, rollout: int, reward: float, length: int = 4, status: Status = Status.COMPLETED) -> SampleMeta:
    return SampleMeta(rollout, group, rollout, 1, length, length, reward, status, False, (0,))


def test_metrics_of_a_dataset() -> None:
    rows = [
        meta(0, 0, 1.0),
        meta(0, 1, 0.0, 8, Status.TRUNCATED),
        meta(0, 2, 0.0),
        meta(1, 3, 1.5),
        meta(1, 4, 0.5),
        meta(1, 4, 0.5),
        meta(1, 5, 0.0),
    ]
    got = eval_metrics("m", rows, solved=1.0)
    assert set(got) == {f"eval/m/{k}" for k in ("reward", "reward_stderr", "response_len", "truncated", "pass@1", "pass@2")}
    assert got["eval/m/reward"] == pytest.approx(3.0 / 6), "the two samples of rollout 4 count once"
    assert got["eval/m/pass@1"] == pytest.approx(1 / 3) and got["eval/m/pass@2"] == pytest.approx(2 / 3)
    assert (got["eval/m/truncated"], got["eval/m/response_len"]) == (pytest.approx(1 / 7), pytest.approx(32 / 7))
    assert eval_metrics("m", rows, solved=0.5)["eval/m/pass@1"] == pytest.approx((1 / 3 + 2 / 3) / 2)
    assert "eval/m/reward_stderr" not in eval_metrics("m", rows[:3], 1.0)
