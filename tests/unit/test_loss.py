"""Corrections and HeadLoss against plain autograd: truncated supports, and losses that need all tokens at once."""

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime import config
from vime.trainer.critic import summary
from vime.trainer.loss import HeadLoss, dpo_loss, head_log_probs, importance_weights, kl, opsm_mask, policy_loss, rejection_mask, value_loss


def test_importance_weights_by_hand():
    old = torch.log(torch.tensor([0.1, 0.6, 1.0, 1.9, 3.0])).requires_grad_()
    tis, ratio = importance_weights(old, torch.zeros(5), "tis", 0.5, 2.0)
    torch.testing.assert_close(tis, torch.tensor([0.5, 0.6, 1.0, 1.9, 2.0]))
    torch.testing.assert_close(ratio, torch.tensor([0.1, 0.6, 1.0, 1.9, 3.0]))
    pop, _ = importance_weights(old, torch.zeros(5), "icepop", 0.5, 2.0)
    torch.testing.assert_close(pop, torch.tensor([0.0, 0.6, 1.0, 1.9, 0.0]))
    assert not (tis.requires_grad or pop.requires_grad)


def test_opsm_drops_whole_drifted_samples_of_negative_advantage():
    new, old = torch.tensor([-1.0, -3.0, -3.0, -1.0, -1.0]), torch.tensor([-1.0, -1.0, -1.0, -1.1, -1.0])
    adv = torch.tensor([-1.0, -1.0, 1.0, -1.0, -1.0])
    assert opsm_mask(new, old, adv, [2, 1, 2], 0.5).tolist() == [0, 0, 1, 1, 1]  # drifted; positive; on policy


def tokens_of(seed, lengths):
    torch.manual_seed(seed)
    n = sum(lengths)
    new = (torch.randn(n) * 0.3 - 2).requires_grad_()
    return new, new.detach() + 0.2 * torch.randn(n), torch.randn(len(lengths)).repeat_interleave(torch.tensor(lengths))


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 99), st.sampled_from([None, 1.05]))
def test_gspo_is_the_clipped_surrogate_of_geometric_means(lengths, seed, dual):
    """The paper's sequence form, one loss a sample, differentiated by autograd through the mean: slime's. Same value and gradient."""
    new, old, adv = tokens_of(seed, lengths)
    weight = torch.tensor([1.0 / n for n in lengths]).repeat_interleave(torch.tensor(lengths))
    loss, clipped = policy_loss(new, old, adv, 0.02, 0.03, dual, "gspo", lengths)
    (loss * weight).sum().backward()
    got, new.grad = new.grad, None
    total = torch.zeros(())
    for lp, o, a, c in zip(*(x.split(lengths) for x in (new, old, adv, clipped))):
        ratio = (lp - o).mean().exp()
        each = torch.maximum(-ratio * a[0], -ratio.clamp(0.98, 1.03) * a[0])
        each = torch.minimum(each, -dual * a[0]) if dual and a[0] < 0 else each
        assert len(set(c.tolist())) == 1, "a sample is clipped whole"
        total = total + each
    torch.testing.assert_close((loss * weight).sum(), total, rtol=1e-5, atol=1e-6)
    total.backward()
    torch.testing.assert_close(got, new.grad, rtol=1e-4, atol=1e-6)


def test_gspo_with_one_token_a_sample_is_ppo():
    new, old, adv = tokens_of(3, [1] * 20)
    for a, b in zip(policy_loss(new, old, adv, 0.1, 0.2, None, "gspo", [1] * 20), policy_loss(new, old, adv, 0.1, 0.2)):
        torch.testing.assert_close(a, b)


def test_cispo_and_gpg_keep_every_tokens_gradient():
    new = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    old, adv = torch.tensor([-2.0, -2.1, -1.0]), torch.tensor([1.0, -2.0, 1.0])
    loss, clipped = policy_loss(new, old, adv, 0.2, 0.28, None, "cispo")
    loss.sum().backward()
    held = torch.tensor([1.28, torch.tensor(0.1).exp(), 0.8])
    torch.testing.assert_close(new.grad, -held * adv)
    torch.testing.assert_close(loss, -held * adv * new)
    assert clipped.tolist() == [1, 0, 1]
    new.grad = None
    policy_loss(new, old, adv, 0.2, 0.28, None, "gpg")[0].sum().backward()
    torch.testing.assert_close(new.grad, -adv)


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 99), st.sampled_from(["k1", "k2", "k3"]))
def test_rejection_by_hand(lengths, seed, divergence):
    new, old, _ = tokens_of(seed, lengths)
    d = (new.detach() - old).split(lengths)
    for how in ("sum", "mean", "max") if divergence != "k1" else ("sum", "mean"):
        want = []
        for x in d:
            y = {"k1": x, "k2": x * x / 2, "k3": x.exp() - 1 - x}[divergence]
            y = getattr(y, how)()
            kept = 0.9 <= y.exp() <= 1.1 if divergence == "k1" else y <= 0.03
            want += [float(kept)] * len(x)
        got = rejection_mask(new, old, lengths, f"seq_{how}_{divergence}", 0.9, 1.1 if divergence == "k1" else 0.03)
        assert got.tolist() == want and not got.requires_grad


def test_value_loss_by_hand():
    v = torch.tensor([1.0, 2.0, 0.0], requires_grad=True)
    old, target = torch.tensor([0.0, 1.9, 0.0]), torch.tensor([0.0, 3.0, 1.0])
    loss, larger = value_loss(v, old, target, 0.2)
    torch.testing.assert_close(loss, torch.tensor([0.5, 0.5, 0.5]))
    assert larger.tolist() == [0, 0, 0]
    v2 = torch.tensor([3.0], requires_grad=True)  # moved towards its return farther than the clip: larger when held, and no gradient
    loss, larger = value_loss(v2, torch.tensor([0.0]), torch.tensor([3.0]), 0.2)
    loss.sum().backward()
    torch.testing.assert_close(loss, torch.tensor([2.8**2 / 2]))
    assert larger.tolist() == [1] and v2.grad.tolist() == [0]
    torch.testing.assert_close(value_loss(v, old, target, None)[0], (v - target) ** 2 / 2)


def test_dpo_by_hand():
    """-log sigmoid(beta margin), its gradient -beta sigmoid(-beta margin) on the chosen answer, and no overflow far out."""
    chosen, rejected = torch.tensor([1.0, -2.0, -4000.0], requires_grad=True), torch.tensor([0.5, 1.0, 4000.0], requires_grad=True)
    loss = dpo_loss(chosen, rejected, 0.5)
    x = torch.tensor([0.25, -1.5])
    torch.testing.assert_close(loss[:2], torch.log(1 + torch.exp(-x)))
    assert loss[2].item() == pytest.approx(4000.0)
    loss.sum().backward()
    torch.testing.assert_close(chosen.grad[:2], -0.5 / (1 + torch.exp(x)))
    torch.testing.assert_close(rejected.grad, -chosen.grad)


def test_critic_metrics_by_hand():
    """Means by loss weight; explained variance 1 where old values are the returns, 0 where they are the returns' mean."""
    returns, weight = torch.tensor([1.0, 2.0, 3.0, 6.0], dtype=torch.float64), torch.tensor([0.1, 0.2, 0.3, 0.4], dtype=torch.float64)
    mean = (returns * weight).sum()
    for old, explained in ((returns, 1.0), (mean.expand(4), 0.0)):
        seen = torch.stack([torch.tensor([1.0, 0, 0, 1]).double(), old, returns, returns**2, (returns - old) ** 2, torch.ones(4).double()])
        m = summary(torch.cat([torch.tensor([3.0]).double(), seen @ weight]), [1.0, 2.0])
        assert m["train/explained_variance"] == pytest.approx(explained) and m["train/return_mean"] == pytest.approx(float(mean))
        assert (m["train/value_loss"], m["train/critic_grad_norm"], m["train/value_clipfrac"]) == pytest.approx((1.5, 1.5, 0.5))
    assert summary(torch.zeros(7), [0.0]) == {"train/value_loss": 0.0, "train/critic_grad_norm": 0.0}


def test_kl_kinds():
    lp = torch.tensor([-1.0, -2.0], requires_grad=True)
    ref = torch.tensor([-1.5, -1.0])
    d = torch.tensor([0.5, -1.0])
    for kind, want in {"k1": d, "k2": d * d / 2, "k3": (-d).exp() - 1 + d, "abs": d.abs()}.items():
        torch.testing.assert_close(kl(lp, ref, kind), want)
    kl(lp, ref, "abs").sum().backward()
    assert lp.grad.tolist() == [1, -1]


@pytest.mark.parametrize(("algo", "low"), [({}, 0.0), ({"correction": "icepop"}, 0.5), ({"correction": "icepop", "tis_clip_low": 0.9}, 0.9)])
def test_lower_bound(algo, low):
    assert config.AlgoConfig(**algo).tis_low == low


@st.composite
def problems(draw):
    n, v = draw(st.integers(1, 9)), draw(st.integers(2, 12))
    truncated = draw(st.booleans())
    keep = torch.zeros(n, v, dtype=torch.bool)
    labels = torch.tensor(draw(st.lists(st.integers(0, v - 1), min_size=n, max_size=n)))
    for i in range(n):
        keep[i, draw(st.lists(st.integers(0, v - 1), max_size=v))] = True
        keep[i, labels[i]] = True
    seed, chunk, block, whole = draw(st.integers(0, 99)), draw(st.integers(1, 10)), draw(st.integers(1, 40)), draw(st.booleans())
    return labels, keep if truncated else torch.ones_like(keep), truncated, (chunk, block), whole, draw(st.sampled_from([0.0, 0.3])), seed


@settings(deadline=None, max_examples=60)
@given(problem=problems())
def test_head_loss_equals_autograd(problem):
    """Value and both gradients, for all sizes of chunks and blocks, with supports and without, entropy always over the whole vocabulary."""
    labels, keep, truncated, (chunk, block), whole, entropy_coef, seed = problem
    torch.manual_seed(seed)
    n, v = keep.shape
    hidden, weight = torch.randn(n, 5, requires_grad=True), torch.randn(v, 5, requires_grad=True)
    old, adv = torch.randn(n) - 2, torch.randn(n)

    def loss_fn(lp, entropy, part):
        if whole and len(lp) > 1:  # couples all tokens: differs from the sum over chunks
            return ((lp - old[part]).mean().exp() * adv[part]).sum() - entropy_coef * entropy.sum()
        return ((lp - old[part]).exp() * adv[part]).sum() - entropy_coef * entropy.sum()

    z = (hidden @ weight.T) / 0.7
    logp = torch.log_softmax(z, -1)
    lp = torch.log_softmax(z.masked_fill(~keep, -torch.inf), -1).gather(1, labels[:, None])[:, 0]
    want = loss_fn(lp, -(logp.exp() * logp).sum(-1), slice(0, n))
    grads = torch.autograd.grad(want, (hidden, weight))
    support = (keep.nonzero()[:, 1], torch.cat([torch.zeros(1, dtype=torch.int64), keep.sum(1).cumsum(0)])) if truncated else None
    with patch("vime.trainer.loss.CPU_BLOCK", block):
        got = HeadLoss.apply(hidden, weight, labels, 0.7, chunk, loss_fn, entropy_coef != 0, support, whole)
        alone = head_log_probs(hidden.detach(), weight.detach(), labels, 0.7, chunk, support)
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip((hidden.grad, weight.grad), grads):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(alone, lp.detach(), rtol=1e-5, atol=1e-5)
