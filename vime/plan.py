"""`vime plan`: does a run fit its GPUs, by computation alone: layouts, memory, links, time; what does not fit first, and the nearest that does.

Weights are counted exactly, on the model that transformers builds without data, cut as trainer/layout.py cuts it. Activations are counted per
token from the shape; benchmarks/plan_memory.py measures how far off that is. Times are estimates: their assumptions are printed.
"""

import math
import re
import tomllib
from functools import cache
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil

from vime.config import Config, ParallelConfig, load
from vime.conflicts import one_host
from vime.errors import VimeError, nearest
from vime.trainer import axes

GB = 1e9
HERE = Path(__file__).parent
RESERVE = 0.06  # share of an accelerator's memory that its runtime, NCCL and fragments take
SERVER, SCRATCH = 0.9, 2.0  # share of it that vLLM takes (gpu_memory_utilization); GB of activations and graphs therein
CPU_BLOCK = 2**21  # trainer/loss.py's, which importing would cost seconds
MFU = 0.35  # share of peak FLOPs that training reaches; mixtures of experts about half of it
STREAM, LINKS = 0.6, 0.8  # shares of memory and link bandwidth that decoding and transfers reach
Bytes = dict[str, float]
Args = dict[str, Any]  # of a vLLM server


def gpu(name: str) -> SimpleNamespace:
    """Its row of gpus.toml, and the bytes that a rank and a server have. Raises: VimeError with the nearest known name."""
    table = tomllib.loads((HERE / "gpus.toml").read_text())
    if name not in table:
        raise VimeError(f"--gpu-type {name}: not known", f"{nearest(name, list(table))}; vime/gpus.toml has the numbers of each")
    g = SimpleNamespace(name=name, cpu=name == "cpu", **table[name])
    memory = (g.memory or psutil.virtual_memory().total / GB) * GB
    g.room, g.served = memory * (1 - RESERVE), memory * SERVER - SCRATCH * GB
    return g


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
    at, size, shards, dim = re.sub(r"\.\d+\.", ".*.", name), list(shape), p.fsdp * p.cp, 0
    if any(at.startswith(f"{k}.") for k, style in m.ep_plan.items() if style == axes.DISPATCH):
        size[0], shards = size[0] // p.ep, shards * p.tp // p.ep
        dim = int(size[0] % shards > 0)
    elif p.tp > 1 and len(shape) > 1 and "embed_tokens" not in name:
        style = "colwise" if name.startswith("lm_head") and not m.tied else m.tp_plan.get(at.rpartition(".")[0], "")
        if style.startswith(("colwise", "rowwise")):
            size[style == "rowwise"] //= p.tp
    whole = math.prod(size)
    return whole, whole / size[dim] * -(-size[dim] // shards)


def activations(c: dict[str, Any], m: axes.Shape, p: ParallelConfig, layer: int, width: int) -> float:
    """Bytes that a decoder layer keeps for its backward, per token of a rank's piece, computing in `width` bytes."""
    heads, kv, k = m.heads / p.tp, m.kv_heads / p.tp, c.get("num_experts_per_tok") or 0
    if rank := c.get("kv_lora_rank"):
        attention = heads * (4 * (c["qk_nope_head_dim"] + c["qk_rope_head_dim"]) + 3 * c["v_head_dim"]) + 2 * (rank + (c.get("q_lora_rank") or 0))
    else:
        normed = (2 if width == 4 else 3) * (heads + kv) if m.kind.startswith("qwen3") else 0  # norms of single heads
        attention = (c.get("head_dim") or m.hidden // m.heads) * (3 * heads + 2 * kv + normed)
    if not m.experts or layer < c.get("first_k_dense_replace", 0):
        mlp = 4 * c["intermediate_size"] / p.tp
    else:
        one = c.get("moe_intermediate_size") or c["intermediate_size"]
        mlp = k * (2 * m.hidden + 4 * one) + 4 * one * c.get("n_shared_experts", 0) / p.tp + m.experts
    return width * (attention + mlp) + 2 * m.hidden * (12 if width == 4 else 8)  # of norms, half: a float32 copy, what comes of it, what goes on


def rank_bytes(cfg: Config, p: ParallelConfig, on_cpu: bool = False) -> Bytes:
    """Of the fullest rank at the peak of a step. "gathered": what FSDP makes whole, the root all the time, two layers on the way."""
    m, (c, weights) = axes.read(cfg.model), tensors(cfg.model)
    t, width, stages = cfg.train, 2 if cfg.train.dtype == "bfloat16" else 4, p.pp * p.pp_interleave
    own, fsdp = t.max_tokens_per_gpu / p.cp, p.ranks > 1 or width == 2
    held: dict[str, list[float]] = {}  # by layer, and the rest: elements whole and as shard
    for name, shape in weights:
        to = held.setdefault(name.split(".")[1] if name.startswith("layers.") else "embed" if "embed_tokens" in name else "rest", [0.0, 0.0])
        whole, shard = cut(name, shape, p, m)
        to[:] = to[0] + whole, to[1] + (shard if fsdp else whole)
    kept = [activations(c, m, p, i, width) * own for i in range(m.layers)]
    found: list[Bytes] = []
    for stage in range(p.pp):
        mine = [i for s in range(stage, stages, p.pp) for i in range(s * m.layers // stages, (s + 1) * m.layers // stages)]
        first, last = stage == 0, stage == p.pp - 1
        outer = [held["embed"]] * (first or (last and m.tied)) + [held["rest"]] * last
        n, around = sum(x[1] for x in outer) + sum(held[str(i)][1] for i in mine), sum(x[0] for x in outer)
        big = max(held[str(i)][0] for i in mine)
        acts = sum(own * m.hidden * width if t.gradient_checkpointing else kept[i] for i in mine) * (p.pp - stage)  # micro-batches on their way back
        # A chunk's logits; in float32 these by temperature, logp, p and a product, and the last block's logp and p; the head's gradient, and a part.
        chunk = min(t.logprob_chunk, own) * m.vocab
        head = chunk * width + 24 * (min(chunk, CPU_BLOCK) if on_cpu else chunk) + 8 * m.vocab * m.hidden if last else 0
        trained, frozen = n * (1 + (cfg.algo.advantage_estimator == "gae" and not cfg.algo.critic_ranks)), n * (cfg.needs_reference and not cfg.lora.rank)
        if r := cfg.lora.rank:
            trained, frozen = sum(r * sum(s) for name, s in weights if len(s) == 2 and name.startswith("layers")) / p.pp, n
        part = {"weights": 4 * (trained + frozen), "gradients": 4 * trained, "optimizer": 8 * trained * (t.offload == "none")}
        part["gathered"] = width * (around + 2 * big) + (width + 4) * max(big, around) if fsdp else 0
        found.append(part | {"activations": acts + max(kept[i] for i in mine) * t.gradient_checkpointing, "head": head})
    return max(found, key=lambda part: sum(part.values()))


def world(args: Args) -> int:
    return math.prod(int(args.get(f"{a}_parallel_size", 1)) for a in ("tensor", "pipeline", "data"))


def server_bytes(cfg: Config, args: Args) -> tuple[float, float]:
    """(weights on each accelerator, keys and values of one token there) of a server."""
    m, (c, weights) = axes.read(cfg.model), tensors(cfg.model)
    tp, pp = (int(args.get(f"{a}_parallel_size", 1)) for a in ("tensor", "pipeline"))
    width = (4 if args.get("dtype", cfg.train.dtype) == "float32" else 2) / pp
    spread = world(args) // pp if args.get("enable_expert_parallel") else tp
    kv = 2 * (c.get("head_dim") or m.hidden // m.heads) * -(-m.kv_heads // tp)
    kv = c["kv_lora_rank"] + c["qk_rope_head_dim"] if c.get("kv_lora_rank") else kv
    return width * sum(math.prod(s) / (spread if ".experts." in n else tp) for n, s in weights), width * kv * m.layers


def faults(cfg: Config, g: SimpleNamespace, gpus: int) -> list[tuple[str, str]]:
    """What does not fit, each with what to do, the first thing first."""
    p, m, longest = cfg.parallel, axes.read(cfg.model), cfg.rollout.max_context_len
    servers, nodes = sum(world(s.vllm) for s in cfg.servers), -(-gpus // g.per_node)
    left = gpus - servers * (not cfg.rollout.colocate) - cfg.algo.critic_ranks
    out = [(what, propose(cfg, g, left)) for what in axes.faults(p, m)]
    if tensors(cfg.model)[0].get("index_topk"):
        out.insert(0, (f"{m.kind!r} chooses the tokens it attends to by an indexer, which the trainer has not", "a model without index_topk"))
    if max(p.ranks, servers) > gpus or p.ranks > left:
        how = f"{cfg.ranks} of trainer ranks, {servers} of servers" + ", shared" * cfg.rollout.colocate
        out.append((f"{max(p.ranks + gpus - left, servers)} accelerators are needed ({how}), there are {gpus}", propose(cfg, g, left)))
    if nodes > 1 and not g.cpu:
        out += [(what, f"these are {nodes} nodes, see docs/multi-node.md") for what in one_host(cfg)]
    if not out and sum((r := rank_bytes(cfg, p, g.cpu)).values()) > g.room:
        most = max(r, key=lambda k: r[k])
        what = f"a trainer rank takes {sum(r.values()) / GB:.1f} GB of the {g.room / GB:.1f} that a {g.name} has for it, {r[most] / GB:.1f} of them {most}"
        out.append((what, propose(cfg, g, left)))
    if not out and cfg.algo.critic_ranks and (peak := sum(rank_bytes(cfg.worlds[1], cfg.worlds[1].parallel, g.cpu).values())) > g.room:
        out.append((f"a critic rank takes {peak / GB:.1f} GB of the {g.room / GB:.1f} that a {g.name} has for it", "raise algo.critic_ranks"))
    kinds = [s.vllm for s in cfg.servers if not g.cpu]
    for i, args in enumerate(kinds):
        if args in kinds[:i]:
            continue  # a group of like servers is at fault once
        tp, (held, kv) = int(args.get("tensor_parallel_size", 1)), server_bytes(cfg, args)
        if m.heads % tp:
            what = f"engine {i}: tensor_parallel_size = {tp} does not divide the model's {m.heads} attention heads"
            out.append((what, f"one of {axes.divisors(m.heads)}"))
        if world(args) > g.per_node:
            what = f"engine {i} takes {world(args)} accelerators, a node has {g.per_node}: a run's own server is on one node"
            out.append((what, "servers of several nodes are started by hand and named in rollout.engines"))
        if (fits := int((g.served - held) / kv)) < longest:
            wide = next((d for d in axes.divisors(m.heads) if held * tp / d + kv * longest < 0.8 * g.served), m.heads)
            what = f"engine {i}: of {g.served / GB:.1f} GB for them on a {g.name} weights take {held / GB:.1f}"
            what += f", one sample of rollout.max_context_len = {longest} {kv * longest / GB:.1f}"
            out.append((what, f"vllm.tensor_parallel_size = {wide}" + f", or at most {fits} tokens" * (fits > 0)))
    return out


def propose(cfg: Config, g: SimpleNamespace, ranks: int) -> str:
    """The overrides of the nearest run that fits on so many ranks, in words: another layout, then checkpointing, offload, short micro-batches."""
    m, p, samples, most = axes.read(cfg.model), cfg.parallel, cfg.train.global_batch_size or cfg.samples_per_step, max(ranks, 0)
    less: Args = {"gradient_checkpointing": True}
    changes = [{}, less, *[less | {"offload": "optimizer"}] * (not g.cpu), less | {"max_tokens_per_gpu": cfg.rollout.max_context_len}]
    able: list[ParallelConfig] = []
    for n in (n for n in axes.divisors(most) if n >= min(p.ranks, most)):
        of_n = [q for q in axes.valid(n, m) if samples % q.fsdp == 0 and q.tp <= g.per_node]
        able += sorted(of_n, key=lambda q: axes.apart(p, q))[:64]
    for change, q in product(changes, able):
        other = cfg.model_copy(update={"train": cfg.train.model_copy(update=change)})
        if sum(rank_bytes(other, q, g.cpu).values()) <= g.room:
            said = {f"parallel.{k}": v for k, v in q.model_dump().items() if v != getattr(p, k)}
            said |= {f"train.{k}": str(v).lower() for k, v in change.items() if v != getattr(cfg.train, k)}
            return "the nearest that fits: " + " ".join(f"{k}={v}" for k, v in said.items())
    return f"no layout on up to {most} {g.name} fits this model: more accelerators, or [lora]"


def times(cfg: Config, g: SimpleNamespace, gpus: int) -> list[tuple[str, str]]:
    """Bytes and seconds of a step, as rows of text, with what they assume."""
    m, (c, weights), r, rows, decode = axes.read(cfg.model), tensors(cfg.model), cfg.rollout, [], 0.0
    total, k = sum(math.prod(s) for _, s in weights), c.get("num_experts_per_tok") or 0
    active = total - sum(math.prod(s) for n, s in weights if ".experts." in n) * (1 - k / max(m.experts, 1))
    response, nodes, mfu = r.max_response_len / 2, -(-gpus // g.per_node), MFU / (2 if m.experts else 1)
    mean, samples = response + (r.max_context_len - r.max_response_len) / 2, cfg.samples_per_step
    wire = (g.nic if nodes > 1 else g.link) * GB * LINKS
    moved = samples * mean * (13 + m.layers * k * r.routing_replay)
    train = 6 * active * samples * mean * (4 / 3 if cfg.train.gradient_checkpointing else 1) / (cfg.parallel.ranks * g.tflops * 1e12 * mfu)
    if cfg.servers:
        args, n = cfg.servers[0].vllm, len(cfg.servers)
        held, kv = server_bytes(cfg, args)
        fits = max(0, int((g.served - held) / kv / mean))
        batch = max(1, min(r.concurrency, samples // n, fits))
        token = max((held + batch * mean * kv) / (g.hbm * GB * STREAM), 2 * active * batch / (world(args) * g.tflops * 1e12 * 0.5))
        decode = math.ceil(samples / n / batch) * response * token
        size = f"weights {held / GB:.1f} GB on each, room for {fits} samples of mean length; {batch} at a time"
        rows.append(("servers", f"{n} of {world(args)} {g.name}: {size}"))
    publish = 2 * total / wire
    whole = publish + (max(decode, train) if cfg.train.mode == "async" else decode + train)
    seen = f"{decode:.3g}" if rows else "not known, its servers run elsewhere"
    rows += [
        ("samples", f"{samples} of {mean:.0f} tokens, {moved / 1e6:.1f} MB a step past the controller: {moved / wire / nodes:.3g} s of the links"),
        ("weights", f"{2 * total / GB:.1f} GB a step to the servers: {publish:.2g} s from one sender at {wire / GB:.3g} GB/s"),
        ("step", f"about {whole:.3g} s ({cfg.train.mode}): rollout {seen}, train {train:.3g}, publish {publish:.2g}"),
        ("assumed", f"responses half of max_response_len, prompts half of what is left; {mfu:.0%} of peak FLOPs in training, {STREAM:.0%} of memory"
         f" and {LINKS:.0%} of link bandwidth; no time for rewards, sync or stragglers"),
    ]  # fmt: skip
    return rows


def command(config: str | None, overrides: list[str], kind: str | None, gpus: int | None, example: str | None) -> None:
    """`vime plan`: print it. Raises: VimeError with everything that does not fit, the first thing first."""
    if example:
        config, kind, gpus = str(HERE.parent / "recipes" / "reference" / f"{example}.toml"), kind or "gb300", gpus or 64
    if not config:
        raise VimeError("vime plan: which run?", "name its TOML file, or --example glm-5.2")
    cfg = load(config, overrides)
    if kind is None and gpus is None:
        return print(axes.describe(cfg))
    g, p, servers = gpu(kind or "cpu"), cfg.parallel, sum(world(s.vllm) for s in cfg.servers)
    n = gpus or (max(cfg.ranks, servers) if cfg.rollout.colocate else cfg.ranks + servers)
    wrong, r = faults(cfg, g, n), rank_bytes(cfg, p, g.cpu)
    if not axes.faults(p, axes.read(cfg.model)):
        print(axes.describe(cfg))
    parts = ", ".join(f"{k} {v / GB:.3g}" for k, v in r.items())
    rows = [("memory", f"{sum(r.values()) / GB:.3g} GB of the {g.room / GB:.1f} on a rank: {parts}"), *times(cfg, g, n)]
    print("\n".join(f"{k:8} {v}" for k, v in rows), flush=True)
    if wrong:
        said = "\n  ".join(f"{what}\n    -> {fix}" for what, fix in wrong)
        raise VimeError(f"{cfg.model} on {n} {g.name} ({p}) does not fit:\n  {said}")
