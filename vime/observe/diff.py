"""`vime diff RUN RUN`: the first step, and the first field in it, where two runs part. Fields are compared in the order in which one causes the
next: samples (prompt, logprobs of the tokens that are the same, tokens, mask, reward), the trainer's logprobs, then metrics."""

import json
import re
from collections.abc import Iterator
from contextlib import suppress
from itertools import takewhile
from pathlib import Path
from typing import Any

import orjson

from vime.errors import VimeError
from vime.observe import metrics

FIELDS = ("prompt_tokens", "prompt", "log_probs", "tokens", "loss_mask", "status", "reward")  # of a sample
# time, load and memory differ between any two runs
UNEQUAL = re.compile(r"^(perf|health|data|weights)/|^rollout/(engine|spec)_|^rollout/(retries|continued|in_flight|ready|buffered|held_back)$")


def samples(folder: Path, step: int) -> dict[int, dict[str, Any]]:
    """The rows of samples/step_N.jsonl by uid; {} where there is none. A line that is no sample is left out."""
    found = {}
    file = folder / "samples" / f"step_{step:06d}.jsonl"
    for line in file.read_bytes().splitlines() if file.exists() else ():
        with suppress(orjson.JSONDecodeError, KeyError, AttributeError):
            row = orjson.loads(line)
            found[row.get("uid", row["index"])] = row
    return found


def train_log_probs(folder: Path, step: int) -> dict[str, list[float | None]]:
    """What the trainer ranks computed for a step's trained tokens, by uid."""
    found: dict[str, list[float | None]] = {}
    for file in sorted((folder / "samples").glob(f"step_{step:06d}.train-*.json")):
        found |= orjson.loads(file.read_bytes())
    return found


def apart(a: Any, b: Any, tol: float) -> str:
    """Where two values differ by more than `tol`, as text; "" where they don't."""
    if isinstance(a, list) and isinstance(b, list):
        at = next((i for i, (x, y) in enumerate(zip(a, b)) if apart(x, y, tol)), min(len(a), len(b)))
        both = at < min(len(a), len(b))
        return "" if at == len(a) == len(b) else f"[{at}] {apart(a[at], b[at], tol)}" if both else f" has {len(a)} | {len(b)} entries"
    number = all(isinstance(x, int | float) and not isinstance(x, bool) for x in (a, b))
    same = abs(a - b) <= tol if number else a == b
    return "" if same else f"{json.dumps(a, ensure_ascii=False):.80} | {json.dumps(b, ensure_ascii=False):.80}"


def at_step(a: Path, b: Path, step: int, rows: list[dict[str, Any]], tol: float) -> Iterator[str]:
    """Every difference of a step, in causal order."""
    of, seen = [samples(f, step) for f in (a, b)], [train_log_probs(f, step) for f in (a, b)]
    if all(of):
        for uid in sorted(set(of[0]) ^ set(of[1])):
            yield f"sample {uid} is in {(a if uid in of[0] else b)} only"
    both = sorted(set(of[0]) & set(of[1]))
    for name in FIELDS:
        for uid in both:
            x, y = (o[uid] for o in of)
            same = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(x["tokens"], y["tokens"]))))
            pair = [r[name][:same] if name == "log_probs" else r[name] for r in (x, y) if name in r]  # those of other tokens say nothing
            if len(pair) == 2 and (what := apart(pair[0], pair[1], tol)):
                yield f"sample {uid} (group {x['group_index']}) {name}{'' if what[0] in '[ ' else ' '}{what}"
    for key in sorted(set(seen[0]) & set(seen[1]), key=int):
        if what := apart(seen[0][key], seen[1][key], tol):
            yield f"sample {key} trainer's log_probs{what}"
    known = [k for k in rows[0] if k in rows[1] and not UNEQUAL.search(k)]
    for key in sorted(known, key=lambda k: (not k.startswith("rollout/"), k)):
        if what := apart(rows[0][key], rows[1][key], tol):
            yield f"metric {key} {what}"


def command(a: str, b: str, tol: float) -> int:
    """Print where the runs part. Returns 1 where they do, 0 where they are the same in all steps that both have."""
    folders = [Path(a), Path(b)]
    runs = [{r["step"]: r for r in metrics.read(f)} for f in folders]
    for folder, rows in zip(folders, runs):
        if not rows:
            raise VimeError(f"{folder} holds no metrics.jsonl with a finished step", "give the folders of two runs, <run_dir>/<name>")
    steps = sorted(set(runs[0]) & set(runs[1]))
    for step in steps:
        if found := list(at_step(folders[0], folders[1], step, [r[step] for r in runs], tol)):
            print(f"step {step}: {found[0]}")
            for line in found[1:10]:
                print(f"  also {line}")
            if len(found) > 10:
                print(f"  and {len(found) - 10} more differences in this step")
            return 1
    left = [f"{f} goes on to step {max(rows)}" for f, rows in zip(folders, runs) if max(rows) > max(steps, default=-1)]
    print("; ".join([f"the same in {len(steps)} steps that both have", *left]))
    return 0
