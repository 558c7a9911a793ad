"""The processes of `vime bench dataplane`: m producers, n consumers and one controller; how each path takes samples from the ones to the others.

All talk over TCP sockets of zmq in pickle protocol 5 with arrays as frames of their own, so that what is measured is the path and not a poor socket.
Item i is made by producer i % m; `who[i]` is the consumer that reads it: an all-to-all re-shard. A round: the controller asks the producers for
an offer, deals what they offer to the consumers, and ends when each consumer has answered with the sum of every byte it was given.
"""

from __future__ import annotations

import base64
import json
import math
import mmap
import pickle
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import zmq

from vime.data.plane import Plane, Ref, Spec, Store, open_store, ray
from vime.errors import said
from vime.sections import DataPlaneConfig

Array = np.ndarray
THROUGH = ("lists", "json", "torch-ray", "numpy", "numpy-ray")  # the bytes go through the controller
ON_RAY = ("ray", "controller", "transferqueue")
TEXT = {"ids": np.int32, "logprobs": np.float32, "mask": np.uint8}


def fields(kind: str, group: int) -> dict[str, tuple[tuple[int, ...], Any]]:
    """Field -> (shape, dtype) of one item, which is a group of samples: text2k and text16k, routing (16k tokens, 48 layers, 8 experts each,
    layer-major), pixels (2k tokens and one picture of 3 x 512 x 512 float32, 3 MiB, per group)."""
    tokens = 2048 if kind in ("text2k", "pixels") else 16384
    out: dict[str, tuple[tuple[int, ...], Any]] = {f: ((group * tokens,), dtype) for f, dtype in TEXT.items()}
    if kind == "routing":
        out["routing"] = ((48, group * tokens, 8), np.uint8)
    return out | ({"pixels": ((3, 512, 512), np.float32)} if kind == "pixels" else {})


def nbytes(kind: str, group: int) -> int:
    return sum(math.prod(shape) * np.dtype(dtype).itemsize for shape, dtype in fields(kind, group).values())


def checksum(arrays: Any) -> int:
    """Sum of all bytes as int64, modulo 2**63. Every field's length is a multiple of 8 bytes."""
    return sum(int(np.add.reduce(np.ascontiguousarray(a).reshape(-1).view(np.int64))) for a in arrays) % 2**63


def send(sock: Any, obj: Any, *envelope: bytes) -> int:
    """Returns the bytes sent."""
    buffers: list[pickle.PickleBuffer] = []
    how = sys.modules["ray"].cloudpickle if "ray" in sys.modules else pickle  # which knows references
    head = how.dumps(obj, protocol=5, buffer_callback=buffers.append)
    raw = [b.raw() for b in buffers]
    sock.send_multipart([*envelope, head, *raw], copy=False)
    return len(head) + sum(r.nbytes for r in raw)


def load(frames: list[zmq.Frame]) -> Any:
    return pickle.loads(frames[0].buffer, buffers=[f.buffer for f in frames[1:]])


def ray_put(obj: Any) -> tuple[Any, bytes]:
    ref = ray().put(obj)
    return ref, ray().cloudpickle.dumps(ref)


def ray_get(ref: bytes) -> Any:
    return ray().get(pickle.loads(ref))


class Party:
    """What every process has: its specification and the stores it has opened."""

    def __init__(self, role: str, spec: dict[str, Any]):
        self.role, self.spec, self.name = role, spec, spec["name"]
        self.stores: dict[str, Store] = {}
        self.held: list[Any] = []  # objects in Ray's store

    def ready_for(self, path: str) -> None:
        """With what it needs; Ray's node of this host may still be starting."""
        deadline = time.monotonic() + 90
        while ("-ray" in path or path.startswith(ON_RAY)) and not ray().is_initialized():
            try:
                quiet = {"log_to_driver": False, "logging_level": "ERROR"}
                ray().init(address=self.spec["ray"], namespace="bench", _node_ip_address=self.spec["ray_host"], **quiet)
            except Exception:  # of many types
                if time.monotonic() > deadline:
                    raise
                time.sleep(1)
        if "torch" in path:
            import torch

            torch.set_num_threads(1)

    def open(self, path: str, spec: Spec | None) -> None:
        """Make ready for `path`; `spec` is that of its store, None where it has none."""
        self.ready_for(path)
        if spec:
            self.stores[path] = open_store(spec, self.name if self.role == "producer" else "")

    def ray_drop(self) -> None:
        if self.held:
            core = ray()._private.worker.global_worker.core_worker
            for ref in self.held:
                core.remove_object_ref_reference(ref)  # one that was pickled by hand keeps its object for ever
            self.held = []

    def close(self) -> None:
        for store in self.stores.values():
            store.close()


class Producer(Party):
    kind, group, items, data = "", 1, [0], {"": np.zeros(0)}
    address = ""
    refs: list[Ref] = []

    def make(self, kind: str, group: int, items: list[int]) -> dict[int, int]:
        """Make the arrays [len(items), ...] of each field; returns the items' checksums."""
        self.kind, self.group, self.items, self.data = kind, group, items, {}
        rng = np.random.default_rng(items)
        noise = np.frombuffer(rng.bytes(1 << 22), np.uint8)
        for f, (shape, dtype) in fields(kind, group).items():
            if f == "routing":
                a = np.resize(noise & 127, (len(items), *shape))
            elif dtype == np.float32:
                a = np.resize((noise.view(np.uint32) >> 9).astype(np.float32) / 2**23, (len(items), *shape))
            else:
                a = rng.integers(0, 2 if dtype == np.uint8 else 150_000, (len(items), *shape), dtype=dtype)
            a.reshape(len(items), -1)[:, 0] = [j % 127 for j in items]
            self.data[f] = a
        return {j: checksum(a[p] for a in self.data.values()) for p, j in enumerate(items)}

    def item(self, p: int) -> dict[str, Array]:
        return {f: a[p] for f, a in self.data.items()}

    def offer(self, path: str, tag: str) -> Any:
        """What the controller gets: the samples themselves in its paths, else item -> where it is."""
        if path == "lists":
            return [(j, {f: a.tolist() for f, a in self.item(p).items()}) for p, j in enumerate(self.items)]
        if path == "json":
            text = {f: [x.tolist() if f in TEXT else base64.b64encode(x.data).decode() for x in a] for f, a in self.data.items()}  # as servers answer
            return [json.dumps({"item": j, **{f: rows[p] for f, rows in text.items()}}) for p, j in enumerate(self.items)]
        if path == "numpy":
            return self.items, self.data
        if path in ("numpy-ray", "torch-ray"):
            ref, name = ray_put({f: a if path == "numpy-ray" else sys.modules["torch"].from_numpy(a) for f, a in self.data.items()})
            self.held = [ref]
            return self.items, name
        if path in ("mmap", "file"):
            return self._write(Path(self.spec["folder"]) / self.name, path == "mmap")
        if path == "zmq":
            return {j: (self._serve(), p) for p, j in enumerate(self.items)}
        self.refs = self.stores[path].put({f"{tag}/g{j}/a0": self.item(p) for p, j in enumerate(self.items)})
        return dict(zip(self.items, self.refs))

    def free(self, path: str, tag: str) -> None:
        self.ray_drop()
        if path in ("mmap", "file"):
            (Path(self.spec["folder"]) / self.name).unlink(missing_ok=True)
        if self.refs:
            self.stores[path].free(self.refs)
            self.refs = []

    def _write(self, file: Path, mapped: bool) -> dict[int, Any]:
        """The arrays one after another in a new file in shared memory, by copies into a map of it or by write()."""
        with file.open("wb+") as f:
            if mapped:
                f.truncate(size := sum(a.nbytes for a in self.data.values()))
                with mmap.mmap(f.fileno(), size) as m:
                    for a in self.data.values():
                        m.write(a.data.cast("B"))
            else:
                for a in self.data.values():
                    f.write(a.data)
        ends = np.cumsum([0, *(a.nbytes for a in self.data.values())]).tolist()
        rows = [(at, a.nbytes // len(self.items)) for at, a in zip(ends, self.data.values())]
        return {j: (str(file), [(at + p * row, row) for at, row in rows]) for p, j in enumerate(self.items)}

    def _serve(self) -> str:
        """Address of a thread that sends rows without copying them."""
        if not self.address:
            sock: Any = zmq.Context.instance().socket(zmq.ROUTER)
            self.address = f"tcp://{self.spec['host']}:{sock.bind_to_random_port('tcp://' + self.spec['host'])}"

            def loop() -> None:
                while True:
                    who, rows = sock.recv_multipart()
                    sock.send_multipart([who, *(a[p] for p in json.loads(rows) for a in self.data.values())], copy=False)

            threading.Thread(target=loop, daemon=True).start()
        return self.address


class Consumer(Party):
    peers: dict[str, Any] = {}

    def take(self, path: str, part: Any) -> int:
        """The sum of every byte of `part`, as the controller dealt it."""
        if path == "lists":
            return checksum(np.asarray(v, TEXT.get(f, np.float32 if f == "pixels" else np.uint8)) for _, d in part for f, v in d.items())
        if path in ("json", "numpy"):
            return checksum(part)
        if path in ("numpy-ray", "torch-ray"):
            return checksum(a if path == "numpy-ray" else a.numpy() for a in ray_get(part))
        if path in ("mmap", "file"):
            maps = {name: np.memmap(name, np.uint8, "r") for name in {name for name, _ in part}}
            return checksum(maps[name][at : at + size] for name, places in part for at, size in places)
        if path == "zmq":
            return self._pull(part)
        return checksum(a for d in self.stores[path].get(part) for a in d.values())

    def _pull(self, part: list[tuple[str, int]]) -> int:
        rows: dict[str, list[int]] = {}
        for address, p in part:
            rows.setdefault(address, []).append(p)
        for address, wanted in rows.items():
            if address not in self.peers:
                self.peers[address] = zmq.Context.instance().socket(zmq.DEALER)
                self.peers[address].connect(address)
            self.peers[address].send(json.dumps(wanted).encode())
        return sum(checksum(np.frombuffer(f.buffer, np.uint8) for f in self.peers[a].recv_multipart(copy=False)) for a in rows) % 2**63


class Controller(Party):
    """Bound to a TCP address for producers and consumers, and to a file for the one who runs the benchmark."""

    def __init__(self, role: str, spec: dict[str, Any], sock: Any):
        super().__init__(role, spec)
        self.sock, self.bytes = sock, 0
        self.present: set[bytes] = set()
        self.planes: list[Plane] = []

    def ask(self, who: str, method: str, args: list[Any]) -> list[Any]:
        """Call `method` of all producers or consumers, each with its own of `args`; their answers in order. Raises the first error they name."""
        names = [f"{who}{i}".encode() for i in range(len(args))]
        for name, a in zip(names, args):
            self.bytes += send(self.sock, (method, a), name)
        out: dict[bytes, Any] = {}
        while len(out) < len(names):
            name, *frames = self.sock.recv_multipart(copy=False)
            self.bytes += sum(len(f) for f in frames)
            out[name.bytes] = load(frames)
        if errors := [f"{n.decode()}: {value}" for n, (fine, value) in out.items() if not fine]:
            raise RuntimeError(errors[0])
        return [out[n][1] for n in names]

    def ready(self) -> None:
        """Returns when all are there."""
        while len(self.present) < self.spec["m"] + self.spec["n"]:
            self.present.add(self.sock.recv_multipart()[0])

    def open_all(self, path: str, settings: dict[str, Any] | None) -> None:
        """In all processes. `settings`: of a store, as in [data_plane]."""
        spec = None
        self.ready_for(path)
        if settings:
            folder = Path(self.spec["folder"])
            self.planes.append(Plane(DataPlaneConfig(**settings), folder.name + path, self.spec["m"], folder, self.spec["host"]))
            spec = self.planes[-1].spec
        self._both("open", path, spec)

    def _both(self, method: str, *args: Any) -> None:
        for who, count in (("producer", self.spec["m"]), ("consumer", self.spec["n"])):
            self.ask(who, method, [args] * count)

    def close_all(self) -> None:
        self._both("close")
        for plane in self.planes:
            plane.close()

    def round(self, path: str, tag: str, who: list[int]) -> dict[str, Any]:
        m, n, self.bytes = self.spec["m"], self.spec["n"], 0
        cpu, begun = time.process_time(), time.perf_counter()
        try:
            offers = self.ask("producer", "offer", [(path, tag)] * m)
            parts = self._deal(path, offers, who, n)
            del offers
            sums = self.ask("consumer", "take", [(path, part) for part in parts])
            wall, cpu, through = time.perf_counter() - begun, time.process_time() - cpu, self.bytes
        finally:
            self.ask("producer", "free", [(path, tag)] * m)
            self.ray_drop()
        return {"wall": wall, "controller_cpu": cpu, "through": through, "sums": sums}

    def _deal(self, path: str, offers: list[Any], who: list[int], n: int) -> list[Any]:
        if path not in THROUGH:
            there = {j: where for o in offers for j, where in o.items()}
            return [[there[j] for j in sorted(there) if who[j] == c] for c in range(n)]
        if path == "lists":
            return [[x for o in offers for x in o if who[x[0]] == c] for c in range(n)]
        if path == "json":
            parts: list[Any] = [[] for _ in range(n)]
            for d in (json.loads(text) for o in offers for text in o):
                mine = parts[who[d.pop("item")]]
                mine += (np.asarray(v, TEXT[f]) if f in TEXT else np.frombuffer(base64.b64decode(v), np.uint8) for f, v in d.items())
            return parts
        batches = [d if path == "numpy" else ray_get(d) for _, d in offers]  # as a DataProto: concatenated, put in order, cut
        order = [j for items, _ in offers for j in items]
        rows = [[r for r, j in enumerate(order) if who[j] == c] for c in range(n)]
        join = sys.modules["torch"].cat if path == "torch-ray" else np.concatenate
        whole = [join([d[f] for d in batches]) for f in batches[0]]
        del batches
        parts = [[a[r] for a in whole] for r in rows]
        if path == "numpy":
            return parts
        self.bytes += 2 * sum(a.nbytes for a in whole)  # in and out by Ray's store
        put = [ray_put(part) for part in parts]
        self.held = [ref for ref, _ in put]
        return [name for _, name in put]


def main(role: str, spec: dict[str, Any]) -> None:
    """Serve calls until this process is ended; all that goes wrong in one is answered."""
    sock: Any = zmq.Context.instance().socket(zmq.ROUTER if role == "controller" else zmq.DEALER)
    sock.setsockopt(zmq.SNDHWM, 0)
    sock.setsockopt(zmq.RCVHWM, 0)
    party: Party
    if role == "controller":
        sock.bind(spec["ipc"])
        sock.bind(spec["address"])
        party = Controller(role, spec, sock)
    else:
        sock.setsockopt(zmq.IDENTITY, spec["name"].encode())
        sock.connect(spec["address"])
        sock.send(b"here")
        party = (Producer if role == "producer" else Consumer)(role, spec)
    while True:
        frames = sock.recv_multipart(copy=False)
        envelope = [frames.pop(0).bytes] if role == "controller" else []
        if isinstance(party, Controller) and envelope != [b"main"]:
            party.present.add(envelope[0])
            continue
        method, args = load(frames)
        del frames
        try:
            answer: Any = (True, getattr(party, method)(*args))
        except Exception as e:
            answer = (False, said(e))
        del args
        send(sock, answer, *envelope)


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
