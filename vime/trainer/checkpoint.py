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

from vime.errors import VimeError

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
