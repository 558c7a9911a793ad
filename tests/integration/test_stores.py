"""What every store of groups does alike, in each backend, with real processes behind it."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.integration.store_kit import SEGMENT, group, mooncake, same, settings
from vime.data.plane import DuplicateKey, Lost, Plane, Ref, Store, StoreFull, open_store
from vime.errors import VimeError

SEGMENTS = {"segment_bytes": SEGMENT}
BACKENDS = {  # -> settings, what becomes of a group whose producer dies
    "shm": (lambda: settings("shm"), "stays"),
    "mooncake-own": (mooncake, "lost"),
    "mooncake-processes": (lambda: mooncake(storage="processes", processes=2), "stays"),
    "ray": (lambda: settings("ray"), "lost"),
    "controller": (lambda: settings("controller"), "stays"),
    "transferqueue-simple": (lambda: settings("transferqueue"), "stays"),
    "transferqueue-mooncake": (
        lambda: settings("transferqueue", mooncake=SEGMENTS | {"storage": "processes"}, transferqueue={"storage": "mooncake"}), "stays",
    ),
}  # fmt: skip
BYTES = {"shm", "mooncake-own", "mooncake-processes", "transferqueue-simple", "transferqueue-mooncake"}  # not Ray, which knows no keys


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray = pytest.importorskip("ray")
    ray.init(address="local", num_cpus=64, include_dashboard=False, namespace="stores", log_to_driver=False, logging_level=logging.ERROR)
    yield ray
    ray.shutdown()


@pytest.fixture(scope="module", params=BACKENDS)
def backend(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Plane, Store, Store]]:
    """Its name, the processes behind it, a store that puts, and one that reads."""
    cfg = BACKENDS[request.param][0]()
    if cfg.backend not in ("shm", "mooncake"):
        request.getfixturevalue("cluster")
    plane = Plane(cfg, f"contract-{request.param}-{time.time_ns()}", 1, tmp_path_factory.mktemp(request.param))
    try:
        yield request.param, plane, open_store(plane.spec, "worker-0"), open_store(plane.spec)
    finally:
        plane.close()


class Producer:
    """In a Ray actor, a store that puts."""

    def __init__(self, spec: Any):
        self.store = open_store(spec, "worker-1")

    def put(self, key: str) -> list[Ref]:
        return self.store.put({key: group(5)})


class Consumer:
    """In a Ray actor, a store that reads, `times` over."""

    def __init__(self, spec: Any):
        self.store = open_store(spec)

    def read(self, refs: list[Ref], times: int) -> bool:
        return all(same(self.store.get(refs)[0], group(5)) for _ in range(times))


@pytest.mark.parametrize("name", ["ray", "controller", "transferqueue-simple", "transferqueue-mooncake"])
def test_a_consumer_then_a_producer_in_ray_dies(name: str, cluster: Any, tmp_path: Path):
    """Of the others: test_store_failures.py. First in this file: a Ray cluster has one TransferQueue, and `backend` keeps its own to the end."""
    plane = Plane(BACKENDS[name][0](), f"dies-{time.time_ns()}", 1, tmp_path)
    try:
        producer = cluster.remote(Producer).options(num_cpus=0).remote(plane.spec)
        refs = cluster.get(producer.put.remote("run/dies/a0"), timeout=60)
        reader = open_store(plane.spec)
        assert same(reader.get(refs)[0], group(5))
        first, second = (cluster.remote(Consumer).options(num_cpus=0).remote(plane.spec) for _ in range(2))
        assert cluster.get([c.read.remote(refs, 1) for c in (first, second)], timeout=60) == [True, True]
        going = first.read.remote(refs, 10**9)
        assert not cluster.wait([going], timeout=0.5)[0]
        cluster.kill(first)  # while it reads
        with pytest.raises(cluster.exceptions.RayActorError):
            cluster.get(going, timeout=30)
        assert cluster.get(second.read.remote(refs, 3), timeout=60) and same(reader.get(refs)[0], group(5))
        cluster.kill(second)  # what it refers to goes with it
        cluster.kill(producer)
        if BACKENDS[name][1] == "lost":
            assert refs[0].owner == "worker-1"
            begin = time.monotonic()
            with pytest.raises(Lost, match="run/dies/a0"):
                for _ in range(40):  # until Ray has noticed
                    reader.get(refs)
                    time.sleep(0.1)
            assert time.monotonic() - begin < 15
        else:
            assert refs[0].owner == ""
            time.sleep(1)
            assert same(reader.get(refs)[0], group(5))
        if name == "controller":
            cluster.kill(plane.hub)
            with pytest.raises(Lost, match="run/dies/a0"):
                for _ in range(40):  # until Ray has noticed
                    reader.get(refs)
                    time.sleep(0.1)
        if name == "transferqueue-simple":
            with pytest.raises(VimeError, match="has a TransferQueue already"):
                Plane(plane.spec.settings, "second", 1, tmp_path)
            assert same(reader.get(refs)[0], group(5))  # and the first one goes on
            for i in range(2):
                cluster.kill(cluster.get_actor(f"TransferQueueStorageUnit#{i}"))
            begin = time.monotonic()
            with pytest.raises(Lost, match="run/dies/a0"):
                for _ in range(40):  # until they have ended
                    reader.get(refs)
                    time.sleep(0.1)
            assert time.monotonic() - begin < 2 * plane.spec.settings.timeout + 10
    finally:
        plane.close()


def test_groups_come_back_whole_and_in_part(backend: tuple[str, Plane, Store, Store]):
    _, _, producer, reader = backend
    items = {f"run/g{i}/a0": group(i, rows=300 + 17 * i) for i in range(5)}
    refs = producer.put(items)
    assert [r.key for r in refs] == [*items] and all(r.nbytes > 300 * 50 for r in refs)
    back = reader.get([refs[3], *refs[:3]])
    order = [3, 0, 1, 2]
    assert all(same(got, group(i, rows=300 + 17 * i)) for i, got in zip(order, back))
    part = reader.get(refs, ["wide", "tokens", "none"], {"wide": (1, 3), "tokens": (5, 5)})
    for i, got in enumerate(part):
        want = group(i, rows=300 + 17 * i)
        assert same(got, {"wide": want["wide"][1:3], "tokens": want["tokens"][:0], "none": want["none"]})
    rows = reader.get(refs[:1], ranges={"narrow": (2, 6)})[0]
    assert same(rows, group(0, 300) | {"narrow": group(0, 300)["narrow"][2:6]})
    assert producer.put({}) == [] and reader.get([]) == []
    with pytest.raises(VimeError, match="no field 'nope'"):
        reader.get(refs[:1], ["nope"])
    reader.free(refs)


def test_arrays_stay_as_they_are_while_others_are_read(backend: tuple[str, Plane, Store, Store]):
    _, _, producer, reader = backend
    refs = producer.put({f"run/keep{i}/a0": group(i, 4000) for i in range(3)})
    held = [reader.get([r])[0] for r in refs] + [reader.get([r], ["narrow"])[0] for r in refs]
    reader.free(refs)
    producer.put({"run/keep9/a0": group(9, 4000)})
    assert all(same(got, group(i, 4000)) for i, got in enumerate(held[:3]))
    assert all((got["narrow"] == group(i, 4000)["narrow"]).all() for i, got in enumerate(held[3:]))
    producer.free(["run/keep9/a0"])


def test_a_taken_key_keeps_its_bytes(backend: tuple[str, Plane, Store, Store]):
    name, _, producer, reader = backend
    refs = producer.put({"run/twice/a0": group(1)})
    if name in BYTES:
        with pytest.raises(DuplicateKey, match="run/twice/a0"):
            producer.put({"run/other/a0": group(2), "run/twice/a0": group(3)})
        assert same(reader.get(refs)[0], group(1))
        producer.put({"run/other/a0": group(2)})  # nothing of it stayed behind
        reader.free(["run/other/a0"])
    else:
        assert same(reader.get(producer.put({"run/twice/a0": group(3)}))[0], group(3)) and same(reader.get(refs)[0], group(1))
    reader.free(refs)


def test_lost_names_every_group_that_is_not_there(backend: tuple[str, Plane, Store, Store]):
    _, _, producer, reader = backend
    refs = producer.put({f"run/lost{i}/a0": group(i) for i in range(4)})
    reader.free([refs[1], refs[3]])
    reader.free([refs[1], refs[3], "run/never/a0"])
    for fields in (None, ["tokens"]):
        with pytest.raises(Lost, match="run/lost1/a0") as lost:
            reader.get(refs, fields)
        assert lost.value.keys == ("run/lost1/a0", "run/lost3/a0")
    with pytest.raises(Lost) as lost:
        reader.get([Ref("run/never/a0", 100, 0, head=64)])
    assert lost.value.keys == ("run/never/a0",)
    assert [same(f, group(i)) for i, f in zip((0, 2), reader.get([refs[0], refs[2]]))] == [True, True]
    reader.free(refs)


def test_another_checksum_or_length_is_lost(backend: tuple[str, Plane, Store, Store]):
    _, _, producer, reader = backend
    (ref,) = producer.put({"run/crc/a0": group(1)})
    with pytest.raises(Lost, match="run/crc/a0: corrupt") as lost:
        reader.get([dataclasses.replace(ref, digest=ref.digest ^ 1)])
    assert lost.value.keys == (ref.key,)
    with pytest.raises(Lost, match="run/crc/a0"):
        reader.get([dataclasses.replace(ref, nbytes=ref.nbytes + 8)])
    assert same(reader.get([ref])[0], group(1))
    reader.free([ref])


def test_a_full_store_keeps_what_it_has_and_nothing_of_what_it_refused(backend: tuple[str, Plane, Store, Store]):
    name, _, producer, reader = backend
    if name not in BYTES:
        pytest.skip("Ray moves to disk what its memory cannot hold: the ledger's budget is the bound")
    third = {"x": np.full(SEGMENT // 3, 7, np.uint8)}
    refs = producer.put({"run/full0/a0": third})
    for _ in range(2):  # what was refused takes no room the second time
        with pytest.raises(StoreFull):
            producer.put({f"run/full{i}/a0": third for i in range(1, 5)})
        refs += producer.put({"run/full1/a0": third})
        assert [(f["x"] == 7).all() for f in reader.get(refs)] == [True, True]
        reader.free([refs.pop()])
    with pytest.raises(Lost):
        reader.get([Ref("run/full2/a0", 100, 0, head=64)])
    reader.free(refs)
