"""What is wrong with a rank's numbers, or with the rank: a step's NaN and inf, an error in its own part of the work."""

import math
import re
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from vime.errors import VimeError, said
from vime.trainer.packing import Pack
from vime.trainer.parallel import agree


def named(batches: Sequence[Pack], k: int) -> str:
    """Micro-batch `k` of a rank, for a person."""
    uids = [s.uid for s in batches[k].samples]
    shown = ", ".join(map(str, uids[:8])) + (", ..." if len(uids) > 8 else "")
    return f"rank {dist.get_rank()}, micro-batch {k + 1} of {len(batches)} ({f'samples {shown}' if uids else 'no samples'})"


def not_finite(model: torch.nn.Module, batches: Sequence[Pack], losses: torch.Tensor, norm: float) -> str:
    """Where the first NaN or inf of an optimizer step is, over all ranks, which get the same answer; empty where there is none. `batches` and
    `losses` (N,) are this rank's, `norm` (the gradient's) is every rank's. A collective."""
    bad = (~torch.isfinite(losses)).any().float() if math.isfinite(norm) else torch.ones((), device=losses.device)
    dist.all_reduce(bad, dist.ReduceOp.MAX)
    if not bad.item():
        return ""
    loss = next((f"{named(batches, k)}: its loss is {x}" for k, x in enumerate(losses.tolist()) if not math.isfinite(x)), "")
    grads = ((n, getattr(p.grad, "_local_tensor", p.grad)) for n, p in model.named_parameters() if p.grad is not None)
    names = [n for n, g in grads if not torch.isfinite(g).all()]
    first = min(((depth(n), i, n) for i, n in enumerate(names)), default=None)
    ranks: list[tuple[str, tuple[float, int, str] | None]] = [("", None)] * dist.get_world_size()
    dist.all_gather_object(ranks, (loss, first))
    found = [text for text, _ in ranks if text][:1]
    if grad := min((f for _, f in ranks if f), default=None):
        found.append(f"the first bad gradient is that of {grad[2]}")
    return "; ".join(found) or f"the gradient's norm is {norm}, though each gradient is finite"


def depth(name: str) -> float:
    """Where in the model a parameter lies, on whatever rank: ranks of a pipeline each number their own."""
    layer = re.search(r"\.layers\.(\d+)\.", name)
    return int(layer[1]) if layer else -1 if "embed" in name else math.inf


@contextmanager
def together(what: str) -> Iterator[None]:
    """Where a rank's input fails in the block, all ranks fail behind it: none enters the next collective. Raises: VimeError with `what`."""
    error = None
    try:
        yield
    except (KeyError, ValueError, VimeError) as e:
        error = VimeError(f"{what}: " + (f"sample {e} did not arrive" if isinstance(e, KeyError) else str(e)))
    agree(error)


@contextmanager
def alone(what: str) -> Iterator[None]:
    """In the block a rank works by itself between collectives; where it fails its peers wait until the controller ends them. Raises: VimeError with
    `what`, the cause and the traceback's end; a lost connection stays what it is."""
    try:
        yield
    except VimeError as e:
        raise VimeError(f"{what}: {e.what}", e.fix, e.log) from e
    except Exception as e:
        if isinstance(e, dist.DistError) or "gloo/transport" in str(e):
            raise
        raise VimeError(f"{what}: {said(e)}", log=traceback.format_exc()[-3000:]) from e
