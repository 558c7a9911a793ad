"""Which group of samples is where: the half of the data plane that the controller owns. Metadata only, one thread, no I/O but its journal.

    reserve -> bytes into the store -> publish -> lease -> optimizer step -> ack -> free
    new ------ open ------------------ ready ---- leased ----------------- done     (or dropped, unless it is leased)

A group is trained once relative to the weights that survive: a step's ack settles its groups, and a checkpoint keeps in `state` what its
weights have settled. A run that goes on from there takes that, whatever was acked later.
Settled groups are an interval set: groups are numbered as they are drawn, so that a few numbers in memory, journal and checkpoint hold any
number of them. Done and dropped ones share it, since apart they would cut each other to pieces; how many of each there were is counted.
The journal is a snapshot and then events, as JSON lines. A crash can tear its end, but no ack: those are synced before they count.
Reservations and leases are not in it, for whoever had them dies with the controller.
"""

from __future__ import annotations

import os
import time
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from vime.data.plane import Ref
from vime.errors import VimeError, said


@dataclass(slots=True)
class Group:
    ref: Ref | None = None  # its bytes; until they are `whole`, the part that its next producer goes on from
    whole: bool = False
    version: int = 0
    gone: list[str] = field(default_factory=list)  # keys that it had before
    producer: str | None = None
    reserved: int = 0  # bytes
    holder: str | None = None  # of the newest lease, also past its deadline: its ack stands until another lease takes the group
    deadline: float = 0.0


def inside(edges: list[int], n: int) -> bool:
    """Whether n is in the intervals [edges[0], edges[1]), [edges[2], edges[3]), ..."""
    return bisect_right(edges, n) % 2 == 1


def insert(edges: list[int], n: int) -> None:
    """Add n, which is in none of them."""
    i = bisect_right(edges, n)
    left, right = i > 0 and edges[i - 1] == n, i < len(edges) and edges[i] == n + 1
    edges[i - left : i + right] = [n] * (not left) + [n + 1] * (not right)


class Ledger:
    """`budget`: bytes that may be stored and reserved at once. `cursor`: `state` of the checkpoint that the run goes on from; without one
    the journal's acks stand. `clock`: seconds, as deadlines. Raises, as whatever changes something: VimeError where the journal can't be
    read or written; nothing has changed then."""

    def __init__(self, budget: int, journal: Path | None = None, cursor: dict[str, Any] | None = None,
                 clock: Callable[[], float] = time.monotonic, compact_at: int = 1 << 20):  # fmt: skip
        self.budget, self.journal, self.clock, self.compact_at = budget, journal, clock, compact_at
        self.live: dict[int, Group] = {}
        self.settled: list[int] = []  # edges of intervals
        self.counts: Counter[str] = Counter()
        self.step, self.last = 0, dict[int, str]()  # the newest step that acked, and who did for its groups: that ack may come again
        self.unfreed: dict[str, Ref] = {}  # by key; the first `handed` of them were given to who frees them
        self.stored = self.reserved = self.handed = 0
        self._file: FileIO | None = None
        self._size = 0
        if journal and journal.exists():
            self._replay(journal, cursor)
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
        self._unreserve(g)
        self.live[group], g.producer, g.reserved = g, owner, nbytes
        self.reserved += nbytes
        return True

    def publish(self, group: int, ref: Ref, version: int, whole: bool = True, by: str | None = None) -> bool:
        """The group's bytes are stored, or without `whole` the part that it goes on from. `version`: of the newest weights that sampled any.
        False: not taken, only to be freed, since the group is not reserved, or not `by` them; of a key that is known nothing changes."""
        g = self.live.get(group) or Group()
        if ref.key in self.unfreed or ref.key in g.gone or (g.ref and g.ref.key == ref.key):
            self.counts["publish_again"] += 1
            return False
        taken = g.producer is not None and by in (None, g.producer)
        self._do({"e": "publish" if taken else "late", "g": [group], "ref": ref, "version": version, "whole": whole})
        return taken

    def reopen(self, groups: Iterable[int]) -> None:
        """Ready groups are not whole after all: a next producer goes on from their bytes."""
        self._do({"e": "reopen", "g": [n for n in groups if (g := self.live.get(n)) and g.whole]})

    def lost(self, groups: Iterable[int]) -> list[int]:
        """Their bytes can't be read. Returns those to generate again."""
        found = [n for n in dict.fromkeys(groups) if n in self.live and self.live[n].ref]
        self._do({"e": "lost", "g": found})
        for g in map(self.live.__getitem__, found):
            self._unreserve(g)
            g.holder = None
        return found

    def owner_died(self, owner: str) -> list[int]:
        """What it stored and reserved is gone. Returns the groups to generate again; who has leased one may have read it before, and ack it."""
        mine = [n for n, g in self.live.items() if g.producer == owner]
        gone = [n for n, g in self.live.items() if g.ref and owner and g.ref.owner == owner]
        self._do({"e": "lost", "g": gone})
        for n in mine:
            self._unreserve(self.live[n])
        for n in gone:
            self.live[n].deadline = self.clock()
        return sorted({*mine, *(n for n in gone if self.live[n].producer is None)})  # other producers may have read it; if not they say `lost`

    def lease(self, groups: Iterable[int], who: str, deadline: float) -> list[Ref]:
        """Ready groups for `who`, a name for one attempt at one step, until `clock` says `deadline`: all of them, or none where one is not ready."""
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
        mine, refused = [], []
        for n in dict.fromkeys(groups):
            g = self.live.get(n)
            if g and g.holder == who:
                mine.append(n)
            elif self.last.get(n) != who:
                self.counts["ack_of_another" if g and g.holder else "ack_settled" if inside(self.settled, n) else "ack_not_leased"] += 1
                refused.append(n)
        self._do({"e": "ack", "g": mine, "step": step, "who": who}, sync=True)
        return refused

    def nack(self, groups: Iterable[int], who: str) -> None:
        """`who` gives back its leases of these groups, as a producer its reservations."""
        for g in (self.live[n] for n in groups if n in self.live):
            g.holder = None if g.holder == who else g.holder
            if g.producer == who:
                self._unreserve(g)

    def drop(self, groups: Iterable[int], reason: str) -> list[int]:
        """They are not to be trained. Returns those refused: leased, or settled."""
        states = {n: self.where(n) for n in groups}
        refused = [n for n, state in states.items() if state in ("leased", "settled")]
        self.counts["drop_refused"] += len(refused)
        self._do({"e": "drop", "g": [n for n in states if n not in refused], "why": reason})
        return refused

    def free(self) -> list[Ref]:
        """What the store is to free now; until here it counts for the budget. Each once, but after a restart those of the last call again."""
        if self.handed:
            self._do({"e": "freed", "g": [], "n": self.handed})
        out, self.handed = list(self.unfreed.values()), len(self.unfreed)
        self.stored -= sum(r.nbytes for r in out)
        return out

    def where(self, group: int) -> str:
        """new, open, ready, leased or settled."""
        if (g := self.live.get(group)) is None:
            return "settled" if inside(self.settled, group) else "new"
        return "open" if not g.whole else "leased" if g.holder is not None and g.deadline > self.clock() else "ready"

    def unsettled(self, end: int) -> list[int]:
        """Those of groups 0 ... end - 1 that are neither done nor dropped."""
        gaps = zip([0, *self.settled[1::2]], [*self.settled[::2], end], strict=True)
        return [n for a, b in gaps for n in range(a, min(b, end))]

    def stats(self) -> dict[str, int]:
        held = {"stored_bytes": self.stored, "reserved_bytes": self.reserved, "to_free": len(self.unfreed) - self.handed}
        return {"open": 0, "ready": 0, "leased": 0} | Counter(map(self.where, self.live)) | held | self.counts

    def state(self) -> dict[str, Any]:
        """JSON-able, for a checkpoint: what its weights have settled. Its step's ack comes first."""
        return {"step": self.step, "settled": list(self.settled), "counts": dict(self.counts)}

    def restore(self, state: dict[str, Any] | None) -> None:
        """Go on from weights that have settled what `state` says. What else was settled is to be generated again, and what weights that are
        gone sampled; other groups that the journal has are ready still. Nobody has reserved or leased one."""
        if state is not None:
            self.settled, self.step, self.counts = list(state["settled"]), state["step"], Counter(state["counts"])
            for n in [n for n, g in self.live.items() if inside(self.settled, n) or g.version > self.step]:
                self._remove(n)
        for g in self.live.values():
            g.holder, g.producer, g.reserved = None, None, 0
        self.last, self.reserved, self.handed = {}, 0, 0
        self.stored = sum(r.nbytes for r in [*self.unfreed.values(), *(g.ref for g in self.live.values() if g.ref)])
        self._compact()

    def _unreserve(self, g: Group) -> None:
        self.reserved -= g.reserved
        g.producer, g.reserved = None, 0

    def _let_go(self, g: Group) -> None:
        if g.ref:
            self.unfreed[g.ref.key] = g.ref
            g.gone.append(g.ref.key)
        g.ref, g.whole = None, False

    def _remove(self, n: int) -> None:
        if g := self.live.pop(n, None):
            self._let_go(g)
            self._unreserve(g)

    def _apply(self, e: dict[str, Any]) -> None:
        kind, groups = e["e"], e["g"]
        self.counts[f"dropped_{e['why']}" if kind == "drop" else {"ack": "done"}.get(kind, kind)] += len(groups)
        if kind in ("publish", "late"):
            ref = e["ref"] if isinstance(e["ref"], Ref) else Ref(**e["ref"])
            self.stored += ref.nbytes
            if kind == "late":
                self.unfreed[ref.key] = ref
                return
            g = self.live.setdefault(groups[0], Group())
            self._let_go(g)
            self._unreserve(g)
            g.ref, g.version, g.whole = ref, e["version"], e["whole"]
        elif kind == "lost":
            for n in groups:
                self._let_go(self.live[n])
        elif kind == "reopen":
            for n in groups:
                self.live[n].whole = False
        elif kind == "freed":
            for key in list(self.unfreed)[: e["n"]]:
                del self.unfreed[key]
            self.handed = 0
        elif kind in ("ack", "drop"):
            for n in groups:
                self._remove(n)
                insert(self.settled, n)
            if kind == "ack" and e["step"] > self.step:
                self.step, self.last = e["step"], {}
            if kind == "ack" and e["step"] == self.step:
                self.last |= dict.fromkeys(groups, e["who"])

    def _do(self, e: dict[str, Any], sync: bool = False) -> None:
        """Log an event, then apply it."""
        if self._file:
            if self._size > self._limit:
                self._compact()
            line = orjson.dumps(e, default=lambda _: None) + b"\n"  # a handle of this process is worthless to the next
            try:
                if self._file.write(line) < len(line):
                    raise OSError("no space left")
                if sync:
                    os.fsync(self._file.fileno())
            except OSError as error:
                with suppress(OSError):
                    os.ftruncate(self._file.fileno(), self._size)
                raise self._failed("written", error) from error
            self._size += len(line)
        self._apply(e)

    def _compact(self) -> None:
        """Begin the journal anew with a snapshot."""
