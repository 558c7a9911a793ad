"""What a run leaves to look at: metrics.jsonl, trackers, a live console, readable sample dumps and the picture of the reward."""

import json
import math
import os
import re
import sys
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from vime.config import Config
from vime.errors import VimeError, blamed, said

# label, metric, format; shown where the step has the metric
COLUMNS = [
    ("reward", "rollout/raw_reward", "{:.3f}"), ("eval", "eval/reward", "{:.3f}"), ("length", "rollout/response_len", "{:.1f}"),
    ("entropy", "train/entropy", "{:.3f}"), ("|dlogp|", "train/logprob_abs_diff", "{:.1e}"), ("grad", "train/grad_norm", "{:.2f}"),
    ("tok/s", "perf/rollout_tokens_per_s", "{:.0f}"), ("rollout s", "perf/rollout_s", "{:.1f}"), ("train s", "perf/train_s", "{:.1f}"),
    ("sync s", "weights/sync_s", "{:.2f}"),
]  # fmt: skip
Tracker = tuple[str, Callable[[int, dict[str, float]], None], Callable[[], None]]  # name, log, close


class MetricLogger:
    """Writes each step's metrics to `folder`/metrics.jsonl, the chosen trackers and the console.

    `start_step` is the last finished step: 0, or the checkpoint's on a resume; lines of later steps are cut off the file.
    Trackers run in a thread of their own: importing TensorBoard takes seconds, and a tracker that fails costs one warning, not the run.
    Raises: VimeError where the file cannot be written.
    """

    def __init__(self, cfg: Config, folder: Path, total_steps: int, start_step: int):
        self.total, self.start, self.begun = total_steps, start_step, time.monotonic()
        self.rows = [r for r in read(folder) if start_step and r["step"] <= start_step]
        with blamed(f"cannot write {folder}/metrics.jsonl", OSError):
            folder.mkdir(parents=True, exist_ok=True)
            tmp = folder / "metrics.jsonl.tmp"
            tmp.write_text("".join(json.dumps(r) + "\n" for r in self.rows))
            tmp.replace(folder / "metrics.jsonl")
            self._file = open(folder / "metrics.jsonl", "a", buffering=1)  # noqa: SIM115 (a line at a time, until close)
        self._title = f"{cfg.name}: {Path(cfg.model).name}, {cfg.rollout.batch_size} x {cfg.rollout.n_samples_per_prompt} samples a step"
        self._live: Live | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="trackers")
        self._trackers: list[Tracker] = []
        for name, opener in {"tensorboard": _tensorboard, "wandb": _wandb, "trackio": _trackio, "prometheus_port": _prometheus}.items():
            if getattr(cfg.log, name):
                self._thread.submit(self._guard, name, lambda opener=opener: self._trackers.append(opener(cfg, folder, start_step)))  # type: ignore[misc]

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Record one step, flushed to disk on return. A value that isn't finite becomes null in the file (JSON has no NaN)."""
        row: dict[str, Any] = {"step": step} | {k: float(v) if math.isfinite(v) else None for k, v in metrics.items()}
        self.rows.append(row)
        with blamed(f"cannot write {self._file.name}", OSError, fix="free some space, then --resume"):
            self._file.write(json.dumps(row) + "\n")
        self._thread.submit(self._track, step, dict(metrics))
        if sys.stdout.isatty():
            self._draw()
        else:
            print(self.line(row), flush=True)

    def line(self, row: dict[str, Any]) -> str:
        cells = [f"{label} {fmt.format(row[key])}" for label, key, fmt in COLUMNS if row.get(key) is not None]
        nulls = [k for k, v in row.items() if v is None]
        return f"step {row['step']}/{self.total}  " + "  ".join(cells) + (f"  NOT FINITE: {', '.join(nulls)}" if nulls else "")

    def close(self) -> None:
        """Flush and end everything. Safe to call twice."""
        if self._live:
            self._live.stop()
        self._thread.shutdown(wait=True)
        for name, _, end in list(self._trackers):
            self._guard(name, end)
        self._trackers = []
        self._file.close()

    def _track(self, step: int, values: dict[str, float]) -> None:
        for name, log, _ in list(self._trackers):
            self._guard(name, lambda log=log: log(step, values))  # type: ignore[misc]

    def _guard(self, name: str, call: Callable[[], None]) -> None:
        try:
            call()
        except Exception as e:  # whatever a tracker raises
            self._trackers = [t for t in self._trackers if t[0] != name]
            print(f"warning: {name} is off from here on: {type(e).__name__}: {e}", file=sys.stderr, flush=True)

    def _draw(self) -> None:
        if self._live is None:
            self._live = Live(auto_refresh=False)
            self._live.start()
        self._live.update(self.table(), refresh=True)

    def table(self, height: int = 12) -> Group:
        """The last steps as a rich table."""
        done, spent = self.rows[-1]["step"], time.monotonic() - self.begun
        here = done - self.start
        left = f", {spent / here * (self.total - done) / 60:.1f} min left" if here > 0 and done < self.total else ""
        head = Text(f"{self._title}\nstep {done}/{self.total}{left}")
        table = Table()
        shown = [c for c in COLUMNS if any(r.get(c[1]) is not None for r in self.rows)]
        for name in ["step", *(c[0] for c in shown)]:
            table.add_column(name, justify="right")
        for r in self.rows[-height:]:
            table.add_row(str(r["step"]), *("" if r.get(key) is None else fmt.format(r[key]) for _, key, fmt in shown))
        return Group(head, table)


def read(folder: Path) -> list[dict[str, Any]]:
    """The rows of `folder`/metrics.jsonl; a last line that a crash cut short is left out, a missing file is an empty one.
    Raises: VimeError naming the line for anything else that is not a row of metrics."""
    file = folder / "metrics.jsonl"
    with blamed(f"{file} cannot be read", OSError, ValueError, fix="move it away"):
        lines = file.read_bytes().splitlines() if file.exists() else []
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            if type(row["step"]) is not int or not all(v is None or isinstance(v, int | float) for v in row.values()):
                raise TypeError("step must be a whole number, the metrics numbers or null")
            rows.append(row)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as e:
            if number < len(lines):
                raise VimeError(f"{file}:{number} is damaged: {said(e)}", "remove this line") from e
    return rows


def _tensorboard(cfg: Config, folder: Path, start: int) -> Tracker:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else None)

    def log(step: int, values: dict[str, float]) -> None:
        for k, v in values.items():
            writer.add_scalar(k, v, step)
        writer.flush()

    return "tensorboard", log, writer.close


def _wandb(cfg: Config, folder: Path, start: int) -> Tracker:
    import wandb

    mark = folder / "wandb_id"  # a resume goes on in the same W&B run
    if not (start and mark.exists()):
        mark.write_text(uuid.uuid4().hex[:12])
    run = wandb.init(
        project=cfg.log.project, name=cfg.name, id=mark.read_text(), resume="allow", dir=str(folder), config=cfg.model_dump(),
        settings=wandb.Settings(silent=True),
    )  # fmt: skip
    return "wandb", lambda step, values: run.log(values, step=step), run.finish


def _trackio(cfg: Config, folder: Path, start: int) -> Tracker:
    os.environ.setdefault("TRACKIO_DIR", str(folder.resolve().parent / "trackio"))  # read when the package is imported
    import trackio

    trackio.init(project=cfg.log.project, name=cfg.name, config=cfg.model_dump(), resume="allow" if start else "never", embed=False)
    return "trackio", lambda step, values: trackio.log(values, step=step), trackio.finish


def _prometheus(cfg: Config, folder: Path, start: int) -> Tracker:
    from prometheus_client import CollectorRegistry, Gauge, start_http_server

    registry, gauges = CollectorRegistry(), dict[str, Gauge]()
    server, thread = start_http_server(cfg.log.prometheus_port or 0, cfg.log.prometheus_host, registry)

    def log(step: int, values: dict[str, float]) -> None:
        for k, v in ({"step": float(step)} | values).items():
            name = "vime_" + re.sub(r"[^a-zA-Z0-9]+", "_", k)
            if name not in gauges:
                gauges[name] = Gauge(name, k, ["run"], registry=registry)
            gauges[name].labels(cfg.name).set(v)

    def end() -> None:
        server.shutdown()
        thread.join()

    log(start, {})
    return "prometheus", log, end


def plot(folder: Path) -> Path:
    """Draw `folder`/reward.png from its metrics.jsonl: reward while training, its running mean, evaluations. Returns its path."""
    from matplotlib.figure import Figure

    rows = read(folder)
    train = [(r["step"], r["rollout/raw_reward"]) for r in rows if r.get("rollout/raw_reward") is not None]
    held_out = [(r["step"], r["eval/reward"]) for r in rows if r.get("eval/reward") is not None]
    figure = Figure(figsize=(7, 4), dpi=120, layout="constrained")
    axes = figure.add_subplot()
    if train:
        steps, rewards = zip(*train)
        means = [fmean(rewards[max(0, i - 4) : i + 1]) for i in range(len(rewards))]
        axes.plot(steps, rewards, color="tab:blue", alpha=0.35, label="each step's samples")
        axes.plot(steps, means, color="tab:blue", label="mean of 5 steps")
    if held_out:
        axes.plot(*zip(*held_out), "o--", color="tab:orange", label="held-out prompts")
    axes.set(xlabel="step", ylabel="mean reward", title=folder.resolve().name)
    axes.grid(alpha=0.3)
    if train or held_out:
        axes.legend()
    figure.savefig(folder / "reward.png")
    return folder / "reward.png"
