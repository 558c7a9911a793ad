"""Which group of samples is where: the half of the data plane that the controller owns. Metadata only, one thread, no I/O but its journal.

    reserve -> bytes into the store -> publish -> lease -> optimizer step -> ack -> free
    new ------ open ------------------ ready ---- leased ----------------- settled: done     (or dropped, unless it is leased)

A group is trained once relative to the weights that survive: a step's ack settles its groups, and a checkpoint keeps in `state` what its
weights have settled. A run that goes on from there takes that, whatever was acked later.

What outlives a crash are events in a file of JSON lines after a snapshot, the journal; reservations and leases are none, for whoever had them
dies with the controller. Settled groups are an interval set: groups are numbered as they are drawn, so that a few numbers in memory, file and
checkpoint hold any number of them. Done and dropped ones share it, since apart they would cut each other to pieces; how many there were of
each is counted.
"""

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
from vime.errors import VimeError, blamed, said

SYNCED = b'{"e":"done"'  # the line of an event that is synced begins with this
INTACT = "is the disk full? checkpoints are intact: go on with --resume"


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
    """Groups, and the journal that they can be read from again; without its path none is kept. `budget`: bytes that may be stored and reserved
    at once. `cursor`: `state` of the checkpoint that the run goes on from; without one the journal's acks stand. `clock`: seconds, as deadlines.
    Raises, as its methods: VimeError for what the file system refuses, and a journal that is damaged; nothing has changed then."""

    def __init__(self, budget: int, journal: Path | None = None, cursor: dict[str, Any] | None = None,
                 clock: Callable[[], float] = time.monotonic, compact_at: int = 1 << 20):  # fmt: skip
        self.path, self.compact_at, self.budget, self.clock = journal, compact_at, budget, clock
        self.live: dict[int, Group] = {}
        self.settled: list[int] = []  # edges of intervals
        self.counts: Counter[str] = Counter()
        self.step, self.last = 0, dict[int, str]()  # the newest step that acked, and who did for its groups: that ack may come again
        self.unfreed: dict[str, Ref] = {}  # by key: of no group any more
        self.handed = 0  # the first of `unfreed` have been given to who frees them
        self.stored = self.reserved = 0  # bytes
        self._file: FileIO | None = None
        self._size = self._limit = 0
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
            self.unreserve(self.live[n])
        return found

    def owner_died(self, owner: str) -> list[int]:
        """What it stored and reserved is gone. Returns the groups to generate again, but none that another producer goes on with: if that has
        not read its part yet, it says `lost`."""
        gone = [n for n, g in self.live.items() if g.ref and g.ref.owner == owner != ""]
        self.do({"e": "lost", "g": gone})
        again = [n for n in gone if self.live[n].producer is None]
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

    # ---------------------------------------------------------------- the journal

    def read(self) -> bool:
        """Apply the journal's events up to where a crash tore it, if it did. Returns whether there was a whole snapshot."""
        assert self.path
        with blamed(f"{self.path} cannot be read", OSError, fix=INTACT):
            lines = self.path.read_bytes().split(b"\n")[:-1]  # what has no newline is torn, whatever it looks like
        for i, line in enumerate(lines):
            try:
                self.apply(orjson.loads(line))
            except (ValueError, TypeError, KeyError) as e:
                if not isinstance(e, orjson.JSONDecodeError) or any(later.startswith(SYNCED) for later in lines[i + 1 :]):  # no crash did this
                    raise VimeError(f"{self.path}:{i + 1} is damaged: {said(e)}", "remove it: what waits to be trained is generated again") from e
                return i > 0
        return bool(lines)

    def do(self, event: dict[str, Any]) -> None:
        """Write an event down, then apply it. An ack is on the disk before it counts."""
        if self._file:
            if self._size > self._limit:
                self.compact()
            line = encode(event)
            with blamed(f"{self.path} cannot be written", OSError, fix=INTACT):
                try:
                    if self._file.write(line) < len(line):
                        raise OSError("no space left")
                    if line.startswith(SYNCED):
                        os.fsync(self._file.fileno())
                except OSError:
                    with suppress(OSError):
                        os.ftruncate(self._file.fileno(), self._size)
                    raise
            self._size += len(line)
        self.apply(event)

    def compact(self) -> None:
        """Begin the journal anew with a snapshot; the old one is there until that is safe."""
        if not self.path:
            return
        live = [(n, g.ref, g.whole, g.version, g.gone) for n, g in self.live.items()]
        line = encode({"e": "snapshot", "g": [], "live": live, "unfreed": list(self.unfreed.values())} | self.state())
        tmp = self.path.with_name(self.path.name + ".tmp")
        with blamed(f"{self.path} cannot be written", OSError, fix=INTACT):
            tmp.write_bytes(line)
            file = open(tmp, "ab", buffering=0)  # noqa: SIM115 (closed by the next)
            os.fsync(file.fileno())
            os.replace(tmp, self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        if self._file:
            self._file.close()
        self._file, self._size, self._limit = file, len(line), max(self.compact_at, 4 * len(line))

    def state(self) -> dict[str, Any]:
        """JSON-able, for a checkpoint: what its weights have settled. Its step's ack comes first."""
        return {"step": self.step, "settled": list(self.settled), "counts": dict(self.counts)}

    def apply(self, event: dict[str, Any]) -> None:
        """What an event does, when it happens and when the journal is read."""
        match event:
            case {"e": "published", "g": [n], "ref": ref, "version": version, "whole": whole}:
                g = self.live.setdefault(n, Group())
                self.let_go(g)
                self.unreserve(g)
                g.ref, g.version, g.whole = as_ref(ref), version, whole
                self.stored += g.ref.nbytes
            case {"e": "late", "ref": ref}:
                ref = as_ref(ref)
                self.unfreed[ref.key] = ref
                self.stored += ref.nbytes
            case {"e": "lost", "g": groups}:
                for n in groups:
                    self.let_go(self.live[n])
                    self.live[n].deadline = self.clock()
            case {"e": "reopened", "g": groups}:
                for n in groups:
                    self.live[n].whole = False
            case {"e": "freed", "g": keys}:
                for key in keys:
                    del self.unfreed[key]
            case {"e": "done", "g": groups, "step": step, "who": who}:
                self.settle(groups)
                if step > self.step:
                    self.step, self.last = step, {}
                if step == self.step:
                    self.last |= dict.fromkeys(groups, who)
            case {"e": "dropped", "g": groups}:
                self.settle(groups)
            case {"e": "snapshot", "live": live, "unfreed": unfreed, "settled": settled, "step": step, "counts": counts}:
                self.settled, self.step, self.counts = settled, step, Counter(counts)
                self.unfreed = {r["key"]: Ref(**r) for r in unfreed}
                self.live = {n: Group(ref and Ref(**ref), *rest) for n, ref, *rest in live}
            case _:
                raise ValueError(f"no event of a ledger: {event}")
        self.counts[event["e"] + event.get("why", "")] += len(event["g"])

    def settle(self, groups: list[int]) -> None:
        for n in groups:
            self.forget(n)
            insert(self.settled, n)

    def forget(self, n: int) -> None:
        if g := self.live.pop(n, None):
            self.let_go(g)
            self.unreserve(g)

    def let_go(self, g: Group) -> None:
        """Of its bytes; they are to be freed."""
        if g.ref:
            self.unfreed[g.ref.key] = g.ref
            g.gone.append(g.ref.key)
        g.ref, g.whole = None, False

    def unreserve(self, g: Group) -> None:
        self.reserved -= g.reserved
        g.producer, g.reserved = None, 0


def as_ref(ref: Ref | dict[str, Any]) -> Ref:
    return ref if isinstance(ref, Ref) else Ref(**ref)


def plain(o: object) -> dict[str, Any]:
    if isinstance(o, Ref):
        return vars(o) | {"at": o.at if isinstance(o.at, str | int) else None}  # else a handle of this process, worthless to the next
    raise TypeError


def encode(event: dict[str, Any]) -> bytes:
    return orjson.dumps(event, default=plain, option=orjson.OPT_PASSTHROUGH_DATACLASS) + b"\n"
