"""train.stream: a step in parts is the whole step."""

from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from tests.integration.trainer_kit import make_batch, make_cfg, make_model, one_rank, train_once, weights
from vime.sample import meta_of
from vime.trainer.advantage import estimate
from vime.trainer.batch import denominator, plan

AGGREGATES = ("sample-mean", "token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def in_parts(trainer, cfg, step, batch, cuts):
    """What vime.train.streamed does, with the groups between the cuts as parts."""
    metas, got, skipped = [], {}, 0
    for a, b in pairwise(cuts):
        for s in (s for g in batch[a:b] for s in g):
            s.token_versions = [step - 1 if v >= 0 else v for v in s.token_versions]
        found, advantages = estimate([meta_of(s) for g in batch[a:b] for s in g], cfg)
        (of_part,), metas = plan(found, advantages, cfg, 1, part=True), metas + found
        if b == len(batch):
            over = denominator([0 if m.removed else m.trained_tokens for m in metas], [m.rollout_id for m in metas], cfg.loss.aggregate)
            of_part = replace(of_part, factor=1 / over, skipped=skipped + of_part.skipped)
        skipped += of_part.skipped
        assert not got
        got = trainer.train(step, of_part, *batch[a:b])
    return got


@pytest.mark.parametrize("aggregate", AGGREGATES)
@pytest.mark.parametrize("cuts", [(0, 1, 4), (0, 1, 2, 3, 4), (0, 2, 4)])
def test_a_step_in_parts_is_the_whole_step(tmp_path, aggregate, cuts):
    """Group 1 has no gradient, so that a part may be empty; the last sample is removed; KL and entropy are parts of the loss."""
    model = make_model(tmp_path / "m")
    algo = {"entropy_coef": 0.01, "kl_loss_coef": 0.1, "ref_model": str(make_model(tmp_path / "ref", seed=1))} if cuts[1] == 2 else {}
    cfg = make_cfg(model, tmp_path, loss={"aggregate": aggregate}, algo=algo, train={"max_tokens_per_gpu": 64})
    with one_rank(cfg) as t:
        want = [train_once(t, cfg, step, make_batch(step)) for step in (1, 2)]
        whole = weights(t)
    with one_rank(cfg) as t:
        got = [in_parts(t, cfg, step, make_batch(step), cuts) for step in (1, 2)]
        for name, w in weights(t).items():
            torch.testing.assert_close(w, whole[name], rtol=0, atol=2e-5)
    for a, b in zip(got, want):
        assert a.keys() == b.keys()
        for key in a.keys() - {k for k in a if k.startswith("perf/")}:
            assert a[key] == pytest.approx(b[key], rel=1e-4, abs=1e-6), key


@pytest.mark.parametrize("aggregate", AGGREGATES[:3])
def test_loss_weights_add_up_to_what_they_would(tmp_path, aggregate):
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path, loss={"aggregate": aggregate}, train={"skip_zero_advantage": False})
    metas = [meta_of(s) for g in make_batch(3) for s in g]
    of = {m.index: m.trained_tokens for m in metas}

    def total(plans):
        return sum(i.weight * of[i.index] for p in plans for mini in p.minibatches for i in mini)

    whole = total(plan(metas, [1.0] * len(metas), cfg, 1))
    parts = sum(total(plan(metas[a:b], [1.0] * (b - a), cfg, 1, part=True)) for a, b in ((0, 3), (3, 10), (10, len(metas))))
    over = denominator([0 if m.removed else m.trained_tokens for m in metas], [m.rollout_id for m in metas], aggregate)
    assert parts / over == pytest.approx(whole, rel=1e-12)
    assert aggregate != "token-mean" or whole == pytest.approx(1)
