import io
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from vime import config
from vime.config import Config
from vime.data.records import dump_samples
from vime.observe.metrics import MetricLogger, plot, read
from vime.sample import Sample, Status


def cfg(**log: Any) -> Config:
    tree = {"model": "m", "data": {"prompts": "p.jsonl"}, "log": {"tensorboard": False} | log}
    return config.validate(tree, "test")


def run(folder: Path, first: int, last: int, total: int = 9, start: int | None = None, **log: Any) -> None:
    m = MetricLogger(cfg(**log), folder, total, first - 1 if start is None else start)
    for step in range(first, last + 1):
        m.log(step, {"rollout/raw_reward": step / 10, "train/loss": 0.1})
    m.close()
    m.close()


def test_a_row_is_on_disk_when_log_returns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    m = MetricLogger(cfg(), tmp_path, 5, 0)
    m.log(1, {"rollout/raw_reward": 0.25, "perf/rollout_s": 1.5})
    assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 1, "rollout/raw_reward": 0.25, "perf/rollout_s": 1.5}
    m.close()
    assert capsys.readouterr().out == "step 1/5  reward 0.250  rollout s 1.5\n"


@pytest.mark.parametrize("resume_at", [0, 2, 5])
def test_a_resume_cuts_later_lines_off(tmp_path: Path, resume_at: int) -> None:
    run(tmp_path, 1, 5)
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 6, "tra')  # a crash in the middle of a line
    run(tmp_path, resume_at + 1, 7, start=resume_at)
    assert [r["step"] for r in read(tmp_path)] == [1, 2, 3, 4, 5, 6, 7]


def test_a_value_that_is_not_finite_is_null_and_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    m = MetricLogger(cfg(), tmp_path, 5, 0)
    m.log(1, {"train/loss": math.nan, "train/grad_norm": math.inf})
    m.close()
    assert read(tmp_path) == [{"step": 1, "train/loss": None, "train/grad_norm": None}]
    assert "NOT FINITE: train/loss, train/grad_norm" in capsys.readouterr().out
    assert plot(tmp_path).exists()


def test_tensorboard_gets_every_metric(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(tmp_path, 1, 3, tensorboard=True)
    run(tmp_path, 3, 4, tensorboard=True)  # resumed after step 2
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, round(e.value, 4)) for e in events.Scalars("rollout/raw_reward")] == [(1, 0.1), (2, 0.2), (3, 0.3), (4, 0.4)]


def test_a_tracker_that_fails_costs_a_warning_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "tensorboard").write_text("a file where the folder should be")
    run(tmp_path, 1, 3, tensorboard=True)
    assert len(read(tmp_path)) == 3
    assert capsys.readouterr().err.count("warning: tensorboard is off") == 1


def test_the_live_table_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.setenv("TERM", "xterm")
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    run(tmp_path, 1, 3)
    text = screen.getvalue()
    assert "step 3/9" in text and "0.300" in text


def test_the_table_keeps_to_the_last_steps(tmp_path: Path) -> None:
    m = MetricLogger(cfg(), tmp_path, 99, 0)
    for step in range(1, 31):
        m.log(step, {"rollout/raw_reward": 0.5})
    console = Console(file=io.StringIO(), width=100)
    console.print(m.table(height=5))
    m.close()
    rows = [line for line in console.file.getvalue().splitlines() if "0.500" in line]  # type: ignore[attr-defined]
    assert len(rows) == 5 and "30" in rows[-1]


def test_a_dump_is_readable(tmp_path: Path) -> None:
    s = Sample(index=3, group_index=1, rollout_id=3, prompt="é>", tokens=[1, 2], label="b", reward=1.0, status=Status.COMPLETED)
    s.append_tokens([7, 8], [-0.1234567, -2.0], versions=4)
    s.response = "é"
    path = tmp_path / "samples" / "step_000001.jsonl"
    dump_samples(str(path), [s], [Sample(index=9, label={1, 2})])
    first, second = (json.loads(line) for line in path.read_text().splitlines())
    assert first["prompt"] == "é>" and "é" in path.read_text() and first["tokens"] == [7, 8] and first["log_probs"] == [-0.12346, -2.0]
    assert (first["reward"], first["status"], first["weight_versions"]) == (1.0, "completed", [4])
    assert (first["prompt_length"], first["response_length"]) == (2, 2)
    dump_samples(str(path), [Sample(response="a\ud800é", status="truncated", metadata={"a": b"x"})])
    half = json.loads(path.read_text())
    assert half["response"] == "a\ud800é" and half["status"] == "truncated" and half["metadata"] == {"a": "b'x'"}
    assert second["index"] == 9 and list(path.parent.iterdir()) == [path]


def test_plot_draws_what_there_is(tmp_path: Path) -> None:
    assert plot(tmp_path).stat().st_size > 1000  # an empty run still gives a picture
    empty = (tmp_path / "reward.png").read_bytes()
    run(tmp_path, 1, 6)
    with open(tmp_path / "metrics.jsonl", "a") as f:
        f.write('{"step": 6, "eval/reward": 0.9}\n')
    picture = plot(tmp_path).read_bytes()
    assert picture.startswith(b"\x89PNG") and picture != empty


def test_prometheus_serves_the_last_step(tmp_path: Path) -> None:
    from urllib.request import urlopen

    from vime.procs import free_port

    port = free_port()
    m = MetricLogger(cfg(prometheus_port=port), tmp_path, 5, 0)
    m.log(1, {"rollout/raw_reward": 0.25})
    m.log(2, {"rollout/raw_reward": 0.5, "eval/held-out/pass@1": 0.125})
    m._thread.submit(lambda: None).result()  # what was logged before it has reached the trackers
    text = urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
    m.close()
    assert {'vime_rollout_raw_reward{run="run"} 0.5', 'vime_eval_held_out_pass_1{run="run"} 0.125', 'vime_step{run="run"} 2.0'} <= set(text.splitlines())
    with pytest.raises(OSError):
        urlopen(f"http://127.0.0.1:{port}/metrics")
