"""Advantages over groups of any shape, and over the tokens of a sample, against the formulas written out."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime import config
from vime.errors import VimeError
from vime.sample import Sample, Status, meta_of
from vime.trainer.advantage import estimate, gae, grpo, overlong_penalty, returns, whiten

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


ESTIMATORS = {  # of rewards r and lengths n of one group's rollouts
    "grpo": lambda r, n: (r - r.mean()) / (r.std(ddof=1) + 1e-6),
    "reinforce_plus_plus_baseline": lambda r, n: r - r.mean(),
    "rloo": lambda r, n: np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))]),
    "opo": lambda r, n: r - (n * r).sum() / n.sum(),
}


def samples_of(groups, lengths=None):
    """Samples of these groups of (reward, samples of the rollout); `lengths`: tokens per group, rollout and sample."""
    out = []
    for g, members in enumerate(groups):
        for k, (reward, copies) in enumerate(members):
            for part in range(copies):
                s = Sample(group_index=g, index=100 * g + k, rollout_id=100 * g + k, part=part, tokens=[1], reward=reward, status=Status.COMPLETED)
                n = lengths[g][k][part] if lengths else 1 + (7 * g + 3 * k + part) % 5
                s.append_tokens([2] * n, [0.0] * n, versions=0)
                out.append(s)
    return out


def made(estimator, samples, n=2, rollout=None, reward=None, **algo):
    tree = {"model": "m", "data": {"prompts": "p"}, "reward": reward or {}, "algo": {"advantage_estimator": estimator} | algo}
    cfg = config.validate(tree | {"rollout": {"n_samples_per_prompt": n} | (rollout or {})}, "test")
    return estimate([meta_of(s) for s in samples], cfg)


@given(rollouts_of_groups, st.sampled_from(sorted(ESTIMATORS)), st.randoms(use_true_random=False))
def test_estimators_equal_their_formula_per_group(groups, estimator, random):
    """Uneven groups, several samples of one rollout, any order; groups of one and of equal rewards get exactly 0."""
    samples = samples_of(groups)
    random.shuffle(samples)
    metas, got = made(estimator, samples)
    want = {}
    for g, members in enumerate(groups):
        r = np.array([reward for reward, _ in members])
        n = np.array([sum(s.response_length for s in samples if s.rollout_id == 100 * g + k) for k in range(len(r))])
        each = ESTIMATORS[estimator](r, n) if len(set(r)) > 1 else np.zeros(len(r))
        want |= {100 * g + k: a for k, a in enumerate(each)}
    np.testing.assert_allclose(got, [want[m.rollout_id] for m in metas], atol=1e-9)
    assert all(a == 0 for m, a in zip(metas, got) if want[m.rollout_id] == 0 and len({r for r, _ in groups[m.group_index]}) == 1)


@given(rollouts_of_groups, st.sampled_from(sorted(ESTIMATORS)), st.floats(-3, 3), st.floats(0.5, 4))
def test_shift_changes_nothing_and_scale_only_what_is_not_normalized(groups, estimator, shift, scale):
    base = made(estimator, samples_of(groups))[1]
    moved = made(estimator, samples_of([[(scale * r + shift, c) for r, c in g] for g in groups]))[1]
    np.testing.assert_allclose(moved, np.array(base) * (1 if estimator == "grpo" else scale), atol=2e-4 if estimator == "grpo" else 1e-9)


@given(rollouts_of_groups, st.integers(2, 4))
def test_splitting_a_rollout_into_samples_changes_no_advantage(groups, parts):
    """Each sample gets its rollout's number, however many samples the rollout's tokens are spread over."""
    whole = [[(r, 1) for r, _ in g] for g in groups]
    split = [[(r, parts) for r, _ in g] for g in groups]
    for estimator in ESTIMATORS:
        once = made(estimator, samples_of(whole, [[[parts * (k + 1)] for k in range(len(g))] for g in groups]))[1]
        many = made(estimator, samples_of(split, [[[k + 1] * parts for k in range(len(g))] for g in groups]))[1]
        np.testing.assert_allclose(np.repeat(once, parts), many, atol=1e-12)


def test_reinforce_leaves_rewards_and_remax_takes_the_greedy_one():
    samples = samples_of([[(1.0, 1), (0.0, 2)], [(3.0, 1)]])
    assert made("reinforce_plus_plus", samples, n=1)[1] == [1.0, 0.0, 0.0, 3.0]
    with pytest.raises(VimeError, match="group 0 has no greedy sample"):
        made("remax", samples, n=1)
    samples[0].multimodal_inputs = {"images": [{"image": "a.png"}]}
    assert samples[0].greedy_twin().images == samples[0].images
    twins = [samples[0].greedy_twin(), samples[3].greedy_twin()]
    for s, reward in zip(twins, (0.25, 1.0)):
        s.append_tokens([2], [0.0], versions=0)
        s.reward, s.status = reward, Status.COMPLETED
    metas, got = made("remax", [*samples, *twins], n=1)
    assert got == [0.75, -0.25, -0.25, 2.0] and len(metas) == 4 and not any(m.greedy for m in metas)
    assert len({s.uid for s in [*samples, *twins]}) == 6 and all(meta_of(s).trained_tokens == 0 for s in twins)


def test_overlong_penalty_and_filter():
    """DAPO's eq. 13 with L_max 20 and L_cache 8; cut-off samples are removed but stay in the mean."""
    assert overlong_penalty([1, 12, 14, 16, 20, 25], 20, 8, 0.5).tolist() == [0, 0, -0.125, -0.25, -0.5, -0.5]
    samples = samples_of([[(1.0, 1), (1.0, 2)]], [[[12], [4, 16]]])
    samples[2].status = Status.TRUNCATED
    limits = {"max_response_len": 20, "max_context_len": 64}
    metas, got = made("reinforce_plus_plus", samples, rollout=limits, reward={"overlong_buffer_len": 8}, overlong_filter=True)
    assert got == [1.0, 0.5, 0.5] and [m.removed for m in metas] == [False, False, True]
    assert made("rloo", samples, rollout=limits, reward={"overlong_buffer_len": 8})[1] == [0.5, -0.5, -0.5]
    assert not any(m.removed for m in made("rloo", samples)[0])


@given(st.lists(st.tuples(st.floats(-2, 2), st.floats(-2, 2)), min_size=1, max_size=70), st.floats(0.1, 1), st.floats(0, 1))
def test_returns_and_gae_equal_their_recursions(tokens, gamma, lam):
    r, v = (np.array(x) for x in zip(*tokens))
    total, run, a, want_g, want_a = 0.0, 0.0, 0.0, [], []
    for t in reversed(range(len(r))):
        total = r[t] + gamma * total
        a = r[t] + gamma * run - v[t] + gamma * lam * a
        run = v[t]
        want_g.append(total)
        want_a.append(a)
    np.testing.assert_allclose(returns(r, gamma), want_g[::-1], atol=1e-9)
    advantages, targets = gae(r, v, gamma, lam)
    np.testing.assert_allclose(advantages, want_a[::-1], atol=1e-9)
    np.testing.assert_allclose(targets, advantages + v, atol=1e-12)
    np.testing.assert_allclose(gae(r, v, gamma, 1.0)[1], want_g[::-1], atol=1e-9)  # lambda 1: the returns themselves


@given(st.lists(st.floats(-50, 50), min_size=2, max_size=40), st.floats(-5, 5), st.floats(0.1, 10))
def test_whitening_is_invariant_to_shift_and_scale(values, shift, scale):
    def whitened(x):
        return whiten(x, len(x), x.sum(), (x**2).sum())

    x = np.array(values)
    if x.std() < 1e-2:
        return
    y = whitened(x)
    assert abs(y.mean()) < 1e-6 and abs(y.std(ddof=1) - 1) < 1e-3
    np.testing.assert_allclose(whitened(scale * x + shift), y, atol=5e-2 if x.std() * scale < 1e-1 else 1e-4)


def test_whitening_without_variance_is_finite():
    assert np.abs(whiten(np.array([0.3, 0.3, 0.3]), 3, 0.9, 0.27)).max() < 1e-3
    assert whiten(np.array([2.0]), 1, 2.0, 4.0).tolist() == [0.0] and len(whiten(np.zeros(0), 0, 0.0, 0.0)) == 0
