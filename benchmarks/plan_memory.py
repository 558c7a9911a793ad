"""What `vime plan` says a trainer rank takes, against what it takes: python benchmarks/plan_memory.py (about two minutes on two cores)

Each layout trains two optimizer steps on gloo processes. Measured on every rank: weights, and AdamW's moments, by the storages of the tensors
themselves; and in the second step the most that torch's CPU allocator held beyond them at once, from the profiler's record of every allocation
and release in that process: gradients, activations, what FSDP gathers, logits. Not measured: what libraries take besides torch's allocator (gloo's
buffers, code), which `vime plan` does not count either. The fullest rank is compared. Exit code 1 where one is off by more than 15 %.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from tests.integration.trainer_kit import Ranks, make_cfg, make_model, train_once
from vime import plan
from vime.sample import Sample
from vime.trainer.layout import local

TOKENS = 1024  # of a micro-batch
DENSE = {"hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 6, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 32}
SHAPES = {
    "llama": ("llama", DENSE | {"vocab_size": 4096}, False),
    "qwen3": ("qwen3", DENSE | {"vocab_size": 4096}, True),
    "moe": ("qwen3_moe", DENSE | {"vocab_size": 4096, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 256}, False),
}
CELLS: list[tuple[str, dict[str, int], dict[str, Any]]] = [
    ("llama", {}, {}),
    ("qwen3", {"fsdp": 2}, {"dtype": "bfloat16"}),
    ("llama", {"tp": 2}, {}),
    ("qwen3", {"cp": 2}, {"gradient_checkpointing": True}),
    ("llama", {"pp": 2}, {}),
    ("moe", {"fsdp": 2, "ep": 2}, {}),
]


def batch(vocab: int) -> list[list[Sample]]:
    """Two micro-batches of TOKENS for each of two shares: groups of two samples, which have their prompts in common."""
    r = torch.Generator().manual_seed(0)
    out = []
    for g in range(8):
        prompt = torch.randint(vocab, (32,), generator=r).tolist()
        out.append([Sample(group_index=g, index=2 * g + i, tokens=list(prompt), reward=float(i)) for i in range(2)])
        for s in out[-1]:
            s.append_tokens(torch.randint(vocab, (240,), generator=r).tolist(), [-1.0] * 240, versions=0)
    return out


def size(tensors: Any) -> int:
    found = {}
    for t in tensors:
        s = local(t.detach()).untyped_storage()
        found[s.data_ptr()] = s.nbytes()
    return sum(found.values())


def measure(trainer: Any, cfg: Any, vocab: int) -> dict[str, float]:
    """On a rank: bytes of what stays, and the most beyond it in the second step."""
    trainer.setup()
    batches = batch(vocab)
    train_once(trainer, cfg, 1, batches)
    weights = size(trainer.model.parameters())
    moments = size(v for s in trainer.optimizer.state.values() for v in s.values() if v.ndim)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
        train_once(trainer, cfg, 2, batches)
    events = sorted((e.start_ns(), e.nbytes()) for e in seen.profiler.kineto_results.events() if e.name() == "[memory]")
    now = most = 0
    for _, n in events:
        now += n
        most = max(most, now)
    return {"weights": weights, "optimizer": moments, "beyond": most}


def main() -> int:
    rows = []
    with tempfile.TemporaryDirectory() as tmp:
        models = {k: str(make_model(Path(tmp) / k, kind, tied, **shape)) for k, (kind, shape, tied) in SHAPES.items()}
        ranks = Ranks(2)
        for kind, parallel, train in CELLS:
            changes = {"parallel": parallel, "rollout": {"batch_size": 8, "n_samples_per_prompt": 2, "max_context_len": 512, "max_response_len": 256}}
            cfg = make_cfg(Path(models[kind]), Path(tmp), train={"max_tokens_per_gpu": TOKENS, "logprob_chunk": 256, **train}, **changes)
            cfg = cfg.model_copy(update={"algo": cfg.algo.model_copy(update={"correction": "rollout_logprobs"})})
            found = ranks(measure, cfg, SHAPES[kind][1]["vocab_size"])
            said = plan.rank_bytes(cfg, cfg.parallel, on_cpu=True)
            wrong = [f for f in found if isinstance(f, Exception)]
            if wrong:
                raise wrong[0]
            full = max(found, key=lambda f: f["weights"] + f["optimizer"] + f["beyond"])
            total = full["weights"] + full["optimizer"] + full["beyond"]
            rows.append(
                {
                    "model": kind,
                    "layout": str(cfg.parallel),
                    **train,
                    "measured": round(total / 1e6, 1),
                    "planned": round(sum(said.values()) / 1e6, 1),
                }
            )
            rows[-1] |= {"off": f"{sum(said.values()) / total - 1:+.1%}", "weights+optimizer": (full["weights"] + full["optimizer"]) / 1e6}
            rows[-1] |= {"planned weights+optimizer": (said["weights"] + said["optimizer"]) / 1e6, "beyond": full["beyond"] / 1e6}
            rows[-1] |= {k: round(v / 1e6, 1) for k, v in said.items()}
            print(json.dumps(rows[-1]), flush=True)
        ranks.close()
    return int(any(abs(r["planned"] / r["measured"] - 1) > 0.15 for r in rows))


if __name__ == "__main__":
    sys.exit(main())
