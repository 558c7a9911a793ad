"""Ring attention (Liu et al. 2023, arXiv:2310.01889) over a packed row in contiguous pieces, one on each rank. At step t each rank gets the keys
and values of the rank t places before it, where any of them are seen. Softmax goes on from block to block by the logarithm of its sum (LSE)."""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

TILE = 1024  # queries, and keys, whose scores are in memory at a time
Segment = tuple[int, int, int, int]  # tokens of a packed row: start and length of the prompt that they see too, their own start and length
Tile = tuple[slice, slice, bool]  # queries of a piece, keys of a piece, causal: they are the same tokens
Work = list[list[list[Tile]]]


@lru_cache(64)
def tiles(segments: tuple[Segment, ...], ranks: int, size: int) -> Work:
    """What rank q computes with keys of rank k, in out[q][k]: every pair of tokens of which one sees the other, once. `size`: of a piece."""

    def cut(start: int, end: int) -> Iterator[tuple[int, int]]:
        while start < end:
            stop = min(end, start + TILE, (start // size + 1) * size)
            yield start, stop
            start = stop

    out: Work = [[[] for _ in range(ranks)] for _ in range(ranks)]
    for prefix, shared, start, length in segments:
        for a, b in cut(start, start + length):
            for c, d in chain(cut(prefix, prefix + shared), cut(start, b)):
                q, k = a // size, c // size
                out[q][k].append((slice(a - q * size, b - q * size), slice(c - k * size, d - k * size), a == c))
    return out


def exchange(mine: Tensor, work: Work, t: int, back: bool, group: dist.ProcessGroup) -> tuple[Tensor | None, Sequence[Any]]:
    """Start to send `mine` to the rank t places behind, if it sees keys here, and to get as much from t before, if seen here; or all of it `back`."""
    r = group.rank()
    to, of = r + t if r + t < len(work) and work[r + t][r] else None, r - t if r >= t and work[r][r - t] else None
    to, of = (of, to) if back else (to, of)
    ops = [] if to is None else [dist.P2POp(dist.isend, mine, group=group, group_peer=to)]
    got = None if of is None else torch.empty_like(mine)
    ops += [] if got is None else [dist.P2POp(dist.irecv, got, group=group, group_peer=of)]
    return got, dist.batch_isend_irecv(ops) if ops else []


def blocks(kv: Tensor, work: Work, group: dist.ProcessGroup) -> Iterator[tuple[int, Tensor]]:
    """For each t the keys and values of the rank t places before this one, float32; where it has no tile for them, any. The next travel meanwhile."""
    block = kv
    for t in range(group.size()):
        coming, under_way = exchange(kv, work, t + 1, False, group)
        yield t, block.float()
        for w in under_way:
            w.wait()
        block = kv if coming is None else coming


def scores(q: Tensor, k: Tensor, scale: float, causal: bool) -> Tensor:
    """(KV heads, G, queries, keys), -inf where a query does not see the key."""
    s = q @ k.mT * scale
    return s.masked_fill(torch.ones(s.shape[-2:], dtype=torch.bool, device=s.device).triu(1), -torch.inf) if causal else s


class Ring(torch.autograd.Function):
    """q (KV heads, G, T, Dk) and kv (KV heads, 1, T, Dk + Dv) of this rank's piece -> (KV heads, G, T, Dv). Computes in float32, tile by tile."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, kv: Tensor, segments: tuple[Segment, ...], scale: float, group: dist.ProcessGroup) -> Tensor:
        work, r, dims = tiles(segments, group.size(), q.shape[2]), group.rank(), (q.shape[3], kv.shape[3] - q.shape[3])
        qf, out = q.float(), q.new_zeros((*q.shape[:3], dims[1]), dtype=torch.float32)
        lse = q.new_full((*q.shape[:3], 1), -torch.inf, dtype=torch.float32)
        for t, block in blocks(kv, work, group):
            for at, keys, causal in work[r][r - t]:
                k, v = block[:, :, keys].split(dims, -1)
                s = scores(qf[:, :, at], k, scale, causal)
                both = torch.logaddexp(lse[:, :, at], s.logsumexp(-1, keepdim=True))
                out[:, :, at] = out[:, :, at] * (lse[:, :, at] - both).exp() + (s - both).exp() @ v
                lse[:, :, at] = both
        ctx.save_for_backward(q, kv, out, lse)
        ctx.rest = work, scale, group
        return out.to(q.dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        q, kv, out, lse = ctx.saved_tensors
        work, scale, group = ctx.rest
        r, dims, qf, grad = group.rank(), (q.shape[3], out.shape[3]), q.float(), grad.float()
        delta = (grad * out).sum(-1, keepdim=True)
        dq, dkv = torch.zeros_like(qf), torch.zeros_like(kv, dtype=torch.float32)
        for t, block in blocks(kv, work, group):
            part = torch.zeros_like(dkv) if t else dkv
            for at, keys, causal in work[r][r - t]:
                (k, v), (dk, dv) = block[:, :, keys].split(dims, -1), part[:, :, keys].split(dims, -1)
                p = (scores(qf[:, :, at], k, scale, causal) - lse[:, :, at]).exp()
                dv += (p.mT @ grad[:, :, at]).sum(1, keepdim=True)
                ds = p * (grad[:, :, at] @ v.mT - delta[:, :, at]) * scale
                dq[:, :, at] += ds @ k
                dk += (ds.mT @ qf[:, :, at]).sum(1, keepdim=True)
            if t:  # home with it, and here with what was found for this rank's keys
                found, under_way = exchange(part, work, t, True, group)
                for w in under_way:
                    w.wait()
                dkv = dkv if found is None else dkv + found
        return dq.to(q.dtype), dkv.to(kv.dtype), None, None, None


def ring_attention(query: Tensor, key: Tensor, value: Tensor, segments: tuple[Segment, ...], scale: float | None, group: dist.ProcessGroup) -> Tensor:
    """query/key/value (1, heads, T, dim) of this rank's piece of a packed row -> (1, T, heads, dim). `segments`: of the whole row."""
    kv = torch.cat([key, value], -1)[0][:, None]
    q = query[0].unflatten(0, (len(kv), -1))
    out: Tensor = Ring.apply(q, kv, segments, query.shape[-1] ** -0.5 if scale is None else scale, group)
    return out.flatten(0, 1).transpose(0, 1)[None]
