"""Checkpoints: <run>/checkpoints/step_000010/{hf/, trainer/, state.json}; a folder is there whole or not at all. trainer/ holds float32
weights and optimizer in shards that any number of ranks can read (state.py), critic/ those of a critic with ranks of its own."""

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vime.errors import VimeError, said

PARTIAL, FULL = ".tmp", "is the disk full? earlier checkpoints are intact"


def write(folder: Path, step: int, state: dict[str, Any], save: Callable[[Path], None], keep: int) -> Path:
    """Make checkpoint `step`: `save(tmp)` fills it, then all but the newest `keep` are removed. Raises: VimeError where it cannot be written."""
    tmp = begin(folder, step, state)
    with whole(tmp):
        save(tmp)
        return commit(tmp, keep)


def begin(folder: Path, step: int, state: dict[str, Any]) -> Path:
    """The folder to fill, which `commit` makes a checkpoint."""
    tmp = folder / f"step_{step:06d}{PARTIAL}"
    with whole(tmp):
        shutil.rmtree(tmp, ignore_errors=True)
        tmp.mkdir(parents=True)
        (tmp / "state.json").write_text(json.dumps(state))
    return tmp


def commit(tmp: Path, keep: int) -> Path:
    """Make what `begin` began, now filled, visible under its name, and remove all but the newest `keep`."""
    folder, final = tmp.parent, tmp.with_name(tmp.name.removesuffix(PARTIAL))
    sync(tmp)
    shutil.rmtree(final, ignore_errors=True)  # there only where a resume repeated this step
    os.rename(tmp, final)
    sync(folder, deep=False)
    for path in [*complete(folder)[:-keep], *folder.glob(f"step_*{PARTIAL}")]:  # and partial ones that a killed run left
        shutil.rmtree(path)
    return final


@contextmanager
def whole(tmp: Path) -> Iterator[None]:
    """Nothing is left of `tmp` where the block fails. Raises: VimeError for what the file system refuses."""
    try:
        yield
    except BaseException as e:
        shutil.rmtree(tmp, ignore_errors=True)
        if isinstance(e, OSError):
            raise VimeError(f"checkpoint {tmp} could not be written: {e}", "earlier checkpoints are intact") from e
        raise


def sync(folder: Path, deep: bool = True) -> None:
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
        whole += [*state["fresh"], state["ledger"]["step"], *state["ledger"]["settled"]]
        if not all(type(n) is int for n in whole) or not all(type(g["ready"]) is bool for g in groups):
            raise TypeError("step, prompts.given, counts, groups, fresh and ledger must be whole numbers, groups.*.ready true or false")
        if lacks := [name for name in ["trainer", *(["groups.jsonl"] if groups else [])] if not (ckpt / name).exists()]:
            raise FileNotFoundError(f"no {' and no '.join(lacks)} beside it")
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
        raise VimeError(f"{ckpt}/state.json is damaged: {said(e)}", f"remove {ckpt}: a resume then takes the one before it") from e
    return dict(state)


def refuse_other_model(ckpt: Path, model: str) -> None:
    """Raises: VimeError where the model folder has another shape than the one that the checkpoint continues; names what differs."""
    try:
        found = [json.loads((folder / "config.json").read_text("utf-8")) for folder in (ckpt / "hf", Path(model))]
        ours, theirs = (c | (c.get("text_config") or {}) for c in found)
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise VimeError(f"{ckpt}: its model's configuration cannot be compared with that of {model}: {said(e)}") from e
    shape = [k for k in sorted({*ours, *theirs}) if k in ("model_type", "vocab_size", "tie_word_embeddings") or k.endswith(("_size", "_dim"))
             or k.startswith("num_")]  # fmt: skip
    if differs := [f"{k} is {ours.get(k)} there, {theirs.get(k)} here" for k in shape if ours.get(k) != theirs.get(k)]:
        raise VimeError(f"{ckpt} is a checkpoint of another model than {model}: {'; '.join(differs[:3])}", "give the model it was made from")


def export(run: Path, step: int | None, out: Path) -> Path:
    """Copy the Hugging Face folder of the run's checkpoint of `step`, None: the newest, to `out`; whole or not at all. Raises: VimeError
    where there is none, and where `out` holds something already."""
    found = complete(run / "checkpoints")
    steps = [int(p.name.removeprefix("step_")) for p in found]
    if not found or (step is not None and step not in steps):
        raise VimeError(f"{run}/checkpoints holds no complete checkpoint{'' if step is None else f' of step {step}'}",
                        f"there are those of steps {', '.join(map(str, steps))}" if steps else "is it a run's folder?")  # fmt: skip
    tmp = out.with_name(out.name + PARTIAL)
    try:
        if out.exists() and (not out.is_dir() or any(out.iterdir())):
            raise VimeError(f"{out} exists already", "remove it or give another --out")
        shutil.rmtree(tmp, ignore_errors=True)
        shutil.copytree(found[-1 if step is None else steps.index(step)] / "hf", tmp)
        os.rename(tmp, out)
    except OSError as e:
        shutil.rmtree(tmp, ignore_errors=True)
        raise VimeError(f"cannot write {out}: {said(e)}") from e
    return out
