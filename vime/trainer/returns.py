"""Advantages per token: KL in the reward, discounting, and whitening over every trained token of the step, whatever rank holds it."""

import numpy as np
import torch
import torch.distributed as dist

from vime.algo import AlgoConfig
from vime.trainer.advantage import gae, returns, whiten
from vime.trainer.loss import kl
from vime.trainer.packing import Pack


def per_token(algo: AlgoConfig, batches: list[Pack], policy: list[torch.Tensor], device: torch.device) -> dict[str, float]:
    """Turn the advantages of this rank's micro-batches, one number a sample, into one a token; `policy` (M,) are the logprobs before the
    update that the KL is of. A collective, whatever rank holds a sample. Returns: metrics, the same on every rank. The number is the reward
    of the last trained token, each costs kl_coef * KL, and an advantage is the discounted sum from the token on, where tokens that are not
    trained count as steps without a reward (reinforce_plus_plus_baseline: the number less the own KL; gae: over trained tokens alone, from
    `values`, which also sets `returns`; on_policy_distillation: ref - policy)."""
    found: list[np.ndarray] = []
    kind = algo.advantage_estimator
    sums = np.zeros(4)  # trained tokens, their advantages, these squared, their KL
    for batch, lp in zip(batches, policy, strict=True):
        number = batch.advantages.double().cpu().numpy()
        cost = np.zeros(len(number))
        if batch.ref is not None and (algo.kl_coef or kind == "on_policy_distillation"):
            cost = kl(lp, batch.ref, algo.kl_loss_type if algo.kl_coef else "k1").double().cpu().numpy()
        parts, start = [-cost if kind == "on_policy_distillation" else number - algo.kl_coef * cost], 0
        if batch.values is not None:
            values, targets = batch.values.double().cpu().numpy(), np.zeros(len(cost))
            rewards, parts = -algo.kl_coef * cost, []
            for n in (sum(s.loss_mask) for s in batch.samples):
                own = slice(start, start := start + n)
                rewards[own.stop - 1] += number[own.start]
                advantages, targets[own] = gae(rewards[own], values[own], algo.gamma, algo.lambd)
                parts.append(advantages)
            batch.returns = torch.from_numpy(targets).to(batch.values)
        elif kind not in ("reinforce_plus_plus_baseline", "on_policy_distillation"):
            parts = []
            for s in batch.samples:
                at = np.flatnonzero(s.loss_mask)
                rewards = np.zeros(s.response_length)
                rewards[at] = -algo.kl_coef * cost[start : start + len(at)]
                rewards[at[-1]] += number[start]
                parts.append(returns(rewards, algo.gamma)[at])
                start += len(at)
        found.append(np.concatenate([np.zeros(0), *parts]))
        sums += len(cost), found[-1].sum(), (found[-1] ** 2).sum(), cost.sum()
    total = torch.from_numpy(sums).to(device)
    dist.all_reduce(total)
    count, mean, squares, costs = total.tolist()
    for batch, x in zip(batches, found):
        x = whiten(x, count, mean, squares) if algo.whitened else x
        batch.advantages = torch.from_numpy(x).to(batch.advantages)
    return {"train/advantage_mean": mean / max(count, 1), "train/reward_kl": costs / max(count, 1)} if count else {}
