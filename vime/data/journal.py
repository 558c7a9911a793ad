"""The part of the ledger that outlives a crash: which groups there are, as events in a file of JSON lines after a snapshot.

Settled groups are an interval set: groups are numbered as they are drawn, so that a few numbers in memory, file and checkpoint hold any number
of them. Done and dropped ones share it, since apart they would cut each other to pieces; how many there were of each is counted.
Reservations and leases are no events, for whoever had them dies with the controller.
"""

import os
from bisect import bisect_right
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from vime.data.plane import Ref
from vime.errors import VimeError, said

SYNCED = b'{"e":"done"'  # the line of an event that is synced begins with this


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


class Book:
    """Groups, and the journal that they can be read from again; None: none is kept.
    Raises, as its methods: VimeError for what the file system refuses, and a journal that is damaged; nothing has changed then."""

    def __init__(self, path: Path | None, compact_at: int):
        self.path, self.compact_at = path, compact_at
        self.live: dict[int, Group] = {}
        self.settled: list[int] = []  # edges of intervals
        self.counts: Counter[str] = Counter()
        self.step, self.last = 0, dict[int, str]()  # the newest step that acked, and who did for its groups: that ack may come again
        self.unfreed: dict[str, Ref] = {}  # by key: of no group any more
        self.stored = self.reserved = 0  # bytes
        self._file: FileIO | None = None
        self._size = self._limit = 0

    def read(self) -> bool:
        """Apply the journal's events up to where a crash tore it, if it did. Returns whether there was a whole snapshot."""
        assert self.path
        try:
            lines = self.path.read_bytes().split(b"\n")[:-1]  # what has no newline is torn, whatever it looks like
        except OSError as e:
            raise self._refused("read", e) from e
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
            try:
                if self._file.write(line) < len(line):
                    raise OSError("no space left")
                if line.startswith(SYNCED):
                    os.fsync(self._file.fileno())
            except OSError as e:
                with suppress(OSError):
                    os.ftruncate(self._file.fileno(), self._size)
                raise self._refused("written", e) from e
            self._size += len(line)
        self.apply(event)

    def compact(self) -> None:
        """Begin the journal anew with a snapshot; the old one is there until that is safe."""
        if not self.path:
            return
        live = [(n, g.ref, g.whole, g.version, g.gone) for n, g in self.live.items()]
        line = encode({"e": "snapshot", "g": [], "live": live, "unfreed": list(self.unfreed.values())} | self.state())
        tmp = self.path.with_name(self.path.name + ".tmp")
        try:
            tmp.write_bytes(line)
            file = open(tmp, "ab", buffering=0)  # noqa: SIM115 (closed by the next)
            os.fsync(file.fileno())
            os.replace(tmp, self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            os.fsync(folder)
            os.close(folder)
        except OSError as e:
            raise self._refused("written", e) from e
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

    def _refused(self, what: str, e: OSError) -> VimeError:
        return VimeError(f"{self.path} cannot be {what}: {said(e)}", "is the disk full? checkpoints are intact: go on with --resume")


def as_ref(ref: Ref | dict[str, Any]) -> Ref:
    return ref if isinstance(ref, Ref) else Ref(**ref)


def plain(o: object) -> dict[str, Any]:
    if isinstance(o, Ref):
        return vars(o) | {"at": o.at if isinstance(o.at, str | int) else None}  # else a handle of this process, worthless to the next
    raise TypeError


def encode(event: dict[str, Any]) -> bytes:
    return orjson.dumps(event, default=plain, option=orjson.OPT_PASSTHROUGH_DATACLASS) + b"\n"
