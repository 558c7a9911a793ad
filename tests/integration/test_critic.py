"""PPO's critic in the real trainer: naive values, advantages and gradients; every way to split a batch; checkpoints."""

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from tests.integration.test_corrections import naive, sampled
from tests.integration.test_trainer import close, compare, plain_log_probs, run_steps
from tests.integration.test_trainer_checkpoint import timeless, train
from tests.integration.trainer_kit import leave, make_batch, make_cfg, make_model, one_rank, train_once, weights
from vime.errors import VimeError
from vime.procs import free_port
from vime.sample import meta_of
from vime.trainer.advantage import estimate
from vime.trainer.apart import CriticTrainer
from vime.trainer.batch import plan

LR = 1e-4
GAE = {"advantage_estimator": "gae", "gamma": 0.97, "lambd": 0.9}
SHOWN = ("train/value_loss", "train/critic_grad_norm", "train/value_clipfrac", "train/value_mean", "train/return_mean", "train/explained_variance")


def of_critic(trainer):
    """Whole weights of the critic by name; a collective."""
    params = trainer.critic.model.named_parameters()
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in params}


def steps_of_critic(trainer, cfg, seeds, checkpoint=None):
    return run_steps(trainer, cfg, seeds, checkpoint), of_critic(trainer)


@pytest.mark.parametrize("value_clip", [0.05, None])
def test_critic_equals_the_naive_one(tmp_path, value_clip):
    """Values by plain forwards; GAE as the sum over later tokens of (gamma lambda)^k delta, over trained tokens alone, KL in the reward,
    whitened over the step; both losses' gradients by autograd, sample by sample."""
    folder, own, ref, batch = make_model(tmp_path / "m"), make_model(tmp_path / "v", seed=2), make_model(tmp_path / "ref", seed=1), make_batch(5)
    algo = GAE | {"kl_coef": 0.2, "kl_loss_type": "k1", "ref_model": str(ref), "critic_model": str(own), "value_clip": value_clip}
    algo |= {"correction": "rollout_logprobs"}  # KL and ratio of the sampled logprobs: off policy, so that both clips act
    cfg = make_cfg(folder, tmp_path, algo=algo, train={"clip_grad": 1e9, "logprob_chunk": 7, "max_tokens_per_gpu": 64})
    plain = AutoModelForTokenClassification.from_pretrained(own, num_labels=1, dtype=torch.float32)
    moved = AutoModelForTokenClassification.from_pretrained(own, num_labels=1, dtype=torch.float32)
    ref_model = AutoModelForCausalLM.from_pretrained(ref, dtype=torch.float32)
    torch.manual_seed(3)
    head = torch.randn(32) * 0.3
    with torch.no_grad():
        for m, shift in ((plain, 0.0), (moved, 0.1)):
            m.score.weight.copy_(head[None] + shift * torch.randn(32)), m.score.bias.fill_(0.1)

    def values(m, s):
        return m(torch.tensor([s.tokens])).logits[0, s.prompt_length - 1 : -1, 0][torch.tensor(s.loss_mask) > 0]

    adv, ret, old = {}, {}, {}
    for s in (s for g in batch for s in g if not s.remove_sample):
        keep = torch.tensor(s.loss_mask) > 0
        with torch.no_grad():
            r = -0.2 * (sampled(s) - plain_log_probs(ref_model, s, 0.8)[0])[keep]
            v = values(plain, s)
        r[-1] += s.reward
        delta = [float(r[k] + (0.97 * v[k + 1] if k + 1 < len(v) else 0) - v[k]) for k in range(len(v))]
        adv[s.index] = np.array([sum((0.97 * 0.9) ** (j - k) * delta[j] for j in range(k, len(v))) for k in range(len(v))])
        ret[s.index], old[s.index] = torch.tensor(adv[s.index], dtype=torch.float32) + v, v
    every = np.concatenate(list(adv.values()))
    shown = {"value": [], "clipped": [], "loss": 0.0}

    def policy(i, s, lp, keep):
        ratio, a = (lp - sampled(s))[keep].exp(), torch.tensor((adv[s.index] - every.mean()) / np.sqrt(every.var(ddof=1) + 1e-8))
        v = values(moved, s)  # after what the optimizer could have done to the old ones
        error = (v - ret[s.index]) ** 2
        if value_clip:
            held = (old[s.index] + (v - old[s.index]).clamp(-value_clip, value_clip) - ret[s.index]) ** 2
            shown["clipped"] += (held > error).tolist()
            error = torch.maximum(error, held)
        shown["loss"] = shown["loss"] + i.weight * error.sum() / 2
        return torch.maximum(-ratio * a, -ratio.clamp(0.8, 1.2) * a)

    want, grads = naive(folder, cfg, batch, policy)
    shown["loss"].backward()
    if value_clip:
        assert 0 < np.mean(shown["clipped"]) < 1
    with one_rank(cfg) as t:
        model, found = t.critic.model, {}
        with torch.no_grad():
            model.score.weight.copy_(plain.score.weight), model.score.bias.copy_(plain.score.bias)
        before, look = t.critic.backward, t.critic.values
        seen: list[torch.Tensor] = []

        def after_a_step(b, total):  # weights other than those of the values
            with torch.no_grad():
                model.score.weight.copy_(moved.score.weight)
            before(b, total)

        def note(b):
            seen.append(look(b))
            torch.testing.assert_close(seen[-1], torch.cat([old[s.index] for s in b.samples]), rtol=0, atol=1e-5)
            return seen[-1]

        t.critic.backward, t.critic.values = after_a_step, note
        t.optimizer.step = lambda: found.update({n: p.grad.clone() for n, p in t.model.named_parameters()})
        t.parts["critic."][1].step = lambda: found.update(value={n: p.grad.clone() for n, p in model.named_parameters()})
        m = train_once(t, cfg, 1, batch)
    assert len(seen) > 2 and torch.cat(seen).std() > 0.3
    assert m["train/value_loss"] == pytest.approx(float(shown["loss"]), rel=1e-5) and m["train/loss"] == pytest.approx(want, abs=1e-5)
    assert 0 < m["train/pg_clipfrac"] < 1
    close(found.pop("value"), {n: p.grad for n, p in moved.named_parameters()})
    close(found, grads)


def test_critic_does_not_depend_on_micro_batches_or_ranks(tmp_path, two_ranks):
    """Weights of both models and metrics over two batches of two optimizer steps; the second batch's values are not 0 any more."""
    folder = make_model(tmp_path / "m")
    algo = GAE | {"critic_lr": 1e-4, "value_clip": 0.001, "kl_coef": 0.1, "ref_model": str(make_model(tmp_path / "ref", seed=1))}
    one, many = (
        make_cfg(folder, tmp_path, algo=algo, train={"lr": LR, "global_batch_size": 8, "max_tokens_per_gpu": b, "logprob_chunk": c})
        for b, c in ((10**6, 1024), (64, 5))
    )
    results = []
    for cfg in (one, many):
        with one_rank(cfg) as t:
            out = [train_once(t, cfg, k + 1, make_batch(s)) for k, s in enumerate([3, 4])]
            results.append(((out, weights(t)), of_critic(t)))
    many.parallel.fsdp = 2
    results += two_ranks(steps_of_critic, many, [3, 4])
    (whole, critic), *others = results
    assert whole[0][1]["train/value_mean"] != 0 and 0 < whole[0][1]["train/value_clipfrac"] < 1
    for got, got_critic in others:
        compare(whole, got)
        close(critic, got_critic)
        for a, b in zip(whole[0], got[0], strict=True):
            assert {k: a[k] for k in SHOWN if k in a} == pytest.approx({k: b[k] for k in SHOWN if k in b}, rel=1e-3, abs=1e-6)


def test_critic_resumes_bit_for_bit_and_at_another_number_of_ranks(tmp_path, two_ranks):
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path, algo=GAE, train={"lr": 1e-4, "global_batch_size": 8})
    (tmp_path / "c").mkdir()
    with one_rank(cfg) as t:
        train(t, cfg, [1, 2])
        t.save(str(tmp_path / "c"))
        rest, final, critic = train(t, cfg, [3, 4]), weights(t), of_critic(t)
    with one_rank(cfg, tmp_path / "c") as t:
        again, end, same = train(t, cfg, [3, 4]), weights(t), of_critic(t)
    assert timeless(again) == timeless(rest)
    assert all(torch.equal(final[k], end[k]) for k in final) and all(torch.equal(critic[k], same[k]) for k in critic)
    cfg.parallel.fsdp = 2
    for got in two_ranks(resumed, cfg, tmp_path / "c"):
        close(critic, got)
    plain = make_cfg(tmp_path / "m", tmp_path, train={"lr": 1e-4})
    (tmp_path / "p").mkdir()
    with one_rank(plain) as t:
        t.save(str(tmp_path / "p"))
    cfg.parallel.fsdp = 1
    with pytest.raises(VimeError, match=r"algo\.advantage_estimator"), one_rank(cfg, tmp_path / "p"):
        pass


def resumed(trainer, cfg, folder):
    trainer.setup(str(folder))
    train(trainer, cfg, [3, 4])
    return of_critic(trainer)


def test_first_steps_may_train_the_critic_alone(tmp_path):
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path, algo=GAE | {"num_critic_only_steps": 1, "critic_lr": 1e-3}, train={"lr": LR})
    with one_rank(cfg) as t:
        before, critic = weights(t), of_critic(t)
        m = train_once(t, cfg, 1, make_batch(3))
        assert all(torch.equal(v, before[k]) for k, v in weights(t).items())
        assert any(not torch.equal(v, critic[k]) for k, v in of_critic(t).items())
        assert m["train/optimizer_steps"] == 0 and "train/loss" not in m and m["train/trained_tokens"] > 0 and m["train/value_loss"] > 0
        assert t.parts["critic."][1].param_groups[0]["lr"] == pytest.approx(1e-3)
        assert train_once(t, cfg, 2, make_batch(4))["train/grad_norm"] > 0
        assert any(not torch.equal(v, before[k]) for k, v in weights(t).items())


def given(trainer, cfg, seeds, advantages):
    """As run_steps, of the model's ranks alone."""
    trainer.setup()
    out = []
    for k, s in enumerate(seeds):
        batch = as_of(k, make_batch(s))
        plans = plan(*judged(cfg, batch), cfg, cfg.parallel.fsdp)
        out.append(trainer.train(k + 1, plans[cfg.parallel.shard(trainer.rank)], *batch, advantages=advantages[k]))
    return out, weights(trainer)


def as_of(version, batch):
    for s in (s for g in batch for s in g):
        s.token_versions = [version if v >= 0 else v for v in s.token_versions]
    return batch


def judged(cfg, batch):
    return estimate([meta_of(s) for g in batch for s in g], cfg)


@pytest.mark.parametrize("axis", ["fsdp", "tp", "cp", "pp"])
def test_a_critic_apart_is_the_one_on_the_same_ranks(tmp_path, two_ranks, axis):
    """Weights and metrics of two batches of two optimizer steps, the model's ranks cut along any axis. The critic needs nothing of the model's."""
    folder, train = make_model(tmp_path / "m"), {"lr": LR, "global_batch_size": 8, "max_tokens_per_gpu": 64}
    both = make_cfg(folder, tmp_path, algo=GAE | {"critic_lr": 1e-4, "value_clip": 0.001}, train=train)
    with one_rank(both) as t:
        want = [train_once(t, both, k + 1, make_batch(s)) for k, s in enumerate([3, 4])]
        model, critic = weights(t), of_critic(t)
    cfg = make_cfg(folder, tmp_path, algo=GAE | {"critic_lr": 1e-4, "value_clip": 0.001, "critic_ranks": 1}, train=train, parallel={axis: 2})
    own, advantages, metrics = cfg.worlds[1], [], []
    trainer = CriticTrainer(own, 0, 1, 2, "127.0.0.1", free_port())
    try:
        trainer.setup()
        for k, s in enumerate([3, 4]):
            batch = as_of(k, make_batch(s))
            (mine,) = plan(*judged(own, batch), own, 1)
            advantages.append(trainer.advantages(k + 1, mine, [s for g in batch for s in g]))
            metrics.append(trainer.train(k + 1, mine))
        close(critic, of_critic(trainer))
    finally:
        leave(trainer)
    for found in two_ranks(given, cfg, [3, 4], advantages):
        assert not isinstance(found, Exception), found
        for whole, rest, ours in zip(want, found[0], metrics):
            assert {k: whole[k] for k in ours} == pytest.approx(ours, rel=1e-4, abs=1e-6)
            assert whole.keys() == (ours | rest).keys()
        if axis != "pp":  # where a rank holds its own layers only
            close(model, found[1])


def test_distillation_takes_the_kl_to_the_teacher(tmp_path):
    """Each token's advantage is teacher - student logprob, not whitened, whatever its reward; one rank, any micro-batches."""
    folder, ref, batch = make_model(tmp_path / "m"), make_model(tmp_path / "ref", seed=1), make_batch(6)
    algo = {"advantage_estimator": "on_policy_distillation", "ref_model": str(ref)}
    cfg = make_cfg(folder, tmp_path, algo=algo, train={"clip_grad": 1e9, "max_tokens_per_gpu": 64})
    teacher = AutoModelForCausalLM.from_pretrained(ref, dtype=torch.float32)
    found = {}

    def token_loss(i, s, lp, keep):
        with torch.no_grad():
            gain = plain_log_probs(teacher, s, 0.8)[0] - lp
        return (-gain * (lp - lp.detach()).exp())[keep]

    want, grads = naive(folder, cfg, batch, token_loss)
    with one_rank(cfg) as t:
        t.optimizer.step = lambda: found.update({n: p.grad.clone() for n, p in t.model.named_parameters()})
        m = train_once(t, cfg, 1, batch)
    assert m["train/loss"] == pytest.approx(want, abs=1e-5) and m["train/reward_kl"] > 0.01
    close(found, grads)
