"""The data plane's byte half: groups of samples from the workers that made them to the ranks that train them, past the controller.

One group is one object in the safetensors layout (8 bytes of length, a JSON header, raw arrays), so that a field or some rows of it are one
range of bytes, the same in memory, on a wire and in a file. Whoever orders, leases and frees groups only handles their Refs.
"""

from __future__ import annotations

import json
import mmap
import os
import threading
import weakref
import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import quote

import numpy as np

from vime.errors import VimeError, said
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


@dataclass(frozen=True)
class Ref:
    """What the controller sees of a group's bytes; of constant size."""

    key: str  # unique per attempt: <run>/g<group>/a<attempt>
    nbytes: int
    crc: int  # zlib.crc32 of the whole object
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


class Store(Protocol):
    """Safe to call from several threads. `counts` says how often something was done again or in a lesser way."""

    counts: Counter[str]

    def put(self, items: Mapping[str, Fields]) -> list[Ref]:
        """Store groups, all or none. Raises: StoreFull, DuplicateKey; VimeError where the store cannot be reached."""

    def get(self, refs: Sequence[Ref], fields: Collection[str] | None = None, ranges: Ranges | None = None) -> list[Fields]:
        """The groups' arrays, read-only. `fields`: only these; `ranges`: of these only some rows. Whole groups are checked by crc.
        Raises: Lost; VimeError for a field or rows that a group has not."""

    def free(self, refs: Iterable[Ref | str]) -> None:
        """Drop groups, by key where there is no Ref; what is not there is no error. ray: bytes live as long as a Ref somewhere does."""

    def close(self) -> None: ...


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
        source, target = fields[name], out[begin:end].view(dtype).reshape(shape)
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
        out = np.frombuffer(memoryview(arena)[:nbytes], np.uint8)  # not a view: numpy's views would refer to the arena itself
        weakref.finalize(out, self.idle.__setitem__, arena.ctypes.data, arena).atexit = False
        return out

    def new(self, nbytes: int) -> np.ndarray:
        return np.empty(nbytes, np.uint8)

    def drop(self, arena: np.ndarray) -> None: ...


# ---------------------------------------------------------------- backends


@dataclass(frozen=True)
class Spec:
    """What a process needs to open a run's store: made by the controller (vime/data/services.py), sent to all."""

    settings: DataPlaneConfig
    run: str  # unlike that of any other run on these hosts
    budget: int  # bytes that may lie in the store
    master: str = ""  # mooncake: host:port


class Base:
    """put and get over two methods that move whole objects: `write` and `read`."""

    def __init__(self, spec: Spec, owner: str):
        self.spec, self.owner = spec, owner
        self.timeout = spec.settings.timeout
        self.arenas, self.lock = Arenas(), threading.Lock()
        self.counts: Counter[str] = Counter()

    def write(self, keys: list[str], objects: list[np.ndarray]) -> list[Any]:
        """Store objects, all or none; returns Ref.at of each. Raises: see Store.put."""
        raise NotImplementedError

    def read(self, refs: Sequence[Ref], whole: bool) -> list[np.ndarray | str]:
        """Each object, or what was found in its place."""
        raise NotImplementedError

    def owner_of(self, at: Any) -> str:
        return ""

    def put(self, items: Mapping[str, Fields]) -> list[Ref]:
        heads = [layout(fields) for fields in items.values()]
        with self.lock:
            arena, objects, at = self.arenas.take(sum(aligned(n) for _, n in heads)), [], 0
            for (head, n), fields in zip(heads, items.values()):
                objects.append(arena[at : at + n])
                pack(head, fields, objects[-1])
                at += aligned(n)
            crcs = [zlib.crc32(o) for o in objects]
            places = self.write([*items], objects) if items else []
        return [
            Ref(key, n, crc, self.owner_of(place), len(head), place)
            for key, (head, n), crc, place in zip(items, heads, crcs, places, strict=True)
        ]  # fmt: skip

    def get(self, refs: Sequence[Ref], fields: Collection[str] | None = None, ranges: Ranges | None = None) -> list[Fields]:
        whole = fields is None and not ranges
        with self.lock:
            objects = self.read(refs, whole)
        out, why = [], {}
        for ref, found in zip(refs, objects, strict=True):
            try:
                if isinstance(found, str):
                    why[ref.key] = found
                elif len(found) != ref.nbytes:
                    why[ref.key] = f"{len(found)} bytes were found, {ref.nbytes} were stored"
                elif whole and (crc := zlib.crc32(found)) != ref.crc:
                    why[ref.key] = f"corrupt: the checksum is {crc:08x}, stored was {ref.crc:08x}"
                else:
                    out.append(unpack(ref.key, found, fields, ranges))
            except ValueError as e:
                why[ref.key] = f"corrupt: {e}"
        if why:
            raise lost(why)
        return out

    def free(self, refs: Iterable[Ref | str]) -> None:
        raise NotImplementedError

    def close(self) -> None: ...


class Shm(Base):
    """Files in /dev/shm/<run>, on one host. A file is written under no name and then given one: what exists is whole."""

    def __init__(self, spec: Spec, owner: str):
        super().__init__(spec, owner)
        self.root = shm_folder(spec.run)
        self.root.mkdir(exist_ok=True)

    def path(self, key: str) -> Path:
        return self.root / quote(key, safe="")

    def write(self, keys: list[str], objects: list[np.ndarray]) -> list[Any]:
        need, used = sum(map(len, objects)), 0
        for entry in os.scandir(self.root):
            with suppress(FileNotFoundError):  # freed meanwhile
                used += entry.stat().st_size
        if used + need > self.spec.budget:
            raise StoreFull(f"{self.root}: {need} bytes do not fit: {used} of {self.spec.budget} are taken", "raise data_plane.budget_bytes")
        done: list[str] = []
        try:
            for key, o in zip(keys, objects):
                fd = os.open(self.root, os.O_TMPFILE | os.O_RDWR, 0o600)
                try:
                    rest = memoryview(o)
                    while rest:
                        rest = rest[os.write(fd, rest) :]
                    os.link(f"/proc/self/fd/{fd}", self.path(key), src_dir_fd=fd)
                finally:
                    os.close(fd)
                done.append(key)
        except OSError as e:
            self.free(done)
            if isinstance(e, FileExistsError):
                raise DuplicateKey(f"group {key} is stored already in {self.root}") from None
            raise StoreFull(f"{self.root}: {e.strerror}", f"{SHM} holds what waits to be trained; see df {SHM}") from e
        return [None] * len(keys)

    def read(self, refs: Sequence[Ref], whole: bool) -> list[np.ndarray | str]:
        flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if whole else 0)
        out: list[np.ndarray | str] = []
        for ref in refs:
            try:
                with self.path(ref.key).open("rb") as f:
                    size = os.fstat(f.fileno()).st_size
                    out.append(np.frombuffer(mmap.mmap(f.fileno(), size, flags, mmap.PROT_READ), np.uint8) if size else "an empty file")
            except OSError as e:
                out.append(f"{self.path(ref.key)}: {e.strerror}")
        return out

    def free(self, refs: Iterable[Ref | str]) -> None:
        for r in refs:
            self.path(r if isinstance(r, str) else r.key).unlink(missing_ok=True)


def shm_folder(run: str) -> Path:
    return Path(SHM) / f"vime-plane-{quote(run, safe='')}"


def open_store(spec: Spec, owner: str = "") -> Store:
    """The run's store in this process. `owner`: the name of a worker, which puts; "": a process that only reads and frees.

    Raises: VimeError where the store cannot be reached.
    """
    return Shm(spec, owner)
