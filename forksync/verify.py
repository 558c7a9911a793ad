"""Gate 2, behaviour: functional, precision and convergence parity, cheap before dear; and the control loop around both gates."""

from __future__ import annotations

import hashlib
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
from forksync.base import FOLDER, Gate, Metric
from forksync.fix import round_of, settle
from forksync.gate import Result, check
from forksync.git import STUCK, ForksyncError, Git
from forksync.sync import Item, Pair, Run, open_run

KINDS = ("functional", "precision", "convergence")
# Student's t, one-sided 5 %, for 1 .. 30 degrees of freedom
T95 = "6.314 2.920 2.353 2.132 2.015 1.943 1.895 1.860 1.833 1.812 1.796 1.782 1.771 1.761 1.753 1.746 1.740 1.734 1.729 1.725 1.721 1.717 1.714 1.711 1.708 1.706 1.703 1.701 1.699 1.697"


@dataclass
class Verdict:
    name: str
    kind: str
    ok: bool
    said: str
    excess: float = 0.0  # by how much it fails, in the gate's own unit
    seconds: float = 0.0
    log: str = ""


def verify(p: Pair, root: Path, tree: str) -> list[Verdict]:
    """Run the gates on a work tree whose content is `tree`. Stops after the first kind that fails. Raises: ForksyncError without a functional gate."""
    gates = sorted(p.base.config.gate, key=lambda g: KINDS.index(g.kind))
    if not gates or gates[0].kind != "functional":
        raise ForksyncError("config.toml has no functional gate", 'no tests, no loop: add [[gate]] kind = "functional" run = "pytest -q"')
    out: list[Verdict] = []
    for gate in gates:
        if any(not v.ok and v.kind != gate.kind for v in out):
            break
        begun = time.monotonic()
        verdict = judged(p, gate, root, tree)
        verdict.seconds = round(time.monotonic() - begun, 1)
        out.append(verdict)
    return out


def judged(p: Pair, gate: Gate, root: Path, tree: str) -> Verdict:
    def failed(said: str, excess: float = 1.0, log: str = "") -> Verdict:
        return Verdict(gate.name, gate.kind, False, said, excess, log=log)

    mine: list[Path] = []
    theirs: list[Path] = []
    for seed in range(gate.seeds):
        for side, where, id_ in [(mine, root, tree)] + ([(theirs, upstream_files(p), p.base.lock.upstream_commit)] if gate.run_upstream else []):
            code, log, out = ran(p, gate, where, id_, seed, keep=side is theirs or gate.kind != "functional")
            if code:
                return failed(f"{'upstream' if side is theirs else 'fork'}, seed {seed}: {code}", log=log)
            side.append(out)
    if gate.judge:
        sides = {"fork": mine, "upstream": theirs}
        command = re.sub(r"\{(fork|upstream)(/[^}]*)?\}", lambda m: shlex.join(f"{x}{m[2] or ''}" for x in sides[m[1]]), gate.judge)
        code, stdout, err = shell(command.replace("{python}", shlex.quote(sys.executable)), root, gate.timeout_s)
        if gate.judge_key and code in ("", "exit code 1"):
            try:
                value: Any = json.loads(stdout.strip().splitlines()[-1])
                for key in gate.judge_key.split("."):
                    value = value[key]
            except (ValueError, KeyError, TypeError, IndexError):
                return failed(f"the judge's output has no {gate.judge_key}", log=stdout + err)
            return Verdict(gate.name, gate.kind, bool(value), f"{gate.judge_key} = {value}", 0.0 if value else 1.0, log=stdout)
        return Verdict(gate.name, gate.kind, not code, code or "equivalent", float(bool(code)), log=stdout + err)
    worst = Verdict(gate.name, gate.kind, True, "passed")
    for name, metric in gate.metrics.items():
        try:
            a, b = ([series(json.loads((f / "metrics.json").read_text())[name]) for f in side] for side in (mine, theirs))
        except (OSError, ValueError, KeyError, TypeError) as e:
            return failed(f"metrics.json of {{out}} has no {name} ({type(e).__name__})")
        excess, said = beyond(metric, a, b)
        if not math.isfinite(excess) or excess > 0:
            return failed(f"{name}: {said}", excess)
        worst.said = f"{name}: {said}"
    return worst


def series(value: Any) -> list[float]:
    return [float(x) for x in value] if isinstance(value, list) else [float(value)]


def beyond(metric: Metric, mine: list[list[float]], theirs: list[list[float]]) -> tuple[float, str]:
    """By how much a metric misses its bound, and the measure in words. With upstream's runs: the mean absolute difference, or an equivalence test
    (TOST) over the seeds: the 90 % interval of the mean difference of the last `window` values lies inside +- tost."""
    if metric.tost is not None:
        diffs = [statistics.fmean(a[-metric.window :]) - statistics.fmean(b[-metric.window :]) for a, b in zip(mine, theirs)]
        if len(diffs) < 2:
            return math.inf, "an equivalence test needs run_upstream and at least 2 seeds"
        n = len(diffs)
        half = (float(T95.split()[n - 2]) if n <= 31 else 1.69) * statistics.stdev(diffs) / math.sqrt(n)
        mean = statistics.fmean(diffs)
        return abs(mean) + half - metric.tost, f"difference {mean:.4g} +- {half:.2g}, allowed {metric.tost:g}, {n} seeds"
    if metric.max is None:
        return math.inf, "neither max nor tost is given"
    if theirs:
        pairs = [(x, y) for a, b in zip(mine, theirs) for x, y in zip(a, b, strict=False)]
        value = statistics.fmean(abs(x - y) for x, y in pairs)
        return value - metric.max, f"mean absolute difference {value:.4g}, allowed {metric.max:g}"
    value = max(x for a in mine for x in a)
    return value - metric.max, f"{value:.4g}, allowed {metric.max:g}"


def filled(command: str, names: dict[str, str]) -> str:
    for name, value in names.items():
        command = command.replace(name, value)
    return command


def ran(p: Pair, gate: Gate, where: Path, tree: str, seed: int, keep: bool) -> tuple[str, str, Path]:
    """("" or what went wrong, end of the log, folder of the results). Results of the same tree, command and seed are used again."""
    key = hashlib.sha256(f"{tree} {gate.run} {seed}".encode()).hexdigest()[:20]
    out = p.state() / "results" / key
    if keep and (out / ".done").exists():
        return "", "", out
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    names = {"{out}": shlex.quote(str(out)), "{seed}": str(seed), "{tree}": shlex.quote(str(where)), "{python}": shlex.quote(sys.executable)}
    code, stdout, err = shell(filled(gate.run, names), where, gate.timeout_s)
    if not code:
        (out / ".done").touch()
    return code, (stdout + err)[-8000:], out


def shell(command: str, where: Path, timeout: float) -> tuple[str, str, str]:
    """("" or what went wrong, stdout, stderr) of a gate's command; nothing of it is left running."""
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
    commit = p.base.lock.upstream_commit
    folder = p.state() / f"upstream-{commit[:12]}"
    if not folder.exists():
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        with tarfile.open(fileobj=io.BytesIO(p.upstream.run("archive", "--format=tar", commit)[1])) as tar:
            tar.extractall(part, filter="data")
        part.rename(folder)
    return folder


def unexecuted(coverage: Path, changed: list[str]) -> list[str]:
    """Changed Python files of which no gate ran a line, from a file of `coverage json`."""
    files = json.loads(coverage.read_text("utf-8"))["files"]
    return [p for p in changed if p.endswith(".py") and not files.get(p, {}).get("executed_lines")]


def error_of(result: Result, run: Run, verdicts: list[Verdict]) -> list[float]:
    """The loop's error, compared from the left: lost, conflicts, drift, lint, then what each kind of gate misses."""
    red = len(result.findings) - result.count("lost", "lint")
    by_kind = {k: sum(v.excess for v in verdicts if v.kind == k and not v.ok) for k in KINDS}
    return [result.count("lost"), sum(i.blocks and i.kind != "gate" for i in run.items), red, result.count("lint"), *by_kind.values()]


def measure(p: Pair, run: Run) -> tuple[Result, list[Verdict], list[float]]:
    """Gate 1, and where it is green gate 2, on the run's branch."""
    here = Git(run.worktree)
    base = knowledge.read(Path(run.worktree))
    result = check(base, here, base.lock.mirror_tree, "HEAD")
    settle(run, result)
    verdicts: list[Verdict] = []
    if not result.findings and not any(i.blocks and i.kind != "gate" for i in run.items):
        side = Pair(base, p.fork, p.upstream, p.ref)
        verdicts = verify(side, Path(run.worktree), here.out("rev-parse", "HEAD^{tree}"))
        here.run("clean", "-fdq")  # what the gates left; ignored files stay
        here.run("reset", "-q", "--hard", "HEAD")
    run.items = [i for i in run.items if i.kind != "gate" or any(v.name == i.path and not v.ok for v in verdicts)]
    for v in verdicts:
        if not v.ok and not any(i.kind == "gate" and i.path == v.name for i in run.items):
            run.items.append(Item(f"G-{v.name}", v.name, "gate", note=v.said))
    return result, verdicts, error_of(result, run, verdicts)


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
    for n in range(1, limits.max_iterations + 1):
        tell(f"round {n}: lost {error[0]:g}, conflicts {error[1]:g}, drift {error[2]:g}, lint {error[3]:g}, gates {sum(error[4:]):g}")
        if not any(error):
            return 0, "converged", result, verdicts
        if error[0]:
            return result.code, "a signed edit is lost", result, verdicts
        if time.monotonic() - begun > limits.budget_s or run.tokens > limits.budget_tokens:
            return STUCK, f"budget spent: {time.monotonic() - begun:.0f} s, {run.tokens} tokens", result, verdicts
        if not any(i.blocks and i.attempts < limits.per_item_attempts for i in run.items):
            return STUCK, "what is left is for people: sign, or edit in the worktree", result, verdicts
        log = "\n".join(v.log for v in verdicts if not v.ok)
        for line in round_of(p, run, result, log):
            tell(f"  {line}")
        open_run(p)  # the fork's branch may have moved meanwhile
        result, verdicts, error = measure(p, run)
        tree = code_tree(run)
        if tree in run.trees[:-1] and tree != run.trees[-1]:
            return STUCK, f"oscillation: the tree of round {n} was there before", result, verdicts
        stalled = 0 if error < min(run.errors) else stalled + 1
        run.errors.append(error)
        run.trees.append(tree)
        run.save(p.state())
        if any(error) and stalled >= limits.stall:
            return STUCK, f"no progress in {stalled} rounds", result, verdicts
    return (STUCK if any(error) else 0), "converged" if not any(error) else f"{limits.max_iterations} rounds", result, verdicts

