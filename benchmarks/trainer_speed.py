"""One policy-gradient step on the same samples: vime's Trainer against a plain transformers loop, on one rank.

    python benchmarks/trainer_speed.py --model models/smollm2-135m

The plain loop pads each micro-batch, runs the model's own forward to full logits, takes cross entropies of them, and steps AdamW on float32
weights (with --dtype bfloat16 under autocast). Loss and gradient norm of the first step must be equal, or the exit code is 1. Each side runs
in a process of its own; memory is that process's peak. Tokens are those of the samples, prompts counted once a sample, for both.
"""

import argparse
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM

from vime import config
from vime.procs import free_port
from vime.sample import Sample, meta_of
from vime.trainer.advantage import grpo
from vime.trainer.batch import RankPlan, plan
from vime.trainer.engine import Trainer

TEMPERATURE, LR = 1.0, 1e-6


def batch(a: argparse.Namespace) -> list[list[Sample]]:
    """Groups that share a prompt; responses of 1/8 to 1 times the longest, as rollouts have. Random tokens."""
    r, vocab = random.Random(0), AutoConfig.from_pretrained(a.model).vocab_size
    groups = []
    for g in range(a.groups):
        prompt = [r.randrange(vocab) for _ in range(a.prompt)]
        groups.append([])
        for i in range(a.samples):
            s = Sample(group_index=g, index=g * a.samples + i, tokens=list(prompt), reward=float(i % 2))
            n = r.randint(a.response // 8, a.response)
            s.append_tokens([r.randrange(vocab) for _ in range(n)], [-10.0] * n, versions=0)
            groups[-1].append(s)
    return groups


def plain(a: argparse.Namespace, samples: dict[int, Sample], p: RankPlan) -> Any:
    """The loop that anyone would write first. Returns one step of it: -> (loss, gradient norm)."""
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.0)

    def step(_: int) -> tuple[float, float]:
        total = 0.0
        for items in p.steps[0]:
            rows = [samples[i.index] for i in items]
            longest = max(len(s.tokens) for s in rows)
            ids = torch.tensor([s.tokens + [0] * (longest - len(s.tokens)) for s in rows])
            mask = torch.tensor([[1] * len(s.tokens) + [0] * (longest - len(s.tokens)) for s in rows])
            weight = torch.zeros(len(rows), longest)
            for k, (i, s) in enumerate(zip(items, rows)):
                weight[k, s.prompt_length : len(s.tokens)] = i.weight * i.advantage
            with torch.autocast("cpu", torch.bfloat16, enabled=a.dtype == "bfloat16"):
                logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            ce = F.cross_entropy(logits[:, :-1].float().flatten(0, 1) / TEMPERATURE, ids[:, 1:].flatten(), reduction="none")
            lp = -ce.view(len(rows), longest - 1)
            loss = -((lp - lp.detach()).exp() * weight[:, 1:]).sum()
            loss.backward()
            total += float(loss.detach())
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total, float(norm)

    return step


def ours(a: argparse.Namespace, cfg: config.Config, groups: list[list[Sample]], p: RankPlan) -> Any:
    trainer = Trainer(cfg, 0, 1, "127.0.0.1", free_port())
    trainer.setup()

    def step(k: int) -> tuple[float, float]:
        for s in (s for g in groups for s in g):
            s.token_versions = [k - 1 if v >= 0 else v for v in s.token_versions]
        m = trainer.train(k, p, *groups)
        return m["train/loss"], m["train/grad_norm"]

    return step


def one(a: argparse.Namespace) -> None:
    """One side, in this process: prints JSON."""
    with tempfile.TemporaryDirectory() as folder:
        tree = {
            "model": a.model, "run_dir": folder, "data": {"prompts": "-"}, "train": {"lr": LR, "dtype": a.dtype, "max_tokens_per_gpu": a.tokens},
            "rollout": {"batch_size": a.groups, "n_samples_per_prompt": a.samples, "temperature": TEMPERATURE}, "weights": {"transport": "file"},
        }  # fmt: skip
        cfg, groups = config.validate(tree, "benchmark"), batch(a)
        metas = [meta_of(s) for g in groups for s in g]
        advantages = grpo([m.reward for m in metas], [m.group_index for m in metas], [m.rollout_id for m in metas])
        p = plan(metas, advantages, cfg, 1)[0]
        step = plain(a, {s.uid: s for g in groups for s in g}, p) if a.side == "plain" else ours(a, cfg, groups, p)
        first, wall, cpu = step(1), [], []
        for k in range(2, a.steps + 2):
            t, c = time.perf_counter(), time.process_time()
            step(k)
            wall.append(time.perf_counter() - t)
            cpu.append(time.process_time() - c)
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    tokens = sum(len(s.tokens) for g in groups for s in g)
    print(json.dumps({"loss": first[0], "norm": first[1], "wall": statistics.median(wall), "cpu": statistics.median(cpu), "rss": rss,
                      "tokens": tokens, "micro": len(p.steps[0])}))  # fmt: skip


def peak(dtype: torch.dtype, n: int = 2048) -> float:
    """FLOP/s of the fastest of several square matrix products."""
    a, b = torch.randn(n, n).to(dtype), torch.randn(n, n).to(dtype)
    best = 1e9
    for _ in range(8):
        t = time.perf_counter()
        a @ b
        best = min(best, time.perf_counter() - t)
    return 2 * n**3 / best


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="models/smollm2-135m")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16")
    for name, default in {"groups": 4, "samples": 8, "prompt": 64, "response": 192, "tokens": 1024, "steps": 2}.items():
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--side", choices=["plain", "vime"], help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.side:
        return one(a)
    env = os.environ | {"OMP_WAIT_POLICY": "PASSIVE", "TOKENIZERS_PARALLELISM": "false"}
    sides = {}
    for side in ("plain", "vime"):
        out = subprocess.run([sys.executable, __file__, *sys.argv[1:], "--side", side], env=env, stdout=subprocess.PIPE, text=True, check=True)
        r = sides[side] = json.loads(out.stdout.splitlines()[-1])
        print(f"{side:6} {r['tokens'] / r['wall']:6.0f} tokens/s, {r['wall']:.1f} s a step ({r['cpu']:.1f} CPU s), peak {r['rss']:.2f} GB; "
              f"{r['tokens']} tokens in {r['micro']} micro-batches; loss {r['loss']:.6g}, gradient norm {r['norm']:.6g}", flush=True)  # fmt: skip
    a_, b = sides["plain"], sides["vime"]
    params = sum(x.numel() for x in AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(a.model)).parameters())
    best = peak(getattr(torch, a.dtype))
    share = 6 * params * b["tokens"] / b["wall"] / best
    print(f"vime/plain: {a_['wall'] / b['wall']:.2f}x tokens/s, {a_['cpu'] / b['cpu']:.2f}x tokens per CPU second, {b['rss'] / a_['rss']:.2f}x memory")
    print(f"machine: {best / 1e9:.0f} GFLOP/s in {a.dtype} matmul; vime does the work of {share:.0%} of it (6 x parameters x sample tokens)")
    tol = 1e-4 if a.dtype == "float32" else 0.05
    off = abs(a_["norm"] - b["norm"]) / a_["norm"]
    print(f"gradient norms differ by {off:.1e} ({'equal' if off < tol else 'NOT EQUAL'} within {tol:g})")
    sys.exit(off >= tol)


if __name__ == "__main__":
    main()
