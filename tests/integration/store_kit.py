"""A store in another process, and what is put there."""

import ctypes
import multiprocessing
import os
import signal
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vime.data.plane import Fields, Plane, Ref, Spec, open_store
from vime.errors import VimeError
from vime.sections import DataPlaneConfig

SEGMENT = 64 << 20


def settings(backend: str, **tables: Any) -> DataPlaneConfig:
    """Skips where this machine lacks what the backend needs."""
    cfg = DataPlaneConfig.model_validate({"backend": backend, "timeout": 10, "budget_bytes": SEGMENT} | tables)
    if backend == "transferqueue" and not find_spec("transfer_queue"):
        pytest.skip('transferqueue is not installed: pip install "vime[dataplane]"')
    if cfg.on_mooncake:
        if not find_spec("mooncake"):
            pytest.skip('mooncake is not installed: pip install "vime[dataplane]"')
        try:
            ctypes.CDLL("libibverbs.so.1")
        except OSError:
            pytest.skip("no libibverbs.so.1: apt-get install libibverbs1")
    return cfg


def mooncake(**changes: Any) -> DataPlaneConfig:
    return settings("mooncake", mooncake={"segment_bytes": SEGMENT} | changes)


def group(seed: int, rows: int = 500) -> Fields:
    """Ragged and typed as a group of samples is, with an empty field and one that is not in C order."""
    g = np.random.default_rng(seed)
    return {
        **{"tokens": g.integers(0, 2**31, rows, dtype=np.int32), "tokens.lengths": np.array([rows - 7, 7])},
        **{"rollout_log_probs": g.random(rows, np.float32), "exact": g.random(3), "loss_mask": g.integers(0, 2, rows + 1, dtype=np.uint8)},
        **{"none": np.zeros((0, 4), np.int64), "narrow": g.integers(0, 9, (rows, 6, 8), dtype=np.uint8).transpose(1, 0, 2)},
        **{"wide": g.integers(0, 999, (rows, 5, 8), dtype=np.uint16).transpose(1, 0, 2), "rest": np.frombuffer(b'[{"a":1}]', np.uint8)},
    }


def same(a: Fields, b: Fields) -> bool:
    return a.keys() == b.keys() and all(a[k].dtype == b[k].dtype and a[k].shape == b[k].shape and (a[k] == b[k]).all() for k in a)


def serve(line: Any, spec: Spec, owner: str) -> None:
    """Open the store, then answer (method, arguments) until the line ends; results are what the method returns, or its VimeError."""
    os.setsid()
    store = open_store(spec, owner)
    line.send("open")
    while True:
        try:
            method, args = line.recv()
        except EOFError:
            os._exit(0)
        while True:
            try:
                answer = store.put({args[0]: group(args[1], args[2])}) if method == "put" else getattr(store, method.removesuffix("!"))(*args)
            except VimeError as e:
                answer = e
            if not method.endswith("!"):
                break
        line.send(answer)


class Process:
    """`call("put", key, seed, rows)`, or any other method of the store; `begin` one with ! at its end runs it again and again."""

    def __init__(self, spec: Spec, owner: str = ""):
        self.line, theirs = multiprocessing.get_context("spawn").Pipe()
        self.child = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs, spec, owner), daemon=True)
        self.child.start()
        theirs.close()
        assert self.answer() == "open"

    def begin(self, method: str, *args: Any) -> None:
        self.line.send((method, args))

    def answer(self, timeout: float = 60) -> Any:
        assert self.line.poll(timeout), "no answer"
        answer = self.line.recv()
        if isinstance(answer, VimeError):
            raise answer
        return answer

    def call(self, method: str, *args: Any) -> Any:
        self.begin(method, *args)
        return self.answer()

    def put(self, key: str, seed: int, rows: int = 500) -> Ref:
        return self.call("put", key, seed, rows)[0]

    def kill(self) -> None:
        os.kill(self.child.pid, signal.SIGKILL)
        self.child.join()


def eventually(call: Any, within: float) -> Any:
    """The call's result, as soon as it raises no VimeError."""
    end = time.monotonic() + within
    while True:
        try:
            return call()
        except VimeError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


def plane_of(cfg: DataPlaneConfig, folder: Path) -> Plane:
    return Plane(cfg, f"test-{folder.name}-{os.getpid()}", 1, folder)
