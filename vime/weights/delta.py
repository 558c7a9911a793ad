"""Weights as differences, bit by bit. A delta is one safetensors file: of a tensor with few changed elements `gap:<name>`, the distances
between their flat positions (in the smallest of uint8, uint16, int32 and int64 that holds them, the first counted from 0), and `bits:<name>`,
the new values as integers of the same size; else `whole:<name>`. Its metadata has "base" and "checksum": the checksums of all weights before
and after it; that of a whole file has "checksum" only."""

import hashlib
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import numpy as np
import torch
from safetensors import safe_open

State = dict[str, torch.Tensor]  # contiguous tensors on the CPU, by checkpoint name
BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by element size in bytes
GAPS = (np.uint8, np.uint16, np.int32, np.int64)


class Delta(NamedTuple):
    tensors: State
    changed: int  # elements whose bits differ
    whole: list[str]  # tensors that are in it in full

    @property
    def size(self) -> int:
        """In bytes, without the file's header."""
        return size(self.tensors)


def size(state: State) -> int:
    return sum(t.numel() * t.element_size() for t in state.values())


def bits(t: torch.Tensor) -> torch.Tensor:
    """The elements of a contiguous tensor as flat integers, in the same memory: -0.0 is not 0.0, and a NaN equals itself."""
    return t.view(-1).view(BITS[t.element_size()])


def same_form(a: State, b: State) -> bool:
    """Whether both have the same names, shapes and dtypes, so that a delta can lead from one to the other."""
    return a.keys() == b.keys() and all(a[k].shape == b[k].shape and a[k].dtype == b[k].dtype for k in a)


def make(old: State, new: State) -> Delta:
    """What leads from `old` to `new`, which are of the same form; neither is changed."""
    out, changed, whole = State(), 0, []
    for name, t in new.items():
        now = bits(t.contiguous())
        at = (now != bits(old[name])).nonzero().view(-1)
        if not at.numel():
            continue
        changed += at.numel()
        gaps = np.diff(at.numpy(), prepend=0)
        kind = next(k for k in GAPS if gaps.max() <= np.iinfo(k).max)
        if len(gaps) * (np.dtype(kind).itemsize + t.element_size()) < t.numel() * t.element_size():
            out[f"gap:{name}"], out[f"bits:{name}"] = torch.from_numpy(gaps.astype(kind)), now[at]
        else:
            out[f"whole:{name}"] = t.clone(memory_format=torch.contiguous_format)
            whole.append(name)
    return Delta(out, changed, whole)


def apply(state: State, delta: State) -> None:
    """Lay a delta's tensors over `state`, in place. Raises ValueError where they don't fit; `state` may be half changed then."""
    for key, value in delta.items():
        kind, _, name = key.partition(":")
        if name not in state or kind not in ("gap", "bits", "whole"):
            raise ValueError(f"{key} is for no tensor that is there")
        have = state[name]
        if kind == "whole":
            if value.shape != have.shape or value.dtype != have.dtype:
                raise ValueError(f"{key}: {value.dtype} {tuple(value.shape)} over {have.dtype} {tuple(have.shape)}")
            bits(have).copy_(bits(value))
        elif kind == "gap":
            if value.dtype not in (torch.uint8, torch.uint16, torch.int32, torch.int64):
                raise ValueError(f"{key}: {value.dtype} are no positions")
            gaps, new = value.numpy(), delta.get(f"bits:{name}")
            at = np.cumsum(gaps, dtype=np.int64)
            if new is None or new.dtype != bits(have).dtype or new.shape != at.shape:
                raise ValueError(f"{key}: {len(at)} positions without as many new values")
            if len(at) and (gaps.min() < 0 or at[-1] >= have.numel()):
                raise ValueError(f"{key}: positions outside of the {have.numel()} elements")
            bits(have)[torch.from_numpy(at)] = new
        elif f"gap:{name}" not in delta:
            raise ValueError(f"{key}: new values without positions")


def checksum(state: State) -> str:
    """SHA-256 over names, dtypes, shapes and bytes; tensors on all cores."""

    def one(name: str) -> bytes:
        t = state[name]
        h = hashlib.sha256(f"{name} {t.dtype} {tuple(t.shape)}".encode())
        h.update(t.view(-1).view(torch.uint8).numpy().data)
        return h.digest()

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        return hashlib.sha256(b"".join(pool.map(one, sorted(state)))).hexdigest()


class Held:
    """The weights that a receiver got last, whole, so that deltas can follow: a copy in memory, since a file may be gone when the next delta
    comes. Nothing is kept of weights without a checksum, after which no deltas come."""

    def __init__(self) -> None:
        self.state: State = {}
        self.checksum = ""

    def read(self, path: str, deltas: Iterable[str] = ()) -> Iterator[tuple[str, torch.Tensor]]:
        """(name, weight) of each tensor of the whole file `path` with `deltas` laid over it in turn; only those files are read that lead on
        from the weights kept. Raises, before it returns: OSError or SafetensorError for a file that can't be read, ValueError for a delta
        that isn't of the weights before it and for a wrong checksum. Nothing is kept then."""
        files = [safe_open(f, framework="pt", device="cpu") for f in (path, *deltas)]  # checks header and length
        heads = [f.metadata() or {} for f in files]
        sums = [h.get("checksum", "") for h in heads]
        names = files[0].keys()
        if not names:
            raise ValueError("no tensors in it")
        if not all(sums):
            if len(files) > 1:
                raise ValueError("deltas and the weights under them need checksums")
            self.state, self.checksum = {}, ""
            return ((name, files[0].get_tensor(name)) for name in names)
        state, at = self.state, max((i for i, s in enumerate(sums) if s == self.checksum), default=-1)
        self.state, self.checksum = {}, ""  # nothing half changed is ever taken for weights
        if at < len(files) - 1:
            if at < 0:
                state, at = {name: files[0].get_tensor(name).clone() for name in names}, 0
            for i in range(at + 1, len(files)):
                if heads[i].get("base") != sums[i - 1]:
                    raise ValueError(f"delta {i} of {len(files) - 1} is not of the weights before it")
                keys = files[i].keys()
                apply(state, {key: files[i].get_tensor(key) for key in keys})
            if checksum(state) != sums[-1]:
                raise ValueError("the weights don't have the checksum that was published with them")
        self.state, self.checksum = state, sums[-1]
        return iter(state.items())
