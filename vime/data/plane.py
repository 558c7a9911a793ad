"""The data plane's byte half: groups of samples from the workers that made them to the ranks that train them, past the controller.

One group is one object in the safetensors layout (8 bytes of length, a JSON header, raw arrays), so that a field or some rows of it are one
range of bytes, the same in memory, on a wire and in a file. Whoever orders, leases and frees groups only handles their Refs.
"""

import json
import mmap
import os
import shutil
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
from xxhash import xxh3_64, xxh3_64_intdigest

from vime.errors import VimeError, blamed, said
from vime.procs import Child, free_port, spawn
from vime.sections import DataPlaneConfig

Fields = dict[str, np.ndarray]
Ranges = Mapping[str, tuple[int, int]]  # field -> (first row, end row) along axis 0

NAMES = {
    **{"|b1": "BOOL", "|u1": "U8", "|i1": "I8", "<u2": "U16", "<i2": "I16", "<u4": "U32", "<i4": "I32", "<u8": "U64", "<i8": "I64"},
    **{"<f2": "F16", "<f4": "F32", "<f8": "F64"},
}
DTYPES = {name: np.dtype(code) for code, name in NAMES.items()}
ALIGN = 64  # of headers, and of objects in an arena
SHM = "/dev/shm"
START = 30.0  # seconds in which a process must serve


@dataclass(frozen=True)
class Ref:
    """What the controller sees of a group's bytes; of constant size."""

    key: str  # unique per attempt: <run>/g<group>/a<attempt>
    nbytes: int
    digest: int  # XXH3 (64 bits) of the whole object
    owner: str = ""  # the worker whose death loses the bytes; "": none
    head: int = 0  # bytes before the first array
    at: Any = field(default=None, compare=False, repr=False)  # ray: the reference that keeps the bytes alive


class StoreFull(VimeError):
    """There is no room; nothing of the call's groups stays behind."""


class DuplicateKey(VimeError):
    """A key is taken; its bytes are as they were."""


class Lost(VimeError):
    """Bytes that cannot be read any more, or are others than those that were put. `keys` names them all."""

    keys: tuple[str, ...] = ()


def lost(why: Mapping[str, str]) -> Lost:
    """`why`: key -> what was found."""
    key, found = next(iter(why.items()))
    more = f", and {len(why) - 1} more" if len(why) > 1 else ""
    error = Lost(f"group {key}: {found}{more}")
    error.keys = tuple(why)
    return error


# ---------------------------------------------------------------- layout


def layout(fields: Fields) -> tuple[bytes, int]:
    """(header with its length, bytes of the whole object). Wide types come first, so that every array is aligned. Raises: VimeError."""
    table, end = {}, 0
    for name, a in sorted(fields.items(), key=lambda kv: -kv[1].itemsize):
        if a.dtype.str not in NAMES:
            raise VimeError(f"field {name!r} has the type {a.dtype}", f"storable are {', '.join(NAMES.values())}")
        table[name] = {"dtype": NAMES[a.dtype.str], "shape": a.shape, "data_offsets": (end, end := end + a.nbytes)}
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    return len(text).to_bytes(8, "little") + text, 8 + len(text) + end


def pack(head: bytes, fields: Fields, out: np.ndarray) -> None:
    """Write an object into `out`, uint8 of its length; arrays may be strided, each is copied once."""
    out[: len(head)] = np.frombuffer(head, np.uint8)
    for name, (dtype, shape, begin, end) in table_of(out[: len(head)]).items():
        copy(fields[name], out[begin:end].view(dtype).reshape(shape))


def copy(source: np.ndarray, target: np.ndarray) -> None:
    width = source.itemsize * source.shape[-1] if source.ndim > 1 and source.strides[-1] == source.itemsize else 0
    if not source.flags.c_contiguous and width in (2, 4, 8, 16):  # short rows in another order: copy each as one number
        source, target = (a.view(f"u{width}" if width < 16 else "c16") for a in (source, target))
    np.copyto(target, source)


def table_of(head: np.ndarray) -> dict[str, tuple[np.dtype, tuple[int, ...], int, int]]:
    """field -> (type, shape, first byte, end) of an object that begins with `head`. Raises: ValueError where that is no header."""
    n = int.from_bytes(head[:8].tobytes(), "little")
    if n > len(head) - 8:
        raise ValueError(f"a header of {n} bytes in {len(head)}")
    try:
        table = json.loads(head[8 : 8 + n].tobytes())
        return {k: (DTYPES[v["dtype"]], tuple(v["shape"]), *(8 + n + at for at in v["data_offsets"])) for k, v in table.items()}
    except (KeyError, TypeError, AttributeError) as e:
        raise ValueError(f"no header: {said(e)}") from e


def windows(key: str, head: np.ndarray, fields: Collection[str] | None, ranges: Ranges | None) -> dict[str, tuple[np.dtype, tuple[int, ...], int, int]]:
    """As table_of, of the fields and rows that are wanted. Raises: VimeError where the object has not all of them, ValueError."""
    table = table_of(head)
    out = {}
    for name in [*table] if fields is None else fields:
        if name not in table:
            raise VimeError(f"group {key} has no field {name!r}", f"it has {', '.join(table)}")
        out[name] = table[name]
    for name, (first, end) in (ranges or {}).items():
        if name not in out:
            raise VimeError(f"group {key}: rows of {name!r} are wanted, which is not read", f"it has {', '.join(table)}")
        dtype, shape, begin, _ = out[name]
        if not shape or not 0 <= first <= end <= shape[0]:
            raise VimeError(f"group {key}: rows {first} to {end} of {name!r}, which is of shape {list(shape)}")
        row = dtype.itemsize * int(np.prod(shape[1:]))
        out[name] = dtype, (end - first, *shape[1:]), begin + first * row, begin + end * row
    return out


def unpack(key: str, whole: np.ndarray, fields: Collection[str] | None = None, ranges: Ranges | None = None) -> Fields:
    """Views of an object's arrays; no copy."""
    return {k: whole[a:b].view(dtype).reshape(shape) for k, (dtype, shape, a, b) in windows(key, whole, fields, ranges).items()}


def digest_of(pieces: Sequence[np.ndarray]) -> int:
    made = xxh3_64()
    for piece in pieces:
        made.update(piece.data)
    return int(made.intdigest())


def aligned(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


class Arenas:
    """Memory that is used again: first touch of fresh pages costs four times the copy. An arena comes back by itself once no array
    refers to it any more."""

    def __init__(self) -> None:
        self.idle: dict[int, np.ndarray] = {}  # by address; a dict, because arenas come back in any thread

    def take(self, nbytes: int) -> np.ndarray:
        """uint8 of `nbytes`: the start of an idle arena that is large enough, or of a new one in place of all that are too small."""
        fits = [(a.nbytes, at) for at, a in self.idle.copy().items() if a.nbytes >= nbytes]
        if fits:
            arena = self.idle.pop(min(fits)[1])
        else:
            for at in [*self.idle]:
                self.drop(self.idle.pop(at))
            arena = self.new(1 << max(20, (nbytes - 1).bit_length()))
        out = np.frombuffer(arena.data[:nbytes], np.uint8)  # not a view: numpy's views would refer to the arena itself
        weakref.finalize(out, self.idle.__setitem__, arena.ctypes.data, arena).atexit = False
        return out

    def new(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def drop(self, arena: np.ndarray) -> None: ...


# ---------------------------------------------------------------- stores


@dataclass(frozen=True)
class Spec:
    """What a process needs to open a run's store: Plane.spec, sent to all."""

    settings: DataPlaneConfig
    run: str  # unlike that of any other run on these hosts
    budget: int  # bytes that may lie in the store
    master: str = ""  # mooncake: host:port


class Store:
    """Groups' bytes in one place or another; safe to call from several threads. `counts`: what was done again, or in a lesser way."""

    scattered = False  # `write` takes an object's pieces as they lie in memory, without a copy in between

    def __init__(self, spec: Spec, owner: str):
        self.spec, self.owner, self.timeout = spec, owner, spec.settings.timeout
        self.arenas, self.lock = Arenas(), threading.Lock()
        self.counts: Counter[str] = Counter()

    def put(self, items: Mapping[str, Fields]) -> list[Ref]:
        """Store groups, all or none. Raises: StoreFull, DuplicateKey; VimeError where the store does not answer."""
        heads = [layout(fields) for fields in items.values()]
        with self.lock:
            objects: list[Any] = []
            if self.scattered:
                objects = [self.pieces(head, fields) for (head, _), fields in zip(heads, items.values())]
            else:
                arena, at = self.arenas.take(sum(aligned(n) for _, n in heads)), 0
                for (head, n), fields in zip(heads, items.values()):
                    objects.append(arena[at : at + n])
                    pack(head, fields, objects[-1])
                    at += aligned(n)
            digests = [digest_of(o if self.scattered else [o]) for o in objects]
            places = self.write([*items], objects) if items else []
        rows = zip(items, heads, digests, places, strict=True)
        return [Ref(key, n, digest, owner, len(head), place) for key, (head, n), digest, (owner, place) in rows]

    def get(self, refs: Sequence[Ref], fields: Collection[str] | None = None, ranges: Ranges | None = None) -> list[Fields]:
        """The groups' arrays, not to be written to. `fields`: only these; `ranges`: of these only some rows. Whole groups are checked by their digest.
        Raises: Lost; VimeError for a field or rows that a group has not."""
        whole = fields is None and not ranges
        with self.lock:
            found = self.read(refs, True) if whole else self.parts(refs, fields, ranges)
        why = {}
        for ref, one in zip(refs, found, strict=True):
            if isinstance(one, str):
                why[ref.key] = one
            elif whole and (digest := xxh3_64_intdigest(one.data)) != ref.digest:
                why[ref.key] = f"corrupt: the checksum is {digest:016x}, and was {ref.digest:016x} when it was stored"
        if why:
            raise lost(why)
        return [unpack(ref.key, one) if whole else one for ref, one in zip(refs, found)]

    def pieces(self, head: bytes, fields: Fields) -> list[np.ndarray]:
        """An object's bytes in order, as uint8 arrays; those of `fields` that are not strided are there without a copy."""
        out = [np.frombuffer(head, np.uint8)]
        for a in (fields[name] for name in table_of(out[0])):
            if not a.flags.c_contiguous:
                copy(a, ordered := self.arenas.take(a.nbytes).view(a.dtype).reshape(a.shape))
                a = ordered
            out.append(a.reshape(-1).view(np.uint8))
        return out

    def free(self, refs: Iterable[Ref | str]) -> None:
        """Drop groups, by key where there is no Ref; what is not there is no error."""
        raise NotImplementedError

    def close(self) -> None: ...

    def write(self, keys: list[str], objects: list[Any]) -> list[tuple[str, Any]]:
        """Of a backend: store objects (uint8 arrays, or lists of `pieces`), all or none; returns each one's Ref.owner and Ref.at. Raises: see put."""
        raise NotImplementedError

    def read(self, refs: Sequence[Ref], whole: bool) -> list[Any]:
        """Of a backend: each object, uint8 of its length, or what was found in its place. Not `whole`: little of it will be looked at."""
        raise NotImplementedError

    def parts(self, refs: Sequence[Ref], fields: Collection[str] | None, ranges: Ranges | None) -> list[Any]:
        """Of each object what is wanted, or what was found in its place."""
        found = self.read(refs, False)
        return [one if isinstance(one, str) else attempt(unpack, ref.key, one, fields, ranges) for ref, one in zip(refs, found)]


def attempt(call: Callable[..., Any], *args: Any) -> Any:
    """What it returns, or what is wrong with the header that it reads."""
    try:
        return call(*args)
    except ValueError as e:
        return f"corrupt: {e}"


def within(seconds: float, call: Callable[..., Any], *args: Any) -> Any:
    """The call's result, from a thread of its own: a library that does not answer holds only that. Raises: TimeoutError."""
    pool = ThreadPoolExecutor(1)
    try:
        return pool.submit(call, *args).result(seconds)
    except TimeoutError:
        raise TimeoutError(f"no answer within {seconds:g} s (data_plane.timeout)") from None
    finally:
        pool.shutdown(wait=False)


def sized(ref: Ref, found: np.ndarray) -> Any:
    return found if len(found) == ref.nbytes else f"{len(found)} bytes were found, {ref.nbytes} were stored"


def key_of(ref: Ref | str) -> str:
    return ref if isinstance(ref, str) else ref.key


class Shm(Store):
    """Files in /dev/shm, on one host. A file is written under no name and then given one: what exists is whole."""

    scattered = True

    def __init__(self, spec: Spec, owner: str):
        super().__init__(spec, owner)
        self.root = folder_of(spec)
        self.root.mkdir(exist_ok=True)

    def path(self, ref: Ref | str) -> Path:
        return self.root / quote(key_of(ref), safe="")

    def write(self, keys: list[str], objects: list[Any]) -> list[tuple[str, Any]]:
        need, used, done = sum(len(p) for o in objects for p in o), 0, list[str]()
        for entry in os.scandir(self.root):
            with suppress(FileNotFoundError):  # freed meanwhile
                used += entry.stat().st_size
        if used + need > self.spec.budget:
            raise StoreFull(f"{self.root}: {need} bytes do not fit, {used} of {self.spec.budget} are taken", "raise data_plane.budget_bytes")
        try:
            for key, pieces in zip(keys, objects):
                with open(self.root, "wb", opener=lambda folder, _: os.open(folder, os.O_TMPFILE | os.O_WRONLY, 0o600)) as f:
                    for piece in pieces:
                        f.write(piece.data)
                    f.flush()
                    os.link(f"/proc/self/fd/{f.fileno()}", self.path(key), src_dir_fd=f.fileno())
                done.append(key)
        except OSError as e:
            self.free(done)
            if isinstance(e, FileExistsError):
                raise DuplicateKey(f"group {key} is stored already, in {self.root}") from None
            raise StoreFull(f"{self.root}: {e.strerror}", f"samples that wait to be trained lie in {SHM}; see df {SHM}") from e
        return [("", None)] * len(keys)

    def read(self, refs: Sequence[Ref], whole: bool) -> list[Any]:
        out: list[Any] = []
        for ref in refs:
            try:
                with self.path(ref).open("rb") as f:
                    size = os.fstat(f.fileno()).st_size
                    flags = mmap.MAP_SHARED | mmap.MAP_POPULATE * whole
                    out.append(sized(ref, np.frombuffer(mmap.mmap(f.fileno(), size, flags, mmap.PROT_READ) if size else b"", np.uint8)))
            except OSError as e:
                out.append(f"{self.path(ref)}: {e.strerror}")
        return out

    def free(self, refs: Iterable[Ref | str]) -> None:
        for r in refs:
            self.path(r).unlink(missing_ok=True)


def folder_of(spec: Spec) -> Path:
    return Path(SHM) / f"vime-{quote(spec.run, safe='')}"


class RayRefs(Store):
    """Objects in Ray's store, each a uint8 array. They go when the last Ref goes, and with the worker that put them; Ray moves to disk what
    its memory cannot hold. Keys are names only: every put makes another object."""

    def write(self, keys: list[str], objects: list[Any]) -> list[tuple[str, Any]]:
        try:
            return [(self.owner, ray().put(o)) for o in objects]
        except ray().exceptions.RayError as e:
            raise StoreFull(f"Ray's object store: {said(e)}", "it is as large as Ray was told by object_store_memory") from e

    def read(self, refs: Sequence[Ref], whole: bool) -> list[Any]:
        if places := [*{r.at for r in refs if r.at}]:  # all at once, then one by one to see which are lost
            ray().wait(places, num_returns=len(places), timeout=self.timeout)
        return [self.one(r) for r in refs]

    def one(self, ref: Ref) -> Any:
        if ref.at is None:
            return "no process has a reference to it any more"
        try:
            return sized(ref, ray().get(ref.at, timeout=1))
        except ray().exceptions.RayError as e:
            return said(e)

    def free(self, refs: Iterable[Ref | str]) -> None:
        for r in refs:  # Ray frees what no process refers to; readers' references are gone once they have read
            if isinstance(r, Ref):
                object.__setattr__(r, "at", None)


class Hub:
    """One process through which every byte goes, as in frameworks whose controller collects samples and hands them out."""

    def put(self, objects: list[np.ndarray]) -> list[Any]:
        return [ray().put(o.copy()) for o in objects]


class Controller(RayRefs):
    """The naive baseline, to compare with."""

    def write(self, keys: list[str], objects: list[Any]) -> list[tuple[str, Any]]:
        with blamed("the process that all samples go through", ValueError, ray().exceptions.RayError, fix="it is Plane's, and ends with it"):
            hub = ray().get_actor(f"hub-{self.spec.run}")
            return [("", at) for at in ray().get(hub.put.remote(objects), timeout=self.timeout)]


def ray() -> Any:
    """Ray, where a backend needs it: its import takes seconds."""
    import ray

    return ray


def open_store(spec: Spec, owner: str = "") -> Store:
    """The run's store in this process. `owner`: the name of a worker, which puts; "": a process that only reads and frees.

    Raises: VimeError where the store does not answer.
    """
    if spec.settings.backend == "mooncake":
        from vime.data.mooncake import Mooncake

        return Mooncake(spec, owner)
    if spec.settings.backend == "transferqueue":
        from vime.data.transferqueue import Queue

        return Queue(spec, owner)
    return {"shm": Shm, "ray": RayRefs, "controller": Controller}[spec.settings.backend](spec, owner)


class Plane:
    """What stands behind a run's store, held by the controller: `spec` opens it anywhere, `check` starts again what died, `close` ends all.

    `workers`: how many processes open it as owners. `folder`: logs. `host`: an address of this host that all others reach. With the backends
    ray, controller and transferqueue Ray must have been started. Raises: VimeError.
    """

    def __init__(self, settings: DataPlaneConfig, run: str, workers: int, folder: Path, host: str = "127.0.0.1"):
        self.folder, self.running, m = folder, dict[str, tuple[list[str], bytes, Child]](), settings.mooncake
        self.queue: Any = None
        shutil.rmtree(folder_of(Spec(settings, run, 0)), ignore_errors=True)  # left by a run that was killed
        segments = m.processes if m.storage == "processes" else workers
        room = m.segment_bytes * segments // m.replicas if settings.on_mooncake else os.statvfs(SHM).f_bavail * os.statvfs(SHM).f_frsize
        self.spec = Spec(settings, run, settings.budget_bytes or int(0.7 * room), m.master or f"{host}:{free_port()}")
        try:
            if settings.on_mooncake:
                from vime.data import mooncake

                for command in mooncake.commands(self.spec):
                    self.start(*command)
            if settings.backend == "transferqueue":
                from vime.data import transferqueue

                transferqueue.start(self.spec, host)
                self.queue = transferqueue
            if settings.backend == "controller":
                self.hub = ray().remote(Hub).options(name=f"hub-{run}", num_cpus=0).remote()
        except BaseException:
            self.close()
            raise

    def start(self, name: str, cmd: list[str], serving: bytes) -> None:
        """Returns when `serving` is in its log. Raises: VimeError with the log's end."""
        log = self.folder / f"{name}.log"
        begin, deadline = log.stat().st_size if log.exists() else 0, time.monotonic() + START
        child = spawn(cmd, log, {})
        self.running[name] = cmd, serving, child
        while serving not in log.read_bytes()[begin:]:
            if not child.alive() or time.monotonic() > deadline:
                raise VimeError(f"{name} has not started within {START:g} s", f"see {log}", log.read_text(errors="replace")[-2000:])
            time.sleep(0.02)

    def check(self) -> list[str]:
        """Start again what has died, and say what it was. What lay there is lost, which its readers find out."""
        dead = [name for name, (*_, child) in self.running.items() if not child.alive()]
        for name in dead:
            cmd, serving, child = self.running[name]
            child.stop()
            self.start(name, cmd, serving)
        return dead

    def close(self) -> None:
        if self.queue:
            self.queue.stop()
        for *_, child in reversed(self.running.values()):
            child.stop()
        shutil.rmtree(folder_of(self.spec), ignore_errors=True)
