"""Checkpoints: <run>/checkpoints/step_000010/{hf/, trainer/, state.json}; a folder is there whole or not at all.

hf/ loads with from_pretrained, trainer/ holds float32 weights and optimizer in shards that any number of ranks can read (state.py).
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vime.errors import VimeError, said

PARTIAL, FULL = ".tmp", "is the disk full? earlier checkpoints are intact"


def write(folder: Path, step: int, state: dict[str, Any], save: Callable[[Path], None], keep: int) -> Path:
    """Make checkpoint `step` in `folder`: `save(tmp)` fills it, state.json completes it, a rename makes it visible. Then all but the
    newest `keep` are removed. Raises: VimeError where it cannot be written; earlier checkpoints stay as they were."""
    final = folder / f"step_{step:06d}"
    tmp = final.with_name(final.name + PARTIAL)
    try:
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
        save(tmp)
        (tmp / "state.json").write_text(json.dumps(state))
        sync(tmp)
        shutil.rmtree(final, ignore_errors=True)  # there only where a resume repeated this step
        os.rename(tmp, final)
        sync(folder, deep=False)
    except BaseException as e:
        shutil.rmtree(tmp, ignore_errors=True)
        if isinstance(e, OSError):
            raise VimeError(f"checkpoint of step {step} could not be written to {folder}: {e}", "earlier checkpoints are intact") from e
        raise
    for path in [*complete(folder)[:-keep], *folder.glob(f"step_*{PARTIAL}")]:  # and partial ones that a killed run left
        shutil.rmtree(path)
    return final


def sync(folder: Path, deep: bool = True) -> None:
    """fsync a folder and, if deep, everything in it."""
    for path in [*(folder.rglob("*") if deep else ()), folder]:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def complete(folder: Path) -> list[Path]:
    """Complete checkpoints, oldest first."""
    return sorted(p.parent for p in folder.glob("step_*/state.json") if not p.parent.name.endswith(PARTIAL))


def latest(folder: Path) -> Path | None:
    """The newest complete checkpoint; partial ones are ignored."""
    return found[-1] if (found := complete(folder)) else None


def read_state(ckpt: Path) -> dict[str, Any]:
    """A checkpoint's state.json. Raises: VimeError where it, or what must lie beside it, is not as `write` left it."""
    try:
        state = json.loads((ckpt / "state.json").read_text("utf-8"))
        step, groups = state["step"], state["groups"]
        whole = [step, state["prompts"]["given"], *state["counts"].values(), *(g[k] for g in groups for k in ("group_index", "oldest"))]
        if not all(type(n) is int for n in whole) or not all(type(g["ready"]) is bool for g in groups):
            raise TypeError("step, prompts.given, counts and groups must be whole numbers, groups.*.ready true or false")
        if lacks := [name for name in ["trainer", *(["groups.jsonl"] if groups else [])] if not (ckpt / name).exists()]:
            raise FileNotFoundError(f"no {' and no '.join(lacks)} beside it")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise VimeError(f"{ckpt}/state.json is damaged: {said(e)}", f"remove {ckpt}: a resume then takes the one before it") from e
    return dict(state)
