"""SFT and DPO in the real trainer: naive losses over plain forwards, every way to split a batch, and a run without servers, resumed."""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.test_trainer import close, plain_log_probs
from tests.integration.trainer_kit import VOCAB, make_cfg, make_model, one_rank, weights
from vime.config import ParallelConfig
from vime.model import _char_tokenizer
from vime.sample import Sample, meta_of
from vime.trainer.batch import plan

ROOT = Path(__file__).resolve().parents[2]


def make_pairs(seed, pairs=6, n=2):
    """Groups of n answers to one prompt, turns of others between them."""
    r = random.Random(seed)
    out = []
    for g in range(pairs):
        prompt, group = [r.randrange(VOCAB) for _ in range(r.randint(1, 9))], []
        for i in range(n):
            s = Sample(group_index=g, index=g * n + i, rollout_id=g, tokens=list(prompt), reward=1.0 - i)
            for trained in (True, False, True) if r.random() < 0.4 else (True,):
                tokens = [r.randrange(VOCAB) for _ in range(r.randint(1, 12))]
                s.append_tokens(tokens, [0.0] * len(tokens) if trained else None, versions=0 if trained else None, trainable=trained)
            group.append(s)
        out.append(group)
    return out


def taught(trainer, cfg, step, batch):
    for s in (s for g in batch for s in g):
        s.token_versions = [step - 1 if v >= 0 else v for v in s.token_versions]
    metas = [meta_of(s) for g in batch for s in g]
    return trainer.train(step, plan(metas, [1.0] * len(metas), cfg, cfg.parallel.fsdp)[cfg.parallel.shard(trainer.rank)], *batch)


def two_steps(trainer, cfg, n):
    trainer.setup()
    return [taught(trainer, cfg, k, make_pairs(k, n=n)) for k in (1, 2)], weights(trainer)


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_offline_losses_equal_the_naive_ones(tmp_path, objective):
    """DPO: by the formula, a pair at a time, summed over trained tokens of every turn. SFT: the mean NLL of trained tokens."""
    batch, tree = make_pairs(5, n=2 if objective == "dpo" else 1), {"objective": objective, "clip_grad": 1e9}
    folder, ref = make_model(tmp_path / "m"), make_model(tmp_path / "ref", seed=1)
    algo = {"algo": {"ref_model": str(ref), "dpo_beta": 0.05}} if objective == "dpo" else {"loss": {"aggregate": "token-mean"}}
    train = tree | {"max_tokens_per_gpu": 64, "logprob_chunk": 7}
    cfg = make_cfg(folder, tmp_path, train=train, **algo, rollout={"batch_size": 6, "n_samples_per_prompt": 8, "temperature": 1.0})
    plain, before = (AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (folder, ref))

    def gain(model, s):
        return plain_log_probs(model, s, 1.0)[0][torch.tensor(s.loss_mask) > 0]

    if objective == "sft":
        want = -torch.cat([gain(plain, s) for (s,) in batch]).mean()
    else:
        margins = []
        for pair in batch:
            with torch.no_grad():
                base = [gain(before, s).sum() for s in pair]
            c, r = (gain(plain, s).sum() - b for s, b in zip(pair, base))
            margins.append(0.05 * (c - r))
        want = torch.stack([torch.log1p(torch.exp(-x)) for x in margins]).mean()
    want.backward()
    with one_rank(cfg) as t:
        found = {}
        t.optimizer.step = lambda: found.update({n: p.grad.clone() for n, p in t.model.named_parameters()})
        m = taught(t, cfg, 1, batch)
    assert m["train/loss"] == pytest.approx(want.item(), rel=1e-5)
    close(found, {n: p.grad for n, p in plain.named_parameters()})
    if objective == "dpo":
        assert m["train/dpo_margin"] == pytest.approx(torch.stack(margins).mean().item(), rel=1e-4)
        assert m["train/dpo_accuracy"] == pytest.approx(sum(float(x > 0) for x in margins) / 6) and 0 < m["train/dpo_accuracy"] < 1
        assert m["train/dpo_margin"] == pytest.approx(m["train/dpo_chosen_reward"] - m["train/dpo_rejected_reward"], abs=1e-6)
    assert m["train/trained_tokens"] == sum(sum(s.loss_mask) for g in batch for s in g) and "train/logprob_abs_diff" not in m


@pytest.mark.parametrize("objective", ["sft", "dpo"])
def test_offline_updates_do_not_depend_on_micro_batches_or_ranks(tmp_path, two_ranks, objective):
    n, results = 2 if objective == "dpo" else 1, []
    folder, ref = make_model(tmp_path / "m"), make_model(tmp_path / "ref", seed=1)
    more = {"algo": {"ref_model": str(ref)}} if objective == "dpo" else {}
    for budget, chunk in ((10**6, 1024), (40, 5)):
        train = {"objective": objective, "lr": 1e-4, "global_batch_size": 3, "max_tokens_per_gpu": budget, "logprob_chunk": chunk}
        rollout = {"batch_size": 6, "n_samples_per_prompt": 8, "temperature": 1.0}
        cfg = make_cfg(folder, tmp_path, train=train, rollout=rollout, **more)
        with one_rank(cfg) as t:
            results.append(([taught(t, cfg, k, make_pairs(k, n=n)) for k in (1, 2)], weights(t)))
    for layout in ({"fsdp": 2}, {"cp": 2}, {"tp": 2}):
        cfg.parallel = ParallelConfig(**layout)
        results += two_ranks(two_steps, cfg, n)
    shown = ("train/loss", "train/grad_norm", "train/entropy", "train/dpo_margin", "train/dpo_accuracy", "train/trained_tokens")
    for metrics, final in results[1:]:
        close(results[0][1], final)
        for a, b in zip(results[0][0], metrics, strict=True):
            assert {k: a[k] for k in shown if k in a} == pytest.approx({k: b[k] for k in shown if k in b}, rel=1e-4)


def test_a_run_without_servers_learns_and_resumes(tmp_path):
    """`vime train` on a file of answers: the loss falls, and a run that was cut in two ends at the same numbers."""
    _char_tokenizer().save_pretrained(make_model(tmp_path / "m"))
    template = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token if m.role == 'assistant' else '>' }}{% endfor %}"
    rows = [{"prompt": w, "response": w[::-1]} for w in ("abcd", "dcab", "bacd", "cdab")]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    run = [
        f'model = "{tmp_path / "m"}"', f'run_dir = "{tmp_path}"', "[data]", f'prompts = "{tmp_path / "a.jsonl"}"', f'chat_template = "{template}"',
        "[rollout]", "batch_size = 4", "max_response_len = 16", "max_context_len = 32", "[train]", 'objective = "sft"', "steps = 6", "lr = 1e-2",
        "[checkpoint]", "interval = 3", "keep = 9",
    ]  # fmt: skip
    (tmp_path / "run.toml").write_text("\n".join(run))

    def losses(name, *more):
        done = subprocess.run([sys.executable, "-m", "vime.cli", "train", tmp_path / "run.toml", f"name={name}", *more], cwd=ROOT, capture_output=True)
        assert done.returncode == 0, done.stderr.decode()[-2000:]
        return [json.loads(x)["train/loss"] for x in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]

    whole = losses("whole")
    assert len(whole) == 6 and whole[-1] < whole[0] / 2
    losses("cut", "train.steps=3")
    assert losses("cut", "--resume") == whole
    assert (tmp_path / "whole" / "checkpoints" / "step_000006" / "hf" / "model.safetensors").exists()
