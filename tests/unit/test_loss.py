"""Corrections and HeadLoss against plain autograd: truncated supports, and losses that need all tokens at once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime import config
from vime.trainer.loss import HeadLoss, head_log_probs, importance_weights, opsm_mask


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
    seed, chunk, whole = draw(st.integers(0, 99)), draw(st.integers(1, 10)), draw(st.booleans())
    return labels, keep if truncated else torch.ones_like(keep), truncated, chunk, whole, draw(st.sampled_from([0.0, 0.3])), seed


@settings(deadline=None, max_examples=60)
@given(problem=problems())
def test_head_loss_equals_autograd(problem):
    """Value and both gradients, for every chunk size, with supports and without, entropy always over the whole vocabulary."""
    labels, keep, truncated, chunk, whole, entropy_coef, seed = problem
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
    got = HeadLoss.apply(hidden, weight, labels, 0.7, chunk, loss_fn, entropy_coef != 0, support, whole)
    got.backward()
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)
    for mine, theirs in zip((hidden.grad, weight.grad), grads):
        torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(head_log_probs(hidden.detach(), weight.detach(), labels, 0.7, chunk, support), lp.detach(), rtol=1e-5, atol=1e-5)
