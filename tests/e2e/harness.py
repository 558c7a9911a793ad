"""Runs `vime train` as a user would: a real process, real servers, real signals."""

import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import tomli_w

from tests.conftest import merged

REVERSE = {
    "data": {"input_key": "prompt", "label_key": "label"},
    "rollout": {"batch_size": 8, "n_samples_per_prompt": 8, "max_response_len": 7, "max_context_len": 32, "concurrency": 64},
    "reward": {"function": "exact"},
    "loss": {"aggregate": "token-mean"},
    "algo": {"eps_clip_high": 0.28},
    "train": {"steps": 6, "lr": 3e-4, "adam_beta2": 0.95, "lr_warmup_iters": 2},
    "checkpoint": {"interval": 1, "keep": 2},
    "log": {"tensorboard": False},
}


class Job:
    """One run: its folder, its process, what it printed."""

    def __init__(self, root: Path, model: Path, prompts: Path, name: str = "job", /, **changes: object):
        self.root, self.name, self.mark = root, name, uuid.uuid4().hex
        self.folder = root / "runs" / name
        tree = merged(REVERSE, {"name": name, "run_dir": str(root / "runs"), "model": str(model), "data": {"prompts": str(prompts)}})
        self.config = root / f"{name}.toml"
        self.config.write_text(tomli_w.dumps(merged(tree, changes)))
        self.out = root / f"{name}.out"
        self.process: subprocess.Popen | None = None

    def start(self, *args: str, **popen: object) -> "Job":
        with open(self.out, "ab") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vime.cli", "train", str(self.config), *args],
                stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "VIME_TEST_MARK": self.mark}, **popen,
            )  # fmt: skip
        return self

    def run(self, *args: str, timeout: float = 300) -> int:
        self.start(*args)
        return self.wait(timeout)

    def wait(self, timeout: float = 300) -> int:
        assert self.process
        return self.process.wait(timeout)

    @property
    def printed(self) -> str:
        return self.out.read_text(errors="replace") if self.out.exists() else ""

    @property
    def metrics(self) -> list[dict]:
        path = self.folder / "metrics.jsonl"
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def wait_for_step(self, step: int, timeout: float = 240) -> None:
        """Returns once `step` is logged, that is while the next one is under way."""
        assert self.process
        end = time.monotonic() + timeout
        while not any(m["step"] >= step for m in self.metrics):
            assert self.process.poll() is None, f"the run ended before step {step}:\n{self.printed[-3000:]}"
            assert time.monotonic() < end, f"step {step} not reached in {timeout} s:\n{self.printed[-3000:]}"
            time.sleep(0.05)

    def pids(self) -> dict[str, int]:
        return json.loads((self.folder / "processes.json").read_text())

    def left_behind(self, grace: float = 15) -> list[str]:
        """Processes with this run's mark in their environment that are still there after `grace` seconds."""
        end = time.monotonic() + grace
        while True:
            found = []
            for p in psutil.process_iter(["pid", "cmdline"]):
                try:
                    if p.status() != psutil.STATUS_ZOMBIE and p.environ().get("VIME_TEST_MARK") == self.mark:
                        found.append(f"{p.pid} {' '.join(p.info['cmdline'] or [])[:150]}")
                except (psutil.NoSuchProcess, psutil.AccessDenied):
                    continue
            if not found or time.monotonic() > end:
                return found
            time.sleep(0.3)

    def trained_ids(self) -> list[int]:
        """Ids of all samples in the step dumps, each dump being one trained step."""
        return sorted(json.loads(line)["index"] for f in (self.folder / "samples").glob("step_*.jsonl") for line in f.read_text().splitlines())

    def expected_ids(self, steps: int, per_step: int = 64) -> list[int]:
        return list(range(steps * per_step))

    def end(self) -> None:
        """End the run if a test failed half way; only processes that carry its mark."""
        if self.process and self.process.poll() is None:
            self.process.terminate()
            time.sleep(0.2)
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        for line in self.left_behind(grace=5):
            psutil.Process(int(line.split()[0])).kill()


@contextmanager
def job(*args: object, **kw: object) -> Iterator[Job]:
    j = Job(*args, **kw)
    try:
        yield j
    finally:
        j.end()
