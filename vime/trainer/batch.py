"""Who trains what, with which weight: one rollout batch split into optimizer steps, ranks and micro-batches. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np

from vime.config import Config
from vime.sample import SampleMeta


@dataclass(frozen=True)
class Item:
    """One sample in an optimizer step: its advantage, and the weight of each of its trained tokens in the step's loss."""

    index: int
    group_index: int
    advantage: float
    weight: float


@dataclass(frozen=True)
class RankPlan:
    """What one rank trains: optimizer steps -> micro-batches (of which all ranks have as many, some empty) -> items."""

    steps: list[list[list[Item]]]
    skipped: int  # samples of the whole batch, over all ranks, that no rank forwards: removed, or without a gradient
    scales: list[float]  # per step, 1 / its rollouts (token-mean: trained tokens), for losses of plug-ins
    factor: float | None = 1.0  # what the gradient is multiplied by before the update; None: the step's other parts follow, no update yet

    @property
    def minibatches(self) -> list[list[Item]]:
        return [[i for micro in step for i in micro] for step in self.steps]


def denominator(trained: Sequence[int], rollouts: Sequence[int], aggregate: str) -> float:
    """What all weights of an optimizer step are divided by: its rollouts, or trained tokens. Arguments as token_weights'."""
    return {"token-mean": max(float(sum(trained)), 1.0), "seq-mean-token-sum-norm": 1.0}.get(aggregate, float(len(set(rollouts))))


def token_weights(trained: Sequence[int], rollouts: Sequence[int], aggregate: str, horizon: int, over: float | None = None) -> np.ndarray:
    """Weight of each trained token of each sample, such that loss = sum of weight * token loss. `trained`: tokens per sample, 0 counts as a
    rollout but carries nothing; samples of one of `rollouts` share one denominator; `horizon`: that of seq-mean-token-sum-norm; `over`: in
    place of these samples' `denominator`."""
    n, scale = np.asarray(trained, dtype=np.float64), denominator(trained, rollouts, aggregate) if over is None else over
    if aggregate == "sample-mean":
        ids, inverse = np.unique(np.asarray(rollouts), return_inverse=True)
        return 1.0 / np.maximum(np.bincount(inverse, weights=n, minlength=len(ids)), 1)[inverse] / scale
    return np.full(len(n), 1.0 / (horizon if aggregate == "seq-mean-token-sum-norm" else scale))


def plan(metas: Sequence[SampleMeta], advantages: Sequence[float], cfg: Config, world: int, width: int = 0, part: bool = False) -> list[RankPlan]:
    """Split one rollout batch into optimizer steps of `train.global_batch_size` rollouts, ranks, and micro-batches of like cost; one RankPlan
    per rank. Loss weights are set here, so their sum depends on nothing below. `width`: the model's hidden size, for the share of attention;
    0: cost is tokens. `part`: more samples of the step follow, so weights are not divided by their `denominator` yet (train.stream)."""
    rollouts = list(dict.fromkeys(m.rollout_id for m in metas))
    size = cfg.train.global_batch_size or max(len(rollouts), 1)
    own = cfg.algo.custom_tis or cfg.algo.custom_advantage or cfg.loss.custom or cfg.loss.custom_reducer
    flat = cfg.train.skip_zero_advantage and not (cfg.algo.kl_loss_coef or cfg.algo.entropy_coef or cfg.algo.per_token or own)
    steps: list[list[list[list[Item]]]] = [[] for _ in range(world)]
    scales: list[float] = []
    skipped = 0
    for start in range(0, len(rollouts), size):
        chosen = set(rollouts[start : start + size])
        rows = [(m, float(a)) for m, a in zip(metas, advantages) if m.rollout_id in chosen]
        trained = [0 if m.removed else m.trained_tokens for m, _ in rows]
        of = [m.rollout_id for m, _ in rows]
        weights = token_weights(trained, of, cfg.loss.aggregate, cfg.rollout.max_response_len, 1.0 if part else None)
        live = [(m, Item(m.index, m.group_index, a, float(w))) for (m, a), w, n in zip(rows, weights, trained) if n and not (flat and a == 0)]
        live.sort(key=lambda x: (x[0].group_index, x[0].index))
        skipped += len(rows) - len(live)
        scales.append(1.0 / max(1, sum(trained) if cfg.loss.aggregate == "token-mean" else len(chosen)))
        units = _units(live, cfg.train.objective == "dpo")
        budget, pp, shares = cfg.train.max_tokens_per_gpu, cfg.parallel.pp, _cut(units, world, width)
        batches = [_fill(share, budget) for share in shares]
        n = -(-max(map(len, batches)) // pp) * pp  # a pipeline wants as many micro-batches as it has ranks, interleaved a multiple
        for r, (share, full) in enumerate(zip(shares, batches)):
            # Ranks run in lock-step, so each wants its work spread evenly over all micro-batches; in a pipeline all are of one length, too.
            even = _cut(share, n, width)
            fits = all(len(part) <= 1 or sum(_costs(joined(part))) <= budget for part in even)
            steps[r].append([[i for _, i in joined(part)] for part in even] if fits else full + [[]] * (n - len(full)))
    return [RankPlan(s, skipped, scales, None if part else 1.0) for s in steps]


def _costs(row: Sequence[tuple[SampleMeta, Item]]) -> list[int]:
    """Tokens each sample adds when the row is packed in order: its prompt only where the one before has another."""
    keys = [None] + [(m.group_index, m.prompt_length) for m, _ in row]
    return [m.response_length + (0 if keys[i] == keys[i + 1] else m.prompt_length) for i, (m, _) in enumerate(row)]


Unit = list[tuple[SampleMeta, Item]]  # what is never split over ranks or micro-batches


def joined(units: Sequence[Unit]) -> Unit:
    return [x for unit in units for x in unit]


def _units(row: Unit, pairs: bool) -> list[Unit]:
    """A unit of each sample, or of each group, whose samples are then compared in the loss."""
    return [list(unit) for _, unit in groupby(row, lambda x: x[0].group_index if pairs else x[0].index)]


def _work(row: Unit, width: int) -> np.ndarray:
    """Tokens of work of each sample. A token costs 24 width^2 FLOPs in a layer's products, a pair of them 4 width in attention."""
    new = np.array(_costs(row), dtype=np.float64)
    if not width:
        return new
    whole = np.array([m.prompt_length + m.response_length for m, _ in row], dtype=np.float64)
    return new + (whole**2 - (whole - new) ** 2) / 2 / (6 * width)


def _cut(row: list[Unit], parts: int, width: int) -> list[list[Unit]]:
    """Cut a row of units, in order, into `parts` of about equal work."""
    work = iter(_work(joined(row), width))
    cost = np.array([sum(next(work) for _ in unit) for unit in row], dtype=np.float64)
    middle = np.cumsum(cost) - cost / 2
    to = np.minimum((middle * parts / max(cost.sum(), 1)).astype(int), parts - 1)
    return [[x for x, t in zip(row, to) if t == p] for p in range(parts)]


def _fill(row: list[Unit], budget: int) -> list[list[Item]]:
    """Micro-batches of at most `budget` packed tokens, in order; a unit beyond the budget gets one of its own."""
    out: list[list[Item]] = []
    used, costs = 0, iter(_costs(joined(row)))
    for unit in row:
        cost = sum(next(costs) for _ in unit)
        if not out or used + cost > budget:
            out.append([])
            used, cost = 0, sum(_costs(unit))
        out[-1] += [item for _, item in unit]
        used += cost
    return out
