"""Which layouts a model allows: told from its config.json, before anything starts. `vime plan` and the preflight ask here."""

import json
import math
from collections.abc import Iterator
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

from vime.config import Config, ParallelConfig
from vime.errors import VimeError

EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")
PARTIAL, DISPATCH = "replicated_with_grad_allreduce", "ep_dispatch_experts"
SINKS = ("gpt_oss", "granite_swa", "granitemoe_swa", "mimo_v2_flash")  # model types with attention sinks
STYLES = ("colwise", "rowwise", "colwise_gather_output", PARTIAL)  # of transformers' plans: those that are tested


class Shape(NamedTuple):
    """What a layout must fit. plans: transformers' styles by the name of the layer, of TP and of EP."""

    kind: str
    layers: int
    heads: int
    kv_heads: int
    hidden: int
    widths: tuple[int, ...]  # of the MLPs
    vocab: int
    tied: bool
    experts: int
    scaled: bool  # its forward changes embeddings that it is given, which a stage would do again
    sees: bool  # takes images
    odd: str  # what its attention has that a ring cannot do, in words
    tp_plan: dict[str, str]
    ep_plan: dict[str, str]


@cache
def read(path: str) -> Shape:
    """The shape of the model in folder `path`. Raises: VimeError where its config.json says too little."""
    try:
        tree = json.loads((Path(path) / "config.json").read_text())
        c: dict[str, Any] = tree | tree.get("text_config", {})
        kind, heads = c["model_type"], int(c["num_attention_heads"])
        experts = next((int(c[k]) for k in EXPERTS if c.get(k)), 0)
        widths = tuple(int(c[k]) for k in ("intermediate_size", "shared_expert_intermediate_size") if c.get(k))
        known = (int(c["num_hidden_layers"]), heads, int(c.get("num_key_value_heads") or heads), int(c["hidden_size"]), widths)
        rest = (int(c["vocab_size"]), bool(c.get("tie_word_embeddings", _default(kind, "tie_word_embeddings"))), experts)
    except (OSError, ValueError, TypeError, KeyError) as e:
        raise VimeError(f"{path}/config.json: {type(e).__name__}: {e}", "the layout of the trainer is checked against it") from e
    value = {k: c.get(k, _default(kind, k)) for k in ("sliding_window", "use_sliding_window", "attn_logit_softcapping")}
    window = "a sliding window" if value["sliding_window"] and value["use_sliding_window"] is not False else ""
    odd = "soft-capped scores" if value["attn_logit_softcapping"] else "sinks" if kind in SINKS else window
    scaled = kind.startswith("gemma") or c.get("embedding_multiplier") not in (None, 1, 1.0)
    return Shape(kind, *known, *rest, scaled, "vision_config" in tree, odd, *(_default(kind, f"base_model_{a}_plan") or {} for a in ("tp", "ep")))


def _default(kind: str, name: str) -> Any:
    from transformers import CONFIG_MAPPING  # takes a second

    return getattr(CONFIG_MAPPING[kind](), name, None) if kind in CONFIG_MAPPING else None


def faults(p: ParallelConfig, m: Shape) -> list[str]:
    """Every reason why layout `p` does not fit the model, in words."""
    out = []

    def divides(axis: str, n: int, what: str, of: int) -> None:
        if of % n:
            out.append(f"parallel.{axis} = {n} does not divide the model's {of} {what}")

    if m.sees and (p.ranks > p.fsdp or p.ep > 1):
        out.append("models that take images are trained on parallel.fsdp ranks only")
    if p.tp > 1:
        own = {k: v for k, v in m.tp_plan.items() if k != "embed_tokens" and not (m.experts and ".experts" in k)}  # as in Layout
        odd = sorted({v for v in own.values() if v not in STYLES})
        if not m.tp_plan:
            out.append(f"parallel.tp: transformers has no plan for model_type {m.kind!r}")
        elif odd:
            where = next(k for k, v in own.items() if v == odd[0])
            why = ": fused columns save overlapping checkpoints, which load wrong" if odd[0].startswith("packed") else ", which is not tested here"
            out.append(f"parallel.tp: {m.kind!r} shards {where} by {odd[0]!r}{why}")
        divides("tp", p.tp, "attention heads", m.heads)
        divides("tp", p.tp, "key-value heads", m.kv_heads)
        for width in m.widths:
            divides("tp", p.tp, "columns of an MLP", width)
        if not m.tied:
            divides("tp", p.tp, "rows of the head", m.vocab)
        if m.experts and p.ep == 1:
            out.append(f"parallel.tp = {p.tp} would cut through experts, whose checkpoints then load wrong: experts are spread by parallel.ep")
    if p.ep > 1:
        if not m.experts:
            out.append("parallel.ep: the model has no experts")
        elif DISPATCH not in m.ep_plan.values():
            out.append(f"parallel.ep: transformers has no dispatch plan for model_type {m.kind!r}")
        else:
            divides("ep", p.ep, "experts", m.experts)
            others = p.fsdp * p.cp * p.tp // p.ep
            if (p.fsdp * p.cp * p.tp) % p.ep:
                out.append(f"parallel.ep = {p.ep} does not divide fsdp x cp x tp = {p.fsdp * p.cp * p.tp}, the ranks that experts are spread over")
            elif (m.experts // p.ep) % others and m.hidden % others:
                out.append(f"parallel.ep = {p.ep} leaves {others} ranks for each expert, which divide neither {m.experts // p.ep} experts nor their rows")
    if m.odd and m.heads % p.tp == 0 and (m.heads // p.tp) % p.cp:
        what = f"{m.heads // p.tp} attention heads" + (f" of each of tp = {p.tp}" if p.tp > 1 else "")
        out.append(f"parallel.cp = {p.cp} does not divide the {what}, and attention of {m.kind!r} has {m.odd}, which the ring does not do")
    if p.pp == 1 and p.pp_interleave > 1:
        out.append("parallel.pp_interleave needs parallel.pp > 1")
    if p.pp > 1:
        if p.pp * p.pp_interleave > m.layers:
            out.append(f"parallel.pp x pp_interleave = {p.pp * p.pp_interleave} stages for {m.layers} layers")
        if m.scaled:
            out.append(f"parallel.pp: {m.kind!r} scales its embeddings inside the model's forward, and each stage would do it again")
    return out


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def valid(ranks: int, m: Shape) -> Iterator[ParallelConfig]:
    for tp, pp, cp in product(divisors(ranks), repeat=3):
        if ranks % (tp * pp * cp) == 0:
            for ep in divisors(ranks // pp) if m.experts else [1]:
                p = ParallelConfig(fsdp=ranks // (tp * pp * cp), tp=tp, pp=pp, cp=cp, ep=ep)
                if not faults(p, m):
                    yield p


def nearest(p: ParallelConfig, m: Shape) -> ParallelConfig | None:
    """The valid layout on as many ranks that is least far from `p`: by the factors between their axes."""
    return min(valid(p.ranks, m), key=lambda q: apart(p, q), default=None)


def apart(p: ParallelConfig, q: ParallelConfig) -> float:
    return sum(abs(math.log(getattr(p, a) / getattr(q, a))) * (1 - 0.1 * (a == "fsdp")) for a in ("tp", "pp", "cp", "ep", "fsdp"))


def check(cfg: Config) -> None:
    """Raises: VimeError with every fault of the run's layout, and the nearest layout that is valid."""
    p = cfg.parallel
    if p.ranks == p.fsdp and p.ep == p.pp_interleave == 1:
        return  # any model allows that
    models = [cfg.model] + ([cfg.algo.ref_model] if cfg.needs_reference and cfg.algo.ref_model else [])
    found = [(path, read(path), fault) for path in models for fault in faults(p, read(path))]
    if found:
        near = nearest(p, found[0][1])
        said = "; ".join(fault if path == cfg.model else f"algo.ref_model: {fault}" for path, _, fault in found)
        raise VimeError(said, f"the nearest layout on {p.ranks} ranks: {near}" if near else f"no layout on {p.ranks} ranks fits")


def describe(cfg: Config) -> str:
    """`vime plan`: the layout and what each rank then holds. Raises: VimeError as `check`."""
    check(cfg)
    p, m = cfg.parallel, read(cfg.model)
    stages = p.pp * p.pp_interleave
    sizes = sorted({(s + 1) * m.layers // stages - s * m.layers // stages for s in range(stages)})
    deal = math.gcd(p.cp, m.heads // p.tp)
    what = "whole rows" if deal == p.cp else f"1/{p.cp // deal} of each row, in a ring of {p.cp // deal} ranks"
    rows = [
        ("ranks", f"{p.ranks} = {p}" if p.ranks > 1 else "1"),
        ("samples", f"in {p.fsdp} share(s) (fsdp); {p.cp * p.tp * p.pp} rank(s) forward the same ones"),
        ("weights", f"layers in {p.fsdp * p.cp} FSDP shard(s)" + (f" of 1/{p.tp} of their columns" if p.tp > 1 else "")),
        ("heads", f"{m.heads // p.tp} of {m.heads} on a rank" + (f", {m.heads // p.tp // deal} in attention, of {what}" if p.cp > 1 else "")),
    ]
    if p.pp > 1:
        how = "1F1B" if p.pp_interleave == 1 else "interleaved 1F1B"
        rows.append(("stages", f"{stages} of {' or '.join(map(str, sizes))} layers, {p.pp_interleave} on a rank, {how}"))
    if m.experts:
        others = p.fsdp * p.cp * p.tp // p.ep
        rows.append(("experts", f"{m.experts // p.ep} of {m.experts} on a rank, in {others} FSDP shard(s)"))
    if p.ranks == 1:
        rows = rows[:1]
    if cfg.algo.critic_ranks:
        rows.append(("critic", f"on {cfg.algo.critic_ranks} more rank(s)"))
    if cfg.lora.rank:
        rows.append(("adapters", f"of rank {cfg.lora.rank} in place of the weights, whole on every rank"))
    return f"{cfg.model}: {m.kind}, {m.layers} layers\n" + "\n".join(f"{k:8} {v}" for k, v in rows)
