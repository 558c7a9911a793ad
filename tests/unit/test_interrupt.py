"""Signals and a terminal that goes away: the step is finished, what follows is not written to nowhere."""

import fcntl
import os
import signal
import subprocess
import sys
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pytest

CODE = """
import signal, sys, time
from collections.abc import Callable
from pathlib import Path
from vime.train import Interrupt, console
if sys.argv[2] == "nohup":
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
i = Interrupt()
i.install()
i.looping = sys.argv[2] != "starting"
try:
    print("ready", flush=True)
    for _ in range(100):
        time.sleep(0.1)
        if i.requested:
            for _ in range(3):
                print("step", flush=True)
                console.print("saving")
            Path(sys.argv[1]).write_text("saved")
            break
    else:
        Path(sys.argv[1]).write_text("undisturbed")
except KeyboardInterrupt:
    Path(sys.argv[1]).write_text("stopped")
"""


def start(mark: Path, how: str, prepare: Callable[[], None] = lambda: None, **popen: object) -> subprocess.Popen:
    """Signals come as in a terminal, also where these tests themselves run under nohup or in the background."""

    def in_child() -> None:
        for sig in (signal.SIGINT, signal.SIGHUP):
            signal.signal(sig, signal.SIG_DFL)
        prepare()

    return subprocess.Popen([sys.executable, "-c", CODE, str(mark), how], preexec_fn=in_child, **popen)  # type: ignore[call-overload]


@pytest.mark.parametrize(
    ("sig", "how"), [(signal.SIGINT, "loop"), (signal.SIGTERM, "loop"), (signal.SIGHUP, "loop"), (signal.SIGTERM, "starting"), (signal.SIGHUP, "starting")]
)
def test_each_signal_finishes_the_step_or_stops_a_start(tmp_path: Path, sig: signal.Signals, how: str) -> None:
    with start(tmp_path / "mark", how, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as p:
        assert p.stdout and p.stdout.readline() == "ready\n"
        p.send_signal(sig)
        out, err = p.communicate(timeout=30)
    assert (tmp_path / "mark").read_text() == ("saved" if how == "loop" else "stopped") and p.returncode == 0, err
    assert how != "loop" or (sig.name in err and out.count("step") == 3)


def test_a_closed_terminal_is_a_signal_and_no_error(tmp_path: Path) -> None:
    """A controlling terminal of its own, closed: the kernel sends SIGHUP, and each later write to it fails with EIO."""
    here, there = os.openpty()

    def take_terminal() -> None:
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    p = start(tmp_path / "mark", "loop", stdin=there, stdout=there, stderr=there, start_new_session=True, prepare=take_terminal)
    os.close(there)
    assert os.read(here, 100).startswith(b"ready")
    os.close(here)
    assert p.wait(30) == 0 and (tmp_path / "mark").read_text() == "saved"


def test_nohup_is_heeded(tmp_path: Path) -> None:
    with start(tmp_path / "mark", "nohup", stdout=subprocess.PIPE, text=True) as p:
        assert p.stdout and p.stdout.readline() == "ready\n"
        p.send_signal(signal.SIGHUP)
        time.sleep(0.5)
        assert p.poll() is None and not (tmp_path / "mark").exists()
        p.send_signal(signal.SIGINT)
        assert p.wait(30) == 0 and (tmp_path / "mark").read_text() == "saved"
