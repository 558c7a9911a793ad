"""Sending side: whole weights as one safetensors file that servers read, in shared memory or in the run's folder."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from vime.config import Config
from vime.errors import VimeError
from vime.trainer.parallel import agree, full_tensors

KEEP = 2  # a server that reads the previous version while the next one appears must still find it
CANARY_LENGTH = 24


def location(cfg: Config) -> Path:
    """Folder of the published files. With transport "shm" it lies in /dev/shm, named after the run's folder, and outlives the
    processes: whoever ends the run removes it."""
    if cfg.weights.transport == "file":
        return cfg.folder.resolve() / "weights"
    return Path("/dev/shm") / f"vime-{hashlib.sha256(str(cfg.folder.resolve()).encode()).hexdigest()[:16]}"


def server_dtype(cfg: Config) -> torch.dtype:
    """The dtype that servers keep weights in: [vllm] dtype where it is set, else train.dtype."""
    name = {"float": "float32", "half": "float16", "auto": cfg.train.dtype}.get(d := str(cfg.vllm.get("dtype", cfg.train.dtype)), d)
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise VimeError(f"vllm.dtype = {name!r} is not a dtype", "float32 or bfloat16")
    return dtype


def publish(model: PreTrainedModel, cfg: Config, version: int, rank: int) -> str:
    """Write weights `version` under Hugging Face names (tied copies left out) and drop versions older than the previous one. A
    collective. The file appears whole or not at all; without room for it every rank raises VimeError. Returns: its path, on every rank."""
    folder = location(cfg)
    path, error = folder / f"v{version}.safetensors", None
    tensors = full_tensors(model, server_dtype(cfg))
    if rank == 0:
        partial = path.with_suffix(".tmp")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            save_file({k: v.contiguous() for k, v in tensors.items()}, partial, metadata={"format": "pt"})
            os.replace(partial, path)
            for old in sorted(folder.glob("v*.safetensors"), key=lambda p: p.stat().st_mtime_ns)[:-KEEP]:
                old.unlink()
        except (OSError, SafetensorError) as e:
            partial.unlink(missing_ok=True)
            fix = 'free some, or set weights.transport = "file"' if cfg.weights.transport == "shm" else "free some space"
            error = VimeError(f"weights v{version} could not be written to {folder}: {e}", fix)
    agree(error)
    return str(path)


def canary_tokens(vocab_size: int) -> list[int]:
    """A fixed prompt spread over the vocabulary: unlikely tokens, whose logprobs move with any change of the weights."""
    return [(7919 * i + 11) % vocab_size for i in range(CANARY_LENGTH)]
