"""Advantages from scalars: pure functions over rewards and ids."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

EPS = 1e-6


def grpo(rewards: Sequence[float], groups: Sequence[int], rollouts: Sequence[int], normalize_std: bool = True) -> np.ndarray:
    """Group-relative advantage of every sample: (reward - group mean) / (group std + 1e-6), std with ddof 1.

    A group is whatever shares a group id, however many samples that is. Samples that share a rollout id (one agent run
    that yielded several samples) count once in mean and std, and get the same advantage. A group of one rollout gets 0.

    Args:
        rewards, groups, rollouts: reward, group id and rollout id per sample, equal lengths.
        normalize_std: False leaves the difference to the mean undivided (Dr.GRPO).

    Returns: float64 array, one advantage per sample, in the order given.
    Raises: ValueError for unequal lengths, a reward that is not finite, or a rollout whose samples disagree on group or reward.
    """
    if not len(rewards) == len(groups) == len(rollouts):
        raise ValueError(f"{len(rewards)} rewards, {len(groups)} group ids and {len(rollouts)} rollout ids: the counts must be equal")
    score: dict[int, tuple[int, float]] = {}  # rollout id -> its group, its reward
    for reward, group, rollout in zip(rewards, groups, rollouts):
        if not np.isfinite(reward):
            raise ValueError(f"rollout {rollout}: reward {reward} is not finite")
        if score.setdefault(rollout, (group, float(reward))) != (group, float(reward)):
            raise ValueError(f"rollout {rollout}: its samples disagree, {score[rollout]} and {(group, float(reward))} (group, reward)")
    members: dict[int, list[float]] = {}
    for group, reward in score.values():
        members.setdefault(group, []).append(reward)
    centre = {g: (float(np.mean(r)), _spread(r) if normalize_std else 1.0) for g, r in members.items()}
    return np.array([(r - centre[g][0]) / centre[g][1] if len(members[g]) > 1 else 0.0 for r, g in zip(rewards, groups)], dtype=np.float64)


def _spread(rewards: list[float]) -> float:
    """Unbiased standard deviation plus EPS; exactly equal rewards give EPS, so that rounding in the mean is never blown up."""
    if len(rewards) < 2 or min(rewards) == max(rewards):
        return EPS if len(rewards) < 2 else np.inf
    return float(np.std(rewards, ddof=1)) + EPS
