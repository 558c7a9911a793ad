"""Who trains what with which weight, and how tokens are laid out: invariant to ranks, micro-batches and packing."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime import config
from vime.sample import Sample, meta_of
from vime.trainer.batch import Item, plan, token_weights
from vime.trainer.engine import learning_rate
from vime.trainer.packing import pack

AGGREGATES = ["sample-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]


def make_cfg(aggregate="sample-mean", **train):
    tree = {"model": "m", "data": {"prompts": "p"}, "loss": {"aggregate": aggregate}, "train": train}
    return config.validate(tree, "test")


@st.composite
def batches(draw, max_groups=5):
    """Samples of uneven groups: shared or different prompts, holes in the mask, removed ones, two samples of one rollout."""
    out, index = [], 0
    for g in range(draw(st.integers(1, max_groups))):
        prompt = draw(st.lists(st.integers(0, 50), min_size=1, max_size=6))
        for _ in range(draw(st.integers(1, 5))):
            own = prompt if draw(st.booleans()) else [*prompt, 7]
            s = Sample(group_index=g, index=index, rollout_id=index - index % 2 if draw(st.integers(0, 3)) == 0 else index, tokens=own)
            for k, n in enumerate(draw(st.lists(st.integers(1, 7), min_size=1, max_size=3))):
                tokens = draw(st.lists(st.integers(0, 50), min_size=n, max_size=n))
                if k == 1:
                    s.append_tokens(tokens, trainable=False)
                else:
                    s.append_tokens(tokens, [-float(t) for t in tokens], versions=0)
            s.remove_sample, s.reward = draw(st.integers(0, 7)) == 0, 1.0
            out.append(s)
            index += 1
    return out


@given(batches(), st.integers(1, 4), st.integers(5, 60))
def test_pairs_are_never_split(samples, world, budget):
    """What a loss compares lies in one micro-batch of one rank, whatever the budget, and nothing is lost."""
    metas = [meta_of(s) for s in samples]
    plans = plan(metas, [1.0] * len(metas), make_cfg(objective="dpo", max_tokens_per_gpu=budget), world)
    micros = [micro for p in plans for mini in p.steps for micro in mini if micro]
    assert Counter(i.index for m in micros for i in m) == Counter(m.index for m in metas if m.trained_tokens)
    groups = [g for m in micros for g in {i.group_index for i in m}]
    assert len(groups) == len(set(groups))


@given(batches(), st.sampled_from(AGGREGATES), st.integers(1, 4), st.integers(5, 60), st.sampled_from([None, 1, 3]), st.sampled_from([1, 2, 3]))
def test_plan_is_invariant_to_ranks_and_budget(samples, aggregate, world, budget, per_step, pp):
    """Every trainable sample is planned once, with a weight per token that no split changes; ranks run in lock-step."""
    metas = [meta_of(s) for s in samples]
    advantages = np.arange(len(metas)) + 1.0
    one = plan(metas, advantages, make_cfg(aggregate, global_batch_size=None, max_tokens_per_gpu=10**9), 1)
    cfg = make_cfg(aggregate, max_tokens_per_gpu=budget)
    cfg.train.global_batch_size = per_step  # after validation, which ties it to the rollout batch
    cfg.parallel.pp = pp
    plans = plan(metas, advantages, cfg, world)
    assert all(len(step) % pp == 0 for p in plans for step in p.steps), "a pipeline's micro-batches are a multiple of its ranks"

    items = [i for p in plans for mini in p.minibatches for i in mini]
    assert Counter(i.index for i in items) == Counter(m.index for m in metas if m.trained_tokens)
    assert all(i.advantage == i.index + 1 for i in items)
    trained = sum(m.trained_tokens for m in metas)
    assert {len(p.scales) for p in plans} == {len(plans[0].steps)}
    if per_step is None:  # then there is one step, and its scale is 1 / rollouts, or 1 / tokens
        assert plans[0].scales == [1 / (max(1, trained) if aggregate == "token-mean" else len({m.rollout_id for m in metas}))]
    assert {p.skipped for p in plans} == {sum(m.trained_tokens == 0 for m in metas)}
    assert len({tuple(len(step) for step in p.steps) for p in plans}) == 1, "every rank needs the same number of micro-batches"
    trained = {m.index: m.trained_tokens for m in metas}
    if per_step is None:
        weight = {i.index: i.weight for i in one[0].minibatches[0]}
        assert {i.index: i.weight for i in items} == weight
        if aggregate == "sample-mean":
            rollouts = {m.rollout_id for m in metas}
            live = {m.rollout_id for m in metas if m.trained_tokens}
            assert sum(w * trained[k] for k, w in weight.items()) == pytest.approx(len(live) / len(rollouts))
        if aggregate == "token-mean" and weight:
            assert sum(w * trained[k] for k, w in weight.items()) == pytest.approx(1)
    of_rollout = {m.index: m.rollout_id for m in metas}
    where: dict[int, set[int]] = {}
    for p in plans:
        for k, mini in enumerate(p.minibatches):
            for i in mini:
                where.setdefault(of_rollout[i.index], set()).add(k)
    assert all(len(v) == 1 for v in where.values()), "samples of one rollout belong to one optimizer step"


@given(batches(), st.integers(8, 60))
def test_budget_holds(samples, budget):
    """Packed tokens never exceed the budget, but for a sample that is longer itself."""
    metas = [meta_of(s) for s in samples]
    by_index = {s.index: s for s in samples}
    same_prompt = {
        g: len({tuple(s.tokens[: s.prompt_length]) for s in samples if s.group_index == g}) for g in {m.group_index for m in metas}
    }
    for micro in plan(metas, [1.0] * len(metas), make_cfg(max_tokens_per_gpu=budget), 1)[0].steps[0]:
        if len(micro) > 1 and all(same_prompt[i.group_index] == 1 for i in micro):
            assert pack(micro, by_index).ids.numel() <= budget


def test_ranks_get_like_shares():
    samples = []
    for k in range(64):
        s = Sample(group_index=k // 8, index=k, tokens=[1] * 20, reward=0.0)
        s.append_tokens([2] * (1 + k % 13), [0.0] * (1 + k % 13), versions=0)
        samples.append(s)
    metas = [meta_of(s) for s in samples]
    plans = plan(metas, [1.0] * 64, make_cfg(), 4)
    loads = [sum(samples[i.index].response_length for mini in p.minibatches for i in mini) for p in plans]
    assert max(loads) - min(loads) <= 2 * 13


def of_lengths(*lengths):
    samples = []
    for k, n in enumerate(lengths):
        s = Sample(group_index=k, index=k, tokens=[1], reward=0.0)
        s.append_tokens([2] * (n - 1), [0.0] * (n - 1), versions=0)
        samples.append(s)
    return [meta_of(s) for s in samples]


def test_long_samples_weigh_more_than_their_tokens():
    """The larger rank's share of the FLOPs: 63% where only tokens are counted, 51% with attention."""
    lengths, width, shares = [1000] * 2 + [100] * 40, 64, []
    flops = np.array([24 * width**2 * n + 4 * width * n**2 / 2 for n in lengths])
    for known in (0, width):
        plans = plan(of_lengths(*lengths), [1.0] * 42, make_cfg(max_tokens_per_gpu=10**6), 2, known)
        shares.append(max(flops[[i.index for i in p.minibatches[0]]].sum() for p in plans) / flops.sum())
    assert shares == pytest.approx([0.628, 0.505], abs=0.002)


def test_micro_batches_are_alike_on_all_ranks():
    """Not full ones and a rest; a rank that would need fewer of them takes as many, in place of empty ones."""
    for p in plan(of_lengths(*[12] * 20), [1.0] * 20, make_cfg(max_tokens_per_gpu=40), 2):
        assert sorted(len(micro) for micro in p.steps[0]) == [2, 2, 3, 3]
    long, short = plan(of_lengths(*[60] * 3, *[15] * 12), [1.0] * 15, make_cfg(max_tokens_per_gpu=90), 2)
    assert [len(m) for m in long.steps[0]] == [1, 1, 1] and [len(m) for m in short.steps[0]] == [4, 4, 4]


def test_zero_advantage_is_left_out_only_where_it_gives_no_gradient():
    samples = []
    for k in range(4):
        s = Sample(group_index=k // 2, index=k, tokens=[1], reward=0.0)
        s.append_tokens([2, 3], [0.0, 0.0], versions=0)
        samples.append(s)
    metas, adv = [meta_of(s) for s in samples], [0.0, 0.0, 1.0, -1.0]
    p = plan(metas, adv, make_cfg(), 1)[0]
    assert [i.index for i in p.minibatches[0]] == [2, 3] and p.skipped == 2
    assert all(i.weight == pytest.approx(1 / 4 / 2) for i in p.minibatches[0]), "the left out still count in the mean"
    cfg = make_cfg()
    for section, key in (("algo", "kl_loss_coef"), ("algo", "entropy_coef")):
        other = cfg.model_copy(deep=True)
        setattr(getattr(other, section), key, 0.1)
        assert plan(metas, adv, other, 1)[0].skipped == 0
    assert plan(metas, adv, make_cfg(skip_zero_advantage=False), 1)[0].skipped == 0


def test_siblings_share_a_denominator():
    np.testing.assert_allclose(token_weights([2, 6, 4], [5, 5, 9], "sample-mean", 1), [1 / 16, 1 / 16, 1 / 8])


@given(batches(), st.randoms(use_true_random=False))
def test_pack_lays_out_every_trained_token_behind_its_own_context(samples, random):
    """Following prefix and own tokens of the attention buckets from each predicting row gives back exactly the sample's text."""
    live = [s for s in samples if not s.remove_sample]
    random.shuffle(live)
    items = [Item(s.index, s.group_index, s.index + 0.5, 0.25) for s in live]
    p = pack(items, {s.index: s for s in samples})
    ids, total = p.ids[0].tolist(), p.ids.numel()
    context: dict[int, list[int]] = {}
    outputs = torch.cat([b.queries.flatten() for b in p.buckets])
    assert torch.equal(outputs[p.scatter], torch.arange(total)), "each token gets the attention output of its own query"
    attended = []
    for b in p.buckets:
        width = b.keys.shape[1]
        mask = torch.ones(b.queries.shape[1], width, dtype=torch.bool).tril().expand(len(b.keys), 1, -1, -1) if b.mask is None else b.mask
        attended += [[b.keys[r][mask[r, 0, q]] for q in range(b.queries.shape[1])] for r in range(len(b.keys))]
    flat = [keys for row in attended for keys in row]
    for t in range(total):
        seen = flat[p.scatter[t]].tolist()
        assert len(set(seen)) == len(seen) and p.positions[0, t] == len(seen) - 1 and seen[-1] == t
        context[t] = [ids[k] for k in seen]
    got = Counter(
        (tuple(context[r]), y, a, lp) for r, y, a, lp in zip(*(x.tolist() for x in (p.rows, p.labels, p.advantages, p.rollout_log_probs)))
    )
    want: Counter = Counter()
    for s in live:
        for k in range(s.response_length):
            if s.loss_mask[k]:
                at = s.prompt_length + k
                want[(tuple(s.tokens[:at]), s.tokens[at], s.index + 0.5, s.rollout_log_probs[k])] += 1
    assert got == want


def test_shared_prompts_are_laid_out_once():
    samples = {}
    for k in range(8):
        samples[k] = Sample(index=k, tokens=list(range(18)))
        samples[k].append_tokens([k] * 14, [0.0] * 14, versions=0)
    assert pack([Item(k, 0, 1.0, 1.0) for k in range(8)], samples).ids.numel() == 18 + 8 * 13


def test_empty_micro_batch_and_missing_prompt():
    p = pack([], {})
    assert p.ids.numel() == 1 and len(p.rows) == len(p.labels) == len(p.weights) == 0
    s = Sample(index=3, tokens=[])
    s.append_tokens([1], [0.0], versions=0)
    with pytest.raises(ValueError, match="sample 3 has no prompt"):
        pack([Item(3, 0, 1.0, 1.0)], {3: s})


def test_learning_rate():
    t = make_cfg(lr=1.0, min_lr=0.1, steps=100, lr_warmup_iters=10, lr_decay_start=0.5, lr_decay_style="linear").train
    assert [learning_rate(s, t) for s in (1, 5, 10, 11, 50, 75, 100)] == pytest.approx([0.1, 0.5, 1, 1, 1, 0.55, 0.1])
    t = t.model_copy(update={"lr_decay_style": "cosine"})
    assert [learning_rate(s, t) for s in (50, 75, 100, 200)] == pytest.approx([1, 0.55, 0.1, 0.1])
    t = t.model_copy(update={"lr_decay_style": "constant", "lr_warmup_iters": 0})
    assert {learning_rate(s, t) for s in (1, 50, 100)} == {1.0}
