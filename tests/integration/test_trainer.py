"""The trainer's numbers: against plain transformers, against a naive loss, and against itself under every way to split a batch."""

import math
import os
import re

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.integration.trainer_kit import make_batch, make_cfg, make_model, one_rank, train_once, weights
from vime.errors import VimeError
from vime.sample import meta_of
from vime.trainer.advantage import grpo
from vime.trainer.batch import Item, plan
from vime.trainer.engine import SUMS
from vime.trainer.packing import pack

LR = 1e-4  # Adam divides by the gradient's size, so where a gradient is only rounding its step, of size lr, is arbitrary: keep it small
SAME = (
    "train/loss",
    "train/pg_loss",
    "train/grad_norm",
    "train/entropy",
    "train/kl_loss",
    "train/ppo_kl",
    "train/pg_clipfrac",
    "train/logprob_abs_diff",
)


def close(a, b, tol=1e-5):
    assert a.keys() == b.keys()
    for k in a:
        torch.testing.assert_close(a[k], b[k], rtol=0, atol=tol)


def plain_log_probs(model, sample, temperature):
    """Logprob and entropy of each response token from a plain forward of one sample."""
    z = model(torch.tensor([sample.tokens])).logits[0, sample.prompt_length - 1 : -1].float() / temperature
    logp = torch.log_softmax(z, -1)
    return logp[range(sample.response_length), sample.tokens[sample.prompt_length :]], -(logp.exp() * logp).sum(-1)


def everything(batch):
    return [Item(s.index, s.group_index, 1.0, 1.0) for g in batch for s in g], {s.index: s for g in batch for s in g}


@pytest.mark.parametrize(("kind", "tied"), [("llama", True), ("llama", False), ("qwen3", True)])
def test_packed_log_probs_equal_a_plain_forward(tmp_path, kind, tied):
    folder = make_model(tmp_path / "m", kind, tied)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    items, samples = everything(make_batch(1, groups=6))
    with one_rank(make_cfg(folder, tmp_path, train={"logprob_chunk": 7})) as t, torch.no_grad():
        got = t.log_probs(t.model, pack(items, samples))
        want = [plain_log_probs(plain, samples[i.index], 0.8)[0][torch.tensor(samples[i.index].loss_mask) > 0] for i in items]
        torch.testing.assert_close(got, torch.cat(want), rtol=0, atol=1e-5)
        assert got.std() > 0.5, "logprobs must vary for the comparison to mean anything"


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradient_equals_the_naive_loss(tmp_path, checkpointing):
    """Clipping, dual clip, KL to a reference, entropy bonus, temperature: one autograd pass over plain forwards, sample by sample."""
    folder, ref = make_model(tmp_path / "m"), make_model(tmp_path / "ref", seed=1)
    algo = {
        "kl_loss_coef": 0.3,
        "kl_loss_type": "low_var_kl",
        "entropy_coef": 0.05,
        "ref_model": str(ref),
        "eps_clip_c": 3.0,
        "eps_clip_high": 0.28,
    }
    cfg = make_cfg(folder, tmp_path, algo=algo, train={"gradient_checkpointing": checkpointing, "logprob_chunk": 16})
    batch = make_batch(2)
    metas = [meta_of(s) for g in batch for s in g]
    samples = {s.index: s for g in batch for s in g}
    items = plan(metas, grpo([m.reward for m in metas], [m.group_index for m in metas], [m.index for m in metas]), cfg, 1)[0].minibatches[0]
    plain, plain_ref = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (folder, ref))
    total, old = torch.zeros(()), []
    for i in items:
        keep = torch.tensor(samples[i.index].loss_mask) > 0
        lp, entropy = (x[keep] for x in plain_log_probs(plain, samples[i.index], 0.8))
        with torch.no_grad():
            r = plain_log_probs(plain_ref, samples[i.index], 0.8)[0][keep]
        old.append(lp.detach() + 0.5 * torch.sin(7 * lp.detach()))  # off-policy enough that both clips act
        ratio = (lp - old[-1]).exp()
        pg = torch.maximum(-ratio * i.advantage, -ratio.clamp(0.8, 1.28) * i.advantage)
        pg = torch.minimum(pg, torch.full_like(pg, -3 * i.advantage)) if i.advantage < 0 else pg
        d = lp - r
        total = total + i.weight * (pg - 0.05 * entropy + 0.3 * ((-d).exp() - 1 + d).clamp(-10, 10)).sum()
    total.backward()
    with one_rank(cfg) as t:
        p = pack(items, samples)
        # the pack keeps items together by prompt; these batches' groups are already in that order
        p.old, p.ref = torch.cat(old), t.log_probs(t.reference, p)
        sums, worst = torch.zeros(len(SUMS), dtype=torch.float64), torch.zeros(())
        t.pipelines[t.model].backward([p], [t.loss_job(p, sums, worst, 1.0)], "step 1")
        assert float(sums[1]) == pytest.approx(total.item(), abs=1e-5)
        close({n: q.grad for n, q in t.model.named_parameters()}, {n: q.grad for n, q in plain.named_parameters()})
        assert 0 < float(sums[3]) < float(sums[0]), "some tokens must be clipped and some not"


def run_steps(trainer, cfg, seeds, checkpoint=None):
    """setup and a step per seed; metrics of each and the final weights. Runs on one or several ranks."""
    trainer.setup(checkpoint)
    out = [train_once(trainer, cfg, k + 1, make_batch(s)) for k, s in enumerate(seeds)]
    return out, weights(trainer)


def single(cfg, seeds, checkpoint=None):
    with one_rank(cfg, checkpoint) as t:
        return [train_once(t, cfg, k + 1, make_batch(s)) for k, s in enumerate(seeds)], weights(t)


def compare(a, b, tol=1e-5):
    for x, y in zip(a[0], b[0], strict=True):
        assert {k: x[k] for k in SAME} == pytest.approx({k: y[k] for k in SAME}, abs=tol, rel=1e-5)
    close(a[1], b[1], tol)


def test_log_probs_are_kept_for_people_to_look_at(tmp_path):
    """With log.samples, of every trained token, before the update; samples without a gradient have none. A part of a step adds to the rest."""
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path, train={"global_batch_size": 8, "max_tokens_per_gpu": 40})
    batch = make_batch(0)
    with one_rank(cfg) as trainer:
        train_once(trainer, cfg, 1, batch)
        kept = trainer.seen
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
        for s in (s for g in batch for s in g if s.index in kept):
            with torch.no_grad():
                expected = plain_log_probs(model, s, 0.8)[0][torch.tensor(s.loss_mask) > 0]
            torch.testing.assert_close(torch.tensor(kept[s.index]), expected, rtol=0, atol=1e-5)
    assert set(kept) == {s.index for g in (batch[0], *batch[2:]) for s in g if not s.remove_sample}


@pytest.mark.parametrize("aggregate", ["sample-mean", "token-mean"])
def test_updates_do_not_depend_on_micro_batches_or_order(tmp_path, aggregate):
    folder = make_model(tmp_path / "m")
    loss, algo = {"aggregate": aggregate}, {"kl_loss_coef": 0.1, "entropy_coef": 0.01}
    runs = [
        single(make_cfg(folder, tmp_path, loss=loss, algo=algo, train={"lr": LR, "max_tokens_per_gpu": b, "logprob_chunk": c}), [3, 4])
        for b, c in ((10**6, 1024), (40, 5), (1, 1024))
    ]
    compare(runs[0], runs[1])
    compare(runs[0], runs[2])


@pytest.mark.parametrize("tied", [True, False])
def test_two_ranks_equal_one(tmp_path, two_ranks, tied):
    """FSDP over two processes: loss, gradient norm and updated weights of the one-rank run, also with uneven micro-batches."""
    cfg = make_cfg(
        make_model(tmp_path / "m", tied=tied),
        tmp_path,
        algo={"kl_loss_coef": 0.1},
        train={"lr": LR, "global_batch_size": 8, "max_tokens_per_gpu": 64},
    )
    one = single(cfg, [5, 6])
    cfg.parallel.fsdp = 2
    two = two_ranks(run_steps, cfg, [5, 6])
    assert [{k: m[k] for k in SAME} for m in two[0][0]] == [{k: m[k] for k in SAME} for m in two[1][0]], "every rank reports the same"
    compare(one, two[0])
    close(two[0][1], two[1][1], 0)


def test_two_ranks_in_bf16(tmp_path, two_ranks):
    """Half precision runs through the same sharding; sums over ranks stay those of one rank but for its rounding."""
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path, train={"lr": 1e-4, "dtype": "bfloat16"})
    one = single(cfg, [5])
    cfg.parallel.fsdp = 2
    two = two_ranks(run_steps, cfg, [5])[0]
    for key in ("train/loss", "train/grad_norm", "train/entropy"):
        assert one[0][0][key] == pytest.approx(two[0][0][key], rel=0.02, abs=0.02)


def test_several_optimizer_steps_start_on_policy(tmp_path):
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path, train={"lr": 1e-2, "global_batch_size": 4})
    (m, later), _ = single(cfg, [7, 8])
    for x in (m, later):
        assert x["train/optimizer_steps"] == 4 and x["train/ppo_kl_first"] < 1e-6 < abs(x["train/ppo_kl"])
    assert m["train/logprob_abs_diff_max"] > m["train/logprob_abs_diff"] > 0


def test_leaving_out_zero_advantages_is_exact(tmp_path):
    """One group of the batch has equal rewards: left out of the forward, it leaves loss, gradient and update as they are."""
    folder = make_model(tmp_path / "m")
    with_, without = (single(make_cfg(folder, tmp_path, train={"lr": LR, "skip_zero_advantage": s}), [9, 10]) for s in (False, True))
    assert without[0][0]["train/skipped_samples"] == 5 and with_[0][0]["train/skipped_samples"] == 1
    for a, b in zip(with_[0], without[0]):
        assert (a["train/loss"], a["train/grad_norm"]) == pytest.approx((b["train/loss"], b["train/grad_norm"]), abs=1e-6)
    close(with_[1], without[1], 1e-6)


def test_a_batch_without_gradient_moves_weights_by_momentum_only(tmp_path):
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path)
    flat = make_batch(11)
    for s in (s for g in flat for s in g):
        s.reward = 1.0
    with one_rank(cfg) as t:
        before = weights(t)
        m = train_once(t, cfg, 1, flat)
        assert m["train/grad_norm"] == m["train/loss"] == 0 and m["train/skipped_samples"] == 16
        close(before, weights(t), 0)


def test_bf16_computes_in_half_and_keeps_fp32_weights(tmp_path):
    folder = make_model(tmp_path / "m")
    items, samples = everything(make_batch(12))
    with one_rank(make_cfg(folder, tmp_path)) as t:
        exact = t.log_probs(t.model, pack(items, samples))
    cfg = make_cfg(folder, tmp_path, train={"dtype": "bfloat16", "lr": 1e-6})
    with one_rank(cfg) as t:
        batch, seen = pack(items, samples), []
        t.model.base_model.layers[0].register_forward_pre_hook(lambda _, args, kw: seen.append(kw["packing"].pack), with_kwargs=True)
        half = t.log_probs(t.model, batch)
        assert seen[0] is batch, "FSDP must not look through a micro-batch, and copy it, in every layer"
        assert half.dtype == torch.float32 and 0 < (half - exact).abs().mean() < 0.06
        before = weights(t)
        m = train_once(t, cfg, 1, make_batch(12))
        after = weights(t)
        assert math.isfinite(m["train/loss"]) and m["train/grad_norm"] > 0
        moved = {k: (after[k] - before[k]).abs().max().item() for k in after}
        assert all(v.dtype == torch.float32 for v in after.values())
        assert max(moved.values()) == pytest.approx(1e-6, rel=0.2), "an update of 1e-6 must not be rounded away"


@pytest.mark.parametrize("tied", [True, False])
def test_publish_writes_whole_weights_and_a_true_canary(tmp_path, tied):
    folder = make_model(tmp_path / "m", tied=tied)
    cfg = make_cfg(folder, tmp_path)
    with one_rank(cfg) as t:
        train_once(t, cfg, 1, make_batch(13))
        for version in range(4):
            files, canary = t.publish(version)
        path = files.path
        published = load_file(path)
        assert ("lm_head.weight" in published) is not tied
        close(published, weights(t), 0)
        assert sorted(os.listdir(os.path.dirname(path))) == ["v2.safetensors", "v3.safetensors"]
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        assert not model.load_state_dict(published, strict=False).unexpected_keys
        model.tie_weights()
        logp = torch.log_softmax(model(torch.tensor([canary.token_ids])).logits[0].detach(), -1)
        want = logp[range(len(canary.token_ids) - 1), canary.token_ids[1:]]
        torch.testing.assert_close(torch.tensor(canary.log_probs), want, rtol=0, atol=1e-5)


def test_publish_of_experts_is_bit_for_bit_the_folder(tmp_path):
    """The model holds a layer's experts in one tensor; the file, written layer by layer, has each expert's own, as servers want them."""
    shape = {"vocab_size": 61, "hidden_size": 32, "moe_intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    config = Qwen3MoeConfig(**shape, intermediate_size=48, num_key_value_heads=2, num_experts=4, num_experts_per_tok=2)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "m")
    with one_rank(make_cfg(tmp_path / "m", tmp_path)) as t:
        found, given = load_file(t.publisher.publish(t.model, 0).path), load_file(tmp_path / "m" / "model.safetensors")
    assert sum("experts.3" in k for k in found) == 6
    assert found.keys() == given.keys() and all(torch.equal(found[k], given[k]) for k in given)


def lose_a_sample_on_rank_one(trainer, cfg):
    trainer.setup()
    batch = make_batch(14)
    metas = [meta_of(s) for g in batch for s in g]
    plans = plan(metas, [1.0] * len(metas), cfg, 2)
    trainer.train(1, plans[trainer.rank], *(batch if trainer.rank == 0 else batch[:1]))


def test_a_failing_rank_fails_its_peers_at_once(tmp_path, two_ranks):
    """Not after the collective timeout of minutes."""
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path, parallel={"fsdp": 2})
    peer, failing = two_ranks(lose_a_sample_on_rank_one, cfg, timeout=60)
    assert re.search("VimeError: step 1, trainer rank 1: sample .* did not arrive", str(failing))
    assert "another trainer rank failed" in str(peer)


def test_errors_name_their_cause(tmp_path):
    folder = make_model(tmp_path / "m")
    cfg = make_cfg(folder, tmp_path, train={"max_bad_steps": 1})
    with one_rank(cfg) as t:
        before = weights(t)
        with torch.no_grad():
            t.model.model.norm.weight[0] = float("nan")
        with pytest.raises(VimeError, match=r"step 3: 1 optimizer step\(s\) in a row .*weights are unchanged"):
            train_once(t, cfg, 3, make_batch(15))
        after = weights(t)
        close(
            {k: v for k, v in before.items() if k != "model.norm.weight"}, {k: v for k, v in after.items() if k != "model.norm.weight"}, 0
        )
    (folder / "model.safetensors").write_bytes(b"not safetensors")
    with pytest.raises(VimeError, match=r"model .*/m: "), one_rank(cfg):
        pass
    with pytest.raises(VimeError, match="nowhere"), one_rank(make_cfg(tmp_path / "nowhere", tmp_path)):
        pass
