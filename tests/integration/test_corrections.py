"""Off-policy corrections, truncated sampling and the user's own losses in the real trainer, against naive losses over plain forwards."""

from array import array

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.test_trainer import close, compare, everything, plain_log_probs, run_steps, single
from tests.integration.trainer_kit import make_batch, make_cfg, make_model, one_rank, train_once, weights
from vime.errors import VimeError
from vime.sample import meta_of
from vime.trainer.advantage import estimate, grpo
from vime.trainer.batch import plan
from vime.trainer.packing import pack

LR = 1e-4
HERE = "tests.integration.test_corrections"
SEEN: dict[str, list] = {}


# ------------------------------------------------------------------ functions that runs below name by dotted path, in slime's shapes


def tis_function(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, total_lengths, response_lengths, **kw):
    """TIS with the built-in's bounds that also rejects every response's first token."""
    assert [len(x) for x in train_log_probs] == [len(x) for x in loss_masks] == response_lengths
    assert all(t > r for t, r in zip(total_lengths, response_lengths)) and pg_loss.shape == (sum(response_lengths),)
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    masks = [m.clone() for m in loss_masks]
    for m in masks:
        m[0] = 0
    return pg_loss * ratio.clamp(args.tis_clip_low, args.tis_clip), masks, {"own_ratio": ratio}


def plain_tis(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kw):
    ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
    weight = ratio.clamp(args.tis_clip_low, args.tis_clip)
    return pg_loss * weight, loss_masks, {"tis": ratio, "tis_clipfrac": (weight != ratio).float(), "tis_abs": (ratio - 1).abs()}


def sum_over_eight(total_lengths, response_lengths, loss_masks, calculate_per_token_loss):
    def reducer(x):
        return sum((a * m).sum() / 8 for a, m in zip(x.split(response_lengths), loss_masks))

    return reducer


def custom_loss(args, batch, logits, sum_of_sample_mean):
    """GRPO without clipping, from the logits: what the built-in gives on policy."""
    assert logits.shape[:2] == (1, sum(batch["total_lengths"])) and logits.dtype == torch.float32
    lps, end = [], 0
    for tokens, total, response in zip(batch["unconcat_tokens"], batch["total_lengths"], batch["response_lengths"]):
        end += total
        z = logits[0, end - response - 1 : end - 1] / args.rollout_temperature
        lps.append(torch.log_softmax(z, -1).gather(1, tokens[-response:, None])[:, 0])
        SEEN.setdefault("logits", []).append((tokens, logits[0, end - total : end].detach()))
    lp = torch.cat(lps)
    loss = sum_of_sample_mean(-torch.cat(batch["advantages"]) * (lp - lp.detach()).exp())
    return loss, {"own": loss.detach()}


def custom_advantage(args, rollout_data):
    """Twice the group-normalized reward, for tokens in the first half of the response only."""
    assert {"log_probs", "rollout_log_probs", "raw_reward", "kl"} <= rollout_data.keys()
    rollout_data["advantages"] = rollout_data["returns"] = [
        torch.where(torch.arange(len(m)) < len(m) / 2, 2.0 * r, 0.0) for r, m in zip(rollout_data["rewards"], rollout_data["loss_masks"])
    ]


def wrong_shape(args, *, pg_loss, loss_masks, **kw):
    return pg_loss[:-1], loss_masks, {}


def no_keywords(args, pg_loss):
    return pg_loss


# ------------------------------------------------------------------ the naive side


def naive(folder, cfg, batch, token_loss):
    """(loss, gradients) of sum over samples of weight * token_loss(item, sample, lp, keep), from plain forwards with the plain model."""
    samples = {s.index: s for g in batch for s in g}
    items = plan(*estimate([meta_of(s) for g in batch for s in g], cfg), cfg, 1)[0].minibatches[0]
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    total = torch.zeros(())
    for i in items:
        s = samples[i.index]
        keep = torch.tensor(s.loss_mask) > 0
        lp = plain_log_probs(plain, s, 0.8)[0]
        total = total + (i.weight * token_loss(i, s, lp, keep)).sum()
    total.backward()
    return total.item(), {n: q.grad for n, q in plain.named_parameters()}


def gradients(cfg, batch):
    """(metrics, gradients) of one step of the trainer, read before the optimizer takes them."""
    with one_rank(cfg) as t:
        found = {}
        t.optimizer.step = lambda: found.update({n: p.grad.clone() for n, p in t.model.named_parameters()})
        return train_once(t, cfg, 1, batch), found


def sampled(x):
    return torch.tensor(x.rollout_log_probs)


def test_corrections_equal_the_naive_loss(tmp_path):
    """TIS, IcePop and sampled logprobs as the old policy, chunked, on samples far off policy: loss, metrics and gradients."""
    folder, batch = make_model(tmp_path / "m"), make_batch(2)
    big = {"clip_grad": 1e9, "logprob_chunk": 16}

    def tis(i, s, lp, keep):
        return (-i.advantage * (lp - lp.detach()).exp() * (lp.detach() - sampled(s)).exp().clamp(0, 2.0))[keep]

    def icepop(i, s, lp, keep):
        w = (lp.detach() - sampled(s)).exp()
        return (-i.advantage * (lp - lp.detach()).exp() * torch.where((w >= 0.5) & (w <= 2.0), w, 0.0))[keep]

    def rollout_logprobs(i, s, lp, keep):
        r = (lp - sampled(s)).exp()
        return torch.maximum(-r * i.advantage, -r.clamp(0.8, 1.2) * i.advantage)[keep]

    for kind in (tis, icepop, rollout_logprobs):
        cfg = make_cfg(folder, tmp_path, algo={"correction": kind.__name__}, train=big)
        want, grads = naive(folder, cfg, batch, kind)
        m, got = gradients(cfg, batch)
        assert m["train/loss"] == pytest.approx(want, abs=1e-5)
        close(got, grads)
        assert ("train/tis" in m) is (kind is not rollout_logprobs)
        if kind is not rollout_logprobs:
            assert 0 < m["train/tis_clipfrac"] < 1 and m["train/tis_abs"] > 0.1, m
        assert m["train/logprob_abs_diff"] > 0.1, "of the trainer against the servers, also where the latter stand for the old policy"


def test_old_is_of_before_the_first_step(tmp_path):
    """With several optimizer steps TIS weighs by the policy before all of them, so its ratios don't depend on the learning rate."""
    folder = make_model(tmp_path / "m")
    ratios = []
    for lr in (1e-9, 3e-2):
        cfg = make_cfg(folder, tmp_path, algo={"correction": "tis"}, train={"lr": lr, "global_batch_size": 4})
        with one_rank(cfg) as t:
            ratios.append(train_once(t, cfg, 1, make_batch(3)))
    assert ratios[0]["train/tis"] == pytest.approx(ratios[1]["train/tis"], rel=1e-5)
    assert abs(ratios[1]["train/ppo_kl"]) > 100 * abs(ratios[0]["train/ppo_kl"])


def test_opsm_drops_whole_samples(tmp_path):
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path, algo={"use_opsm": True, "correction": "rollout_logprobs"}, train={"logprob_chunk": 7})

    def token_loss(i, s, lp, keep):
        r = (lp - sampled(s)).exp()
        drop = i.advantage < 0 and (sampled(s) - lp)[keep].mean() > 1e-4
        return torch.maximum(-r * i.advantage, -r.clamp(0.8, 1.2) * i.advantage)[keep] * (0.0 if drop else 1.0)

    want, grads = naive(tmp_path / "m", cfg, make_batch(4), token_loss)
    cfg.train.clip_grad = 1e9
    m, got = gradients(cfg, make_batch(4))
    assert m["train/loss"] == pytest.approx(want, abs=1e-5) and 0 < m["train/opsm_clipfrac"] < 1
    close(got, grads)


def test_staleness_counts_trained_tokens_of_all_ranks(tmp_path, two_ranks):
    """Versions 0 to 3 at step 4: mean and maximum over the trained tokens, from either rank."""
    batch = versioned(7)
    trained = [v for g in batch for s in g if not s.remove_sample for v, m in zip(s.token_versions, s.loss_mask) if m]
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path, algo={"correction": "tis"}, train={"max_staleness": 3, "skip_zero_advantage": False})
    cfg.parallel.fsdp = 2
    for m in two_ranks(step_four, cfg, 7):
        assert m["train/staleness_mean"] == pytest.approx(sum(3 - v for v in trained) / len(trained))
        assert m["train/staleness_max"] == 3 - min(trained) == 3


def versioned(seed):
    batch = make_batch(seed)
    for k, s in enumerate(s for g in batch for s in g):
        s.token_versions = [(k + j) % 4 if m else -1 for j, m in enumerate(s.loss_mask)]
    return batch


def step_four(trainer, cfg, seed, step=4):
    trainer.setup()
    batch = versioned(seed)
    metas = [meta_of(s) for g in batch for s in g]
    return trainer.train(step, plan(metas, [float(m.reward) for m in metas], cfg, trainer.world)[trainer.rank], *batch)


def test_a_token_beyond_the_bound_is_refused(tmp_path):
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path, algo={"correction": "tis"}, train={"max_staleness": 3})
    with one_rank(cfg) as t:
        t.setup = lambda: None
        assert step_four(t, cfg, 7)["train/staleness_max"] == 3
        with pytest.raises(VimeError, match="weights are 4 versions old"):
            step_four(t, cfg, 7, step=5)


# ------------------------------------------------------------------ truncated sampling


def with_supports(batch, seed=0):
    """Give each trained token a random support that holds it; tool tokens have none."""
    g = torch.Generator().manual_seed(seed)
    for s in (s for group in batch for s in group):
        ids, ends = array("i"), array("q", [0])
        for token, m in zip(s.tokens[s.prompt_length :], s.loss_mask):
            if m:
                size = int(torch.randint(1, 12, (1,), generator=g))
                ids.extend(sorted({token, *torch.randperm(61, generator=g)[:size].tolist()}))
            ends.append(len(ids))
        s.rollout_top_p_token_ids, s.rollout_top_p_token_offsets = ids, ends
    return batch


def test_truncated_supports_equal_the_naive_loss(tmp_path, two_ranks):
    """Logprobs over each token's support, entropy over the vocabulary; gradients; and two ranks with micro-batches as one."""
    folder, batch = make_model(tmp_path / "m"), with_supports(make_batch(8))
    cfg = make_cfg(folder, tmp_path, algo={"entropy_coef": 0.05}, train={"clip_grad": 1e9, "logprob_chunk": 7, "lr": LR})
    cfg.rollout.top_p = 0.9
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def over_support(s, model):
        z = model(torch.tensor([s.tokens])).logits[0, s.prompt_length - 1 : -1].float() / 0.8
        off, out = s.rollout_top_p_token_offsets, []
        for r, token in enumerate(s.tokens[s.prompt_length :]):
            ids = torch.tensor(list(s.rollout_top_p_token_ids[off[r] : off[r + 1]]))
            out.append(z[r, token] - z[r, ids].logsumexp(0) if len(ids) else z.new_zeros(()))
        return torch.stack(out), -(torch.log_softmax(z, -1).exp() * torch.log_softmax(z, -1)).sum(-1)

    total = torch.zeros(())
    metas = [meta_of(s) for g in batch for s in g]
    samples = {s.index: s for g in batch for s in g}
    advantages = grpo([m.reward for m in metas], [m.group_index for m in metas], [m.rollout_id for m in metas])
    for i in plan(metas, advantages, cfg, 1)[0].minibatches[0]:
        keep = torch.tensor(samples[i.index].loss_mask) > 0
        lp, entropy = over_support(samples[i.index], plain)
        total = total + (i.weight * (-i.advantage * (lp - lp.detach()).exp() - 0.05 * entropy)[keep]).sum()
    total.backward()
    m, got = gradients(cfg, batch)
    assert m["train/loss"] == pytest.approx(total.item(), abs=1e-5)
    close(got, {n: q.grad for n, q in plain.named_parameters()})
    with one_rank(cfg) as t, torch.no_grad():
        items, known = everything(batch)
        want = torch.cat([over_support(known[i.index], plain)[0][torch.tensor(known[i.index].loss_mask) > 0] for i in items])
        torch.testing.assert_close(t.log_probs(t.model, pack(items, known)), want, rtol=0, atol=1e-5)
    cfg.train.max_tokens_per_gpu = 64
    one = run_supports_single(cfg)
    cfg.parallel.fsdp = 2
    compare(one, two_ranks(run_supports, cfg)[0])


def run_supports(trainer, cfg):
    trainer.setup()
    return [train_once(trainer, cfg, 1, with_supports(make_batch(8)))], weights(trainer)


def run_supports_single(cfg):
    with one_rank(cfg) as t:
        return [train_once(t, cfg, 1, with_supports(make_batch(8)))], weights(t)


def test_samples_without_their_support_are_refused(tmp_path):
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path)
    cfg.rollout.top_k = 5
    batch = with_supports(make_batch(9))
    for s in batch[0]:
        s.rollout_top_p_token_ids, s.rollout_top_p_token_offsets = array("i"), array("q")
    with one_rank(cfg) as t:
        with pytest.raises(VimeError, match="came without the tokens they were drawn from"):
            train_once(t, cfg, 1, batch)
        with pytest.raises(VimeError, match="every sample needs its sampling_mask"):
            train_once(t, cfg, 1, make_batch(9))


# ------------------------------------------------------------------ the user's own functions


def test_custom_tis_as_the_built_in_and_with_rejection(tmp_path):
    folder = make_model(tmp_path / "m")
    split = {"lr": LR, "max_tokens_per_gpu": 64, "logprob_chunk": 7, "skip_zero_advantage": False}
    built_in = single(make_cfg(folder, tmp_path, algo={"correction": "tis"}, train={"lr": LR, "skip_zero_advantage": False}), [5])
    own = single(make_cfg(folder, tmp_path, algo={"custom_tis": f"{HERE}:plain_tis"}, train=split), [5])
    compare(built_in, own)
    for k in ("train/tis", "train/tis_clipfrac", "train/tis_abs"):
        assert own[0][0][k] == pytest.approx(built_in[0][0][k], rel=1e-5)
    cfg = make_cfg(folder, tmp_path, algo={"custom_tis": f"{HERE}:tis_function"}, train=split | {"clip_grad": 1e9})

    def rejecting(i, s, lp, keep):
        kept = keep.clone()
        kept[0] = False
        return (-i.advantage * (lp - lp.detach()).exp() * (lp.detach() - sampled(s)).exp().clamp(0, 2.0))[kept]

    want, grads = naive(folder, cfg, make_batch(5), rejecting)
    m, got = gradients(cfg, make_batch(5))
    assert m["train/loss"] == pytest.approx(want, abs=1e-5) and m["train/own_ratio"] > 0
    close(got, grads)


def test_custom_loss_equals_the_built_in(tmp_path, two_ranks):
    """From logits of all positions, as an on-policy GRPO loss; its metrics are those of the run; also over two ranks."""
    folder = make_model(tmp_path / "m")
    built_in = single(make_cfg(folder, tmp_path, train={"lr": LR, "skip_zero_advantage": False}), [6, 7])
    cfg = make_cfg(folder, tmp_path, loss={"custom": f"{HERE}:custom_loss"}, train={"lr": LR, "max_tokens_per_gpu": 64})
    SEEN.clear()
    own = single(cfg, [6, 7])
    close(built_in[1], own[1])
    for a, b in zip(built_in[0], own[0]):
        assert b["train/loss"] == b["train/own"] == pytest.approx(a["train/loss"], abs=1e-6)
        assert b["train/grad_norm"] == pytest.approx(a["train/grad_norm"], rel=1e-5) and "train/entropy" not in b
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokens, logits = SEEN["logits"][0]
    torch.testing.assert_close(logits[:-1], plain(tokens[None]).logits[0, :-1].detach(), rtol=0, atol=1e-4)
    cfg.parallel.fsdp = 2
    two = two_ranks(run_steps, cfg, [6, 7])
    close(own[1], two[0][1])
    assert [m["train/own"] for m in two[1][0]] == pytest.approx([m["train/own"] for m in own[0]], abs=1e-6)


def test_custom_reducer_and_advantage(tmp_path):
    folder = make_model(tmp_path / "m")
    big = {"clip_grad": 1e9, "logprob_chunk": 7, "max_tokens_per_gpu": 64}
    cfg = make_cfg(folder, tmp_path, loss={"custom_reducer": f"{HERE}:sum_over_eight"}, train=big)

    def on_policy(i, s, lp, keep):  # the reducer divides by 8 and by the step's 16 samples in place of item.weight
        return (-i.advantage * (lp - lp.detach()).exp())[keep] / 8 / 16 / i.weight

    want, grads = naive(folder, cfg, make_batch(6), on_policy)
    m, got = gradients(cfg, make_batch(6))
    assert m["train/pg_loss"] == pytest.approx(want, abs=1e-5)
    close(got, grads)
    cfg = make_cfg(folder, tmp_path, algo={"custom_advantage": f"{HERE}:custom_advantage"}, train=big)

    def first_half(i, s, lp, keep):
        half = torch.arange(len(lp)) < len(lp) / 2
        return (-2 * i.advantage * half * (lp - lp.detach()).exp())[keep]

    want, grads = naive(folder, cfg, make_batch(6), first_half)
    m, got = gradients(cfg, make_batch(6))
    assert m["train/loss"] == pytest.approx(want, abs=1e-5)
    close(got, grads)


def test_functions_that_do_not_fit_are_named(tmp_path):
    folder = make_model(tmp_path / "m")
    cfg = make_cfg(folder, tmp_path, algo={"custom_tis": f"{HERE}:no_keywords"})
    said = r"algo.custom_tis = .*expected \(args, pg_loss=, .*found no_keywords\(args, pg_loss\)"
    with pytest.raises(VimeError, match=said), one_rank(cfg):
        pass
    cfg = make_cfg(folder, tmp_path, algo={"custom_tis": f"{HERE}:wrong_shape"})
    with one_rank(cfg) as t, pytest.raises(VimeError, match=r"algo.custom_tis: values of shape .* came back for \d+ response tokens"):
        train_once(t, cfg, 1, make_batch(6))
