"""`vime bench dataplane` with real processes, small: that it measures what it says, and what bytes reach the controller."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = [sys.executable, "-m", "vime.cli", "bench", "dataplane"]


def bench(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*BENCH, *args], capture_output=True, text=True, timeout=120)


def ours() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(("vb-", "vime-vb-"))}


def test_through_the_controller_and_past_it(tmp_path: Path) -> None:
    """The consumers check every byte themselves. Bytes through the controller: all of them, twice; or the same few from 2k tokens to pictures."""
    before = ours()
    out, picture = tmp_path / "rows.json", tmp_path / "bench.png"
    paths, cells = ["numpy", "shm", "zmq"], ["text2k:8", "pixels:8", "text2k:2x4"]
    done = bench("--cells", *cells, "--paths", *paths, "-m", "2", "-n", "2", "--rounds", "1", "--json", "--out", str(out), "--plot", str(picture))
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert rows == json.loads(out.read_text())
    assert [(r["cell"], r["path"]) for r in rows] == [(c, p) for c in cells for p in paths]
    of = {(r["cell"], r["path"]): r for r in rows}
    assert of["text2k:2x4", "shm"]["MB"] == of["text2k:8", "shm"]["MB"] == pytest.approx(8 * 2048 * 9 / 1e6)
    for r in rows:
        assert 0 < r["controller_cpu"] < r["cpu"] and r["wall"] > 0
    for cell in cells:
        assert of[cell, "numpy"]["through"] > 2e6 * of[cell, "numpy"]["MB"]
    assert of["pixels:8", "shm"]["through_per_item"] == pytest.approx(of["text2k:8", "shm"]["through_per_item"], abs=64)
    assert of["pixels:8", "shm"]["through_per_item"] < 2000
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert ours() <= before, "something stayed in shared memory"
    shown = bench("--read", str(out), "--model").stdout
    assert "| numpy " in shown and "COMPUTED, not measured" in shown


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--paths", "shn", "-m", "0", "--rounds", "-1", "--cells", "text2k:2"], "no path 'shn', of lists, json"),
        (["-m", "0", "--rounds", "-1", "--cells", "text2k:2"], "-m 0: at least 1; --rounds -1: at least 1; text2k:2 for 0 producers and 4 consumers"),
        (["--read", "missing"], "--read missing: [Errno 2] No such file or directory"),
        (["--cells", "video:3"], "no cell 'video:3' (as text2k:64"),
        (["--cells", "pixels:1000000"], "GB of memory are free, the largest cell wants"),
    ],
)
def test_what_cannot_be_measured_is_one_line(args: list[str], said: str) -> None:
    done = bench(*args)
    assert done.returncode == 1 and done.stdout == "" and said in done.stderr and done.stderr.count("\n") == 1
