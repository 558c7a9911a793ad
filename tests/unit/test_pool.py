"""Admission, deadlines and interruption of groups, against a simulated fleet of workers that finish in any order."""

import itertools
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.ledger_world import unsettled
from vime import config
from vime.data.plane import Ref
from vime.errors import VimeError
from vime.rollout.pool import UNBOUND, Pool, feasible, too_late
from vime.rollout.worker import GroupReport
from vime.sample import SampleMeta, Status

BATCH = 3


class Prompts:
    """An endless row of groups of one sample."""

    def __init__(self):
        self.given = 0

    def numbers(self, k):
        self.given += k
        return range(self.given - k, self.given)

    def state(self):
        return {"given": self.given}

    def load_state(self, state):
        self.given = state["given"]


ATTEMPTS = itertools.count()


def kept(key, tokens):
    """A group in the data plane, with tokens of these versions, None for those that are masked."""
    return Ref(f"{key}/{next(ATTEMPTS)}", 1 + len(tokens), 0, at=list(tokens))


class Workers:
    """Stands where Cluster does. A group needs `work` ticks; each tick gives it a token of the newest weights, `fate` may drop it."""

    def __init__(self, work, fate):
        self.rollouts, self.pending, self.now = self, {}, 0
        self.work, self.fate = work, fate

    def submit(self, key, group, version, wave):
        assert key not in self.pending
        tokens = [] if isinstance(group, int) else list(group.at)
        tokens = [v if v is not None and v >= (version if self.mask else 0) else None for v in tokens]
        self.pending[key] = [max(1, next(self.work) - len(tokens)), tokens]

    def finished(self, timeout):
        out = []
        for key, (left, tokens) in list(self.pending.items()):
            tokens.append(self.now)
            if left > 1:
                self.pending[key][0] -= 1
                continue
            del self.pending[key]
            oldest = min((v for v in tokens if v is not None), default=None)
            drop = next(self.fate)
            metas = [] if drop else [SampleMeta(key, key, key, 1, len(tokens), 1, 0.0, Status.COMPLETED, False, tuple(tokens))]
            out.append((key, GroupReport(key, metas, "unlucky" if drop else None, oldest=oldest), kept(key, tokens)))
        return out

    def interrupt(self, wave):
        pass

    def drain(self, timeout):
        for key, (_, tokens) in list(self.pending.items()):
            del self.pending[key]
            oldest = min((v for v in tokens if v is not None), default=None)
            yield key, GroupReport(key, interrupted=True, oldest=oldest), kept(key, tokens)


MODES = {
    "sync": {},
    "over-sampling": {"rollout": {"over_sampling_batch_size": 2 * BATCH}},
    "partial": {"rollout": {"over_sampling_batch_size": 2 * BATCH, "partial_rollout": True}, "train": {"max_staleness": 1}},
    "partial, masked": {"rollout": {"over_sampling_batch_size": 2 * BATCH, "partial_rollout": True, "mask_offpolicy_prefix": True}},
    "partial, far over": {"rollout": {"over_sampling_batch_size": 4 * BATCH, "partial_rollout": True}, "train": {"max_staleness": 3}},
    "one-step-off": {"train": {"mode": "async", "max_staleness": 1}},
    "async": {"train": {"mode": "async", "max_staleness": 3}},
}


def make(mode, work, fate, batch=BATCH, step=1):
    tree = {"model": "m", "data": {"prompts": "p"}, **{k: dict(v) for k, v in MODES[mode].items()}}
    tree.setdefault("rollout", {})["batch_size"] = batch
    tree["algo"] = {"correction": "tis"}
    cfg = config.validate(tree, "test")
    workers = Workers(itertools.cycle(work), itertools.cycle([*fate, False]))
    workers.mask = cfg.rollout.mask_offpolicy_prefix
    workers.now = step - 1
    return Pool(cfg, workers, Prompts(), step), workers, cfg


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(list(MODES)), st.lists(st.integers(1, 30), min_size=1, max_size=30), st.lists(st.booleans(), max_size=6))
def test_no_token_is_too_old_and_no_group_is_lost_or_trained_twice(mode, work, fate):
    pool, workers, cfg = make(mode, work, fate)
    bound, trained, dropped = cfg.train.max_staleness, [], 0
    for step in range(1, 8):
        batch = pool.take()
        assert len(batch) == BATCH
        for f in batch:
            versions = [v for m in f.metas for v in m.versions if v is not None]
            assert all(step - 1 - bound <= v <= step - 1 for v in versions), (step, versions)
        trained += [f.group_index for f in batch]
        if mode == "async":
            for _ in range(2):
                pool.pump()
        held = [f.group_index for f in (*pool.ready, *pool.waiting, *pool.running.values())]
        dropped += sum(n for k, n in pool.counts.items() if k.startswith("dropped"))
        assert Counter(trained + held).most_common(1)[0][1] == 1
        assert len(trained) + len(held) + dropped == pool.prompts.given
        if bound:
            assert len(held) <= BATCH * (bound + 1)
        if cfg.train.mode == "sync":
            assert not pool.running and not workers.pending
        pool.metrics()
        pool.version = workers.now = step


@given(st.sampled_from(["sync", "over-sampling", "partial"]), st.lists(st.integers(1, 9), min_size=1, max_size=9), st.lists(st.booleans(), max_size=4))
def test_a_stream_is_a_batch_in_parts(mode, work, losses):
    """Groups that the data plane loses meanwhile come again; none is drawn for nothing, none comes twice."""
    pool, workers, _ = make(mode, work, [])
    fate, trained = iter(losses), []
    for step in range(1, 4):
        batch = []
        for part in pool.stream():
            assert part
            if next(fate, False):
                pool.lost(part, [part[0].group_index])
                batch += [f for f in part if f not in pool.ready and f.data]
            else:
                batch += part
        assert len(batch) == BATCH and pool.step == step + 1
        trained += [f.group_index for f in batch]
        assert pool.trained(step, batch) is not None
        workers.now = step
        held = [f.group_index for f in (*pool.ready, *pool.waiting, *pool.running.values())]
        assert sorted(trained + held) == list(range(pool.prompts.given))


@given(st.sampled_from(list(MODES)), st.lists(st.integers(1, 9), min_size=1, max_size=9))
def test_a_snapshot_holds_every_group(mode, work):
    pool, _, _ = make(mode, work, [])
    pool.take()
    state, refs = pool.snapshot()
    assert len(refs) == len(state["groups"])
    # what the ledger has settled and what the snapshot holds are all groups that were drawn, apart from those taken and not trained yet
    of_snapshot = {g["group_index"] for g in state["groups"]} | set(state["fresh"])
    assert of_snapshot | {n for n in range(pool.prompts.given) if pool.ledger.where(n) == "leased"} == set(unsettled(pool.ledger, pool.prompts.given))
    again, workers, _ = make(mode, work, [])
    metas = {f.group_index: f.metas for f in pool.ready}
    workers.load_groups = lambda path, ready: [(metas.get(g["group_index"], []), ref) for g, ref in zip(state["groups"], refs, strict=True)]
    again.step, again.version = pool.step, pool.version
    again.restore(state, Path())
    assert again.prompts.given == pool.prompts.given
    assert {f.group_index for f in again.ready} == {f.group_index for f in pool.ready}
    assert {f.group_index for f in again.waiting} == {f.group_index for f in (*pool.waiting, *pool.running.values())}


def restored(pool, mode, work, batch):
    """A pool of another configuration that goes on from `pool`'s snapshot."""
    state, refs = pool.snapshot()
    again, workers, cfg = make(mode, work, [], batch, pool.step)
    metas = {f.group_index: f.metas for f in pool.ready}
    workers.load_groups = lambda path, ready: [(metas.get(g["group_index"], []), ref) for g, ref in zip(state["groups"], refs, strict=True)]
    again.restore(state, Path())
    return again, workers, cfg, state


@settings(max_examples=300)
@given(
    st.sampled_from(list(MODES)), st.integers(1, BATCH + 2), st.sampled_from(list(MODES)), st.integers(1, BATCH + 2),
    st.lists(st.integers(1, 12), min_size=1, max_size=12), st.integers(1, 3),
)  # fmt: skip
def test_a_resume_with_other_bounds_and_batches_goes_on_and_trains_nothing_too_old(before, batch0, after, batch, work, steps):
    """Whatever the checkpoint was written with: no hang, no token too old, no group lost or twice, and what was dropped is counted."""
    pool, workers, _ = make(before, work, [], batch0)
    trained = []
    for step in range(1, steps + 1):
        trained += [f.group_index for f in pool.take()]
        pool.version = workers.now = step
    if before in ("one-step-off", "async"):
        pool.pump()
    pool, workers, cfg, state = restored(pool, after, work, batch)
    assert pool.counts["restarted"] == state["counts"].get("restarted", 0) + len(too_late(cfg, state["groups"], steps + 1))
    finished, calls = workers.finished, itertools.count()

    def counted(timeout):
        assert next(calls) < 1000, "it hangs"
        return finished(timeout)

    workers.finished = counted
    for step in range(steps + 1, steps + 8):
        batch_ = pool.take()
        versions = [v for f in batch_ for m in f.metas for v in m.versions if v is not None and v >= 0]
        assert all(step - 1 - cfg.train.max_staleness <= v <= step - 1 for v in versions), (step, versions)
        trained += [f.group_index for f in batch_]
        held = [f.group_index for f in (*pool.ready, *pool.waiting, *pool.running.values())]
        assert sorted(trained + held) == list(range(pool.prompts.given))
        pool.version = workers.now = step


def test_the_same_configuration_restarts_nothing_that_was_going_on():
    for mode in ("partial", "partial, masked", "one-step-off", "async"):
        pool, workers, _ = make(mode, [1, 9, 4], [])
        for step in range(1, 4):
            pool.take()
            pool.version = workers.now = step
        _, _, cfg, state = restored(pool, mode, [1], BATCH)
        assert state["groups"] and not too_late(cfg, state["groups"], 4), mode


def test_a_source_that_cannot_give_prompts_again_is_refused_before_the_start():
    source = {"model": "m", "data": {"prompts": "p", "source": "m:S"}, "rollout": {"batch_size": 1}}
    cfg = config.validate(source, "test")
    new, old = {"group_index": 3, "oldest": UNBOUND, "ready": False}, {"group_index": 4, "oldest": 5, "ready": True}
    assert too_late(cfg, [new], 9) == set()
    with pytest.raises(VimeError, match=r"1 groups of the checkpoint are too old .*max_staleness = 0 and rollout.batch_size = 1.*config.toml"):
        too_late(cfg, [new, old], 9)


@given(st.lists(st.integers(1, 6), max_size=12), st.integers(1, 3))
def test_feasible_is_what_trying_every_order_finds(deadlines, batch):
    """Earliest deadline first is optimal: if any schedule is in time, that one is."""
    slots = sorted(deadlines)
    assert feasible(deadlines, 1, batch) == all(sum(d <= t for d in slots) <= batch * t for t in range(1, 7))
