"""The user's functions on the loss side: packed tokens spread out into slime's lists, one tensor per sample on the trainer's device, as long
as its response (loss_mask and logprob 0 where not trained), and back. Their errors become a VimeError that names them."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vime.errors import VimeError
from vime.hooks import Args
from vime.sample import Sample
from vime.trainer.packing import Pack

Fn = Callable[..., Any]


def call(fn: Fn, key: str, *args: Any, **kw: Any) -> Any:
    """fn(*args, **kw). Raises: VimeError with the function's key and error."""
    try:
        return fn(*args, **kw)
    except Exception as e:  # a plug-in may fail in any way
        raise VimeError(f"{key}: {getattr(fn, '__name__', fn)} failed: {type(e).__name__}: {e}") from e


def spread(x: Tensor, masks: Sequence[Tensor]) -> list[Tensor]:
    """Packed values (M,) of trained tokens -> one tensor per sample, 0 at its other tokens; differentiable."""
    mask = torch.cat(list(masks)) > 0
    return list(x.new_zeros(len(mask)).masked_scatter(mask, x).split([len(m) for m in masks]))


def gather(x: Tensor | Sequence[Tensor], masks: Sequence[Tensor], key: str) -> Tensor:
    """The inverse of spread, of a list or its concatenation: (M,). Raises: VimeError naming `key` where lengths don't fit."""
    mask, flat = torch.cat(list(masks)) > 0, x if isinstance(x, Tensor) else torch.cat(list(x))
    if flat.shape != mask.shape:
        raise VimeError(f"{key}: values of shape {tuple(flat.shape)} came back for {len(mask)} response tokens")
    return flat[mask]


def lists(samples: list[Sample], device: torch.device) -> dict[str, Any]:
    return {
        "total_lengths": [len(s.tokens) for s in samples],
        "response_lengths": [s.response_length for s in samples],
        "loss_masks": [torch.tensor(s.loss_mask, dtype=torch.int32, device=device) for s in samples],
    }


def log_probs(batches: Sequence[Pack], masks: Sequence[Tensor]) -> dict[str, list[Tensor]]:
    """Those that are known of the samples, under slime's names."""
    fields = {"log_probs": "old", "ref_log_probs": "ref", "rollout_log_probs": "rollout_log_probs"}
    known = {name: field for name, field in fields.items() if getattr(batches[0], field) is not None}
    return {name: spread(torch.cat([getattr(b, field) for b in batches]), masks) for name, field in known.items()}


def tis(fn: Fn, args: Args, batch: Pack, pg: Tensor, train: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """algo.custom_tis on a micro-batch: its token losses (M,), the share of each token's weight that is left (M,), its metrics (M,)."""
    known, key = lists(batch.samples, pg.device), "algo.custom_tis"
    masks = known["loss_masks"]
    given = {"train_log_probs": spread(train, masks), "rollout_log_probs": spread(batch.rollout_log_probs, masks)}
    pg, left, metrics = call(fn, key, args, pg_loss=torch.cat(spread(pg, masks)), **given, **known)
    return gather(pg, masks, key), gather(left, masks, key).float(), {k: gather(v, masks, f"{key}: {k}") for k, v in metrics.items()}


def reduce(fn: Fn, args: Args, batch: Pack, pg: Tensor, left: Tensor) -> Tensor:
    """loss.custom_reducer on a micro-batch: a sum over its samples, not yet divided by the step's samples (or tokens)."""
    known, key = lists(batch.samples, pg.device), "loss.custom_reducer"
    masks = known["loss_masks"]
    kept = [m.int() for m in spread(left, masks)]
    reducer = call(fn, key, known["total_lengths"], known["response_lengths"], kept, args.calculate_per_token_loss)
    return call(reducer, key, torch.cat(spread(pg, masks)))


def advantages(fn: Fn, args: Args, batches: list[Pack], rewards: dict[int, float]) -> None:
    """algo.custom_advantage on all micro-batches of this rank; `rewards` are the group-normalized ones, by uid."""
    if not (samples := [s for b in batches for s in b.samples]):
        return
    data, key = lists(samples, batches[0].ids.device), "algo.custom_advantage"
    masks = data["loss_masks"]
    data |= {"tokens": [torch.tensor(s.tokens) for s in samples], "rewards": [rewards[s.uid] for s in samples]}
    data |= {"raw_reward": [s.reward for s in samples], "kl": [torch.zeros(len(m), device=m.device) for m in masks]}
    data |= log_probs(batches, masks)
    call(fn, key, args, data)
    if "advantages" not in data:
        raise VimeError(f"{key}: {getattr(fn, '__name__', fn)} filled in no rollout_data['advantages']")
    found = gather(data["advantages"], masks, key).float()
    for b, part in zip(batches, found.split([len(b.labels) for b in batches])):
        b.advantages = part


def loss(fn: Fn, args: Args, batch: Pack, hidden: Tensor, weight: Tensor, scale: float) -> tuple[Tensor, dict[str, float]]:
    """loss.custom on a micro-batch: its loss divided by the step's samples, and its metrics. hidden: (sum of total lengths less one each, D);
    weight: (V, D). The function gets float32 logits (1, T, V) before temperature, samples one after another in total length; those of a
    sample's last token, which predict nothing, are 0."""
    if not batch.samples:  # a rank without samples still joins the backward
        return hidden.sum() * 0 + weight.sum() * 0, {}
    data = lists(batch.samples, hidden.device)
    masks = data["loss_masks"]
    data |= {"unconcat_tokens": [torch.tensor(s.tokens, device=hidden.device) for s in batch.samples]}
    data |= log_probs([batch], masks) | {"advantages": spread(batch.advantages, masks)}
    parts = (hidden @ weight.T).float().split([n - 1 for n in data["total_lengths"]])
    logits = torch.cat([F.pad(z, (0, 0, 0, 1)) for z in parts])[None]

    def sum_of_sample_mean(x: Tensor) -> Tensor:
        return (gather(x, masks, "loss.custom: sum_of_sample_mean") * batch.weights).sum() / scale

    out, metrics = call(fn, "loss.custom", args, data, logits, sum_of_sample_mean)
    return out * scale, {k: float(v) * scale for k, v in metrics.items()}
