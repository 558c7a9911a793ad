"""One micro-batch on several ranks: the ranks of a replica (cp x tp) forward the same one, each cp rank a piece of its row. In attention they
trade sequence for heads (Ulysses, Jacobs et al. 2023, arXiv:2309.14509) and see the whole row for their heads; with too few heads a larger
piece, and ring.py goes on. Behind the last layer each gets the hidden states of the whole samples whose loss it computes, wherever they lie."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed._functional_collectives import all_to_all_single_autograd
from torch.distributed.tensor import DTensor, Partial
from transformers.distributed.tensor_parallel import _AllReduceBackward

from vime.trainer.layout import Layout
from vime.trainer.packing import Pack


def lay_out(packs: Sequence[Pack], layout: Layout, pairs: bool = False) -> list[Pack]:
    """This rank's view of an optimizer step's micro-batches, on its device: padded to what cp and pp need, its piece of the row, and of the loss's
    arrays those of its own samples (of none, on stages before the last). `pairs`: a group's samples go to one rank."""
    cp = layout.p.cp
    lengths = [-(-b.ids.shape[1] // cp) * cp for b in packs]
    if layout.p.pp > 1:  # the pipeline's buffers have one size
        lengths = [max(lengths, default=0)] * len(lengths)
    return [_view(b, n, layout, pairs).to(layout.device) for b, n in zip(packs, lengths)]


def _view(b: Pack, length: int, layout: Layout, pairs: bool) -> Pack:
    p, pad = layout.p, length - b.ids.shape[1]
    # Padding attends to nothing: it reads the first token's attention output (of a ring zeros), and no loss reads it.
    ids, positions, scatter = (F.pad(x, (0, pad)) for x in (b.ids, b.positions, b.scatter))
    routing = b.routing if b.routing is None else F.pad(b.routing, (0, 0, 0, 0, 0, pad), value=-1)
    uses = b.uses if b.uses is None else F.pad(b.uses, (0, pad))
    parts = p.cp * p.tp
    sizes = np.array([sum(m > 0 for m in s.loss_mask) for s in b.samples], dtype=np.int64)
    ends = np.concatenate([[0], np.cumsum(sizes)])
    to = np.minimum((ends[:-1] + ends[1:]) * parts // (2 * max(1, int(ends[-1]))), parts - 1)  # by a sample's middle token
    if pairs and b.samples:
        _, heads, group = np.unique([s.group_index for s in b.samples], return_index=True, return_inverse=True)
        to = to[heads][group]
    cuts = np.searchsorted(to, np.arange(parts + 1))
    own = layout.cp * p.tp + layout.tp
    first, last = (cuts[own], cuts[own + 1]) if layout.last else (0, 0)
    peers = [slice(cuts[c * p.tp + layout.tp], cuts[c * p.tp + layout.tp + 1]) for c in range(p.cp)]
    tokens = slice(ends[first], ends[last])
    support = b.support
    if support is not None:
        offsets = support[1][tokens.start : tokens.stop + 1]
        support = support[0][offsets[0] : offsets[-1]], offsets - offsets[0]
    mine = slice(layout.cp * length // p.cp, (layout.cp + 1) * length // p.cp)
    return replace(
        b, ids=ids[:, mine], positions=positions[:, mine], scatter=scatter, routing=None if routing is None else routing[mine],
        rows=b.rows[tokens], labels=b.labels[tokens], advantages=b.advantages[tokens], weights=b.weights[tokens],
        rollout_log_probs=b.rollout_log_probs[tokens], support=support, samples=b.samples[first:last], where=b.where[first:last],
        uses=None if uses is None else uses[mine], cp=layout.cp_groups if p.cp > 1 else None,
        trained=[b.rows[ends[s.start] : ends[s.stop]] for s in peers],
        everything=[torch.cat([b.rows[:0], *b.where[s]]) for s in peers],
    )  # fmt: skip


def to_heads(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """(1, heads, T / cp, D) of this rank's piece -> (1, heads / cp, T, D) of the whole row. Fewer heads than ranks are repeated first."""
    n = group.size()
    return to_sequence(x.repeat_interleave(n // math.gcd(n, x.shape[1]), 1) if x.shape[1] % n else x, group)


def to_sequence(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The way back: (1, T, heads / cp, D) -> (1, T / cp, heads, D). Each rank keeps its part of the second dimension, and gets all of the third."""
    n = group.size()
    x = all_to_all_single_autograd(x[0].unflatten(0, (n, -1)).contiguous(), [1] * n, [1] * n, group)
    return x.transpose(0, 1).flatten(1, 2)[None]


def own_rows(hidden: Tensor, rows: list[Tensor], layout: Layout) -> Tensor:
    """Hidden states (T / cp, D) of this rank's piece -> (M, D) of the positions rows[cp rank] of the whole row. `rows`: each cp rank's."""
    if layout.p.tp > 1:  # all TP ranks hold these, and each computes the loss of other samples
        hidden = _AllReduceBackward.apply(hidden, layout.tp_group)
    if layout.p.cp == 1:
        return hidden[rows[0]]
    size, wanted = len(hidden), rows[layout.cp]
    owner = wanted // size
    order = owner.argsort(stable=True)
    here = [r[r // size == layout.cp] - layout.cp * size for r in rows]
    incoming = torch.bincount(owner, minlength=layout.p.cp).tolist()
    got = all_to_all_single_autograd(hidden[torch.cat(here)].contiguous(), incoming, [len(r) for r in here], layout.cp_group)
    return got[order.argsort()]


def whole_weight(weight: Tensor, layout: Layout) -> Tensor:
    """The head's weight (V, D), gathered over TP; the gradients of the TP ranks, whose losses are of unlike samples, are summed."""
    if isinstance(weight, DTensor):
        return weight.full_tensor(grad_placements=[Partial()])
    return _AllReduceBackward.apply(weight, layout.tp_group) if layout.p.tp > 1 else weight
