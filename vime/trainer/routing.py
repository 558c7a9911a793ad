"""Routing replay (R3, Ma et al. 2025, arXiv:2510.11370): the trainer sends every token to the experts that the server sent it to, in their
order, since rounding alone flips near ties. Weights are computed anew from the trainer's own router, which keeps its gradient."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vime.errors import VimeError
from vime.model import shape
from vime.sample import Sample
from vime.trainer.axes import EXPERTS

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from vime.trainer.packing import Pack

FAMILIES = ("qwen3_moe", "qwen2_moe", "olmoe", "mixtral")  # model types whose router is softmax, top-k, and maybe a renormalisation


def check_model(path: str) -> None:
    """Raises VimeError unless the model in folder `path` has experts, and a router that can be replayed."""
    config = shape(path)
    if not any(config.get(k) for k in EXPERTS):
        raise VimeError(f"{path} is a dense model: its config.json has no {', '.join(EXPERTS)}", "leave rollout.routing_replay out")
    if (kind := config.get("model_type")) not in FAMILIES:
        raise VimeError(f"{path}: the router of model_type {kind!r} is not known", f"known are {', '.join(FAMILIES)}")


def pack_routing(samples: Sequence[Sample], where: Sequence[np.ndarray], total: int) -> torch.Tensor | None:
    """Experts of a micro-batch's tokens, (total, layers, top_k) int16, sample i's token j at where[i][j], -1: not known; None where no sample has
    any. Raises: ValueError where only some have."""
    rows = [s.rollout_routed_experts for s in samples if s.rollout_routed_experts is not None]
    if not rows:
        return None
    if len(rows) < len(samples) or len({r.shape[1:] for r in rows}) > 1:
        shapes = sorted({str(r.shape[1:]) for r in rows})
        raise ValueError(f"{len(rows)} of {len(samples)} samples came with the experts of their tokens, of shapes {', '.join(shapes)}")
    out = np.full((total, *rows[0].shape[1:]), -1, dtype=np.int16)
    for r, at in zip(rows, where, strict=True):
        out[at[: len(r)]] = r
    return torch.from_numpy(out)


class Replay:
    """Stands in for every router's forward. Each layer says which micro-batch runs, since in a pipeline a recompute comes after others' forward;
    forward and recompute only look their layer up in its routing."""

    def __init__(self, model: PreTrainedModel):
        self.batch: Pack | None = None
        self.experts = self.top_k = 0  # where no router is here: a stage of dense layers
        self.counts: list[torch.Tensor] = []  # of forwards with a gradient: see take()
        config = model.config.get_text_config()
        self.layers, self.path = config.num_hidden_layers, config.name_or_path
        for name, module in model.named_modules():
            if type(module).__name__.endswith("TopKRouter"):
                found = re.search(r"layers\.(\d+)\.", name)
                assert found, name
                self.experts, self.top_k = module.num_experts, module.top_k
                model.get_submodule(name[: found.end() - 1]).register_forward_pre_hook(self.see, with_kwargs=True)
                module.forward = partial(self.route, module, int(found[1]), module.forward)

    def see(self, layer: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.batch = kwargs["packing"].pack if "packing" in kwargs else None

    def route(self, router: Any, layer: int, forward: Callable[..., Any], hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(router logits, weights (T, top_k), experts (T, top_k))"""
        logits, weights, own = forward(hidden)
        if self.batch is None or self.batch.routing is None:
            return logits, weights, own
        recorded = self.batch.routing[:, layer].to(own.dtype)
        known = recorded[:, :1] >= 0
        chosen = torch.where(known, recorded, own)
        if torch.is_grad_enabled():
            flipped = (chosen.sort(-1).values != own.sort(-1).values).any(-1)
            self.counts.append((torch.stack([flipped, known[:, 0]]) * self.batch.uses).sum(1))
        replayed = logits.softmax(-1, dtype=torch.float32).gather(-1, chosen)
        if getattr(router, "norm_topk_prob", True):  # Mixtral always does
            replayed = replayed / replayed.sum(-1, keepdim=True)
        return logits, replayed.to(weights.dtype), chosen

    def take(self) -> torch.Tensor:
        """(flipped choices, choices) since the last call, float64; a choice is a token's in one layer, in each sample that has it."""
        counts, self.counts = self.counts, []
        return torch.stack(counts).sum(0).double() if counts else torch.zeros(2, dtype=torch.float64)

    def check(self, batches: Sequence[Pack]) -> None:
        """Raises ValueError unless every micro-batch with samples has experts that this model has."""
        for b in batches:
            if b.samples and b.routing is None:
                raise ValueError("with rollout.routing_replay every sample needs its rollout_routed_experts (see Sample.append_tokens)")
            if b.routing is not None and self.experts and (b.routing.shape[1:] != (self.layers, self.top_k) or int(b.routing.max()) >= self.experts):
                got = f"experts up to {int(b.routing.max())} in the shape {tuple(b.routing.shape[1:])}"
                raise ValueError(f"{got} were recorded; {self.path} has {self.experts}, and (layers, top_k) {(self.layers, self.top_k)}")
