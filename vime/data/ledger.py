"""Which group of samples is where: the half of the data plane that the controller owns. Metadata only, one thread, no I/O but its journal.

    reserve -> bytes into the store -> publish -> lease -> optimizer step -> ack -> free
    new ------ open ------------------ ready ---- leased ----------------- settled: done     (or dropped, unless it is leased)

A group is trained once relative to the weights that survive: a step's ack settles its groups, and a checkpoint keeps in `state` what its
weights have settled. A run that goes on from there takes that, whatever was acked later.
journal.py is what outlives a crash, here is what groups go through; leases and reservations end with the controller.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from vime.data.journal import Book, Group, inside
from vime.data.plane import Ref
from vime.errors import VimeError


class Ledger(Book):
    """`budget`: bytes that may be stored and reserved at once. `cursor`: `state` of the checkpoint that the run goes on from; without one
    the journal's acks stand. `clock`: seconds, as deadlines. Raises, as its methods: VimeError of the journal; nothing has changed then."""

    def __init__(self, budget: int, journal: Path | None = None, cursor: dict[str, Any] | None = None,
                 clock: Callable[[], float] = time.monotonic, compact_at: int = 1 << 20):  # fmt: skip
        super().__init__(journal, compact_at)
        self.budget, self.clock, self.handed = budget, clock, 0  # handed: the first of `unfreed` have been given to who frees them
        if journal and journal.exists() and not self.read() and cursor is None:
            raise VimeError(f"{journal} holds no snapshot: what was trained is unknown", "go on from a checkpoint, or begin a new run")
        self.restore(cursor)

    def reserve(self, group: int, owner: str, nbytes: int) -> bool:
        """Room for what `owner` is to generate, in place of what was reserved for the group before. False: none now. Raises: VimeError
        where there never will be, or the group is there."""
        g = self.live.get(group) or Group()
        if g.whole or inside(self.settled, group):
            raise VimeError(f"group {group} is {self.where(group)}: it is not to be generated again")
        others = self.reserved - g.reserved
        if self.stored + others + nbytes > self.budget:
            if nbytes > self.budget or not (others or len(self.unfreed) > self.handed or any(o.whole for o in self.live.values())):
                what = f"group {group} may take {nbytes:,} bytes beside {self.stored:,} of unfinished groups: over the budget of {self.budget:,}"
                raise VimeError(what, "raise data_plane.budget_bytes, or make groups smaller")
            self.counts["over_budget"] += 1
            return False
        self.live[group], self.reserved = g, others + nbytes
        g.producer, g.reserved = owner, nbytes
        return True

    def publish(self, group: int, ref: Ref, version: int, whole: bool = True, by: str | None = None) -> bool:
        """The group's bytes are stored, or without `whole` the part that it goes on from. `version`: step of the newest weights that sampled any.
        False: not taken, only to be freed, since the group is not reserved, or not `by` them; of a key that is known nothing changes."""
        g = self.live.get(group) or Group()
        if ref.key in self.unfreed or ref.key in g.gone or (g.ref and g.ref.key == ref.key):
            self.counts["publish_again"] += 1
            return False
        taken = g.producer is not None and by in (None, g.producer)
        self.do({"e": "published" if taken else "late", "g": [group], "ref": ref, "version": version, "whole": whole})
        return taken

    def reopen(self, groups: Iterable[int]) -> None:
        """Ready groups aren't whole after all: a next producer goes on from their bytes."""
        self.do({"e": "reopened", "g": [n for n in dict.fromkeys(groups) if n in self.live and self.live[n].whole]})

    def lost(self, groups: Iterable[int]) -> list[int]:
        """Their bytes can't be read. Returns those to generate again. Who has leased one may have read it before: its ack stands until another
        lease takes the group."""
        found = [n for n in dict.fromkeys(groups) if n in self.live and self.live[n].ref]
        self.do({"e": "lost", "g": found})
        for n in found:
            self.live[n].deadline = self.clock()
            self.unreserve(self.live[n])
        return found

    def owner_died(self, owner: str) -> list[int]:
        """What it stored and reserved is gone. Returns the groups to generate again, but none that another producer goes on with: if that has
        not read its part yet, it says `lost`."""
        gone = [n for n, g in self.live.items() if g.ref and g.ref.owner == owner != ""]
        self.do({"e": "lost", "g": gone})
        again = [n for n in gone if self.live[n].producer is None]
        for n in gone:
            self.live[n].deadline = self.clock()
        for n, g in self.live.items():
            if g.producer == owner:
                self.unreserve(g)
                again.append(n)
        return sorted(again)

    def lease(self, groups: Iterable[int], who: str, deadline: float) -> list[Ref]:
        """Ready groups for `who`, a name for one attempt at one step, until `clock` says `deadline`: all of them, or none where one isn't ready."""
        groups, now = list(groups), self.clock()
        found = [g for n in dict.fromkeys(groups) if (g := self.live.get(n)) and g.whole and (g.holder in (None, who) or g.deadline <= now)]
        if len(found) < len(groups):
            self.counts["lease_refused"] += 1
            return []
        for g in found:
            self.counts["lease_expired"] += g.holder not in (None, who)
            g.holder, g.deadline = who, deadline
        return [g.ref for g in found if g.ref]

    def ack(self, groups: Iterable[int], step: int, who: str) -> list[int]:
        """The step that `who` leased these groups for is committed. Returns those refused: leased by another since, settled, or not leased;
        but the newest step's ack may come again."""
        holders = {n: self.live[n].holder if n in self.live else None for n in groups}
        mine = [n for n, holder in holders.items() if holder == who]
        refused = [n for n, holder in holders.items() if holder != who != self.last.get(n)]
        for n in refused:
            self.counts["ack_of_another" if holders[n] else "ack_settled" if inside(self.settled, n) else "ack_not_leased"] += 1
        self.do({"e": "done", "g": mine, "step": step, "who": who})
        return refused

    def nack(self, groups: Iterable[int], who: str) -> None:
        """`who` gives back its leases of these groups, as a producer its reservations."""
        for g in (self.live[n] for n in groups if n in self.live):
            g.holder = None if g.holder == who else g.holder
            if g.producer == who:
                self.unreserve(g)

    def drop(self, groups: Iterable[int], reason: str) -> list[int]:
        """They are not to be trained. Returns those refused: leased, or settled."""
        at = {n: self.where(n) for n in groups}
        self.do({"e": "dropped", "g": [n for n in at if at[n] not in ("leased", "settled")], "why": f"_{reason}"})
        return [n for n in at if at[n] in ("leased", "settled")]

    def free(self) -> list[Ref]:
        """What the store is to free now; until here it counts for the budget. Each once, but after a restart those of the last call again."""
        if self.handed:
            self.do({"e": "freed", "g": list(self.unfreed)[: self.handed]})
        self.handed, out = len(self.unfreed), list(self.unfreed.values())
        self.stored -= sum(r.nbytes for r in out)
        return out

    def where(self, group: int) -> str:
        """new, open, ready, leased or settled."""
        if (g := self.live.get(group)) is None:
            return "settled" if inside(self.settled, group) else "new"
        return "open" if not g.whole else "leased" if g.holder is not None and g.deadline > self.clock() else "ready"

    def stats(self) -> dict[str, int]:
        held = {"stored_bytes": self.stored, "reserved_bytes": self.reserved, "to_free": len(self.unfreed) - self.handed}
        return {"open": 0, "ready": 0, "leased": 0} | Counter(map(self.where, self.live)) | held | self.counts

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on from weights that have settled what `state` says. What else was settled is to be generated again, and what weights that are
        gone sampled; other groups that the journal has are ready still. Nobody has reserved or leased one."""
        if state is not None:
            self.settled, self.step, self.counts = list(state["settled"]), state["step"], Counter(state["counts"])
        for n, g in list(self.live.items()):
            if not (g.ref or g.gone) or (state is not None and (inside(self.settled, n) or g.version > self.step)):
                self.forget(n)
        for g in self.live.values():
            g.holder, g.producer, g.reserved = None, None, 0
        self.last, self.reserved, self.handed = {}, 0, 0
        self.stored = sum(r.nbytes for r in [*self.unfreed.values(), *(g.ref for g in self.live.values() if g.ref)])
        self.compact()
