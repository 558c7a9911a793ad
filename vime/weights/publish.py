"""Sending side: whole weights as one safetensors file that servers read, in shared memory or in the run's folder."""

from __future__ import annotations

import os

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedModel

from vime.config import Config
from vime.errors import VimeError
from vime.trainer.parallel import agree, full_tensors
from vime.weights import location, server_dtype

KEEP = 2  # a server that reads the previous version while the next one appears must still find it
CANARY_LENGTH = 24


def publish(model: PreTrainedModel, cfg: Config, version: int, rank: int) -> str:
    """Write weights `version` under Hugging Face names (tied copies left out) and drop versions older than the previous one. A
    collective. The file appears whole or not at all; without room for it every rank raises VimeError. Returns: its path, on every rank."""
    folder = location(cfg)
    path, error = folder / f"v{version}.safetensors", None
    tensors = full_tensors(model, getattr(torch, server_dtype(cfg)))
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


def canary_tokens(vocab_size: int, but: int | None = None) -> list[int]:
    """A fixed prompt spread over the vocabulary: unlikely tokens, whose logprobs move with any change of the weights. `but`: not this one."""
    return [t if t != but else 1 for t in ((7919 * i + 11) % vocab_size for i in range(CANARY_LENGTH))]
