"""Advantages per token on real packs: whatever the micro-batches are, each token gets what a loop over its sample gives."""

import random
from collections.abc import Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from vime.config import AlgoConfig
from vime.sample import Sample
from vime.trainer.batch import Item
from vime.trainer.loss import kl
from vime.trainer.packing import pack
from vime.trainer.returns import per_token

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def made(seed: int, n: int) -> dict[int, tuple[Sample, float, dict[str, list[float]]]]:
    """Samples with holes and tails that are not trained, the number of each, and logprobs of its trained tokens."""
    r = random.Random(seed)
    out = {}
    for i in range(n):
        s = Sample(group_index=i // 2, index=i, tokens=[1, 2 + i // 2])
        for trainable in (True, False, True, False)[: r.randint(1, 4)]:
            k = r.randint(1, 5)
            s.append_tokens([r.randrange(9) for _ in range(k)], [0.0] * k if trainable else None, versions=0, trainable=trainable)
        lps = {name: [r.uniform(-3, 0) for _ in range(sum(s.loss_mask))] for name in ("old", "ref", "values")}
        out[i] = (s, r.choice([0.0, 1.0, -0.5]), lps)
    return out


def packed(known: dict, order: list[int], cuts: list[int], names: tuple[str, ...] = ("old", "ref")) -> list:
    out = []
    for part in np.split(np.array(order, dtype=int), sorted({c % (len(order) + 1) for c in cuts})):
        p = pack([Item(int(i), known[i][0].group_index, known[i][1], 1.0) for i in part], {int(i): known[i][0] for i in part})
        for name in names:
            setattr(p, name, torch.tensor([x for s in p.samples for x in known[s.index][2][name]]))
        out.append(p)
    return out


def expected(algo: AlgoConfig, known: dict) -> dict[int, list[float]]:
    found = {}
    for i, (s, number, lps) in known.items():
        cost = kl(torch.tensor(lps["old"]), torch.tensor(lps["ref"]), algo.kl_loss_type).tolist()
        if algo.advantage_estimator == "on_policy_distillation":
            found[i] = [b - a for a, b in zip(lps["old"], lps["ref"])]
            continue
        if algo.advantage_estimator == "gae":  # trained tokens alone, from the last to the first
            v, ahead, found[i] = [*lps["values"], 0.0], 0.0, []
            for k in reversed(range(len(cost))):
                reward = number * (k == len(cost) - 1) - algo.kl_coef * cost[k]
                ahead = reward + algo.gamma * v[k + 1] - v[k] + algo.gamma * algo.lambd * ahead
                found[i].insert(0, ahead)
            continue
        at = [k for k, m in enumerate(s.loss_mask) if m]
        if algo.advantage_estimator == "reinforce_plus_plus_baseline":
            found[i] = [number - algo.kl_coef * c for c in cost]
            continue
        rewards = [-algo.kl_coef * cost[at.index(k)] + number * (k == at[-1]) if k in at else 0.0 for k in range(s.response_length)]
        found[i] = [sum(algo.gamma ** (j - k) * rewards[j] for j in range(k, len(rewards))) for k in at]
    if algo.whitened:
        flat = np.concatenate(list(found.values()))
        std = np.sqrt((flat.var(ddof=1) if len(flat) > 1 else 0.0) + 1e-8)
        found = {i: list((np.array(x) - flat.mean()) / std) for i, x in found.items()}
    return found


ALGOS = [
    AlgoConfig(advantage_estimator="reinforce_plus_plus", gamma=0.9, kl_coef=0.3),
    AlgoConfig(advantage_estimator="reinforce_plus_plus", gamma=0.9, kl_coef=0.3, normalize_advantages=False, kl_loss_type="k1"),
    AlgoConfig(advantage_estimator="reinforce_plus_plus_baseline", kl_coef=0.2, kl_loss_type="abs"),
    AlgoConfig(kl_coef=0.2, kl_loss_type="k2"),
    AlgoConfig(normalize_advantages=True),
    AlgoConfig(advantage_estimator="gae", gamma=0.9, lambd=0.8, kl_coef=0.3),
    AlgoConfig(advantage_estimator="gae", lambd=0.5, normalize_advantages=False),
    AlgoConfig(advantage_estimator="on_policy_distillation", ref_model="m"),
]


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 999), st.integers(1, 8), st.randoms(use_true_random=False), st.lists(st.integers(0, 8), max_size=3), st.sampled_from(ALGOS))
def test_tokens_get_what_a_loop_gives_however_they_are_batched(seed, n, r, cuts, algo):
    known, order = made(seed, n), list(range(n))
    r.shuffle(order)
    critic = algo.advantage_estimator == "gae"
    batches = packed(known, order, cuts, ("old", "ref", "values") if critic else ("old", "ref"))
    metrics = per_token(algo, batches, [b.old for b in batches], CPU)
    want = expected(algo, known)
    for b in batches:
        assert b.advantages.dtype == torch.float32
        values = [v for s in b.samples for v in want[s.index]]
        np.testing.assert_allclose(b.advantages.numpy(), values, atol=2e-4 if algo.whitened else 1e-5)
    if critic:  # returns are of advantages before they are whitened
        plain = expected(algo.model_copy(update={"normalize_advantages": False}), known)
        for b in batches:
            targets = [a + v for s in b.samples for a, v in zip(plain[s.index], known[s.index][2]["values"])]
            np.testing.assert_allclose(b.returns.numpy(), targets, atol=1e-5)
    if algo.kl_coef:
        costs = [c for _, _, x in known.values() for c in kl(torch.tensor(x["old"]), torch.tensor(x["ref"]), algo.kl_loss_type).tolist()]
        assert metrics["train/reward_kl"] == pytest.approx(np.mean(costs), abs=1e-5)


def test_nothing_to_train_on_this_rank():
    assert per_token(ALGOS[0], [pack([], {})], [torch.zeros(0)], CPU) == {} == per_token(ALGOS[0], [], [], CPU)


def test_without_kl_and_discount_tokens_share_their_samples_number():
    known = made(3, 4)
    batches = packed(known, [0, 1, 2, 3], [2])
    before = [b.advantages.clone() for b in batches]
    per_token(AlgoConfig(advantage_estimator="reinforce_plus_plus", normalize_advantages=False), batches, [b.old for b in batches], CPU)
    for b, a in zip(batches, before):
        torch.testing.assert_close(b.advantages, a)
