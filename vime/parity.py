"""`vime parity`: two variants of one run, over the same seeds, judged by an equivalence test of their curves (observe/equivalence.py)."""

import json
import sys
import time
from argparse import Namespace
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from vime import config, train
from vime.config import Config
from vime.errors import VimeError, said
from vime.observe.equivalence import draw, tost
from vime.observe.metrics import read
from vime.procs import spawn
from vime.trainer import checkpoint

METRICS = {"rollout/raw_reward": "margin_reward", "train/logprob_abs_diff": "margin_logprob"}  # -> its margin's option
OWN = ("seed", "name", "run_dir")  # keys that are set here
console = Console(stderr=True, highlight=False)


def command(args: Namespace) -> int:
    """Run what is not there yet, judge, draw. Returns 0: equivalent, 1: not shown to be. Raises: VimeError where it cannot be judged."""
    for option in METRICS.values():  # faults of margins, alpha and window show before any run, not after all of them
        tost([[0]], [[0]], getattr(args, option), args.alpha, args.window)
    if args.config and not (args.runs_a or args.runs_b):
        first = config.load(args.config, args.overrides)
        out = Path(args.out or f"{first.run_dir}/{first.name}-parity")
        a, b = both(args.config, {"a": [*args.overrides, *args.a], "b": [*args.overrides, *args.b]}, args.seeds, out)
    elif args.runs_a and args.runs_b and not (args.config or args.a or args.b):
        a, b, out = list(map(Path, args.runs_a)), list(map(Path, args.runs_b)), Path(args.out or "runs/parity")
    else:
        raise VimeError("nothing to judge", "give a run file with --a and --b, or finished runs with --runs-a and --runs-b, not both")
    seeds, values = curves(a, b)
    verdicts = {m: tost(values[m][0], values[m][1], getattr(args, option), args.alpha, args.window) for m, option in METRICS.items()}
    picture = out / "parity.png"
    names = (f"a: {' '.join(args.a or args.runs_a[:1]) or 'as is'}", f"b: {' '.join(args.b or args.runs_b[:1]) or 'as is'}")
    try:
        out.mkdir(parents=True, exist_ok=True)
        draw(picture, {m: (*values[m], v) for m, v in verdicts.items()}, names)
    except OSError as e:
        raise VimeError(f"{picture} cannot be written: {said(e)}", "give another --out") from e
    equivalent = all(v.equivalent for v in verdicts.values())
    if args.json:
        extra = ("equivalent", "half_width", "needed")
        found = {m: asdict(v) | {k: getattr(v, k) for k in extra} | {"said": str(v)} for m, v in verdicts.items()}
        runs = {"a": list(map(str, a)), "b": list(map(str, b))}
        print(json.dumps({"equivalent": equivalent, "metrics": found, "seeds": seeds, "runs": runs, "picture": str(picture)}))
    else:
        whole = f"seeds {', '.join(map(str, seeds))}: {'equivalent' if equivalent else 'not shown to be equivalent'}; picture {picture}"
        print("\n".join([*names, *(f"{m}: {v}" for m, v in verdicts.items()), whole]))
    return 0 if equivalent else 1


def both(file: str, sides: dict[str, list[str]], seeds: list[int], out: Path) -> list[list[Path]]:
    """The folders of each side's runs, <out>/<side>-seed<k>, finished on return: begun, resumed, or left alone where they were finished.
    Raises: VimeError; for faults of configurations, model and data before anything starts."""
    todo = []
    for k in dict.fromkeys(seeds):  # seed by seed, so that a slow change of the machine meets both sides
        for side, given in sides.items():
            if own := [o for o in given if o.partition("=")[0].strip() in OWN]:
                raise VimeError(f"{own[0]}: vime parity sets {', '.join(OWN)} itself", "leave it out; see --seeds and --out")
            overrides = [*given, f"seed={k}", f"name={side}-seed{k}", f"run_dir={json.dumps(str(out))}"]
            cfg = config.load(file, overrides)
            if (cfg.folder / "config.toml").exists() and config.load(cfg.folder / "config.toml") != cfg:
                raise VimeError(f"{cfg.folder} holds a run of another configuration", "give another --out, or remove it")
            if steps(cfg.folder) < cfg.train.steps:
                todo.append((cfg, overrides))
    for cfg, _ in todo[:2]:
        train.preflight(cfg)
    begun = time.monotonic()
    for i, (cfg, overrides) in enumerate(todo):
        left = f", {(time.monotonic() - begun) / i * (len(todo) - i) / 60:.0f} min left" if i else ""
        console.print(f"run {i + 1} of {len(todo)}: {cfg.folder}{left}; log {cfg.folder}.log", soft_wrap=True)
        run(file, cfg, overrides)
    return [[out / f"{side}-seed{k}" for k in dict.fromkeys(seeds)] for side in sides]


def steps(folder: Path) -> int:
    return max((int(r["step"]) for r in read(folder)), default=0)


def run(file: str, cfg: Config, overrides: list[str]) -> None:
    """One `vime train` to its end, from its newest checkpoint if it has one. Raises: VimeError with the end of its log where it fails."""
    how = ["--resume"] if checkpoint.latest(cfg.folder / "checkpoints") else ["--overwrite"] if cfg.folder.exists() else []
    log = Path(f"{cfg.folder}.log")
    child = spawn([sys.executable, "-m", "vime.cli", "train", file, *overrides, *how], log, {})
    try:
        with console.status("") as status:
            while child.returncode is None:
                status.update(f"{cfg.name}: step {steps(cfg.folder)} of {cfg.train.steps}")
                time.sleep(1)
    finally:
        child.stop()
    if child.returncode or steps(cfg.folder) < cfg.train.steps:
        tail = "\n".join(log.read_text(errors="replace").splitlines()[-15:])
        raise VimeError(f"{cfg.folder}: vime train ended with exit code {child.returncode}", "the same command goes on from here", tail)


def curves(a: list[Path], b: list[Path]) -> tuple[list[int], dict[str, list[Any]]]:
    """Seeds, and of each metric both arrays [seeds, steps], from the runs' folders, paired by the seeds in their config.toml.
    Raises: VimeError where seeds or steps don't match, or a value is missing or not finite."""
    sides = [{config.load(f / "config.toml").seed: f for f in folders} for folders in (a, b)]
    if sorted(sides[0]) != sorted(sides[1]) or (len(a), len(b)) != (len(sides[0]), len(sides[1])):
        of = [" ".join(str(config.load(f / "config.toml").seed) for f in folders) for folders in (a, b)]
        raise VimeError(f"runs of seeds {of[0]} on side a, {of[1]} on side b", "one run of each seed on both sides")
    seeds = sorted(sides[0])
    rows = {side[k]: [r for r in read(side[k]) if r["step"] > 0] for side in sides for k in seeds}
    if len({len(r) for r in rows.values()}) > 1 or not all(rows.values()):
        raise VimeError("runs of " + ", ".join(f"{len(r)} steps: {f}" for f, r in rows.items()), "all must have the same steps")
    if gaps := [f"{f}/metrics.jsonl, step {r['step']}: {m}" for f in rows for r in rows[f] for m in METRICS if r.get(m) is None]:
        raise VimeError(f"{len(gaps)} value(s) missing or not finite, first {gaps[0]}", "runs with a gap cannot be judged")
    return seeds, {m: [np.array([[r[m] for r in rows[side[k]]] for k in seeds]) for side in sides] for m in METRICS}
