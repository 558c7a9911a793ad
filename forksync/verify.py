"""Gate 2, behaviour: functional, precision and convergence parity, cheap before dear; and the control loop around both gates."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forksync import base as knowledge
from forksync.base import FOLDER, Config, Gate, Metric, digest
from forksync.fix import round_of, settle
from forksync.gate import Result, check
from forksync.git import STUCK, ForksyncError, Git
from forksync.sync import Item, Pair, Run, open_run

KINDS = ("functional", "precision", "convergence")
# Student's t, one-sided 5 %, for 1 .. 30 degrees of freedom
T95 = [6.314, 2.920, 2.353, 2.132, 2.015, 1.943, 1.895, 1.860, 1.833, 1.812, 1.796, 1.782, 1.771, 1.761, 1.753]
T95 += [1.746, 1.740, 1.734, 1.729, 1.725, 1.721, 1.717, 1.714, 1.711, 1.708, 1.706, 1.703, 1.701, 1.699, 1.697]


@dataclass
class Verdict:
    name: str
    kind: str
    said: str
    excess: float = 0.0  # by how much it fails, in the gate's own unit
    log: str = ""
    ok: bool = False
    seconds: float = 0.0


def gates(config: Config) -> list[Gate]:
    """Cheap before dear. Raises: ForksyncError without a functional gate."""
    found = sorted(config.gate, key=lambda g: KINDS.index(g.kind))
    if not found or found[0].kind != "functional":
        raise ForksyncError("config.toml has no functional gate", 'no tests, no loop: add [[gate]] kind = "functional" run = "pytest -q"')
    return found


def verify(p: Pair, root: Path, tree: str) -> list[Verdict]:
    """Run the gates on a work tree whose content is `tree`. Stops after the first kind that fails."""
    out: list[Verdict] = []
    for gate in gates(p.base.config):
        if all(v.ok or v.kind == gate.kind for v in out):
            begun = time.monotonic()
            said, excess, log = judged(p, gate, root, tree)
            out.append(Verdict(gate.name, gate.kind, said, excess, log, excess <= 0, round(time.monotonic() - begun, 1)))
    return out


def judged(p: Pair, gate: Gate, root: Path, tree: str) -> tuple[str, float, str]:
    """What a gate says, by how much it fails (<= 0: passed), and the end of its log."""
    sides: dict[str, list[Path]] = {"fork": [], "upstream": []}
    for seed in range(gate.seeds):
        for side in ["fork"] + ["upstream"] * gate.run_upstream:
            where, id_ = (root, tree) if side == "fork" else (upstream_files(p), p.base.lock.upstream_commit)
            code, log, out = ran(p, gate, where, id_, seed, side == "upstream" or gate.kind != "functional")
            if code:
                return f"{side}, seed {seed}: {code}", 1.0, log
            sides[side].append(out)
    if gate.judge:
        command = re.sub(r"\{(fork|upstream)(/[^}]*)?\}", lambda m: shlex.join(f"{x}{m[2] or ''}" for x in sides[m[1]]), gate.judge)
        code, stdout, err = shell(command.replace("{python}", shlex.quote(sys.executable)), root, gate.timeout_s)
        if not gate.judge_key or code not in ("", "exit code 1"):
            return code or "equivalent", float(bool(code)), stdout + err
        with contextlib.suppress(ValueError, KeyError, TypeError, IndexError):
            value: Any = json.loads(stdout.strip().splitlines()[-1])
            for key in gate.judge_key.split("."):
                value = value[key]
            return f"{gate.judge_key} = {value}", float(not value), stdout
        return f"the judge's output has no {gate.judge_key}", 1.0, stdout + err
    said = "passed"
    for name, metric in gate.metrics.items():
        try:
            values = [[json.loads((f / "metrics.json").read_text())[name] for f in sides[s]] for s in sides]
            mine, theirs = ([[float(x) for x in (v if isinstance(v, list) else [v])] for v in side] for side in values)
        except (OSError, ValueError, KeyError, TypeError) as e:
            return f"metrics.json of {{out}} has no {name} ({type(e).__name__})", 1.0, ""
        excess, words = beyond(metric, mine, theirs)
        said = f"{name}: {words}"
        if not excess <= 0:
            return said, excess, ""
    return said, 0.0, ""


def beyond(metric: Metric, mine: list[list[float]], theirs: list[list[float]]) -> tuple[float, str]:
    """By how much a metric misses its bound, and the measure in words. With upstream's runs: the mean absolute difference, or an equivalence test
    (TOST) over the seeds: the 90 % interval of the mean difference of the last `window` values lies inside +- tost."""
    if metric.tost is not None:
        diffs = [statistics.fmean(a[-metric.window :]) - statistics.fmean(b[-metric.window :]) for a, b in zip(mine, theirs)]
        if (n := len(diffs)) < 2:
            return math.inf, "an equivalence test needs run_upstream and at least 2 seeds"
        half, mean = T95[min(n, 31) - 2] * statistics.stdev(diffs) / math.sqrt(n), statistics.fmean(diffs)
        return abs(mean) + half - metric.tost, f"difference {mean:.4g} +- {half:.2g}, allowed {metric.tost:g}, {n} seeds"
    assert metric.max is not None  # one of the two is given
    gaps = [abs(x - y) for a, b in zip(mine, theirs) for x, y in zip(a, b)]
    value, what = (statistics.fmean(gaps), "mean absolute difference ") if gaps else (max(x for a in mine for x in a), "")
    return value - metric.max, f"{what}{value:.4g}, allowed {metric.max:g}"


def ran(p: Pair, gate: Gate, where: Path, tree: str, seed: int, keep: bool) -> tuple[str, str, Path]:
    """("" or what went wrong, end of the log, folder of the results). Results of the same tree, command and seed are used again."""
    out = p.state() / "results" / digest([tree, gate.run, seed])[:20]
    if keep and (out / ".done").exists():
        return "", "", out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    command = gate.run
    for name, value in {"{out}": out, "{seed}": seed, "{tree}": where, "{python}": sys.executable}.items():
        command = command.replace(name, shlex.quote(str(value)))
    code, stdout, err = shell(command, where, gate.timeout_s)
    if not code:
        (out / ".done").touch()
    return code, (stdout + err)[-8000:], out


def shell(command: str, where: Path, timeout: float) -> tuple[str, str, str]:
    """("" or what went wrong, stdout, stderr) of a gate's command; a timeout ends all of it."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    child = subprocess.Popen(command, shell=True, cwd=where, env=clean, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    try:
        out, err = child.communicate(timeout=timeout)
        code = f"exit code {child.returncode}" if child.returncode else ""
    except subprocess.TimeoutExpired:
        os.killpg(child.pid, signal.SIGKILL)
        out, err = child.communicate()
        code = f"still running after {timeout:.0f} s"
    return code, out.decode(errors="replace"), err.decode(errors="replace")


def upstream_files(p: Pair) -> Path:
    """Upstream's files at the lock's commit, unpacked once; the clone of upstream stays as it is."""
    folder = p.state() / f"upstream-{p.base.lock.upstream_commit[:12]}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        with tarfile.open(fileobj=io.BytesIO(p.upstream.run("archive", "--format=tar", p.base.lock.upstream_commit)[1])) as tar:
            tar.extractall(part, filter="data")
        part.rename(folder)
    return folder


def measure(p: Pair, run: Run) -> tuple[Result, list[Verdict], list[float]]:
    """Gate 1, where it is green gate 2, on the run's branch, and the error: lost, conflicts, drift, lint, then what each kind of gate misses,
    to be compared from the left."""
    here, base = Git(run.worktree), knowledge.read(Path(run.worktree))
    here.undisturbed()
    result = check(base, here, base.lock.mirror_tree, "HEAD")
    settle(run, result)
    conflicts = sum(i.blocks and i.kind != "gate" for i in run.items)
    verdicts: list[Verdict] = []
    if not result.findings and not conflicts:
        verdicts = verify(Pair(base, p.fork, p.upstream, p.ref), Path(run.worktree), here.tree_of("HEAD"))
        here.run("clean", "-fdq")  # what the gates left; ignored files stay
        here.run("reset", "-q", "--hard", "HEAD")
    failed, old = {v.name: v for v in verdicts if not v.ok}, {i.path: i for i in run.items if i.kind == "gate"}
    run.items = [i for i in run.items if i.kind != "gate"] + [old.get(n, Item(n, "gate", v.said, f"G-{n}")) for n, v in failed.items()]
    red, excess = len(result.findings) - result.count("lost", "lint"), [sum(v.excess for v in failed.values() if v.kind == k) for k in KINDS]
    return result, verdicts, [result.count("lost"), conflicts, red, result.count("lint"), *excess]


def code_tree(run: Run) -> str:
    """The branch's tree without .forksync, whose audit never repeats."""
    return Git(run.worktree).tree_with("HEAD", {p: None for p in Git(run.worktree).tree("HEAD") if p.startswith(f"{FOLDER}/")})


def loop(p: Pair, run: Run, tell: Callable[[str], None]) -> tuple[int, str, Result, list[Verdict]]:
    """Compare, fix, run, measure until the error is 0. Returns exit code, the reason to stop, and the last measures."""
    limits, begun, stalled = p.base.config.loop, time.monotonic(), 0
    for item in run.items:
        item.attempts = 0
    result, verdicts, error = measure(p, run)
    run.errors, run.trees = [error], [code_tree(run)]
    for n in range(1, limits.max_iterations + 2):
        tell("round {}: lost {:g}, conflicts {:g}, drift {:g}, lint {:g}, gates {:g}".format(n, *error[:4], sum(error[4:])))
        spent, left = time.monotonic() - begun, any(i.blocks and i.attempts < limits.per_item_attempts for i in run.items)
        stops: list[tuple[object, int, str]] = [
            (not any(error), 0, "converged"),
            (error[0], result.code, "a signed edit is lost"),
            (spent > limits.budget_s or run.tokens > limits.budget_tokens, STUCK, f"budget spent: {spent:.0f} s, {run.tokens} tokens"),
            (run.trees[-1] in run.trees[:-2] and run.trees[-1] != run.trees[-2], STUCK, "oscillation: this tree was there before"),
            (stalled >= limits.stall, STUCK, f"no progress in {stalled} rounds"),
            (n > limits.max_iterations, STUCK, f"{limits.max_iterations} rounds"),
            (not left, STUCK, "what is left is for people: sign, or edit in the worktree"),
        ]
        for hit, code, why in stops:
            if hit:
                return code, why, result, verdicts
        for line in round_of(p, run, result, "\n".join(v.log for v in verdicts if not v.ok)):
            tell(f"  {line}")
        open_run(p)  # the fork's branch may have moved meanwhile
        result, verdicts, error = measure(p, run)
        stalled = 0 if error < min(run.errors) else stalled + 1
        run.errors.append(error)
        run.trees.append(code_tree(run))
        run.save(p.state())
    raise AssertionError("the loop ends by its limits")
