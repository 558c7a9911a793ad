"""`vime plan`: does a run fit its GPUs, by computation alone: layouts, memory, links, time; what does not fit first, and the nearest that does.

Weights are counted exactly, on the model that transformers builds without data, cut as trainer/layout.py cuts it. Activations are counted per
token from the shape; benchmarks/plan_memory.py measures how far off that is. Times are estimates: their assumptions are printed.
"""

import math
import tomllib
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from vime.config import Config, ParallelConfig, load
from vime.conflicts import one_host
from vime.errors import VimeError, nearest
from vime.trainer import axes

GB = 1e9
HERE = Path(__file__).parent
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


def rank_bytes(cfg: Config, p: ParallelConfig, on_cpu: bool = False) -> Rank:
    """Of the fullest rank at the peak of a step."""
    m, (c, weights) = axes.read(cfg.model), tensors(cfg.model)
    t, width, stages = cfg.train, 2 if cfg.train.dtype == "bfloat16" else 4, p.pp * p.pp_interleave
    own, fsdp = t.max_tokens_per_gpu / p.cp, p.ranks > 1 or width == 2
    layers, root = [[0.0, 0.0] for _ in range(m.layers)], {"embed": [0.0, 0.0], "rest": [0.0, 0.0]}  # elements whole and as shard
    for name, shape in weights:
        parts = name.split(".")
        to = layers[int(parts[1])] if parts[0] == "layers" else root["embed" if "embed_tokens" in name else "rest"]
        whole, shard = cut(name, shape, p, m)
        to[0], to[1] = to[0] + whole, to[1] + (shard if fsdp else whole)
    kept = [activations(c, m, p, i, width) * own for i in range(m.layers)]
    found = []
    for stage in range(p.pp):
        mine = [i for s in range(stage, stages, p.pp) for i in range(s * m.layers // stages, (s + 1) * m.layers // stages)]
        first, last = stage == 0, stage == p.pp - 1
        outer = [root["embed"]] * (first or (last and m.tied)) + [root["rest"]] * last
        held, around = sum(x[1] for x in [*outer, *(layers[i] for i in mine)]), sum(x[0] for x in outer)
        big, most = max(layers[i][0] for i in mine), max(kept[i] for i in mine)
        acts = sum(own * m.hidden * width if t.gradient_checkpointing else kept[i] for i in mine) * (p.pp - stage)  # micro-batches on their way back
        gathered = width * (around + 2 * big) + (width + 4) * max(big, around) if fsdp else 0
        # A chunk's logits; in float32 these by temperature, logp, p and a product, and the last block's logp and p; the head's gradient, and a part.
        chunk = min(t.logprob_chunk, own) * m.vocab
        head = chunk * width + 24 * (min(chunk, CPU_BLOCK) if on_cpu else chunk) + 8 * m.vocab * m.hidden if last else 0
        trained, frozen = held * (2 if cfg.algo.advantage_estimator == "gae" else 1), held * (cfg.needs_reference and not cfg.lora.rank)
        if r := cfg.lora.rank:
            trained, frozen = sum(r * sum(s) for n, s in weights if len(s) == 2 and n.startswith("layers")) / p.pp, held
        moments = 8 * trained if t.offload == "none" else 0
        found.append(Rank(4 * (trained + frozen), 4 * trained, moments, gathered, acts + most * t.gradient_checkpointing, head))
    return max(found, key=lambda r: r.total)


def server_bytes(cfg: Config, args: dict[str, Any]) -> tuple[float, float]:
    """(weights on each accelerator, keys and values of one token there) of a server with these vLLM arguments."""
    m, (c, weights) = axes.read(cfg.model), tensors(cfg.model)
    tp, pp = (int(args.get(f"{a}_parallel_size", 1)) for a in ("tensor", "pipeline"))
    width = 4 if args.get("dtype", cfg.train.dtype) == "float32" else 2
    spread = tp * (int(args.get("data_parallel_size", 1)) if args.get("enable_expert_parallel") else 1)
    held = sum(math.prod(s) / (spread if ".experts." in n else tp) for n, s in weights) / pp
    dim = c.get("head_dim") or m.hidden // m.heads
    kv = c["kv_lora_rank"] + c["qk_rope_head_dim"] if c.get("kv_lora_rank") else 2 * dim * -(-m.kv_heads // tp)
    return width * held, width * kv * m.layers / pp


def world(args: dict[str, Any]) -> int:
    return math.prod(int(args.get(f"{a}_parallel_size", 1)) for a in ("tensor", "pipeline", "data"))


def faults(cfg: Config, g: Gpu, gpus: int) -> list[tuple[str, str]]:
    """What does not fit, each with what to do, the first thing first."""
    p, m = cfg.parallel, axes.read(cfg.model)
    out = [(what, propose(cfg, g, gpus)) for what in axes.faults(p, m)]
    servers, shared, nodes = sum(world(s.vllm) for s in cfg.servers), cfg.rollout.colocate, -(-gpus // g.per_node)
    need = max(p.ranks, servers) if shared else p.ranks + servers
    if need > gpus:
        how = f"{p.ranks} of trainer ranks, {servers} of servers" + (", shared" if shared else "")
        out.append((f"{need} accelerators are needed ({how}), there are {gpus}", propose(cfg, g, gpus - (0 if shared else servers))))
    if nodes > 1 and g.name != "cpu":
        out += [(what, f"these are {nodes} nodes, see docs/multi-node.md") for what in one_host(cfg)]
    if not out and (r := rank_bytes(cfg, p, g.name == "cpu")).total > limit(g):
        most = max(r._fields, key=lambda f: getattr(r, f))
        what = f"a trainer rank takes {r.total / GB:.1f} GB of the {limit(g) / GB:.1f} that a {g.name} has for it, {getattr(r, most) / GB:.1f} of them {most}"
        out.append((what, propose(cfg, g, gpus - (0 if shared else servers))))
    kinds: dict[str, dict[str, Any]] = {}  # a group of like servers is at fault once
    for i, s in enumerate(cfg.servers if g.name != "cpu" else []):
        kinds = {f"engine {i}": s.vllm} | kinds if s.vllm not in kinds.values() else kinds
    for who, args in reversed(kinds.items()):
        tp, (held, kv), room = int(args.get("tensor_parallel_size", 1)), server_bytes(cfg, args), g.memory * GB * SERVER - SCRATCH * GB
        fits, needs = int((room - held) / kv), cfg.rollout.max_context_len
        if m.heads % tp:
            out.append(
                (f"{who}: tensor_parallel_size = {tp} does not divide the model's {m.heads} attention heads", f"one of {axes.divisors(m.heads)}")
            )
        if world(args) > g.per_node:
            fix = "servers of several nodes are started by hand and named in rollout.engines"
            out.append((f"{who} takes {world(args)} accelerators, a node has {g.per_node}: a run's own server is on one node", fix))
        if fits < needs:
            what = f"{who}: of {room / GB:.1f} GB for them on a {g.name} weights take {held / GB:.1f}, one sample of rollout.max_context_len = {needs} {kv * needs / GB:.1f}"
            wide = next((d for d in axes.divisors(m.heads) if held * tp / d + kv * needs < 0.8 * room), m.heads)
            out.append((what, f"vllm.tensor_parallel_size = {wide}" + (f", or at most {fits} tokens" if fits > 0 else "")))
    return out


def limit(g: Gpu) -> float:
    return g.memory * GB * (1 - RESERVE)


def propose(cfg: Config, g: Gpu, ranks: int) -> str:
    """The overrides of the nearest run that fits on so many ranks, in words: another layout, then checkpointing, offload, short micro-batches."""
    m, p, samples, most = axes.read(cfg.model), cfg.parallel, cfg.train.global_batch_size or cfg.samples_per_step, max(ranks, 0)
    changes: list[dict[str, Any]] = [{}, {"gradient_checkpointing": True}]
    changes += [changes[1] | {"offload": "optimizer"}] * (g.name != "cpu") + [changes[1] | {"max_tokens_per_gpu": cfg.rollout.max_context_len}]
    for n in (n for n in axes.divisors(most) if n >= min(p.ranks, most)):
        able = sorted((q for q in axes.valid(n, m) if samples % q.fsdp == 0 and q.tp <= g.per_node), key=lambda q: axes.apart(p, q))
        for change, q in product(changes, able[:64]):
            other = cfg.model_copy(update={"train": cfg.train.model_copy(update=change)})
            if rank_bytes(other, q, g.name == "cpu").total <= limit(g):
                said = {f"parallel.{k}": v for k, v in q.model_dump().items() if v != getattr(p, k)}
                said |= {f"train.{k}": str(v).lower() for k, v in change.items() if v != getattr(cfg.train, k)}
                return "the nearest that fits: " + " ".join(f"{k}={v}" for k, v in said.items())
    return f"no layout on up to {most} {g.name} fits this model: more accelerators, or [lora]"


def times(cfg: Config, g: Gpu, gpus: int) -> list[tuple[str, str]]:
    """Bytes and seconds of a step, as rows of text, with what they assume."""
    m, (c, weights), r, p = axes.read(cfg.model), tensors(cfg.model), cfg.rollout, cfg.parallel
    total = sum(math.prod(s) for _, s in weights)
    routed = sum(math.prod(s) for n, s in weights if ".experts." in n)
    active = total - routed * (1 - (c.get("num_experts_per_tok") or 0) / m.experts) if m.experts else total
    response, prompt = r.max_response_len / 2, (r.max_context_len - r.max_response_len) / 2
    tokens, nodes = cfg.samples_per_step * (prompt + response), -(-gpus // g.per_node)
    each = (prompt + response) * (13 + (m.layers * (c.get("num_experts_per_tok") or 0) if r.routing_replay else 0))
    wire = (g.nic if nodes > 1 else g.link) * GB * LINKS
    moved, sent = each * cfg.samples_per_step, total * 2.0
    mfu = MFU / (2 if m.experts else 1)
    train = 6 * active * tokens * (4 / 3 if cfg.train.gradient_checkpointing else 1) / (p.ranks * g.tflops * 1e12 * mfu)
    rows, decode = [], 0.0
    if cfg.servers:
        args = cfg.servers[0].vllm
        (held, kv), n, k = server_bytes(cfg, args), world(args), len(cfg.servers)
        fits = int((g.memory * GB * SERVER - SCRATCH * GB - held) / kv / (prompt + response))
        batch = max(1, min(r.concurrency, cfg.samples_per_step // k, fits))
        one = max((held + batch * (prompt + response) * kv) / (g.hbm * GB * STREAM), 2 * active * batch / (n * g.tflops * 1e12 * 0.5))
        decode = math.ceil(cfg.samples_per_step / k / batch) * response * one
        rows = [
            ("servers", f"{k} of {n} {g.name}: weights {held / GB:.1f} GB on each, room for {max(0, fits)} samples of mean length; {batch} at a time")
        ]
    publish = sent / wire
    whole = publish + (max(decode, train) if cfg.train.mode == "async" else decode + train)
    rows += [
        ("samples", f"{cfg.samples_per_step} of {prompt + response:.0f} tokens, {moved / 1e6:.1f} MB a step past the controller: {moved / wire / nodes:.3g} s of the links"),
        ("weights", f"{sent / GB:.1f} GB a step to the servers: {publish:.2g} s from one sender at {wire / GB:.3g} GB/s"),
        ("step", f"about {whole:.3g} s ({cfg.train.mode}): rollout {decode:.3g}, train {train:.3g}, publish {publish:.2g}"),
        ("assumed", f"responses half of max_response_len, prompts half of what is left; {mfu:.0%} of peak FLOPs in training, {STREAM:.0%} of memory and"
         f" {LINKS:.0%} of link bandwidth; no time for rewards, sync or stragglers"),
    ]  # fmt: skip
    return rows


def command(config: str | None, overrides: list[str], kind: str | None, gpus: int | None, example: str | None) -> None:
    """`vime plan`: print it. Raises: VimeError with everything that does not fit, the first thing first."""
    if example:
        config, kind, gpus = str(HERE.parent / "recipes" / "reference" / f"{example}.toml"), kind or "gb300", gpus or 64
        if not Path(config).exists():
            raise VimeError(f"--example {example}: there is no {config}", "glm-5.2 is there, in a clone of the source tree")
    if not config:
        raise VimeError("vime plan: which run?", "name its TOML file, or --example glm-5.2")
    cfg = load(config, overrides)
    if kind is None and gpus is None:
        return print(axes.describe(cfg))
    g, p, servers = gpu(kind or "cpu"), cfg.parallel, sum(world(s.vllm) for s in cfg.servers)
    n = gpus or (max(p.ranks, servers) if cfg.rollout.colocate else p.ranks + servers)
    wrong, r = faults(cfg, g, n), rank_bytes(cfg, p, g.name == "cpu")
    if not axes.faults(p, axes.read(cfg.model)):
        print(axes.describe(cfg))
    parts = ", ".join(f"{k} {v / GB:.3g}" for k, v in r._asdict().items())
    rows = [("memory", f"{r.total / GB:.3g} GB of the {limit(g) / GB:.1f} on a rank: {parts}"), *times(cfg, g, n)]
    print("\n".join(f"{k:8} {v}" for k, v in rows), flush=True)
    if wrong:
        said = "\n  ".join(f"{what}\n    -> {fix}" for what, fix in wrong)
        raise VimeError(f"{cfg.model} on {n} {g.name} ({p}) does not fit:\n  {said}")
