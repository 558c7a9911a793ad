"""One policy-gradient step on the same GRPO batch: vime's Trainer against a plain transformers loop, on one rank, with the same threads.

    python benchmarks/trainer_speed.py            # a random Qwen3 of 75M parameters, float32 and bfloat16, about 4 minutes on two cores

The batch: groups whose samples share a prompt, response lengths log-normal, as rollouts have them. The plain loop is what one writes first with
transformers: a group is a padded micro-batch, model(...).logits, logprobs of the sampled tokens, the same loss with the same weights, clipping
and AdamW on float32 weights; in bfloat16 under autocast. Each side is a process of its own, and they take turns: rounds of one step each; times
are medians. Tokens are those of the samples, prompt and response, for both sides: no padding. Before, one step's loss and gradients are
compared, every entry of them; the exit code is 1 where they differ.

The share of the machine's matmul peak counts what the loss needs: no padding, a prompt once a group, the vocabulary at trained tokens, no recompute.
"""

import argparse
import json
import math
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AutoConfig, AutoModelForCausalLM, Qwen3Config

from vime import config
from vime.procs import free_port
from vime.sample import Sample, meta_of
from vime.trainer.advantage import grpo
from vime.trainer.batch import RankPlan, plan
from vime.trainer.engine import Trainer

LR = 1e-6
SHARE = {"float32": 1e-5, "bfloat16": 0.05}  # of a tensor's largest entry, by which two gradients' entries may differ
ALLOWED = {"float32": 0.0, "bfloat16": 1e-3}  # share of entries that differ by more


def make_model(folder: str) -> None:
    torch.manual_seed(0)
    shape = {
        "vocab_size": 32000, "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 8, "num_attention_heads": 12,
        "num_key_value_heads": 4, "head_dim": 64, "tie_word_embeddings": True, "max_position_embeddings": 4096,
    }  # fmt: skip
    AutoModelForCausalLM.from_config(Qwen3Config(**shape)).save_pretrained(folder)


def make_batch(a: argparse.Namespace) -> list[list[Sample]]:
    r, vocab = random.Random(0), AutoConfig.from_pretrained(a.model).vocab_size
    groups: list[list[Sample]] = []
    for g in range(a.groups):
        prompt = [r.randrange(vocab) for _ in range(r.randint(a.prompt // 2, a.prompt * 3 // 2))]
        groups.append([])
        for i in range(a.samples):
            s = Sample(group_index=g, index=g * a.samples + i, tokens=list(prompt), reward=float(i % 2))
            n = max(1, min(a.longest, round(r.lognormvariate(math.log(a.response), a.sigma))))
            s.append_tokens([r.randrange(vocab) for _ in range(n)], [r.gauss(-math.log(vocab), 0.3) for _ in range(n)], versions=0)
            groups[-1].append(s)
    return groups


def plain(a: argparse.Namespace, groups: list[list[Sample]], p: RankPlan) -> Any:
    """-> a step, and the list that its gradients are put into before the update."""
    model = AutoModelForCausalLM.from_pretrained(a.model, dtype=torch.float32, attn_implementation="sdpa").train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.98), weight_decay=0.0, fused=True)
    items = {i.index: i for micro in p.steps[0] for i in micro}

    def step(_: int, grads: dict[str, torch.Tensor] | None = None) -> tuple[float, float]:
        total = 0.0
        for rows in groups:
            longest = max(len(s.tokens) for s in rows)
            ids = torch.tensor([s.tokens + [0] * (longest - len(s.tokens)) for s in rows])
            mask = torch.tensor([[1] * len(s.tokens) + [0] * (longest - len(s.tokens)) for s in rows])
            weight, advantage, old = torch.zeros(3, len(rows), longest)
            for k, s in enumerate(rows):
                own = slice(s.prompt_length, len(s.tokens))
                weight[k, own], advantage[k, own], old[k, own] = items[s.uid].weight, items[s.uid].advantage, torch.tensor(s.rollout_log_probs)
            with torch.autocast("cpu", torch.bfloat16, enabled=a.dtype == "bfloat16"):
                logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits
            lp = -F.cross_entropy(logits[:, :-1].float().flatten(0, 1), ids[:, 1:].flatten(), reduction="none").view(len(rows), -1)
            ratio, advantage = (lp - old[:, 1:]).exp(), advantage[:, 1:]
            loss = (torch.maximum(-ratio * advantage, -ratio.clamp(0.8, 1.2) * advantage) * weight[:, 1:]).sum()
            loss.backward()
            total += float(loss.detach())
        if grads is not None:
            grads.update({n: x.grad.clone() for n, x in model.named_parameters()})
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total, float(norm)

    return step


def ours(a: argparse.Namespace, cfg: config.Config, groups: list[list[Sample]], p: RankPlan) -> Any:
    trainer = Trainer(cfg, 0, 1, "127.0.0.1", free_port())
    trainer.setup()
    update = trainer.update

    def step(k: int, grads: dict[str, torch.Tensor] | None = None) -> tuple[float, float]:
        for s in (s for g in groups for s in g):
            s.token_versions = [k - 1 if v >= 0 else v for v in s.token_versions]

        def keep(norm: float, model: Any, optimizer: Any) -> None:
            if grads is not None:
                grads.update({n: getattr(x.grad, "full_tensor", x.grad.clone)().clone() for n, x in model.named_parameters()})
            update(norm, model, optimizer)

        trainer.update = keep  # type: ignore[method-assign]
        m = trainer.train(k, p, *groups)
        return m["train/loss"], m["train/grad_norm"]

    return step


def peak_memory() -> float:
    """This process's, in GB. (Its ru_maxrss may be that of the process that started it.)"""
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) / 2**20


def serve(a: argparse.Namespace) -> None:
    """One side, in this process: a first step, whose gradients go into a file, then one for every line of input. Each prints JSON."""
    with tempfile.TemporaryDirectory() as folder:
        tree = {
            "model": a.model, "run_dir": folder, "data": {"prompts": "-"}, "weights": {"transport": "file"},
            "train": {"lr": LR, "dtype": a.dtype, "max_tokens_per_gpu": a.tokens, "gradient_checkpointing": a.checkpointing},
            "algo": {"correction": "rollout_logprobs"}, "rollout": {"batch_size": a.groups, "n_samples_per_prompt": a.samples, "temperature": 1.0},
        }  # fmt: skip
        cfg, groups = config.validate(tree, "benchmark"), make_batch(a)
        metas = [meta_of(s) for g in groups for s in g]
        advantages = grpo([m.reward for m in metas], [m.group_index for m in metas], [m.rollout_id for m in metas])
        p = plan(metas, list(advantages), cfg, 1, AutoConfig.from_pretrained(a.model).hidden_size)[0]
        step = plain(a, groups, p) if a.side == "plain" else ours(a, cfg, groups, p)
        grads: dict[str, torch.Tensor] = {}
        loss, norm = step(1, grads)
        torch.save(grads, a.grads)
        del grads
        print(json.dumps({"loss": loss, "norm": norm, "micro": len(groups) if a.side == "plain" else len(p.steps[0])}), flush=True)
        Path("/proc/self/clear_refs").write_text("5")  # the peak from here on: without loading, and the copy of the gradients
        for k, _ in enumerate(sys.stdin, 2):
            t, c = time.perf_counter(), time.process_time()
            step(k)
            print(json.dumps({"wall": time.perf_counter() - t, "cpu": time.process_time() - c, "rss": peak_memory()}), flush=True)


def rates(a: argparse.Namespace) -> None:
    """This machine's products, FLOP/s by dtype: of large squares, and of one layer and the head forward and backward. Prints JSON."""
    c, out = AutoConfig.from_pretrained(a.model), {}
    t, d, i, q = a.tokens, c.hidden_size, c.intermediate_size, c.num_attention_heads * c.head_dim
    pairs = [(d, i), (d, i), (i, d), (d, q), (q, d), (d, c.vocab_size)]
    layer = [s for m, n in pairs for s in ((t, m, n), (t, n, m), (n, t, m))]
    for dtype in ("float32", "bfloat16"):
        for name, shapes in {"square": [(4096, 4096, 4096)], "layer": layer}.items():
            seconds = 0.0
            for m, k, n in shapes:
                x, y = torch.randn(m, k).to(getattr(torch, dtype)), torch.randn(n, k).to(getattr(torch, dtype))
                best = math.inf
                for _ in range(4):
                    start = time.perf_counter()
                    F.linear(x, y)
                    best = min(best, time.perf_counter() - start)
                seconds += best
            out[f"{name} {dtype}"] = sum(2 * m * k * n for m, k, n in shapes) / seconds
    print(json.dumps(out))


def work(a: argparse.Namespace, groups: list[list[Sample]]) -> float:
    """FLOPs of the step that the loss needs, forward and backward."""
    c = AutoConfig.from_pretrained(a.model)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(c)
    layers = sum(x.numel() for n, x in model.named_parameters() if ".layers." in n and x.ndim == 2)
    tokens = pairs = trained = 0
    for g in groups:
        prompt, own = g[0].prompt_length, [s.response_length - 1 for s in g]
        tokens += prompt + sum(own)
        trained += sum(s.response_length for s in g)
        pairs += prompt * (prompt + 1) // 2 + sum(n * prompt + n * (n + 1) // 2 for n in own)
    attention = 4 * c.num_hidden_layers * c.num_attention_heads * c.head_dim * pairs
    return 3.0 * (2 * layers * tokens + 2 * c.vocab_size * c.hidden_size * trained + attention)


def compare(dtype: str, files: list[Path], firsts: list[dict[str, float]]) -> bool:
    a, b = (torch.load(f) for f in files)
    assert a.keys() == b.keys(), a.keys() ^ b.keys()
    off = {n: (a[n] - b[n]).abs() / a[n].abs().max() for n in a}
    share = sum(int((x > SHARE[dtype]).sum()) for x in off.values()) / sum(x.numel() for x in off.values())
    worst = max(off, key=lambda n: float(off[n].max()))
    equal = share <= ALLOWED[dtype] and abs(firsts[0]["loss"] - firsts[1]["loss"]) <= SHARE[dtype] * abs(firsts[0]["loss"])
    print(f"  first step: loss {firsts[0]['loss']:.7g} and {firsts[1]['loss']:.7g}, gradient norm {firsts[0]['norm']:.7g} and {firsts[1]['norm']:.7g}; "
          f"{share:.2%} of the gradient's entries differ by more than {SHARE[dtype]:g} of their tensor's largest, at most {float(off[worst].max()):.1e} "
          f"({worst}): {'equal' if equal else 'NOT EQUAL'}", flush=True)  # fmt: skip
    return equal


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", help="a model folder; default: a random Qwen3 of 75M parameters")
    p.add_argument("--dtype", choices=["float32", "bfloat16"], nargs="+", default=["float32", "bfloat16"])
    p.add_argument("--sigma", type=float, default=0.8, help="standard deviation of the logarithm of response lengths")
    p.add_argument("--checkpointing", action="store_true", help="vime's side with train.gradient_checkpointing")
    sizes = {"groups": 2, "samples": 8, "prompt": 128, "response": 128, "longest": 768, "tokens": 2048, "rounds": 2, "threads": os.cpu_count() or 1}
    for name, default in sizes.items():
        p.add_argument(f"--{name}", type=int, default=default)
    p.add_argument("--side", choices=["plain", "vime", "rates"], help=argparse.SUPPRESS)
    p.add_argument("--grads", help=argparse.SUPPRESS)
    a = p.parse_args()
    if a.side:
        a.dtype = a.dtype[0]
        return rates(a) if a.side == "rates" else serve(a)
    with tempfile.TemporaryDirectory() as folder:
        if not a.model:
            a.model = f"{folder}/model"
            make_model(a.model)
        env = os.environ | {"OMP_NUM_THREADS": str(a.threads), "TOKENIZERS_PARALLELISM": "false"}
        env |= {"GOMP_SPINCOUNT": "10000", "THP_MEM_ALLOC_ENABLE": "1"}  # what a run of vime sets for its trainers; here for both sides
        base = [sys.executable, __file__, *sys.argv[1:], "--model", a.model]

        def measured() -> dict[str, float]:
            return json.loads(subprocess.run([*base, "--side", "rates"], env=env, stdout=subprocess.PIPE, text=True, check=True).stdout)

        def ask(side: subprocess.Popen[str], line: str = "") -> dict[str, float]:
            assert side.stdin and side.stdout
            side.stdin.write(line)
            return json.loads(side.stdout.readline())

        groups, before = make_batch(a), measured()
        tokens, need = sum(len(s.tokens) for g in groups for s in g), work(a, groups)
        slots = sum(len(g) * max(len(s.tokens) for s in g) for g in groups)
        packed = sum(g[0].prompt_length + sum(s.response_length - 1 for s in g) for g in groups)
        print(f"{a.groups} groups of {a.samples}: {tokens} tokens; padded {slots}, packed with shared prompts {packed}; {a.threads} threads", flush=True)
        walls: dict[tuple[str, str], float] = {}
        fine = True
        for dtype in a.dtype:
            print(f"{dtype}, load average {os.getloadavg()[0]:.1f}:", flush=True)
            files = [Path(folder, f"{side}.pt") for side in ("plain", "vime")]
            sides, firsts = {}, []
            for file in files:
                cmd = [*base, "--side", file.stem, "--grads", str(file), "--dtype", dtype]
                sides[file.stem] = subprocess.Popen(cmd, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
                firsts.append(ask(sides[file.stem]))
            fine &= compare(dtype, files, firsts)
            rounds: dict[str, list[dict[str, float]]] = {side: [] for side in sides}
            for k in range(a.rounds):
                for side in list(sides)[:: 1 if k % 2 else -1]:
                    rounds[side].append(ask(sides[side], "\n"))
            for (side, process), first in zip(sides.items(), firsts):
                process.communicate()
                wall, cpu = (statistics.median(r[x] for r in rounds[side]) for x in ("wall", "cpu"))
                walls[side, dtype] = wall
                low, high = (f(r["wall"] for r in rounds[side]) for f in (min, max))
                print(f"  {side:6} {tokens / wall:6.0f} tokens/s: {wall:.2f} s a step ({low:.2f} to {high:.2f}, {cpu:.2f} CPU s), "
                      f"{first['micro']} micro-batches, peak {rounds[side][-1]['rss']:.2f} GB", flush=True)  # fmt: skip
            cpus = [statistics.median(r["cpu"] for r in rounds[side]) for side in ("plain", "vime")]
            print(f"  vime/plain: {walls['plain', dtype] / walls['vime', dtype]:.2f}x tokens/s, {cpus[0] / cpus[1]:.2f}x tokens per CPU second; "
                  f"load average {os.getloadavg()[0]:.1f}", flush=True)  # fmt: skip
        rate = {k: max(v, before[k]) for k, v in measured().items()}
        print(f"machine, GFLOP/s: {', '.join(f'{k} {v / 1e9:.0f}' for k, v in rate.items())}; load average {os.getloadavg()[0]:.1f}")
        for side, dtype in walls:
            done = need / walls[side, dtype]
            print(f"  {side:6} {dtype:8} {done / 1e9:4.0f} GFLOP/s of what the loss needs: {done / rate[f'square {dtype}']:.0%} of this dtype's peak, "
                  f"{done / rate[f'layer {dtype}']:.0%} of the rate at the model's own shapes")  # fmt: skip
    sys.exit(not fine)


if __name__ == "__main__":
    main()
