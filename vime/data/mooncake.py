"""The store in Mooncake: groups lie in the memory of the workers that made them, or of storage processes, and are read from there, over TCP or
RDMA. Mooncake by itself evicts what nobody has read, and answers a put on a taken key with success and the old bytes; neither can happen here.

    python -m vime.data.mooncake --master HOST:PORT --bytes N   gives N bytes of this host's memory to a store
"""

import argparse
import importlib.util
import itertools
import os
import signal
import socket
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from vime.data.plane import START, Arenas, DuplicateKey, Ranges, Ref, Spec, Store, StoreFull, aligned, attempt, key_of, windows, within
from vime.errors import VimeError, blamed
from vime.procs import free_port

PATIENCE = 3.0  # seconds for a master that starts to answer, and for room to come
BUFFER = 16 << 20  # Mooncake's own, which we don't use
QUIET = {"MC_LOG_LEVEL": "ERROR", "GLOG_minloglevel": "2", "MC_STORE_CLIENT_SETUP_RETRIES": "3"}
TTL = 10  # seconds without a sign of life after which the master forgets a client, and what lay there
GONE = TTL + 3.0  # seconds after which every client has learnt that
FULL, ABSENT = -200, -704
SAID = {
    **{ABSENT: "it is not there", -707: "the read took longer than its lease", -800: "the process that has it does not answer"},
    **{-600: "the process that has it does not answer, or it is shorter", -900: "the master does not answer"},
}


def lease(spec: Spec) -> float:
    """Seconds that bytes stay where they are for a reader; a slower read gets none."""
    return max(20.0, spec.settings.timeout)


def commands(spec: Spec) -> list[tuple[str, list[str], bytes]]:
    """(name, command, what it writes once it serves) of the master, unless one is given, and of the storage processes."""
    m = spec.settings.mooncake
    found = importlib.util.find_spec("mooncake")
    assert found and found.submodule_search_locations, "vime.conflicts has looked for it"
    host, _, port = spec.master.rpartition(":")
    ttl = int(1000 * lease(spec))
    master = [str(Path(found.submodule_search_locations[0]) / "mooncake_master"), f"--rpc_address={host}", f"--rpc_port={port}"]
    master += [f"--metrics_host={host}", f"--metrics_port={free_port()}", f"--client_ttl={TTL}", f"--default_kv_lease_ttl={ttl}"]
    master += ["--eviction_high_watermark_ratio=1.0", "--eviction_ratio=0.0", "--enable_metric_reporting=false", "--minloglevel=0"]
    out = [] if m.master else [("mooncake_master", master, b"Master service started")]
    store = [sys.executable, "-m", "vime.data.mooncake", f"--master={spec.master}", f"--bytes={m.segment_bytes}"]
    store += [f"--protocol={m.protocol}", f"--device={m.device}"]
    return out + [(f"mooncake_storage_{i}", store, b"serving") for i in range(m.processes if m.storage == "processes" else 0)]


def connect(master: str, segment: int, protocol: str, device: str, timeout: float) -> Any:
    """A client that gives `segment` bytes to the store. Raises: VimeError."""
    host, _, port = master.rpartition(":")
    deadline, here = time.monotonic() + PATIENCE, ""
    while not here:
        try:
            with socket.create_connection((host, int(port)), timeout) as line:
                here = line.getsockname()[0]  # where others reach this host
        except (OSError, ValueError) as e:
            if time.monotonic() > deadline or isinstance(e, ValueError):
                raise VimeError(f"data_plane.mooncake: no mooncake_master answers at {master}: {e}", "does it run? is this host:port?") from e
            time.sleep(0.02)
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    try:
        rc = within(timeout, store.setup, here, "P2PHANDSHAKE", segment, BUFFER, protocol, device, master)
    except TimeoutError as e:
        rc = str(e)
    if rc != 0:
        what = f"data_plane.mooncake: no client of {master} over {protocol}{device and f' ({device})'} with {segment} bytes"
        raise VimeError(f"{what}: {SAID.get(rc, rc)}", "is there memory for it? see data_plane.mooncake.segment_bytes, protocol and device")
    return store


class Registered(Arenas):
    """Arenas that Mooncake reads from and writes to without a copy of its own."""

    def __init__(self, store: Any):
        super().__init__()
        self.store = store

    def new(self, nbytes: int) -> np.ndarray:
        arena = super().new(nbytes)
        if rc := self.store.register_buffer(arena.ctypes.data, nbytes):
            raise VimeError(f"Mooncake cannot use {nbytes} bytes of memory: {rc}", "over RDMA memory is locked: see ulimit -l")
        return arena

    def drop(self, arena: np.ndarray) -> None:
        self.store.unregister_buffer(arena.ctypes.data)


class Mooncake(Store):
    def __init__(self, spec: Spec, owner: str):
        super().__init__(spec, owner)
        m = spec.settings.mooncake
        self.scattered = m.protocol == "tcp"  # over RDMA only memory that is registered can be sent: the arenas
        own = m.storage == "own" and owner
        self.store = connect(spec.master, m.segment_bytes if own else 0, m.protocol, m.device, self.timeout)
        from mooncake.store import ReplicateConfig

        self.arenas = Registered(self.store)
        self.place = ReplicateConfig()
        self.place.with_hard_pin, self.place.replica_num = True, m.replicas
        self.here = ""  # of an own segment, how descriptors name it: not as get_hostname does
        if own:
            probe = f"{spec.run}/{(name := self.store.get_hostname())}"
            self.place.preferred_segment = name
            if rc := self.store.put(probe, b"\0", self.place):
                raise VimeError(f"Mooncake at {spec.master} cannot use the segment of {name}: {SAID.get(rc, f'error {rc}')}")
            self.here = self.where([probe])[probe][0]

    def ask(self, method: str, *args: Any) -> Any:
        with blamed(f"Mooncake at {self.spec.master}: {method}", TimeoutError, fix="does its master run? is a storage host gone?"):
            return within(self.timeout, getattr(self.store, method), *args)

    def write(self, keys: list[str], objects: list[Any]) -> list[tuple[str, Any]]:
        there = self.ask("batch_is_exist", keys)
        if 1 in there:
            raise DuplicateKey(f"group {keys[there.index(1)]} is stored already, in Mooncake at {self.spec.master}")
        held = [[(p.ctypes.data, len(p)) for p in (o if self.scattered else [o]) if len(p)] for o in objects]
        todo, end, full = dict(zip(keys, held)), time.monotonic() + GONE, False
        while True:
            places, sizes = [[at for at, _ in o] for o in todo.values()], [[n for _, n in o] for o in todo.values()]
            codes = self.ask("batch_put_from_multi_buffers", [*todo], places, sizes, self.place)
            bad = {k: rc for k, rc in zip(todo, codes) if rc}
            if not bad:
                break
            key, rc = next(iter(bad.items()))
            if FULL in bad.values():  # as is a store whose master has just come back, until its segments have
                full, end = True, end if full else time.monotonic() + PATIENCE
            if time.monotonic() > end:
                self.free(keys)
                what = f"group {key} of {sum(n for _, n in todo[key])} bytes: Mooncake at {self.spec.master}"
                if full:
                    raise StoreFull(f"{what} has no room", "raise data_plane.mooncake.segment_bytes, or lower data_plane.budget_bytes")
                raise VimeError(f"{what}: {SAID.get(rc, f'error {rc}')}", "is its master, or a storage process, gone?")
            todo = {k: todo[k] for k in bad}
            self.counts["put_again"] += len(todo)
            time.sleep(0.3)
        lie = self.where(keys)
        for at in lie.values():
            self.counts["short_of_replicas"] += len(at) < self.place.replica_num
            self.counts["elsewhere"] += bool(self.here) and self.here not in at  # its own segment was full
        return [(self.owner if lie[k] == [self.here] else "", None) for k in keys]

    def where(self, keys: list[str]) -> dict[str, list[str]]:
        """The segments that have copies of each object."""
        found = self.ask("batch_get_replica_desc", keys)
        return {k: [r.get_memory_descriptor().buffer_descriptor.transport_endpoint for r in found.get(k, [])] for k in keys}

    def read(self, refs: Sequence[Ref], whole: bool) -> list[Any]:
        return [one if isinstance(one, str) else one[0] for one in self.fetch(refs, [[(0, r.nbytes)] for r in refs])]

    def parts(self, refs: Sequence[Ref], fields: Collection[str] | None, ranges: Ranges | None) -> list[Any]:
        heads = self.fetch(refs, [[(0, r.head)] for r in refs])
        out: list[Any] = [one if isinstance(one, str) else attempt(windows, r.key, one[0], fields, ranges) for r, one in zip(refs, heads)]
        there = [i for i, one in enumerate(out) if not isinstance(one, str)]
        found = self.fetch([refs[i] for i in there], [[(a, b) for *_, a, b in out[i].values()] for i in there])
        for i, rows in zip(there, found):
            table = out[i].items()
            out[i] = rows if isinstance(rows, str) else {k: row.view(t).reshape(shape) for (k, (t, shape, *_)), row in zip(table, rows)}
        return out

    def fetch(self, refs: Sequence[Ref], spans: Sequence[Sequence[tuple[int, int]]]) -> list[Any]:
        """Of each object its bytes first to end of each span, or what was found in their place. What fails but is there is read once more;
        where there are replicas, until the master has noticed which one is gone: readers don't turn to another by themselves."""
        end = time.monotonic() + (GONE if self.place.replica_num > 1 else 0)
        out: list[Any] = self.once(refs, spans) if refs else []
        pause = 0.0
        while todo := [i for i, one in enumerate(out) if isinstance(one, str) and one != SAID[ABSENT]]:
            if pause and time.monotonic() > end:
                break
            self.counts["reread"] += len(todo)
            time.sleep(pause)
            pause = 0.3
            for i, one in zip(todo, self.once([refs[i] for i in todo], [spans[i] for i in todo])):
                out[i] = one
        return out

    def once(self, refs: Sequence[Ref], spans: Sequence[Sequence[tuple[int, int]]]) -> list[Any]:
        """One call for all of fetch's."""
        ends = [*itertools.accumulate((aligned(b - a) for row in spans for a, b in row), initial=0)]
        arena, starts = self.arenas.take(ends[-1]), iter(ends)
        at = [[next(starts) for _ in row] for row in spans]
        sizes = [[b - a for a, b in row] for row in spans]
        try:
            wanted = [[r.key for r in refs]], [at], [[[a for a, _ in row] for row in spans]], [sizes]
            codes = self.ask("get_into_ranges", [arena.ctypes.data], *wanted)[0]
        except VimeError as e:
            return [str(e)] * len(refs)
        out: list[Any] = []
        for got, places, row in zip(codes, at, sizes, strict=True):
            rc = next((rc for rc, n in zip(got, row, strict=True) if rc != n), 0)
            out.append(SAID.get(rc, f"Mooncake's error {rc}") if rc else [arena[x : x + n] for x, n in zip(places, row)])
        return out

    def free(self, refs: Iterable[Ref | str]) -> None:
        if keys := [key_of(r) for r in refs]:
            codes = self.ask("batch_remove", keys, True)  # True: whatever lease or pin
            self.counts["not_freed"] += sum(rc not in (0, ABSENT) for rc in codes)

    def close(self) -> None:
        """What lies in this process's segment is gone."""
        self.ask("close")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m vime.data.mooncake", description="Give memory of this host to a run's store, until it ends.")
    for flag, kind, default in (("master", str, None), ("bytes", int, None), ("protocol", str, "tcp"), ("device", str, "")):
        parser.add_argument(f"--{flag}", type=kind, default=default, required=default is None)
    args = parser.parse_args()
    ends = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, ends)  # in all of Mooncake's threads, too
    store = connect(args.master, args.bytes, args.protocol, args.device, START)
    print(f"serving {args.bytes} bytes as {store.get_hostname()} to {args.master}", flush=True)
    signal.sigwait(ends)
    os._exit(0)  # what lies here is gone either way, and Mooncake would take seconds to say so


if __name__ == "__main__":
    main()
