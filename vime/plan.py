"""`vime plan`: does a run fit its GPUs, by computation alone: layouts, memory, links, time; what does not fit first, and the nearest that does.

Weights are counted exactly, on the model that transformers builds without data, cut as trainer/layout.py cuts it. Activations are counted per
token from the shape; benchmarks/plan_memory.py measures how far off that is. Times are estimates: their assumptions are printed.
"""

import math
import tomllib
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from vime.config import Config, ParallelConfig
from vime.errors import VimeError, nearest
from vime.trainer import axes

GB = 1e9
HERE = Path(__file__).parent
ADAM = 16  # bytes of a trained weight: float32 master, gradient and two moments
RESERVE = 0.06  # share of an accelerator's memory that its runtime, NCCL and fragments take
SERVER = 0.9  # of it that vLLM takes (gpu_memory_utilization)
SCRATCH = 2.0  # GB of activations and graphs in a server
CPU_BLOCK = 2**21  # trainer/loss.py's, which importing would cost seconds
MFU = 0.35  # share of peak FLOPs that training reaches; mixtures of experts about half of it
STREAM, LINKS = 0.6, 0.8  # shares of memory and link bandwidth that decoding and transfers reach


class Gpu(NamedTuple):
    name: str
    memory: float
    tflops: float
    hbm: float
    link: float
    nic: float
    per_node: int


class Rank(NamedTuple):
    """Bytes at the peak of a step on the trainer rank that has the most."""

    weights: float  # float32 masters, frozen models included
    gradients: float
    optimizer: float
    gathered: float  # what FSDP makes whole: the root all the time, two layers on the way
    activations: float
    head: float  # logits and their gradient, of a chunk

    @property
    def total(self) -> float:
        return sum(self)


def gpu(name: str) -> Gpu:
    """Raises: VimeError with the nearest known name."""
    table = tomllib.loads((HERE / "gpus.toml").read_text())
    if name not in table:
        raise VimeError(f"--gpu-type {name}: not known", f"{nearest(name, list(table))}; vime/gpus.toml has the numbers of each")
    found = Gpu(name, **table[name])
    if found.memory:
        return found
    import psutil

    return found._replace(memory=psutil.virtual_memory().total / GB)


@cache
def tensors(path: str) -> tuple[dict[str, Any], list[tuple[str, tuple[int, ...]]]]:
    """The text model's configuration and all its weights, tied ones once, as (name without "model.", shape)."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path).get_text_config()
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError, KeyError) as e:
        raise VimeError(f"model {path}: {type(e).__name__}: {str(e).splitlines()[0]}", "it must hold the config.json of a causal LM") from e
    return config.to_dict(), [(n.removeprefix("model."), tuple(p.shape)) for n, p in model.named_parameters()]


def cut(name: str, shape: tuple[int, ...], p: ParallelConfig, m: axes.Shape) -> tuple[float, float]:
    """(elements of a weight on a rank while it computes, elements that FSDP leaves there): as Layout.distribute."""
    parts = name.split(".")
    at = ".".join("*" if x.isdecimal() else x for x in parts)
    shape_, shards, dim = list(shape), p.fsdp * p.cp, 0
    expert = next((k for k, style in m.ep_plan.items() if style == axes.DISPATCH and at.startswith(k + ".")), None)
    if expert:
        shape_[0] //= p.ep
        shards = p.fsdp * p.cp * p.tp // p.ep
        dim = 1 if shape_[0] % shards else 0
    elif p.tp > 1 and len(shape) > 1 and "embed_tokens" not in name:
        style = "colwise" if name.startswith("lm_head") and not m.tied else m.tp_plan.get(at.rpartition(".")[0], "")
        if style.startswith("colwise") or style == "rowwise":
            shape_[style == "rowwise"] //= p.tp
    whole = math.prod(shape_)
    return whole, whole / shape_[dim] * -(-shape_[dim] // shards)


def activations(c: dict[str, Any], m: axes.Shape, p: ParallelConfig, layer: int, width: int) -> float:
    """Bytes that a decoder layer keeps for its backward, per token of a rank's piece, computing in `width` bytes."""
    h, heads = m.hidden, m.heads / p.tp
    dim = c.get("head_dim") or h // m.heads
    if rank := c.get("kv_lora_rank"):
        dims = c["qk_nope_head_dim"] + c["qk_rope_head_dim"]
        attention = heads * (4 * dims + 3 * c["v_head_dim"]) + 2 * (rank + (c.get("q_lora_rank") or 0))
    else:
        kv = m.kv_heads / p.tp
        attention = dim * (3 * heads + 2 * kv + ((2 if width == 4 else 3) * (heads + kv) if m.kind.startswith("qwen3") else 0))
    norms = 2 * h * (12 if width == 4 else 8)  # half: the float32 copy, what comes of it, what goes on
    k = c.get("num_experts_per_tok") or 0
    dense = not m.experts or layer < c.get("first_k_dense_replace", 0)
    one = c.get("moe_intermediate_size") or c.get("intermediate_size") or 0
    mlp = 4 * c["intermediate_size"] / p.tp if dense else k * (2 * h + 4 * one) + 4 * one * c.get("n_shared_experts", 0) / p.tp + m.experts
    return width * (attention + mlp) + norms


def rank_bytes(cfg: Config, p: ParallelConfig, tokens: int | None = None, on_cpu: bool = False) -> Rank:
    """Of the fullest rank at the peak of a step with micro-batches of `tokens` packed tokens (train.max_tokens_per_gpu)."""
    m, (c, weights) = axes.read(cfg.model), tensors(cfg.model)
    t, width = cfg.train, 2 if cfg.train.dtype == "bfloat16" else 4
    own = (tokens or t.max_tokens_per_gpu) / p.cp
    fsdp = p.ranks > 1 or width == 2
    stages = p.pp * p.pp_interleave
    of = {i: s % p.pp for s in range(stages) for i in range(s * m.layers // stages, (s + 1) * m.layers // stages)}
    found = []
    for stage in range(p.pp):
        held, layers, root = 0.0, dict[int, float](), 0.0
        for name, shape in weights:
            parts = name.split(".")
            layer = int(parts[1]) if parts[0] == "layers" and parts[1].isdecimal() else None
            first, last = stage == 0, stage == p.pp - 1
            here = of.get(layer, -1) == stage if layer is not None else first or (last and m.tied) if "embed" in name else last
            if here:
                whole, shard = cut(name, shape, p, m)
                held += shard if fsdp else whole
                root += whole if layer is None else 0
                if layer is not None:
                    layers[layer] = layers.get(layer, 0) + whole
        flying = min(p.pp - stage, p.pp) if p.pp > 1 else 1  # micro-batches that wait for their backward
        kept = [own * (m.hidden * width if t.gradient_checkpointing else activations(c, m, p, i, width)) for i in layers]
        acts = flying * sum(kept) + (own * max(activations(c, m, p, i, width) for i in layers) if t.gradient_checkpointing and layers else 0)
        big = max(layers.values(), default=0)
        gathered = (width * root + 2 * width * big + (width + 4) * max(big, root)) if fsdp else 0
        # a chunk's logits; in float32 these by temperature, logp, p and a product, and the last block's logp and p; the head's gradient, and a part
        chunk, block = min(t.logprob_chunk, own) * m.vocab, CPU_BLOCK if on_cpu else math.inf
        logits = chunk * width + 24 * min(chunk, block) + 8 * m.vocab * m.hidden if stage == p.pp - 1 else 0
        frozen = held * 4 * (cfg.needs_reference and not cfg.lora.rank)
        if cfg.lora.rank:
            share = sum(cfg.lora.rank * sum(s) for n, s in weights if len(s) == 2 and "layers" in n)
            found.append(Rank(4 * held + frozen + 4 * share, 4 * share, 8 * share, gathered, acts, logits))
        else:
            critic = 2 if cfg.algo.advantage_estimator == "gae" else 1
            found.append(Rank(4 * held * critic + frozen, 4 * held * critic, 8 * held * critic * (t.offload == "none"), gathered, acts, logits))
    return max(found, key=lambda r: r.total)
