"""A rank's share of a checkpoint: weights, optimizer, random state; and the Hugging Face folder that rank 0 writes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from vime.errors import VimeError
from vime.trainer.checkpoint import FULL
from vime.trainer.parallel import agree, full_tensors


def tree(model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The tensors themselves, by name: weights (tied copies left out) and AdamW's moments. Loading writes into them in place."""
    tied = set(model.all_tied_weights_keys or {})
    moments: dict[str, Any] = {}
    for name, p in model.named_parameters():
        if not p.requires_grad:
            continue
        if not optimizer.state[p]:
            optimizer.state[p] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        moments |= {f"{name}.{k}": v for k, v in optimizer.state[p].items()}
    return {"model": {k: v for k, v in model.state_dict().items() if k not in tied}, "optimizer": moments}


def save_rank(folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, source: Path, dtype: torch.dtype) -> None:
    """This rank's share of a checkpoint, into an existing folder; a collective. `source`: the model folder whose tokenizer and
    configuration go along. Raises: VimeError on every rank where any rank cannot write."""
    rank, error = dist.get_rank(), None
    full = full_tensors(model, dtype)
    try:
        (folder / "trainer").mkdir(exist_ok=True)
        if rank == 0:
            export(folder / "hf", full, source, dtype)
        torch.save({"torch": torch.get_rng_state()}, folder / "trainer" / f"rng_{rank}.pt")
    except (OSError, RuntimeError, SafetensorError) as e:
        error = VimeError(f"checkpoint {folder.name} could not be written: {e}", FULL)
    agree(error)
    try:
        dcp.save(tree(model, optimizer), checkpoint_id=folder / "trainer")
    except (CheckpointException, Exception) as e:  # the former is no Exception; it carries every rank's error to all of them
        raise VimeError(f"checkpoint {folder.name} could not be written: {last_line(e)}", FULL) from e


def last_line(e: BaseException) -> str:
    return (str(e).strip() or type(e).__name__).splitlines()[-1]


def export(folder: Path, tensors: dict[str, torch.Tensor], source: Path, dtype: torch.dtype) -> None:
    """A plain Hugging Face folder: model.safetensors, config.json, and the source's tokenizer and generation files."""
    folder.mkdir(parents=True, exist_ok=True)
    for f in source.iterdir():
        if f.is_file() and f.suffix in (".json", ".jinja", ".txt", ".model", ".tiktoken") and not f.name.endswith(".index.json"):
            shutil.copyfile(f, folder / f.name)
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": str(dtype).removeprefix("torch.")}, indent=2))
    save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors", metadata={"format": "pt"})


def load_rank(folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer) -> None:
    """Weights, optimizer and, where this rank existed when it was saved, its random state; a collective."""
    try:
        dcp.load(tree(model, optimizer), checkpoint_id=folder / "trainer")
    except (CheckpointException, Exception) as e:
        raise VimeError(f"checkpoint {folder} does not load: {last_line(e)}", "is it of this model?") from e
    rng = folder / "trainer" / f"rng_{dist.get_rank()}.pt"
    if rng.exists():
        torch.set_rng_state(torch.load(rng)["torch"])
