"""GRPO advantages over groups of any shape."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.trainer.advantage import grpo

rollouts_of_groups = st.lists(  # per group: rewards of its rollouts and how many samples each of them yielded
    st.lists(st.tuples(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]), st.integers(1, 3)), min_size=1, max_size=6), min_size=1, max_size=6
)


@given(rollouts_of_groups, st.booleans(), st.randoms(use_true_random=False))
def test_uneven_groups_equal_the_formula_per_group(groups, normalize, random):
    rows, want = [], {}
    for g, members in enumerate(groups):
        r = np.array([reward for reward, _ in members])
        for k, (reward, copies) in enumerate(members):
            rollout = 100 * g + k
            rows += [(reward, g, rollout)] * copies
            spread = r.std(ddof=1) + 1e-6 if normalize and len(r) > 1 else 1.0
            want[rollout] = (reward - r.mean()) / spread if len(r) > 1 else 0.0
    random.shuffle(rows)
    got = grpo(*zip(*rows), normalize)
    np.testing.assert_allclose(got, [want[rollout] for _, _, rollout in rows], atol=1e-9)


@given(st.lists(st.floats(-5, 5), min_size=2, max_size=8))
def test_group_sums_to_zero_and_equal_rewards_give_exact_zero(rewards):
    n = len(rewards)
    assert abs(grpo(rewards, [7] * n, range(n), False).sum()) < 1e-9
    assert (grpo([0.1] * n, [7] * n, range(n), True) == 0).all()


def test_copies_of_a_rollout_do_not_move_the_baseline():
    once = grpo([1, 0, 0], [0, 0, 0], [0, 1, 2])
    many = grpo([1, 1, 1, 1, 0, 0], [0] * 6, [0, 0, 0, 0, 1, 2])
    assert many[0] == once[0] and many[-1] == once[-1]


def test_refuses_what_has_no_meaning():
    with pytest.raises(ValueError, match="counts must be equal"):
        grpo([1.0], [0, 0], [0, 1])
    with pytest.raises(ValueError, match="not finite"):
        grpo([float("nan"), 1.0], [0, 0], [0, 1])
    with pytest.raises(ValueError, match="disagree"):
        grpo([1.0, 0.0], [0, 0], [3, 3])
