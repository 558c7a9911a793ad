"""A world around the data plane's ledger, beside a plain model of what the ledger must say: for ledger.py here and tests/unit/test_ledger.py."""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

from vime.data.ledger import Ledger
from vime.data.plane import Ref
from vime.errors import VimeError

OWNERS, BUDGET, LARGEST = ("w0", "w1", "w2"), 400, 60  # bytes


def unsettled(ledger: Ledger, end: int) -> list[int]:
    """Those of groups 0 ... end - 1 that are neither done nor dropped."""
    gaps = zip([0, *ledger.settled[1::2]], [*ledger.settled[::2], end], strict=True)
    return [n for a, b in gaps for n in range(a, min(b, end))]


@dataclass
class Held:
    """What the model knows of a group that is not settled."""

    key: str | None = None
    nbytes: int = 0
    owner: str = ""
    version: int = 0
    whole: bool = False
    gone: set[str] = field(default_factory=set)
    producer: str | None = None
    reserved: int = 0
    holder: str | None = None
    deadline: float = 0.0


@dataclass
class Kept:
    """What the model says must outlive a crash."""

    live: dict[int, Held] = field(default_factory=dict)
    settled: dict[int, str] = field(default_factory=dict)  # group -> done, or why it was dropped, in order
    unfreed: dict[str, int] = field(default_factory=dict)  # key -> bytes
    step: int = 0

    def shot(self) -> tuple[dict[int, Held], int, dict[str, int], int]:
        """A copy; of what is settled only how many there are, since it grows at its end."""
        return {n: replace(g, gone=set(g.gone)) for n, g in self.live.items()}, len(self.settled), dict(self.unfreed), self.step


@dataclass
class Job:
    """One attempt at a group, by a producer that may be thought dead."""

    group: int
    owner: str
    key: str
    nbytes: int
    version: int
    ref: Ref | None = None  # once its bytes are stored


class World:
    """Everything around a ledger. Each method does one thing, given small numbers that choose among what there is; `check` compares."""

    def __init__(self, folder: Path, compact_at: int = 1200):
        self.path, self.compact_at = folder / "ledger.jsonl", compact_at
        self.now, self.drawn, self.keys, self.whos = 0.0, 0, 0, 0
        self.version = 0  # of the weights that producers have
        self.kept, self.wanted = Kept(), set[int]()  # wanted: drawn and not settled
        self.handed: set[str] = set()
        self.store: set[str] = set()  # keys whose bytes are there
        self.jobs: list[Job] = []
        self.leases: list[tuple[str, list[int]]] = []
        self.trained: list[int] = []  # by the weights that survive, in order
        self.checkpoints: list[tuple[str, int, list[int], dict[int, str], int]] = []
        self.commits = self.crashes = self.rollbacks = 0
        self.seen: Counter[str] = Counter()  # what happened, to show that the run was no stroll
        self.ledger = self.opened(None)
        self.history: list[tuple[int, Any]] = []
        self.inode, self.synced, self.acked = 0, 0, False
        self.note()

    def opened(self, cursor: dict[str, Any] | None) -> Ledger:
        return Ledger(BUDGET, self.path, cursor, lambda: self.now, self.compact_at)

    def note(self) -> None:
        """Remember which length of the journal says what."""
        stat = self.path.stat()
        if stat.st_ino != self.inode or not self.history:
            first = self.path.read_bytes().index(b"\n") + 1
            before = self.history[-1][1] if self.history else self.kept.shot()
            self.history, self.inode, self.synced = [(first, before)], stat.st_ino, first
        if self.history[-1][0] != stat.st_size:
            self.history.append((stat.st_size, self.kept.shot()))
        if self.acked:
            self.synced, self.acked = stat.st_size, False

    # ---------------------------------------------------------------- producers

    def open_groups(self) -> list[int]:
        live = self.kept.live
        return [n for n in sorted(self.wanted) if not (n in live and live[n].whole)]

    def start(self, owner: int, nbytes: int, which: int) -> None:
        """Begin a new group, or another attempt at one that is not there."""
        waiting = self.open_groups()
        n = waiting[which % len(waiting)] if waiting and which % 3 else self.drawn
        name, k = OWNERS[owner % len(OWNERS)], self.kept
        own = k.live[n].reserved if n in k.live else 0
        others = sum(g.reserved for g in k.live.values()) - own
        stored = sum(g.nbytes for g in k.live.values() if g.key) + sum(b for key, b in k.unfreed.items() if key not in self.handed)
        fits = stored + others + nbytes <= BUDGET
        never = not fits and not others and not (k.unfreed.keys() - self.handed) and not any(g.whole for g in k.live.values())
        try:
            ok = self.ledger.reserve(n, name, nbytes)
            assert ok == fits and not never, (ok, fits, never)
        except VimeError:
            assert never
            stuck = [m for m, g in k.live.items() if g.key]
            return self.drop_groups([stuck[which % len(stuck)]], "stuck")
        if ok:
            g = k.live.setdefault(n, Held())
            g.producer, g.reserved = name, nbytes
            self.draw(n + 1)
            self.keys += 1
            self.jobs.append(Job(n, name, f"run/g{n}/a{self.keys}", nbytes, self.version))
        else:
            self.seen["over budget"] += 1

    def draw(self, end: int) -> None:
        self.wanted |= {*range(self.drawn, end)} - self.kept.settled.keys()
        self.drawn = max(self.drawn, end)

    def put(self, which: int, owned: int) -> None:
        waiting = [j for j in self.jobs if j.ref is None]
        if waiting:
            j = waiting[which % len(waiting)]
            self.store.add(j.key)
            j.ref = Ref(j.key, max(1, j.nbytes - owned % 7), which, j.owner if owned % 2 else "", at=object())

    def publish(self, which: int, part: bool, again: bool, by: bool) -> None:
        done = [j for j in self.jobs if j.ref]
        if not done:
            return
        j, k = done[which % len(done)], self.kept
        assert j.ref
        g = k.live.get(j.group, Held())
        known = j.key in k.unfreed or j.key in g.gone or j.key == g.key
        takes = not known and g.producer is not None and (not by or g.producer == j.owner)
        assert self.ledger.publish(j.group, j.ref, j.version, not part, j.owner if by else None) == takes
        if takes:
            self.let_go(g)
            g.key, g.nbytes, g.owner, g.version, g.whole = j.key, j.ref.nbytes, j.ref.owner, j.version, not part
            g.producer, g.reserved = None, 0
        elif not known:
            k.unfreed[j.key] = j.ref.nbytes
            self.seen["late"] += 1
        if not again or j.group in k.settled:  # a settled group's keys are forgotten: its messages don't come twice in this world
            self.jobs.remove(j)

    def give_back(self, which: int) -> None:
        if self.jobs:
            j = self.jobs[which % len(self.jobs)]
            self.ledger.nack([j.group], j.owner)
            g = self.kept.live.get(j.group)
            if g and g.producer == j.owner:
                g.producer, g.reserved = None, 0

    def owner_dies(self, which: int, forgets: bool) -> None:
        name, again = OWNERS[which % len(OWNERS)], set()
        for n, g in self.kept.live.items():
            if g.key and g.owner == name:
                self.store.discard(g.key)
                self.let_go(g)
                g.deadline = self.now
                again |= {n} if g.producer is None else set()
                self.seen["lost by death"] += 1
            if g.producer == name:
                g.producer, g.reserved = None, 0
                again.add(n)
        for j in self.jobs:
            if j.owner == name and j.ref and j.ref.owner:
                self.store.discard(j.key)
        if forgets:  # else its messages still come
            self.jobs = [j for j in self.jobs if j.owner != name]
        assert self.ledger.owner_died(name) == sorted(again)

    # ---------------------------------------------------------------- consumers

    def let_go(self, g: Held) -> None:
        if g.key:
            self.kept.unfreed[g.key] = g.nbytes
            g.gone.add(g.key)
        g.key, g.whole = None, False

    def lease(self, first: int, count: int, ttl: float, blind: bool) -> None:
        """By a new consumer. `blind`: of groups that may not be there."""
        have = self.kept.live
        pool = list(have) if blind else [n for n in have if self.where(n) == "ready"]
        wanted = [pool[(first + i) % len(pool)] for i in range(min(count, len(pool)))]
        self.whos += 1
        who = f"t{self.whos}"
        refs = self.ledger.lease(wanted, who, self.now + ttl)
        if all(self.where(n) == "ready" for n in wanted):
            assert [r.key for r in refs] == [have[n].key for n in wanted]
            for n in wanted:
                self.seen["taken over"] += have[n].holder is not None
                have[n].holder, have[n].deadline = who, self.now + ttl
            if wanted:
                self.leases.append((who, wanted))
        else:
            assert refs == []

    def commit(self, which: int, again: bool) -> None:
        """A consumer reads, trains and acks; or says that it cannot read."""
        if not self.leases:
            return
        k, (who, groups) = self.kept, self.leases.pop(which % len(self.leases))
        mine = [n for n in groups if n in k.live and k.live[n].holder == who]
        missing = [n for n in mine if (key := k.live[n].key) and key not in self.store]
        if missing:
            return self.lose(missing)
        step = k.step + 1
        refused = self.ledger.ack(groups, step, who)
        assert refused == [n for n in groups if n not in mine], (refused, groups, mine)
        if again:
            assert self.ledger.ack(groups, step, who) == refused
        self.seen["acks refused"] += len(refused)
        for n in mine:
            self.settle(n, "done")
            self.trained.append(n)
        k.step, self.version = step, step
        self.commits += bool(mine)
        self.acked = True

    def settle(self, n: int, how: str) -> None:
        assert n not in self.kept.settled
        if g := self.kept.live.pop(n, None):
            self.let_go(g)
        self.kept.settled[n] = how
        self.wanted.discard(n)

    def lose(self, groups: list[int]) -> None:
        found = [n for n in groups if n in self.kept.live and self.kept.live[n].key]
        assert self.ledger.lost(groups) == found
        for g in (self.kept.live[n] for n in found):
            self.let_go(g)
            g.deadline, g.producer, g.reserved = self.now, None, 0
            self.seen["lost"] += 1

    def reopen(self, groups: list[int]) -> None:
        self.ledger.reopen(groups)
        for g in (self.kept.live[n] for n in groups if n in self.kept.live):
            self.seen["reopened"] += g.whole
            g.whole = False

    def nack(self, which: int) -> None:
        if self.leases:
            who, groups = self.leases.pop(which % len(self.leases))
            self.ledger.nack(groups, who)
            for g in (self.kept.live[n] for n in groups if n in self.kept.live):
                g.holder = None if g.holder == who else g.holder

    def drop(self, which: int, reason: str) -> None:
        if self.drawn:
            self.drop_groups([which % self.drawn], reason)

    def drop_groups(self, groups: list[int], reason: str) -> None:
        refused = [n for n in groups if self.where(n) in ("leased", "settled")]
        assert self.ledger.drop(groups, reason) == refused
        for n in groups:
            if n not in refused:
                self.settle(n, reason)
                self.seen["dropped"] += 1

    def free(self) -> None:
        out = [r.key for r in self.ledger.free()]
        for key in self.handed:
            del self.kept.unfreed[key]
        assert sorted(out) == sorted(self.kept.unfreed), "each once, all of them"
        assert not {g.key for g in self.kept.live.values()} & set(out), "bytes that are wanted"
        self.handed = set(out)
        self.store -= self.handed

    def tick(self, seconds: float) -> None:
        self.now += seconds

    # ---------------------------------------------------------------- checkpoints and crashes

    def checkpoint(self) -> None:
        cursor = json.dumps(self.ledger.state())
        self.checkpoints = [*self.checkpoints[-2:], (cursor, self.drawn, list(self.trained), dict(self.kept.settled), self.kept.step)]

    def crash(self, cut: float, back: int | None, forget: bool) -> None:
        """The controller dies and the journal ends somewhere; it goes on from the journal alone, of which what was synced is there, or from a
        checkpoint, with any part of the journal."""
        ckpt = self.checkpoints[-1 - back % len(self.checkpoints)] if back is not None and self.checkpoints else None
        data = self.path.read_bytes()
        floor = 0 if ckpt else self.synced
        length = floor + round(cut * (len(data) - floor))
        if length < len(data):
            self.path.write_bytes(data[:length])
        live, count, unfreed, step = next((shot for size, shot in reversed(self.history) if size <= length), ({}, 0, {}, 0))
        kept = Kept(live, dict(islice(self.kept.settled.items(), count)), unfreed, step)
        self.crashes += 1
        self.leases, self.handed = [], set()
        for g in kept.live.values():
            g.producer, g.reserved, g.holder, g.deadline = None, 0, None, 0.0
        kept.live = {n: g for n, g in kept.live.items() if g.key or g.gone}  # what was only reserved is in no journal
        self.kept = kept
        if ckpt:
            self.rollbacks += 1
            cursor, self.drawn, self.trained, settled, step = ckpt[0], ckpt[1], list(ckpt[2]), dict(ckpt[3]), ckpt[4]
            kept.settled, kept.step, self.version = settled, step, step
            for n in [n for n, g in kept.live.items() if n in settled or g.version > step]:
                self.seen["of weights that are gone"] += n not in settled
                self.let_go(kept.live.pop(n))
            self.checkpoints = self.checkpoints[: len(self.checkpoints) - back % len(self.checkpoints)] if back is not None else []
            self.ledger = self.opened(json.loads(cursor))
        else:
            assert all(kept.settled.get(n) == "done" for n in self.trained), "an ack was not safe"
            self.ledger = self.opened(None)
        self.history, self.inode = [], 0
        self.wanted = {*range(self.drawn)} - kept.settled.keys()
        self.jobs = [] if forget else self.jobs
        self.draw(max([self.drawn, *(n + 1 for n in kept.live), *(j.group + 1 for j in self.jobs)]))
        self.check(whole=True)

    # ---------------------------------------------------------------- what must hold

    def where(self, n: int) -> str:
        if n in self.kept.settled:
            return "settled"
        if n not in self.kept.live:
            return "new"
        g = self.kept.live[n]
        return "open" if not g.whole else "leased" if g.holder is not None and g.deadline > self.now else "ready"

    def check(self, whole: bool = False) -> None:
        self.note()
        k, ledger = self.kept, self.ledger
        if whole:
            assert len(set(self.trained)) == len(self.trained), "a group was trained twice"
            assert set(self.trained) == {n for n, how in k.settled.items() if how == "done"}, "done are others than were trained"
            assert self.wanted == {*range(self.drawn)} - k.settled.keys()
        assert unsettled(ledger, self.drawn) == sorted(self.wanted), "a group is neither settled nor wanted"
        recent = {*range(max(0, self.drawn - 40), self.drawn + 1), *k.live}
        assert {n: ledger.where(n) for n in recent} == {n: self.where(n) for n in recent}
        assert {n: g.ref and g.ref.key for n, g in ledger.live.items()} == {n: g.key for n, g in k.live.items()}
        stats = ledger.stats()
        assert stats["reserved_bytes"] == sum(g.reserved for g in k.live.values())
        assert stats["stored_bytes"] == sum(g.nbytes for g in k.live.values() if g.key) + sum(
            n for key, n in k.unfreed.items() if key not in self.handed)  # fmt: skip
        assert ledger.unfreed.keys() == k.unfreed.keys()
        assert stats.get("done", 0) == len(self.trained)
        assert sum(v for n, v in stats.items() if n.startswith("dropped_")) == len(k.settled) - len(self.trained)
        assert ledger.step == k.step

    def finish(self) -> None:
        """Whatever the state is, the run can end, and then every group that was ever drawn is settled once."""
        while left := unsettled(self.ledger, self.drawn):
            self.now += 1e6
            self.free()
            for n in left:
                if self.where(n) in ("new", "open"):
                    if self.where(n) == "open" and self.kept.live[n].key:
                        self.lose([n])
                        self.free()
                    try:
                        if self.ledger.reserve(n, "w0", 10):
                            self.keys += 1
                            g = self.kept.live.setdefault(n, Held())
                            g.producer, g.reserved = "w0", 10
                            self.jobs = [Job(n, "w0", f"run/g{n}/a{self.keys}", 10, self.version)]
                            self.put(0, 0)
                            self.publish(0, False, False, True)
                    except VimeError:
                        pass
            self.check()
            assert any(self.where(n) == "ready" for n in left)
            self.lease(0, len(left), 10.0, False)
            self.commit(len(self.leases) - 1, False)
            self.check()
        self.check(whole=True)
        assert not self.wanted


def roam(world: World, rng: random.Random) -> None:
    """One random thing."""
    r = rng.randrange
    things: list[tuple[float, Callable[[], None]]] = [
        (30, lambda: world.start(r(3), r(1, LARGEST), r(100))),
        (30, lambda: world.put(r(100), r(100))),
        (30, lambda: world.publish(r(100), r(8) == 0, r(8) == 0, r(2) == 0)),
        (4, lambda: world.give_back(r(100))),
        (1.5, lambda: world.owner_dies(r(3), r(2) == 0)),
        (14, lambda: world.lease(r(100), r(1, 5), rng.choice([1.0, 5.0, 50.0]), r(8) == 0)),
        (14, lambda: world.commit(r(100), r(4) == 0)),
        (2, lambda: world.nack(r(100))),
        (5, lambda: world.drop(max(0, world.drawn - 1 - r(20)), rng.choice(["filtered", "stale"]))),
        (2, lambda: world.lose(rng.sample(sorted(world.kept.live), min(2, len(world.kept.live))))),
        (2, lambda: world.reopen(rng.sample(sorted(world.kept.live), min(2, len(world.kept.live))))),
        (10, lambda: world.tick(rng.random())),
        (8, world.free),
        (1.5, world.checkpoint),
        (0.5, lambda: world.crash(rng.choice([0.0, 1.0, rng.random()]), rng.choice([None, 0, 1, 2]), r(3) > 0)),
    ]
    rng.choices(things, [weight for weight, _ in things])[0][1]()
