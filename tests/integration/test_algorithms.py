"""Estimators and policy losses in the real trainer: no way to split a batch changes them, and naive losses over plain forwards agree."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.test_corrections import gradients, naive, sampled
from tests.integration.test_trainer import close, compare, plain_log_probs, run_steps, single
from tests.integration.trainer_kit import make_batch, make_cfg, make_model

LR = 1e-4
SEVERAL = {"global_batch_size": 8}  # two optimizer steps a batch: the second is off policy
FAMILIES = {
    "gspo": ({"policy_loss": "gspo", "eps_clip": 3e-4, "eps_clip_high": 4e-4, "advantage_estimator": "rloo"}, SEVERAL),
    "cispo": ({"policy_loss": "cispo", "eps_clip": 1.0, "correction": "rollout_logprobs", "advantage_estimator": "opo"}, SEVERAL),
    "gpg": ({"policy_loss": "gpg", "normalize_std": False}, {}),
    "reinforce++": ({"advantage_estimator": "reinforce_plus_plus", "gamma": 0.97, "kl_coef": 0.1, "kl_loss_type": "k1"}, SEVERAL),
    "reinforce++baseline": ({"advantage_estimator": "reinforce_plus_plus_baseline", "kl_coef": 0.1, "correction": "tis"}, {}),
    "whitened gspo of tokens": ({"policy_loss": "gspo", "kl_coef": 0.2, "normalize_advantages": True}, SEVERAL),
    "rejection": ({"rejection": "seq_mean_k1", "rejection_high": 3.0, "kl_loss_coef": 0.1, "correction": "icepop"}, SEVERAL),
}


def observed(m):
    return {k: v for k, v in m.items() if k in ("train/advantage_mean", "train/reward_kl", "train/rejected")}


@pytest.mark.parametrize("family", FAMILIES)
def test_updates_do_not_depend_on_micro_batches_or_ranks(tmp_path, two_ranks, family):
    folder, ref = make_model(tmp_path / "m"), make_model(tmp_path / "ref", seed=1)
    algo, train = FAMILIES[family]
    one, many = (
        make_cfg(folder, tmp_path, algo=algo | {"ref_model": str(ref)}, train=train | {"lr": LR, "max_tokens_per_gpu": b, "logprob_chunk": c})
        for b, c in ((10**6, 1024), (64, 5))
    )
    whole = single(one, [3, 4])
    compare(whole, single(many, [3, 4]))
    many.parallel.fsdp = 2
    two = two_ranks(run_steps, many, [3, 4])
    for rank in two:
        compare(whole, rank)
        for a, b in zip(whole[0], rank[0], strict=True):
            assert observed(a) == pytest.approx(observed(b), abs=1e-5)
    seen = observed(whole[0][1])
    if "rejection" in algo:
        assert 0 < seen["train/rejected"] < 1
    if "kl_coef" in algo:
        assert abs(seen["train/reward_kl"]) > 0.05


def test_gspo_equals_the_naive_loss(tmp_path):
    """Against the servers' logprobs, far enough off for the bounds to act: the paper's loss per sample, by autograd through the mean."""
    algo = {"policy_loss": "gspo", "correction": "rollout_logprobs", "eps_clip": 0.3, "eps_clip_high": 0.4}
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path, algo=algo, train={"clip_grad": 1e9, "logprob_chunk": 7})

    def token_loss(i, s, lp, keep):
        ratio = (lp - sampled(s))[keep].mean().exp()
        return torch.maximum(-ratio * i.advantage, -ratio.clamp(0.7, 1.4) * i.advantage).expand(int(keep.sum()))

    want, grads = naive(tmp_path / "m", cfg, make_batch(4), token_loss)
    m, got = gradients(cfg, make_batch(4))
    assert m["train/loss"] == pytest.approx(want, abs=1e-5) and 0 < m["train/pg_clipfrac"] < 1
    close(got, grads)


def test_reinforce_plus_plus_equals_the_naive_loss(tmp_path):
    """Reward at the last trained token, KL at each, discounted over the response, whitened over the step; removed samples are left out."""
    folder, ref, batch = make_model(tmp_path / "m"), make_model(tmp_path / "ref", seed=1), make_batch(5)
    algo = {"advantage_estimator": "reinforce_plus_plus", "gamma": 0.9, "kl_coef": 0.2, "kl_loss_type": "k2", "ref_model": str(ref)}
    cfg = make_cfg(folder, tmp_path, algo=algo, train={"clip_grad": 1e9, "logprob_chunk": 7, "max_tokens_per_gpu": 64})
    models, found, costs = [AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (folder, ref)], {}, []
    for s in (s for g in batch for s in g if not s.remove_sample):
        with torch.no_grad():
            now, before = (plain_log_probs(m, s, 0.8)[0] for m in models)
        total, out = 0.0, []
        cost = (now - before) ** 2 / 2 * torch.tensor(s.loss_mask)
        costs += [float(c) for c, m in zip(cost, s.loss_mask) if m]
        last = max(k for k, m in enumerate(s.loss_mask) if m)
        for k in reversed(range(s.response_length)):
            total = 0.9 * total - 0.2 * float(cost[k]) + (s.reward if k == last else 0.0)
            out.insert(0, total)
        found[s.index] = np.array(out)
    of_trained = np.concatenate([found[s.index][np.array(s.loss_mask) > 0] for g in batch for s in g if s.index in found])
    mean, std = of_trained.mean(), np.sqrt(of_trained.var(ddof=1) + 1e-8)

    def token_loss(i, s, lp, keep):
        assert i.advantage == s.reward
        return (-torch.tensor((found[s.index] - mean) / std, dtype=torch.float32) * (lp - lp.detach()).exp())[keep]

    want, grads = naive(folder, cfg, batch, token_loss)
    m, got = gradients(cfg, batch)
    assert m["train/loss"] == pytest.approx(want, abs=1e-5)
    assert (m["train/advantage_mean"], m["train/reward_kl"]) == pytest.approx((mean, np.mean(costs)), rel=1e-4)
    close(got, grads)
