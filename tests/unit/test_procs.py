"""Children die with their parent, and take all of their own along."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from vime.procs import born, descendants, free_port, spawn

# A process with a child in a session of its own (as vLLM's workers may have) and a grandchild that ignores TERM.
FAMILY = """
import os, signal, subprocess, sys, time
stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('ready', flush=True); time.sleep(100)"
middle = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {stubborn!r}]); time.sleep(100)"
subprocess.Popen([sys.executable, "-c", middle], start_new_session=True)
time.sleep(100)
"""


def gone(pids: list[int], within: float = 15) -> bool:
    end = time.monotonic() + within
    while any(Path(f"/proc/{p}").exists() for p in pids):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


def wait_for(log: Path, word: str) -> None:
    end = time.monotonic() + 30
    while word not in (log.read_text() if log.exists() else ""):
        assert time.monotonic() < end
        time.sleep(0.05)


def family(log: Path) -> tuple:
    child = spawn([sys.executable, "-c", FAMILY], log, {})
    wait_for(log, "ready")
    pids = [child.pid, *descendants(child.pid)]
    assert len(pids) == 3
    return child, pids


def test_output_environment_and_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONDONTWRITEBYTECODE", "1")
    code = "import os, sys; print(os.environ['A'], os.environ.get('PYTHONDONTWRITEBYTECODE'), os.getpid()); sys.exit(7)"
    child = spawn([sys.executable, "-c", code], tmp_path / "logs" / "x.log", {"A": "b"})
    assert gone([child.pid])
    child.stop()
    assert child.returncode == 7 and not child.alive()
    assert (tmp_path / "logs" / "x.log").read_text() == f"b None {child.pid}\n"


def test_missing_command(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="no-such-command"):
        spawn(["no-such-command"], tmp_path / "log", {})


def test_stop_ends_every_descendant(tmp_path: Path) -> None:
    child, pids = family(tmp_path / "log")
    assert child.alive() and child.returncode is None
    child.stop(timeout=20)
    assert gone(pids, 0) and child.returncode == -signal.SIGTERM
    child.stop()


def test_killed_child_leaves_no_orphans(tmp_path: Path) -> None:
    child, pids = family(tmp_path / "log")
    os.kill(child.pid, signal.SIGKILL)
    assert gone(pids)
    child.stop()
    assert child.returncode == -signal.SIGKILL


def test_killed_parent_takes_all_along(tmp_path: Path) -> None:
    log = tmp_path / "log"
    code = "import time; from pathlib import Path; from vime.procs import spawn; "
    code += f"c = spawn({[sys.executable, '-c', FAMILY]!r}, Path({str(log)!r}), {{}}); print(c.pid, flush=True); time.sleep(100)"
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout
    pid = int(parent.stdout.readline())
    wait_for(log, "ready")
    pids = [*descendants(parent.pid)]
    assert pid in pids and len(pids) == 4  # guard, command, child, grandchild
    parent.kill()
    parent.wait()
    assert gone(pids)


def test_killed_guard_is_noticed_and_cleaned_up(tmp_path: Path) -> None:
    child = spawn([sys.executable, "-c", "import time; time.sleep(100)"], tmp_path / "log", {})
    os.kill(child._guard.pid, signal.SIGKILL)
    child._guard.wait()
    assert not child.alive()
    child.stop()
    assert gone([child.pid], 5)


def test_terminal_signals_do_not_reach_the_child(tmp_path: Path) -> None:
    child = spawn([sys.executable, "-c", "import time; time.sleep(100)"], tmp_path / "log", {})
    assert os.getsid(child.pid) == child.pid != os.getsid(0)
    os.kill(child.pid, signal.SIGINT)  # its own default handling is untouched by the guard's
    assert gone([child.pid], 5)
    child.stop()


def test_free_ports_are_distinct_enough() -> None:
    assert all(1024 <= free_port() < 65536 for _ in range(10))


def test_followed_processes_end_soon_after_their_killed_parent(tmp_path: Path) -> None:
    """Neither the roots nor their children care for their parent's death, as Ray's agents do not; what the follower does not know stays."""
    code = f"""
import subprocess, sys, time
from vime.procs import Follower
run = lambda code: subprocess.Popen([sys.executable, "-c", code])
root = run("import subprocess, time; print('child', subprocess.Popen(['sleep', '100']).pid, flush=True); time.sleep(100)")
other = run("import time; time.sleep(100)")
follower = Follower([root.pid])
time.sleep(2.5)  # it has looked since
open({str(tmp_path / "pids")!r}, "w").write(f"{{root.pid}} {{other.pid}} ready")
time.sleep(100)
"""
    with open(tmp_path / "out", "w") as out:
        parent = subprocess.Popen([sys.executable, "-c", code], stdout=out)
    wait_for(tmp_path / "pids", "ready")
    root, other = map(int, (tmp_path / "pids").read_text().split()[:2])
    child = int((tmp_path / "out").read_text().split()[1])
    parent.kill()
    parent.wait()
    try:
        end = time.monotonic() + 15
        while born(root) or born(child):
            assert time.monotonic() < end
            time.sleep(0.05)
        assert born(other)
    finally:
        os.kill(other, signal.SIGKILL)
