"""The ledger in a world (benchmarks/ledger_world.py) of producers, consumers, a store and crashes that hypothesis drives."""

import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from benchmarks.ledger_world import World, roam

N = st.integers(0, 99)


@settings(max_examples=150, stateful_step_count=50)
class Machine(RuleBasedStateMachine):
    """Every group is done once, or dropped once, or wanted still, whatever happens in whatever order."""

    @initialize(compact_at=st.sampled_from([1, 300, 1200, 1 << 20]))
    def begin(self, compact_at):
        self.folder = tempfile.TemporaryDirectory(dir="/dev/shm")
        self.world = World(Path(self.folder.name), compact_at)

    @rule(owner=N, nbytes=st.integers(1, 60), which=N)
    def start(self, **drawn):
        self.world.start(**drawn)

    @rule(which=N, owned=N)
    def put(self, **which):
        self.world.put(**which)

    @rule(which=N, part=st.booleans(), again=st.booleans(), by=st.booleans())
    def publish(self, which, part, again, by):
        self.world.publish(which, part, again, by)

    @rule(owner=N, nbytes=st.integers(1, 60), which=N, owned=N)
    def generate(self, owner, nbytes, which, owned):
        self.world.start(owner, nbytes, which)
        self.world.put(-1, owned)
        self.world.publish(-1, False, False, True)

    @rule(name=st.sampled_from(["give_back", "nack"]), which=N)
    def back(self, name, which):
        getattr(self.world, name)(which)

    @rule(name=st.sampled_from(["free", "checkpoint"]))
    def plain(self, name):
        getattr(self.world, name)()

    @rule(which=N, forgets=st.booleans())
    def owner_dies(self, which, forgets):
        self.world.owner_dies(which, forgets)

    @rule(first=N, count=st.integers(0, 5), ttl=st.sampled_from([0.0, 1.0, 50.0]), blind=st.booleans())
    def lease(self, first, count, ttl, blind):
        self.world.lease(first, count, ttl, blind)

    @rule(which=N, again=st.booleans())
    def commit(self, which, again):
        self.world.commit(which, again)

    @rule(which=N, reason=st.sampled_from(["filtered", "stale"]))
    def drop(self, which, reason):
        self.world.drop(which, reason)

    @rule(name=st.sampled_from(["lose", "reopen"]), which=N)
    def live(self, name, which):
        getattr(self.world, name)(sorted(self.world.kept.live)[which % 5 :][:2])

    @rule(seconds=st.sampled_from([0.5, 1.0, 60.0]))
    def tick(self, seconds):
        self.world.tick(seconds)

    @rule(cut=st.floats(0, 1), back=st.none() | st.integers(0, 2), forget=st.booleans())
    def crash(self, cut, back, forget):
        self.world.crash(cut, back, forget)

    @invariant()
    def holds(self):
        if hasattr(self, "world"):
            self.world.check(whole=True)

    def teardown(self):
        if hasattr(self, "world"):
            self.world.finish()
            self.folder.cleanup()


TestMachine = Machine.TestCase


@pytest.mark.parametrize("seed", range(3))
def test_a_long_way(seed):
    """What hypothesis, which likes things short, does not come to."""
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        long_way(World(Path(folder)), random.Random(seed))


def long_way(world, rng):
    for i in range(6000):
        roam(world, rng)
        world.check(whole=i % 100 == 0)
    world.finish()
    rare = ("over budget", "late", "taken over", "acks refused", "lost", "lost by death", "of weights that are gone")
    assert min(world.seen[k] for k in rare) > 0 < world.rollbacks < world.crashes
