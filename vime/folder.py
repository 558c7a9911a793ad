"""A run's folder <run_dir>/<name>: what is in it, whose it is, and where a resume begins."""

import fcntl
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from vime import config as configs
from vime.config import Config
from vime.errors import VimeError, blamed, said
from vime.trainer import checkpoint

LOCK = ".lock"  # held by the run that is at work in the folder; says which
PARTS = ("samples", "checkpoints", "logs")


class Start(NamedTuple):
    """Where a run begins: at step 0, or after that of the checkpoint `ckpt` with its `state`."""

    ckpt: Path | None = None
    state: dict[str, Any] = {}
    step: int = 0


def _written(folder: Path) -> AbstractContextManager[None]:
    return blamed(f"{folder} cannot be written", OSError, ValueError, fix="give another run_dir=...")


def _held(folder: Path) -> set[str]:
    """Names of what lies in the folder. Raises: VimeError where it is none, or cannot be made."""
    with _written(folder):
        there = next(p for p in (folder, *folder.parents) if p.exists())
        if not there.is_dir():
            raise VimeError(f"{there} is not a folder", "remove it, or give another name=... or run_dir=...")
        if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
            raise PermissionError(f"no permission to write into {there}")
        return {p.name for p in folder.iterdir()} - {LOCK} if there == folder else set()


def look(cfg: Config, resume: bool, overwrite: bool) -> Start:
    """Where the run would begin; changes nothing. Raises: VimeError where it must not begin."""
    folder = cfg.folder
    held = _held(folder)
    if not resume:
        if held and not overwrite:
            raise VimeError(f"{folder} exists already", "continue it with --resume, replace it with --overwrite, or give another name=...")
        if held and "config.toml" not in held:
            raise VimeError(f"{folder} does not look like a run: no config.toml in it, so --overwrite leaves it alone", "give another name=...")
        return Start()
    ckpt = checkpoint.latest(folder / "checkpoints")
    if ckpt is None:
        raise VimeError(f"{folder}/checkpoints holds no complete checkpoint to resume from", "start without --resume")
    state = checkpoint.read_state(ckpt)
    if state["step"] >= cfg.train.steps:
        at = f"{ckpt} is at step {state['step']} of train.steps = {cfg.train.steps}"
        raise VimeError(f"{at}: a resume would do nothing", "raise train.steps")
    return Start(ckpt, state, state["step"])


@contextmanager
def opened(cfg: Config, resume: bool, overwrite: bool, check: Callable[[Start], object] = lambda start: None) -> Iterator[Start]:
    """The run's folder made, emptied first with `overwrite`, and kept from other runs for as long as the block lasts. What it holds changes
    only once `check` of the start has raised nothing.

    Raises: VimeError as `look`, where another run is at work in the folder, and where it cannot be written.
    """
    folder = cfg.folder
    look(cfg, resume, overwrite)
    with _written(folder):
        folder.mkdir(parents=True, exist_ok=True)
        lock = open(folder / LOCK, "a+")  # noqa: SIM115 (closed below)
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            lock.seek(0)
            who = f"process {lock.read().strip() or '?'} is at work in it" if isinstance(e, BlockingIOError) else f"it cannot be locked: {said(e)}"
            raise VimeError(f"{folder}: {who}", "wait for that run, stop it, or give another name=...") from e
        start = look(cfg, resume, overwrite)  # again: the run that held it may have changed it
        check(start)
        with _written(folder):
            lock.truncate(0)
            lock.write(f"{os.getpid()} on {platform.node()}\n")
            lock.flush()
            for path in folder.iterdir() if overwrite else ():
                if path.is_dir() and not path.is_symlink():
                    shutil.rmtree(path)
                elif path.name != LOCK:
                    path.unlink()
            (folder / "config.toml").write_text(configs.dump(cfg), "utf-8")
            for part in PARTS:
                (folder / part).mkdir(exist_ok=True)
        yield start


def summary(cfg: Config, resume: bool, overwrite: bool) -> str:
    """What a run would do with its folder, for --dry-run; that it needs --resume or --overwrite is no error there."""
    if _held(cfg.folder) and not (resume or overwrite):
        return f"{cfg.folder} exists already: give --resume, --overwrite or another name=..."
    start = look(cfg, resume, overwrite)
    if start.ckpt:
        return f"resume after step {start.step} of {cfg.train.steps} from {start.ckpt}, {len(start.state['groups'])} groups under way"
    return f"{cfg.folder}, {'emptied first' if cfg.folder.exists() and overwrite else 'new'}"
