"""A rank's share of a checkpoint: weights, optimizer, random state; and the Hugging Face folder that rank 0 writes."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException
from transformers import PreTrainedModel

from vime.errors import VimeError
from vime.trainer.checkpoint import FULL
from vime.trainer.parallel import agree, whole_parts

Parts = dict[str, tuple[PreTrainedModel, torch.optim.Optimizer]]  # by prefix: "" the model that is trained, "critic." its critic


def tree(parts: Parts) -> dict[str, Any]:
    """The tensors themselves, by name: weights (tied copies left out; of a model with adapters these alone) and AdamW's moments. Loading writes into them in place."""
    out: dict[str, Any] = {}
    for prefix, (model, optimizer) in parts.items():
        left = set(model.all_tied_weights_keys or {})
        if hasattr(model, "peft_config"):  # frozen weights are in the model's folder
            left |= {k for k in model.state_dict() if ".lora_" not in k}
        moments: dict[str, Any] = {}
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            if not optimizer.state[p]:
                optimizer.state[p] = {"step": torch.zeros(()), "exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            moments |= {f"{name}.{k}": v for k, v in optimizer.state[p].items()}
        out |= {f"{prefix}model": {k: v for k, v in model.state_dict().items() if k not in left}, f"{prefix}optimizer": moments}
    return out


class Share(NamedTuple):
    tree: dict[str, Any]
    full: dict[str, torch.Tensor]  # whole weights in `dtype`, on rank 0
    rng: torch.Tensor
    dtype: torch.dtype


def share(parts: Parts, dtype: torch.dtype, copied: bool) -> Share:
    """This rank's share of a checkpoint; a collective. `copied`: in host memory, so that training may go on; else the live tensors."""
    tensors, whole = tree(parts), whole_parts(parts[""][0], dtype, 1 << 30)[1] if "" in parts else ()
    full = {name: t for part in whole for name, t in part.items()}
    if copied:
        tensors = {k: {n: v.detach().to("cpu", copy=True) for n, v in part.items()} for k, part in tensors.items()}
        full = {k: v.detach().clone() for k, v in full.items()}
    return Share(tensors, full, torch.get_rng_state(), dtype)


def save_share(folder: Path, part: Share, source: Path, group: dist.ProcessGroup | None = None, at: str = "trainer") -> None:
    """Write it into folder `at` of an existing one; a collective of `group`. `source`: whose tokenizer goes along. Raises: VimeError on every rank."""
    rank, error = dist.get_rank(), None
    try:
        (folder / at).mkdir(exist_ok=True)
        if part.full:
            export(folder / "hf", part.full, source, part.dtype)
        torch.save({"torch": part.rng}, folder / at / f"rng_{rank}.pt")
    except (OSError, RuntimeError, SafetensorError) as e:
        error = VimeError(f"checkpoint {folder.name} could not be written: {e}", FULL)
    agree(error, group)
    try:
        dcp.save(part.tree, checkpoint_id=folder / at, process_group=group)
    except (CheckpointException, Exception) as e:  # the former is no Exception; it carries every rank's error to all of them
        raise VimeError(f"checkpoint {folder.name} could not be written: {last_line(e)}", FULL) from e


def misfit(shapes: dict[str, tuple[int, ...]], held: dcp.Metadata) -> str:
    """The first difference between the tensors of a model and its optimizer and those of a checkpoint; empty where there is none."""
    found = {k: tuple(getattr(v, "size", ())) for k, v in held.state_dict_metadata.items()}
    for names, what in ((shapes.keys() - found.keys(), "it lacks"), (found.keys() - shapes.keys(), "the model has no")):
        if names:
            return f"{what} {min(names)}" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
    return next((f"{k} is {found[k]} in it, {shape} in the model" for k, shape in shapes.items() if found[k] != shape), "")


def cut_short(folder: Path, held: dcp.Metadata) -> str:
    """The first of a checkpoint's files that is missing, or shorter than what lies in it; empty where there is none."""
    ends: dict[str, int] = {}
    for at in (held.storage_data or {}).values():
        ends[at.relative_path] = max(ends.get(at.relative_path, 0), at.offset + at.length)
    for name, end in sorted(ends.items()):
        if not (folder / name).exists():
            return f"its shard {name} is missing"
        if (size := (folder / name).stat().st_size) < end:
            return f"its shard {name} is cut short: {size} bytes of {end}"
    return ""


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


def load_rank(folder: Path, parts: Parts, at: str = "trainer") -> None:
    """Weights, optimizer and, where this rank was saved, random state; a collective. Raises: VimeError naming what is not as this model needs."""
    wanted = tree(parts)
    try:
        held = dcp.FileSystemReader(folder / at).read_metadata()
        ranks: list[Any] = [None] * dist.get_world_size()  # where they have different layers, the checkpoint has those of all
        dist.all_gather_object(ranks, {f"{part}.{name}": tuple(v.shape) for part, tensors in wanted.items() for name, v in tensors.items()})
        if fault := misfit({k: shape for rank in ranks for k, shape in rank.items()}, held) or cut_short(folder / at, held):
            raise ValueError(fault)
        dcp.load(wanted, checkpoint_id=folder / at)
    except (CheckpointException, Exception) as e:
        fix = "is it whole, of this model, and of a run with the same algo.advantage_estimator, critic_ranks and [lora]? an earlier one may be"
        raise VimeError(f"checkpoint {folder} does not load: {last_line(e)}", fix) from e
    rng = folder / at / f"rng_{dist.get_rank()}.pt"
    if rng.exists():
        torch.set_rng_state(torch.load(rng, weights_only=True)["torch"])
