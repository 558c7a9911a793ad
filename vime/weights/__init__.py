"""Weights on their way from trainer to servers: what both sides, and the driver, must know. Imports nothing heavy."""

import hashlib
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from vime.config import Config
from vime.errors import VimeError

# How a server begins its refusal of an update that it found wrong before it touched its model.
UNTOUCHED = "weights refused, the model is unchanged"


@dataclass(frozen=True)
class Canary:
    """A fixed prompt and the trainer's logprobs of its tokens 1..n-1 given their prefix, under the published weights (temperature 1)."""

    token_ids: list[int]
    log_probs: list[float]


class Published(NamedTuple):
    """Weights of one version as files: a whole one and the deltas to lay over it, none unless weights.delta is set."""

    path: str  # "": they were sent, and are written when a server needs them
    deltas: tuple[str, ...]
    metrics: dict[str, float]  # weights/bytes of the newest file, weights/full_bytes, ...


class Receiver(NamedTuple):
    """A server that takes weights over NCCL."""

    engine: int
    url: str
    workers: int  # its processes that hold a part of the model, TP x PP x DP
    epoch: int  # another number where its process may be another one


class Route(NamedTuple):
    """One NCCL group: trainer rank `sender` is number 0 in it, the workers of each server follow from that server's offset on."""

    sender: int
    receivers: list[tuple[Receiver, int]]  # with their offsets
    size: int


def routes(receivers: list[Receiver], ranks: int) -> list[Route]:
    """Deal the servers out to as many of trainer ranks 0 to `ranks` - 1 as can send at once: rank 0, and others as far apart as may be."""
    n = min(len(receivers), ranks)
    dealt = [receivers[k::n] for k in range(n)]
    ends = [list(accumulate((r.workers for r in part), initial=1)) for part in dealt]
    return [Route(k * ranks // n, list(zip(dealt[k], ends[k])), ends[k][-1]) for k in range(n)]


def location(cfg: Config) -> Path:
    """Folder of the published files. With transport "shm" it lies in /dev/shm and outlives the processes: whoever ends the run removes it."""
    if cfg.weights.transport != "shm":
        return cfg.folder.resolve() / "weights"
    return Path("/dev/shm") / f"vime-{hashlib.sha256(str(cfg.folder.resolve()).encode()).hexdigest()[:16]}"


def server_dtype(cfg: Config) -> str:
    """Torch's name of the dtype that servers keep weights in: [vllm] dtype where it is set, else train.dtype."""
    given = str(cfg.vllm.get("dtype", cfg.train.dtype))
    name = {"float": "float32", "half": "float16", "auto": cfg.train.dtype}.get(given, given)
    if name not in ("float32", "bfloat16", "float16"):
        raise VimeError(f"vllm.dtype = {given!r} is not supported", "float32 or bfloat16")
    return name
