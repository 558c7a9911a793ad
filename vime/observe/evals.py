"""What an evaluation says: mean reward with its standard error, pass@k, lengths. Pure functions of scalars."""

from collections.abc import Sequence
from math import comb, sqrt
from statistics import fmean

from vime.sample import SampleMeta, Status


def pass_at_k(n: int, c: int, k: int) -> float:
    """Probability that k of n samples, drawn without replacement, hold one of the c solved: the unbiased estimator of
    Chen et al. 2021 (arXiv 2107.03374, eq. 1)."""
    return 1.0 - comb(n - c, k) / comb(n, k)


def standard_error(clusters: Sequence[Sequence[float]]) -> float:
    """Of the mean over all values, where those of one cluster (the samples of one prompt) are not independent; NaN below two clusters.

    sqrt(C / (C - 1) * sum over clusters of (sum of the deviations from the mean)^2) / N; with equal sizes it is that of the C means.
    """
    if (c := len(clusters)) < 2:
        return float("nan")
    mean = fmean(v for values in clusters for v in values)
    return sqrt(c / (c - 1) * sum(sum(v - mean for v in values) ** 2 for values in clusters)) / sum(map(len, clusters))


def eval_metrics(name: str, metas: Sequence[SampleMeta], solved: float) -> dict[str, float]:
    """Metrics eval/<name>/... of one dataset. Samples of one rollout count once; a sample is solved from the reward `solved` on.

    pass@k is there for k = 1, 2, 4, ... up to the smallest group, and averaged over prompts.
    """
    groups: dict[int, dict[int, float]] = {}
    for m in metas:
        groups.setdefault(m.group_index, {})[m.rollout_id] = m.reward
    rewards = [list(g.values()) for g in groups.values()]
    out = {
        "reward": fmean(r for g in rewards for r in g),
        "response_len": fmean(m.response_length for m in metas),
        "truncated": fmean(m.status is Status.TRUNCATED for m in metas),
    }
    if len(rewards) > 1:
        out["reward_stderr"] = standard_error(rewards)
    for k in (1 << i for i in range(min(map(len, rewards)).bit_length())):
        out[f"pass@{k}"] = fmean(pass_at_k(len(g), sum(r >= solved for r in g), k) for g in rewards)
    return {f"eval/{name}/{k}": v for k, v in out.items()}
