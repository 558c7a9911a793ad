"""The local sandbox, seen from the process that opens it. What is done with rights is in keeper.py, a process of its own."""

import asyncio
import contextlib
import glob
import itertools
import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vime.agents.sandbox import Backend, Running, SandboxSpec
from vime.errors import VimeError
from vime.procs import born

HOME = "/home/agent"
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin", "HOME": HOME, "USER": "agent", "LANG": "C.UTF-8", "TERM": "dumb"}
ETC = ("alternatives", "ca-certificates", "chromium.d", "fonts", "ld.so.cache", "ld.so.conf", "ld.so.conf.d", "localtime", "magic", "mime.types", "ssl")
NUMBERS = itertools.count()
_zygote: dict[int, socket.socket] = {}  # pid of the process that has it (a fork needs its own) -> the line to it


def states() -> Path:
    """Where each sandbox of this user has a folder: empty as the host sees it, a mount point in the keeper's namespace."""
    return Path(tempfile.gettempdir(), f"vime-sandboxes-{os.geteuid()}")


def sweep() -> None:
    """Remove folders and cgroups whose owner is dead and whose keeper was killed."""
    for folder in states().glob("*-*-*"):
        pid, start, _ = folder.name.split("-")
        if born(int(pid)) != start:
            for left in (folder, *Path("/sys/fs/cgroup").rglob(f"vime-{folder.name}")):
                with contextlib.suppress(OSError):
                    left.rmdir()


def zygote() -> socket.socket:
    """The line to this process's zygote, started the first time."""
    if os.getpid() not in _zygote:
        missing = [p for p in ("bwrap", "bash") if not shutil.which(p)]
        if missing or sys.platform != "linux":
            raise VimeError(f"sandbox local needs Linux with {' and '.join(missing or ['bubblewrap'])}", "apt-get install -y bubblewrap, or use kind = docker:IMAGE")
        states().mkdir(mode=0o700, exist_ok=True)
        if states().stat().st_uid != os.geteuid():
            raise VimeError(f"sandbox: {states()} belongs to someone else", "set TMPDIR")
        sweep()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        words = [sys.executable, "-I", "-S", os.path.join(os.path.dirname(__file__), "keeper.py"), str(theirs.fileno())]
        with theirs:  # no environment: it could be read from inside where there is no root
            subprocess.Popen(words, env={"PATH": os.defpath + ":/usr/sbin:/sbin"}, start_new_session=True, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL)
        _zygote[os.getpid()] = ours
    return _zygote[os.getpid()]


def ask(line: socket.socket, word: str, body: Any = None, fds: tuple[int, ...] = ()) -> None:
    held = os.memfd_create("request")
    try:
        with open(held, "wb", closefd=False) as f:
            f.write(json.dumps(body).encode())
        socket.send_fds(line, [word.encode()], [held, *fds])
    finally:
        os.close(held)


def arguments(spec: SandboxSpec, state: str) -> list[str]:
    """bubblewrap's: all that can be seen is said here."""
    out = ["--unshare-ipc", "--unshare-uts", "--unshare-pid", "--unshare-cgroup-try", "--hostname", "sandbox", "--as-pid-1", "--cap-drop", "ALL"]
    out += [] if spec.network else ["--unshare-net"]
    for inside in ("/etc/-", HOME, spec.workdir, *spec.binds.values()):
        for above in itertools.accumulate(inside.strip("/").split("/")[:-1], os.path.join, initial="/"):
            out += ["--perms", "0755", "--dir", above] if above not in ("/", "/usr", "/tmp") else []
    out += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--bind", f"{state}/shm", "/dev/shm"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64"):
        path = f"/{name}"
        if os.path.islink(path):
            out += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            out += ["--ro-bind", path, path]
    for name in (*ETC, *(("resolv.conf",) if spec.network else ())):
        out += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name in ("passwd", "group", "hosts", "nsswitch.conf"):
        out += ["--ro-bind", f"{state}/{name}", f"/etc/{name}"]
    out += ["--bind", f"{state}/tmp", "/tmp", "--bind", f"{state}/home", HOME, "--bind", f"{state}/work", spec.workdir]
    for host, inside in spec.binds.items():
        out += ["--ro-bind", os.path.abspath(host), inside]
    held: set[str] = set()
    for path in sorted({p.rstrip("/") for g in spec.protected for p in glob.glob(g, root_dir=spec.base, recursive=True, include_hidden=True)}) if spec.base else ():
        above = list(itertools.accumulate(path.split("/"), os.path.join))[:-1]
        if held.isdisjoint(above) and not os.path.islink(os.path.join(spec.base or "", path)):
            # a folder above one that is mounted could be moved away, and another put there; not if it is a mount itself
            for how, name in (*(("--bind", a) for a in above), ("--ro-bind", path)):
                out += [how, f"{state}/work/{name}", f"{spec.workdir}/{name}"] if name not in out else []
            held.add(path)
    return [*out, "--remount-ro", "/dev", "--remount-ro", "/", "--chdir", spec.workdir]


class Local(Backend):
    """One local sandbox. `mode` is overlay, or copy where the kernel has none; `limited` names what cgroups limit, of memory and pids (the
    rest is limited for each process, by rlimits)."""

    mode, limited = "", ""

    def __init__(self, spec: SandboxSpec, line: socket.socket):
        super().__init__(spec)
        self._line, self._numbers, self._pending = line, itertools.count(), {}  # type: ignore[var-annotated]
        self._servers: list[asyncio.Server] = []
        self._gone = ""

    async def begin(self) -> None:
        loop, spec = asyncio.get_running_loop(), self.spec
        self._pending["open"] = opened = loop.create_future()
        loop.add_reader(self._line, self._hear)
        self.mode, self.limited, socks = await opened
        for sock, port in zip(socks, spec.sockets.values()):
            self._servers.append(await asyncio.start_server(lambda r, w, port=port: relay(r, w, port), sock=sock))  # type: ignore[misc]

    def _hear(self) -> None:
        try:
            text, fds, _, _ = socket.recv_fds(self._line, 4096, 64, socket.MSG_CMSG_CLOEXEC)
        except OSError as e:
            text, fds = f"failed {e}".encode(), []
        words = text.decode(errors="replace").split()
        if words[:1] == ["ended"] and (future := self._pending.pop(words[1], None)) and not future.done():
            future.set_result(int(words[2]))
        elif words[:1] == ["open"]:
            self._pending.pop("open").set_result((words[1], words[2], [socket.socket(fileno=fd) for fd in fds]))
        elif not words or words[0] == "failed":
            self._gone = " ".join(words[1:]) or self._gone or "it has ended"
            if not words:
                asyncio.get_running_loop().remove_reader(self._line)
                for future in self._pending.values():
                    if not future.done():
                        fix = "give this process CAP_SYS_ADMIN (docker run --privileged), or use kind = docker:IMAGE" if "not permitted" in self._gone else ""
                        future.set_exception(VimeError(f"sandbox: {self._gone}", fix))
                self._pending.clear()

    def _send(self, word: str, body: Any = None, fds: tuple[int, ...] = ()) -> tuple[str, "asyncio.Future[int]"]:
        number = str(next(self._numbers))
        future = self._pending[number] = asyncio.get_running_loop().create_future()
        try:
            ask(self._line, f"{word} {number}", body, fds)
        except OSError as e:
            self._pending.pop(number)
            raise VimeError(f"sandbox: {self._gone or 'it has ended'}") from e
        return number, future

    async def start(self, argv: list[str], cwd: str, env: dict[str, str]) -> Running:
        loop = asyncio.get_running_loop()
        (inside_in, ours_in), (ours_out, inside_out), (ours_err, inside_err) = os.pipe(), os.pipe(), os.pipe()
        theirs = (inside_in, inside_out, inside_err)
        try:
            number, future = self._send("start", {"argv": argv, "cwd": cwd, "env": ENV | env}, theirs)
        except VimeError:
            for fd in (ours_in, ours_out, ours_err):
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        readers = [asyncio.StreamReader(limit=1 << 20) for _ in range(2)]
        pipes: list[asyncio.BaseTransport] = []
        for reader, fd in zip(readers, (ours_out, ours_err)):
            pipes.append((await loop.connect_read_pipe(lambda r=reader: asyncio.StreamReaderProtocol(r), os.fdopen(fd, "rb", 0)))[0])  # type: ignore[misc]
        to, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(ours_in, "wb", 0))
        writer = asyncio.StreamWriter(to, protocol, None, loop)

        async def kill() -> None:
            if not future.done():
                with contextlib.suppress(OSError):
                    ask(self._line, f"kill {number}")
                await asyncio.wait([future], timeout=5)

        def close() -> None:
            for pipe in (*pipes, to):
                pipe.close()

        return Running(writer, *readers, lambda: asyncio.shield(future), kill, close)

    async def changes(self) -> dict[str, str]:
        """{path below the work folder: added, modified or deleted}, against `base`."""
        held = os.memfd_create("changes")
        with open(held, "rb") as f:
            await self._send("changes", None, (held,))[1]
            f.seek(0)
            return dict(json.loads(f.read()))

    async def stop(self) -> None:
        """End it: no process, mount or folder is left when this returns."""
        for server in self._servers:
            server.close()
        if self._line.fileno() < 0:
            return
        with contextlib.suppress(OSError):
            self._line.shutdown(socket.SHUT_WR)
        ended = self._pending.setdefault("stop", asyncio.get_running_loop().create_future())
        if not self._gone:
            await asyncio.wait([ended], timeout=30)
        if ended.done():
            ended.exception()  # that it has ended
        asyncio.get_running_loop().remove_reader(self._line)
        self._line.close()


async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int) -> None:
    """Between one connection from inside, and a port of the host's loopback interface."""

    async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError, RuntimeError):
            while data := await source.read(1 << 16):
                to.write(data)
                await to.drain()
            to.write_eof()

    with contextlib.closing(writer), contextlib.suppress(OSError):
        far, to = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(to):
            await asyncio.gather(copy(reader, to), copy(far, writer))


async def open_local(spec: SandboxSpec) -> Local:
    number = next(NUMBERS)
    name = f"{os.getpid()}-{born(os.getpid())}-{number}"
    parent, state = zygote(), str(states() / name)
    uid = 1_000_000_000 + os.getpid() % (1 << 22) * 256 + number % 256  # of no one else: limits, signals and keys are by uid
    files = {
        "passwd": f"root:x:0:0::/:/usr/sbin/nologin\nagent:x:{uid if os.geteuid() == 0 else 0}:{uid if os.geteuid() == 0 else 0}::{HOME}:/bin/bash\n",
        "group": f"root:x:0:\nagent:x:{uid}:\n", "hosts": "127.0.0.1 localhost sandbox\n", "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n",
    }  # fmt: skip
    body = {
        "name": f"vime-{name}", "state": state, "uid": uid, "base": spec.base and os.path.abspath(spec.base), "files": files, "disk": spec.disk_mb << 20,
        "memory": spec.memory_mb << 20, "pids": spec.pids, "ports": list(spec.sockets), "bwrap": arguments(spec, state),
    }  # fmt: skip
    os.mkdir(state, 0o700)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with theirs:
        ask(parent, "open", body, (theirs.fileno(),))
    box = Local(spec, ours)
    try:
        await box.begin()
    except BaseException:
        await box.stop()
        raise
    return box


