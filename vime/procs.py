"""Child processes that never outlive their parent, nor leave anything of their own behind.

Each command runs under a small guard (this file run as a script; stdlib only, so that it starts in milliseconds), which adopts
every orphan among the command's descendants and ends them all when the command exits or when the parent is gone.
"""

import contextlib
import ctypes
import faulthandler
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

GRACE = 5.0  # seconds between TERM and KILL


class Child:
    """A running command. `pid` is the command's own pid, not the guard's."""

    def __init__(self, guard: "subprocess.Popen[bytes]", pid: int, line: socket.socket):
        self.pid, self._guard, self._line = pid, guard, line

    @property
    def returncode(self) -> int | None:
        """Exit code, negative for a signal; None until the command and all its descendants are gone."""
        rc = self._guard.poll()
        return 128 - rc if rc is not None and rc > 128 else rc

    def alive(self) -> bool:
        """Whether the command itself runs; its descendants may still be ending when it does not."""
        return self._guard.poll() is None and Path(f"/proc/{self.pid}").exists()

    def stop(self, timeout: float = 2 * GRACE) -> None:
        """End the command and all its descendants: TERM, then KILL. Does nothing the second time."""
        self._line.close()
        try:
            self._guard.wait(timeout)
        except subprocess.TimeoutExpired:
            self._guard.kill()
        if self._guard.wait() < 0:  # the guard was killed: what it held shares the command's process group
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signal.SIGKILL)


def spawn(cmd: list[str], log: Path, env: dict[str, str]) -> Child:
    """Start `cmd` under a guard; its output is appended to `log`, `env` is laid over this process's environment. Or raises OSError."""
    full = {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"} | env
    log.parent.mkdir(parents=True, exist_ok=True)
    ours, theirs = socket.socketpair()
    with theirs, open(log, "ab") as out:
        run = [sys.executable, "-I", "-S", os.path.abspath(__file__), str(theirs.fileno()), *cmd]
        fds = {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": out, "pass_fds": [theirs.fileno()]}
        guard = subprocess.Popen(run, env=full, start_new_session=True, **fds)  # type: ignore[call-overload]
    with ours.makefile() as said:
        word, _, rest = said.readline().strip().partition(" ")
    if word != "pid":
        ours.close()
        guard.wait()
        raise OSError(f"cannot start {cmd[0]}: {rest or f'see {log}'}")
    return Child(guard, int(rest), ours)


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port that nothing listens on now, of the interface with address `host`: the loopback one."""
    with socket.socket() as s:
        s.bind((host, 0))
        return int(s.getsockname()[1])


def _stat(pid: int) -> list[str]:
    """What Linux's /proc says of process `pid`, from its state on; [] where there is none, or none any more."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def descendants(root: int, deep: bool = True) -> list[int]:
    """Pids below `root`, or only its children, from Linux's /proc."""
    below: dict[int, list[int]] = {}
    for pid in map(int, filter(str.isdigit, os.listdir("/proc"))):
        if stat := _stat(pid):
            below.setdefault(int(stat[1]), []).append(pid)
    found = list(below.get(root, []))
    for pid in found if deep else ():  # grows while it is walked
        found += below.get(pid, [])
    return found


class Follower:
    """Sees to it that the processes `roots` and their children end when this process does, even by SIGKILL: those still there GRACE seconds
    later are killed. For Ray's, whose agents wait a minute for an answer of its dead server. `close()` does the same at once."""

    def __init__(self, roots: list[int]):
        self._line, theirs = socket.socketpair()
        run = [sys.executable, "-I", "-S", os.path.abspath(__file__), "follow", str(theirs.fileno()), *map(str, roots)]
        with theirs:
            self._process = subprocess.Popen(run, start_new_session=True, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)

    def close(self) -> None:
        self._line.close()
        self._process.wait()


def born(pid: int) -> str | None:
    """When process `pid` began, which tells it from a later one of that number; None where there is none, or a zombie."""
    stat = _stat(pid)
    return stat[19] if stat and stat[0] != "Z" else None


def _follow(fd: int, roots: list[int]) -> int:
    """Note the children of `roots` each second, until EOF on `fd`; then give them GRACE seconds to end."""
    line, known = socket.socket(fileno=fd), {pid: born(pid) for pid in roots}
    while not select.select([line], [], [], 1.0)[0]:
        known |= {pid: born(pid) for root in roots for pid in descendants(root, deep=False)}
    deadline = time.monotonic() + GRACE
    while left := [pid for pid, then in known.items() if then and born(pid) == then]:
        for pid in left if time.monotonic() > deadline else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.05)
    return 0


def _guard(fd: int, cmd: list[str]) -> int:
    """Run `cmd`, wait for its end, a TERM, or EOF on `fd`; then end every descendant. Returns the exit code (128 + signal)."""
    ctypes.CDLL(None).prctl(36, 1, 0, 0, 0)  # PR_SET_CHILD_SUBREAPER: orphans below become our children
    line, (wake, woken) = socket.socket(fileno=fd), os.pipe()
    line.set_inheritable(False)
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    ended: list[int] = []
    signal.signal(signal.SIGTERM, lambda *_: ended.append(1))
    for sig in (signal.SIGCHLD, signal.SIGINT, signal.SIGHUP):  # a handler, not SIG_IGN: that would be inherited
        signal.signal(sig, lambda *_: None)
    try:
        child = subprocess.Popen(cmd, start_new_session=True)
    except OSError as e:
        line.sendall(f"error {e}\n".encode())
        return 127
    line.sendall(f"pid {child.pid}\n".encode())

    def reap() -> bool:
        """Collect the dead; whether any child is left."""
        with contextlib.suppress(ChildProcessError):
            while (got := os.waitpid(-1, os.WNOHANG)) != (0, 0):
                if got[0] == child.pid:
                    child.returncode = os.waitstatus_to_exitcode(got[1])
            return True
        return False

    while reap() and child.returncode is None and not ended:
        ready, _, _ = select.select([line.fileno(), wake], [], [])
        if wake in ready:
            os.read(wake, 4096)
        if line.fileno() in ready:  # the parent closed its end, or died
            break
    deadline, sent = time.monotonic() + GRACE, False
    while reap():
        if not sent or time.monotonic() > deadline:
            for pid in descendants(os.getpid()):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL if sent else signal.SIGTERM)
            sent = True
        time.sleep(0.02)
    code = child.returncode if child.returncode is not None else 1
    return code if code >= 0 else 128 - code


@contextlib.contextmanager
def watched(file: Path, seconds: float) -> Iterator[None]:
    """Where the block lasts longer than `seconds`, the Python stack of every thread goes to `file`: by a thread outside of the interpreter,
    which works also where this process is stuck in C. One such block at a time in a process."""
    with file.open("w") as f:
        faulthandler.dump_traceback_later(seconds, file=f)
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


def stack(file: Path, mark: str) -> list[str]:
    """The frames, innermost first, of the first thread in a file of `watched` that is in code whose path has `mark`; [] where there is none."""
    for thread in file.read_text("utf-8").split("\n\n") if file.exists() else ():
        frames = [line.strip() for line in thread.splitlines() if line.startswith("  File ")]
        if any(mark in f for f in frames):
            return frames
    return []


if __name__ == "__main__":
    if sys.argv[1] == "follow":
        sys.exit(_follow(int(sys.argv[2]), [int(pid) for pid in sys.argv[3:]]))
    sys.exit(_guard(int(sys.argv[1]), sys.argv[2:]))
