"""Token layout of one micro-batch: packed without padding, prompts that samples share laid out once. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Self

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from vime.sample import Sample
from vime.trainer.batch import Item
from vime.trainer.ring import Segment
from vime.trainer.routing import pack_routing

SHARE_LIMIT = 4096  # responses longer than this are not packed behind a shared prompt: their attention masks would grow too large


class Bucket(NamedTuple):
    """Rows of like length whose attention runs in one call. keys: (B, P + R) token positions, a prefix then the row's own;
    queries: (B, R); mask: (B, 1, R, P + R) True where attended, None: plain causal (no row has a prefix)."""

    queries: torch.Tensor
    keys: torch.Tensor
    mask: torch.Tensor | None


@dataclass
class Pack:
    """One micro-batch without padding: T input tokens, M trained tokens (per-token arrays are float32). A prompt that several samples share is laid
    out once; a sample's last token, which predicts nothing, is left out. `rows` are the positions whose hidden state predicts `labels`."""

    ids: torch.Tensor  # (1, T) int64
    positions: torch.Tensor  # (1, T) int64, position within the sample
    buckets: list[Bucket]
    scatter: torch.Tensor  # (T,) where each token's attention output lies in the buckets' outputs, flattened and joined
    rows: torch.Tensor  # (M,) int64
    labels: torch.Tensor  # (M,) int64
    advantages: torch.Tensor
    weights: torch.Tensor
    rollout_log_probs: torch.Tensor
    support: tuple[torch.Tensor, torch.Tensor] | None = None  # loss.Support: what each trained token was drawn from; None: the vocabulary
    samples: list[Sample] = field(default_factory=list)  # in the order of their tokens
    where: list[torch.Tensor] = field(default_factory=list)  # per sample, the positions (0..T-1) of all its tokens but the last
    old: torch.Tensor | None = None  # (M,) logprobs before the update; None: this forward's own
    ref: torch.Tensor | None = None  # (M,) logprobs of the reference
    seen: torch.Tensor | None = None  # (M,) what the loss took for the logprobs before the update, for people to look at; NaN: it took none
    values: torch.Tensor | None = None  # (M,) the critic's, before its update
    returns: torch.Tensor | None = None  # (M,) what it should have said
    routing: torch.Tensor | None = None  # (T, layers, top_k) int16: each token's experts, -1 where nothing needs them to be known
    uses: torch.Tensor | None = None  # (T,) samples that a token is of, where there is routing
    segments: tuple[Segment, ...] = ()  # who sees whom, as in buckets
    # On one of several ranks (context.lay_out): ids, positions, routing and uses are its piece of the row, what attention reads is the whole row's.
    cp: Any = None  # the groups of context parallelism, see Layout.cp_groups
    trained: list[torch.Tensor] = field(default_factory=list)  # rows of each cp rank's samples
    everything: list[torch.Tensor] = field(default_factory=list)  # `where` of each cp rank's samples, joined

    def to(self, device: torch.device) -> Self:
        return type(self)(**tree_map_only(torch.Tensor, lambda t: t.to(device, non_blocking=True), vars(self)))


class Sealed:
    """A Pack on its way through a model. FSDP would look for tensors in it, dataclasses and lists too, several times a layer."""

    def __init__(self, pack: Pack):
        self.pack = pack


def pack(items: Sequence[Item], samples: dict[int, Sample]) -> Pack:
    """Lay out one micro-batch; an empty one becomes a single token that trains nothing (its rank still joins the collectives)."""
    shared: dict[tuple[int, tuple[int, ...], bytes], list[Item]] = {}
    for i in items:
        s = samples[i.index]
        if s.prompt_length < 1:
            raise ValueError(f"sample {s.index} has no prompt token: its first response token cannot be predicted")
        routed = b"" if s.rollout_routed_experts is None else s.rollout_routed_experts[: s.prompt_length].tobytes()
        shared.setdefault((s.group_index, tuple(s.tokens[: s.prompt_length]), routed), []).append(i)
    ids: list[int] = []
    pos: list[int] = []
    segments: list[Segment] = []
    per_token: list[tuple[np.ndarray, ...]] = []  # of each sample what the trained tokens' arrays are made of
    whole: list[np.ndarray] = []
    order: list[Sample] = []
    drawn: list[tuple[np.ndarray, np.ndarray]] = []  # of a sample: the supports of its trained tokens, and the size of each

    def lay(tokens: Sequence[int], first: int, prefix: int = 0) -> int:
        start = len(ids)
        if tokens:
            ids.extend(tokens)
            pos.extend(range(first, first + len(tokens)))
            segments.append((prefix, first, start, len(tokens)))
        return start

    for (_, prompt, _), members in shared.items():
        p = len(prompt)
        share = len(members) > 1 and max(samples[i.index].response_length for i in members) <= SHARE_LIMIT
        head = lay(prompt, 0) if share else 0
        for i in members:
            s = samples[i.index]
            start = lay(s.tokens[p:-1], p, head) if share else lay(s.tokens[:-1], 0) + p
            first = head if share else start - p
            whole.append(np.r_[first : first + p, start : start + s.response_length - 1])
            keep = np.flatnonzero(s.loss_mask)
            order.append(s)
            if s.rollout_top_p_token_offsets:
                sizes, trained = np.diff(s.rollout_top_p_token_offsets), np.asarray(s.loss_mask) > 0
                drawn.append((np.asarray(s.rollout_top_p_token_ids, dtype=np.int64)[np.repeat(trained, sizes)], sizes[keep]))
            position, label = whole[-1][p - 1 :][keep], np.asarray(s.tokens[p:], dtype=np.int64)[keep]
            numbers = np.full(len(keep), i.advantage), np.full(len(keep), i.weight), np.asarray(s.rollout_log_probs)[keep]
            per_token.append((position, label, *numbers))
    if not ids:
        lay([0], 0)
    arrays = [np.concatenate(x) for x in zip(*per_token)] if per_token else [np.zeros(0)] * 5
    rows, labels = (torch.from_numpy(np.asarray(a, dtype=np.int64)) for a in arrays[:2])
    advantages, weights, rollout = (torch.from_numpy(np.asarray(a, dtype=np.float32)) for a in arrays[2:])
    support = None
    if drawn:
        if len(drawn) != len(order):
            raise ValueError(f"{len(order) - len(drawn)} of {len(order)} samples came without the tokens they were drawn from")
        supports, sizes = (np.concatenate(x) for x in zip(*drawn))
        support = torch.from_numpy(supports), torch.from_numpy(np.concatenate([[0], np.cumsum(sizes)]))
    where, routing = [torch.from_numpy(w) for w in whole], pack_routing(order, whole, len(ids))
    everything = torch.cat([rows[:0], *where])
    buckets, scatter = _buckets(segments, len(ids))
    uses = None if routing is None else everything.bincount(minlength=len(ids))
    return Pack(
        torch.tensor([ids]), torch.tensor([pos]), buckets, scatter, rows, labels, advantages, weights, rollout, support, order, where,
        routing=routing, uses=uses, segments=tuple(segments), trained=[rows], everything=[everything],
    )  # fmt: skip


def _buckets(segments: list[Segment], total: int) -> tuple[list[Bucket], torch.Tensor]:
    """Group rows of like length (at most a third of padding, or 16 tokens), longest first, and index their tokens."""
    lots: list[list[Segment]] = []
    low = high = 0  # prefix lengths in the last lot
    for s in sorted(segments, key=lambda s: (s[1] > 0, s[3], s[1]), reverse=True):
        prefix = s[1]
        alike = lots and (prefix > 0) == (high > 0) and lots[-1][0][3] <= 1.5 * s[3] + 16
        if not alike or max(high, prefix) > 1.5 * min(low, prefix) + 16:
            lots.append([])
            low = high = prefix
        lots[-1].append(s)
        low, high = min(low, prefix), max(high, prefix)
    buckets, offset = [], 0
    scatter = np.zeros(total, dtype=np.int64)
    for lot in lots:
        ps, pn, qs, qn = (np.array(x)[:, None] for x in zip(*lot))
        longest, prefix = int(qn.max()), int(pn.max())
        i, j = np.arange(longest)[None], np.arange(prefix)[None]
        queries = np.where(i < qn, qs + i, qs)  # padding repeats a row's first token; its outputs are never read
        keys = np.concatenate([np.where(j < pn, ps + j, ps), queries], 1)
        mask = None
        if prefix:
            causal = np.broadcast_to(np.tril(np.ones((longest, longest), dtype=bool)), (len(lot), longest, longest))
            seen = np.broadcast_to((j < pn)[:, None], (len(lot), longest, prefix))
            mask = torch.from_numpy(np.concatenate([seen, causal], 2))[:, None]
        real = i < qn
        scatter[queries[real]] = (offset + np.arange(len(lot) * longest).reshape(len(lot), longest))[real]
        offset += len(lot) * longest
        buckets.append(Bucket(torch.from_numpy(queries), torch.from_numpy(keys), mask))
    return buckets, torch.from_numpy(scatter)
