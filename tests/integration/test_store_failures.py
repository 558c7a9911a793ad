"""What becomes of groups when a process dies, a store is full or bytes change: with real processes, and within a deadline."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.store_kit import SEGMENT, Process, eventually, group, mooncake, plane_of, same, settings
from vime.data import mooncake as backend
from vime.data.plane import Lost, Plane, Shm, StoreFull, open_store
from vime.errors import VimeError
from vime.sections import DataPlaneConfig

QUICK = 15.0  # seconds within which what is lost is known to be


@pytest.fixture
def plane(tmp_path: Path) -> Iterator[Callable[[DataPlaneConfig], Plane]]:
    """plane(settings) -> its processes, ended after the test."""
    made: list[Plane] = []

    def make(cfg: DataPlaneConfig) -> Plane:
        made.append(plane_of(cfg, tmp_path))
        return made[-1]

    yield make
    for p in made:
        p.close()


def lost(call: Any, *keys: str) -> str:
    """What a Lost that names `keys` says of the first."""
    begin = time.monotonic()
    with pytest.raises(Lost) as error:
        call()
    assert error.value.keys == keys and time.monotonic() - begin < QUICK
    return str(error.value)


@pytest.mark.parametrize("kind", ["shm", "own", "processes"])
def test_a_producer_is_killed_after_its_put(kind: str, plane: Callable[[DataPlaneConfig], Plane]):
    p = plane(settings("shm") if kind == "shm" else mooncake(storage=kind))
    a, reader = Process(p.spec, "worker-0"), open_store(p.spec)
    refs = [a.put(f"run/g{i}/a0", i) for i in range(3)]
    b = Process(p.spec, "worker-1")
    other = b.put("run/g9/a0", 9)
    assert same(reader.get(refs)[2], group(2))
    a.kill()
    if kind == "own":
        assert {r.owner for r in refs} == {"worker-0"} and other.owner == "worker-1"
        lost(lambda: reader.get([refs[0], other, refs[2]]), refs[0].key, refs[2].key)
        lost(lambda: reader.get(refs, ["tokens"]), *(r.key for r in refs))
        reader.free(refs)
        assert same(eventually(lambda: reader.get([b.put("run/g0/a1", 4)]), QUICK)[0], group(4))  # generated again
    else:
        assert {r.owner for r in refs} == {""}
        assert [same(f, group(i)) for i, f in enumerate(reader.get(refs))] == [True] * 3
    assert same(reader.get([other])[0], group(9))
    b.kill()


def test_a_storage_process_is_killed(plane: Callable[[DataPlaneConfig], Plane]):
    p = plane(mooncake(storage="processes"))
    store = open_store(p.spec, "worker-0")
    (ref,) = store.put({"run/g0/a0": group(0)})
    p.running["mooncake_storage_0"][2].stop()
    lost(lambda: store.get([ref]), ref.key)
    assert p.check() == ["mooncake_storage_0"] and p.check() == []
    (again,) = eventually(lambda: store.put({"run/g0/a1": group(1)}), 2 * QUICK)
    assert same(store.get([again])[0], group(1))
    lost(lambda: store.get([ref, again]), ref.key)


def test_a_storage_process_is_killed_and_there_is_a_replica(plane: Callable[[DataPlaneConfig], Plane]):
    p = plane(mooncake(storage="processes", processes=2, replicas=2))
    store = open_store(p.spec, "worker-0")
    refs = store.put({f"run/g{i}/a0": group(i) for i in range(8)})  # some of which are read from the one, some from the other
    assert store.counts["short_of_replicas"] == 0
    p.running["mooncake_storage_1"][2].stop()
    begin = time.monotonic()
    assert [same(f, group(i)) for i, f in enumerate(store.get(refs))] == [True] * 8
    assert same(store.get(refs, ["wide"], {"wide": (1, 2)})[3], {"wide": group(3)["wide"][1:2]}) and time.monotonic() - begin < QUICK
    (ref,) = store.put({"run/g9/a0": group(9)})  # one copy is left to have
    assert same(store.get([ref])[0], group(9)) and store.counts["short_of_replicas"] == 1


def test_the_master_is_killed_and_comes_back(plane: Callable[[DataPlaneConfig], Plane]):
    p = plane(mooncake())
    store, other = open_store(p.spec, "worker-0"), Process(p.spec, "worker-1")
    (ref,) = store.put({"run/g0/a0": group(0)})
    p.running["mooncake_master"][2].stop()
    lost(lambda: store.get([ref]), ref.key)
    other.begin("put", "run/g1/a0", 1, 500)  # goes on trying
    assert not other.line.poll(1) and p.check() == ["mooncake_master"]
    again = other.answer(2 * QUICK)[0]
    assert same(store.get([again])[0], group(1)) and again.owner in ("worker-1", "")  # whichever segment came back first
    lost(lambda: store.get([ref, again]), ref.key)  # Mooncake's master keeps no record on disk
    with pytest.raises(VimeError, match="no mooncake_master answers at 127"):
        backend.connect("127.0.0.1:1", 0, "tcp", "", 5)


@pytest.mark.parametrize("kind", ["shm", "own"])
def test_a_producer_is_killed_while_it_puts_into_a_full_store(kind: str, plane: Callable[[DataPlaneConfig], Plane]):
    """Refused and unfinished puts leave nothing: neither room that is gone, nor a group that is half there."""
    p = plane(settings("shm") if kind == "shm" else mooncake())
    a, b = Process(p.spec, "worker-0"), Process(p.spec, "worker-1")
    reader = open_store(p.spec)
    refs = []
    with pytest.raises(StoreFull):
        for i in range(40):
            refs.append(a.put(f"run/g{i}/a0", i, 50_000))
    assert 5 < len(refs) < 40 and [same(f, group(i, 50_000)) for i, f in enumerate(reader.get(refs))] == [True] * len(refs)
    assert {r.owner for r in refs} == ({""} if kind == "shm" else {"worker-0", ""})  # its own segment first, then the other's
    reader.free(refs[:2])
    a.begin("put!", "run/unfinished/a0", 1, 50_000)  # on and on: a taken key, packed each time
    time.sleep(0.3)
    a.kill()
    if kind == "shm":
        assert [same(f, group(i, 50_000)) for i, f in enumerate(reader.get(refs[2:]), start=2)] == [True] * len(refs[2:])
        reader.free(["run/unfinished/a0"])
        assert same(reader.get([b.put("run/g0/a1", 0, 50_000)])[0], group(0, 50_000))
        assert sum(f.stat().st_size for f in reader.root.iterdir()) == (len(refs) - 1) * refs[0].nbytes
    b.kill()


@pytest.mark.parametrize("kind", ["shm", "own"])
def test_a_consumer_is_killed_while_it_reads(kind: str, plane: Callable[[DataPlaneConfig], Plane]):
    p = plane(settings("shm") if kind == "shm" else mooncake())
    store, consumer = open_store(p.spec, "worker-0"), Process(p.spec)
    refs = store.put({f"run/g{i}/a0": group(i, 40_000) for i in range(4)})
    consumer.begin("get!", refs)
    time.sleep(0.5)
    consumer.kill()
    other = Process(p.spec)
    assert [same(f, group(i, 40_000)) for i, f in enumerate(other.call("get", refs))] == [True] * 4
    store.free(refs)  # whatever lease the dead one had
    lost(lambda: other.call("get", refs[:1]), refs[0].key)
    other.kill()


def test_a_read_that_outlives_its_lease(plane: Callable[[DataPlaneConfig], Plane], monkeypatch: pytest.MonkeyPatch):
    """It gets the right bytes, or is told why it gets none."""
    monkeypatch.setattr(backend, "lease", lambda spec: 0.001)
    p = plane(mooncake(segment_bytes=4 * SEGMENT))
    store, reader = Process(p.spec, "worker-0"), open_store(p.spec)
    refs, want = [store.put(f"run/g{i}/a0", i, 200_000) for i in range(3)], [group(i, 200_000) for i in range(3)]  # of 27 MB
    for fields in (None, ["wide"]):
        try:
            assert all(same(got, {k: a for k, a in w.items() if not fields or k in fields}) for got, w in zip(reader.get(refs, fields), want))
        except Lost as e:
            assert "longer than its lease" in str(e) and reader.counts["reread"]
    small = store.put("run/g9/a0", 9)
    assert same(eventually(lambda: reader.get([small]), QUICK)[0], group(9))
    store.kill()


def test_bytes_of_a_file_change(plane: Callable[[DataPlaneConfig], Plane]):
    p = plane(settings("shm"))
    store = open_store(p.spec, "worker-0")
    assert isinstance(store, Shm)
    refs = store.put({f"run/g{i}/a0": group(i) for i in range(5)})
    for ref, change in zip(refs[1:], ("flip", "cut", "grow", "head")):
        raw = bytearray(store.path(ref).read_bytes())
        if change == "flip":
            raw[-1] ^= 1
        elif change == "head":
            raw[8:9] = b"]"
        store.path(ref).write_bytes(raw[:-1] if change == "cut" else raw + b"\0" if change == "grow" else raw)
    said = lost(lambda: store.get(refs), *(r.key for r in refs[1:]))
    assert refs[1].key in said
    for ref, words in zip(refs[1:], ("corrupt: the checksum", "bytes were found", "bytes were found", "corrupt")):
        assert words in lost(lambda r=ref: store.get([r]), ref.key)
    assert "corrupt: " in lost(lambda: store.get(refs[4:], ["tokens"]), refs[4].key)  # no checksum of a part, but its header tells
    store.path(refs[0]).write_bytes(b"")
    assert "0 bytes were found" in lost(lambda: store.get(refs[:1]), refs[0].key)
