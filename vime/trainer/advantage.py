"""Advantages: pure functions over rewards and ids (one number a sample), and over the tokens of one sample (returns, GAE, whitening)."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from vime.config import Config
from vime.errors import VimeError
from vime.sample import SampleMeta, Status

EPS = 1e-6
Numbers = Sequence[float] | np.ndarray
Ids = Sequence[int]


class Groups:
    """Rewards by group, where samples of one rollout id (an agent run that yielded several) count once. `r` and `g`: reward and group's
    number of each rollout, `of`: each sample's rollout, `alike`: groups of equal rewards. Raises: ValueError for unequal lengths, a reward
    that is not finite, or a rollout whose samples disagree on group or reward."""

    def __init__(self, rewards: Numbers, groups: Ids, rollouts: Ids):
        if not len(rewards) == len(groups) == len(rollouts):
            raise ValueError(f"{len(rewards)} rewards, {len(groups)} group ids and {len(rollouts)} rollout ids: the counts must be equal")
        all_r, all_g = np.asarray(rewards, dtype=np.float64), np.asarray(groups, dtype=np.int64)
        _, first, self.of = np.unique(np.asarray(rollouts, dtype=np.int64), return_index=True, return_inverse=True)
        for i in np.flatnonzero(~np.isfinite(all_r)):
            raise ValueError(f"rollout {rollouts[i]}: reward {rewards[i]} is not finite")
        for i in np.flatnonzero((all_r != all_r[first][self.of]) | (all_g != all_g[first][self.of])):
            k = first[self.of[i]]
            both = f"{(groups[k], rewards[k])} and {(groups[i], rewards[i])}"
            raise ValueError(f"rollout {rollouts[i]}: its samples disagree, {both} (group, reward)")
        self.r = all_r[first]
        names, self.g = np.unique(all_g[first], return_inverse=True)
        self.n = np.bincount(self.g, minlength=len(names)).astype(np.float64)
        low, high = np.full(len(names), np.inf), np.full(len(names), -np.inf)
        np.minimum.at(low, self.g, self.r)
        np.maximum.at(high, self.g, self.r)
        self.alike = low == high  # a group of one, too

    def mean(self, x: np.ndarray, weights: np.ndarray | None = None) -> np.ndarray:
        w = np.ones(len(x)) if weights is None else weights
        return np.bincount(self.g, w * x, len(self.n)) / np.bincount(self.g, w, len(self.n))

    def minus(self, baseline: np.ndarray, scale: np.ndarray | float = 1.0) -> np.ndarray:
        """(reward - its group's baseline) * its group's scale for each sample; exactly 0 in groups of equal rewards and of one."""
        scaled = (self.r - baseline[self.g]) * np.broadcast_to(scale, self.n.shape)[self.g]
        return np.where(self.alike[self.g], 0.0, scaled)[self.of]


def grpo(rewards: Numbers, groups: Ids, rollouts: Ids, normalize_std: bool = True) -> np.ndarray:
    """(reward - group mean) / (group std + 1e-6) of every sample, float64, std with ddof 1 (Shao et al. 2024), from reward, group id and
    rollout id per sample; without normalize_std not divided (Dr.GRPO, Liu et al. 2025). Raises: as Groups."""
    x = Groups(rewards, groups, rollouts)
    mean = x.mean(x.r)
    if not normalize_std:
        return x.minus(mean)
    return x.minus(mean, 1 / (np.sqrt(x.mean((x.r - mean[x.g]) ** 2) * x.n / np.maximum(x.n - 1, 1)) + EPS))


def rloo(rewards: Numbers, groups: Ids, rollouts: Ids) -> np.ndarray:
    """REINFORCE leave-one-out (Ahmadian et al. 2024): reward - mean of the group's other rewards. Arguments and result as grpo's."""
    x = Groups(rewards, groups, rollouts)
    return x.minus(x.mean(x.r), x.n / np.maximum(x.n - 1, 1))


def opo(rewards: Numbers, groups: Ids, rollouts: Ids, lengths: Numbers) -> np.ndarray:
    """Optimal baseline (Hao et al. 2025): reward - the group's mean weighted by the rollouts' `lengths` in tokens, above 0. Otherwise as grpo."""
    x = Groups(rewards, groups, rollouts)
    return x.minus(x.mean(x.r, np.bincount(x.of, np.asarray(lengths, dtype=np.float64), len(x.r))))


def overlong_penalty(lengths: Numbers, limit: int, buffer: int, factor: float) -> np.ndarray:
    """DAPO's soft punishment (Yu et al. 2025, eq. 13) of responses of `lengths` tokens: 0 up to limit - buffer, falling to -factor at limit."""
    over = np.asarray(lengths, dtype=np.float64) - (limit - buffer)
    return -factor * np.clip(over / buffer, 0.0, 1.0)


def estimate(metas: Sequence[SampleMeta], cfg: Config) -> tuple[list[SampleMeta], list[float]]:
    """The step's samples without greedy ones, cut-off ones removed with algo.overlong_filter, and a number for each by algo.advantage_estimator:
    the same at each of its tokens, unless algo.per_token (returns.py). Raises: VimeError where remax has no greedy sample for a group."""
    algo, scores = cfg.algo, np.array([m.reward for m in metas])
    if buffer := cfg.reward.overlong_buffer_len:
        longest: dict[int, int] = {}
        for m in metas:
            longest[m.rollout_id] = max(longest.get(m.rollout_id, 0), m.response_length)
        lengths = [longest[m.rollout_id] for m in metas]
        scores = scores + overlong_penalty(lengths, cfg.rollout.max_response_len, buffer, cfg.reward.overlong_penalty_factor)
    greedy = {m.group_index: r for m, r in zip(metas, scores) if m.greedy}
    rewards = scores[[not m.greedy for m in metas]]
    own = [m for m in metas if not m.greedy]
    rollouts, groups = [m.rollout_id for m in own], [m.group_index for m in own]
    if algo.advantage_estimator in ("reinforce_plus_plus", "gae", "on_policy_distillation"):
        found = rewards
    elif algo.advantage_estimator == "remax":
        if missing := set(groups) - set(greedy):
            raise VimeError(f"remax: group {min(missing)} has no greedy sample", "leave out plug-ins that take samples out of their groups")
        found = rewards - np.array([greedy[g] for g in groups])
    elif algo.advantage_estimator == "rloo":
        found = rloo(rewards, groups, rollouts)
    elif algo.advantage_estimator == "opo":  # a removed sample has no trained tokens but stays in the baseline
        found = opo(rewards, groups, rollouts, [m.trained_tokens or max(m.response_length, 1) for m in own])
    else:
        found = grpo(rewards, groups, rollouts, algo.normalize_std and algo.advantage_estimator == "grpo")
    if algo.overlong_filter:
        own = [replace(m, removed=True) if m.status is Status.TRUNCATED else m for m in own]
    return own, found.tolist()


def returns(rewards: np.ndarray, gamma: float) -> np.ndarray:
    """Discounted sum of rewards from each token of one sample to its end: G_t = r_t + gamma * G_t+1. (T,) -> (T,) float64."""
    out, k = np.array(rewards, dtype=np.float64), 1
    while k < len(out):  # out[t] holds the next k rewards of t: doubling takes log T passes
        out[:-k] += gamma**k * out[k:]
        k *= 2
    return out


def gae(rewards: np.ndarray, values: np.ndarray, gamma: float, lam: float) -> tuple[np.ndarray, np.ndarray]:
    """Generalized advantage estimation (Schulman et al. 2016) of one sample, (T,) each; the value after the last is 0. Given trained tokens
    only it steps over those between them (verl); given all it is slime's. Returns: advantages and returns, (T,) float64, not whitened."""
    v = np.asarray(values, dtype=np.float64)
    advantages = returns(rewards + gamma * np.append(v[1:], 0.0)[: len(v)] - v, gamma * lam)
    return advantages, advantages + v


def whiten(x: np.ndarray, count: float, total: float, squares: float) -> np.ndarray:
    """(x - mean) / sqrt(variance + 1e-8), ddof 1, float64, given count, sum and sum of squares of all numbers that x belongs to."""
    mean = total / max(count, 1.0)
    variance = max(squares - count * mean * mean, 0.0) / max(count - 1, 1.0)
    return (x - mean) / np.sqrt(variance + 1e-8)
