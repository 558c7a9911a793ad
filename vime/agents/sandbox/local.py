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
from collections.abc import Callable
from pathlib import Path

from vime.agents.sandbox import Running, Sandbox, SandboxSpec
from vime.errors import VimeError, said
from vime.procs import born

HOME = "/home/agent"
ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin:/usr/local/sbin:/usr/sbin:/sbin", "HOME": HOME, "USER": "agent", "LANG": "C.UTF-8", "TERM": "dumb"}
ETC = "alternatives ca-certificates chromium.d fonts ld.so.cache ld.so.conf ld.so.conf.d localtime magic mime.types ssl".split()  # noqa: SIM905
NUMBERS = itertools.count()
_zygote: dict[int, tuple[str, "subprocess.Popen[bytes]"]] = {}  # pid of the process that has it (a fork needs its own) -> its socket, itself


def zygote() -> str:
    """The socket of this process's zygote, which the first call starts, after what dead processes left has been swept."""
    me, folder = os.getpid(), Path(tempfile.gettempdir(), f"vime-sandboxes-{os.geteuid()}")
    if me not in _zygote or _zygote[me][1].poll() is not None:
        if sys.platform != "linux" or not shutil.which("bwrap"):
            raise VimeError("sandbox local needs Linux with bubblewrap", "apt-get install -y bubblewrap, or use kind = docker:IMAGE")
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.geteuid():
            raise VimeError(f"sandbox: {folder} belongs to someone else", "set TMPDIR")
        for old in folder.glob("[0-9]*-*"):
            pid, start, *_ = old.name.partition(".")[0].split("-")
            for left in (old, *Path("/sys/fs/cgroup").rglob(f"vime-{old.name}")) if born(int(pid)) != start else ():
                with contextlib.suppress(OSError):
                    left.rmdir() if left.is_dir() else left.unlink()
        path = f"{folder}/{me}-{born(me)}.sock"
        Path(path).unlink(missing_ok=True)
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path)
            server.listen(512)
            words = [sys.executable, "-I", "-S", os.path.join(os.path.dirname(__file__), "keeper.py"), str(server.fileno())]
            env = {"PATH": os.defpath + ":/usr/sbin:/sbin"}  # and no more: without root it could be read from inside
            process = subprocess.Popen(words, env=env, start_new_session=True, pass_fds=[server.fileno()], stdin=subprocess.PIPE)
        _zygote[me] = path, process
    return _zygote[me][0]


def folders(path: str) -> list[str]:
    """Those above `path`, which bubblewrap would make such that only root may enter them."""
    above = itertools.accumulate(path.strip("/").split("/")[:-1], os.path.join, initial="/")
    return [w for f in above if f not in ("/", "/usr", "/tmp") for w in ("--perms", "0755", "--dir", f)]


def arguments(spec: SandboxSpec, state: str) -> list[str]:
    """bubblewrap's: all that can be seen inside is said here."""
    out = ["--unshare-ipc", "--unshare-uts", "--unshare-pid", "--unshare-cgroup-try", "--hostname", "sandbox", "--as-pid-1", "--cap-drop", "ALL"]
    out += [] if spec.network else ["--unshare-net"]
    out += ["--ro-bind", "/usr", "/usr", "--proc", "/proc", "--dev", "/dev", "--bind", f"{state}/shm", "/dev/shm"]
    for path in filter(os.path.exists, ("/bin", "/sbin", "/lib", "/lib32", "/lib64")):
        out += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    out += folders("/etc/x")
    for name in (*ETC, *(("resolv.conf",) if spec.network else ())):
        out += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    for name in ("passwd", "group", "hosts", "nsswitch.conf"):
        out += ["--ro-bind", f"{state}/{name}", f"/etc/{name}"]
    mounts = [("--bind", f"{state}/tmp", "/tmp"), ("--bind", f"{state}/home", HOME), ("--bind", f"{state}/work", spec.workdir)]
    for how, host, inside in (*mounts, *(("--ro-bind", os.path.abspath(h), i) for h, i in spec.binds.items())):
        out += [*folders(inside), how, host, inside]
    held, base = set[str](), os.path.realpath(spec.base or "")
    for pattern in spec.protected if spec.base else ():
        for path in sorted(p.rstrip("/") for p in glob.glob(pattern, root_dir=spec.base, recursive=True, include_hidden=True)):
            above = list(itertools.accumulate(path.split("/"), os.path.join))[:-1]
            if held.isdisjoint((path, *above)):
                real = os.path.realpath(os.path.join(base, path))  # what bubblewrap would mount
                if not os.path.exists(real) or not f"{real}/".startswith(f"{base}/"):
                    raise VimeError(f"sandbox: protected {pattern!r} matches {path}, which leads out of the work folder, or nowhere")
                # a folder above it could be moved away and another put in its place; not if it is a mount itself
                for how, under in (*(("--bind", a) for a in above if a not in held), ("--ro-bind", path)):
                    out += [how, f"{state}/work/{under}", f"{spec.workdir}/{under}"]
                held.add(path)
    return [*out, "--remount-ro", "/dev", "--remount-ro", "/"]


class Local(Sandbox):
    """One local sandbox. `mode` is overlay, copy where the kernel has none, or empty without a base; `limited` names what cgroups limit of
    memory and pids (else each process is limited, by rlimits)."""

    mode, limited = "", []  # type: ignore[var-annotated]

    async def begin(self) -> None:
        spec, me, root = self.spec, os.getpid(), os.geteuid() == 0
        self.closes = set[Callable[[], None]]()
        try:
            path, number = zygote(), next(NUMBERS)
            uid = 1_000_000_000 + me % (1 << 22) * 256 + number % 256  # no one else's: limits, signals and keys go by uid
            self.state = f"{path.removesuffix('.sock')}-{number}"
            users = {"passwd": f"agent:x:{uid * root}:{uid * root}::{HOME}:/bin/bash\n", "group": f"agent:x:{uid * root}:\n"}
            files = users | {"hosts": "127.0.0.1 localhost sandbox\n", "nsswitch.conf": "passwd: files\ngroup: files\nhosts: files dns\n"}
            body = {"state": self.state, "uid": uid, "base": spec.base and os.path.abspath(spec.base), "files": files, "ports": spec.sockets}
            limits = {"memory": spec.memory_mb << 20, "pids": spec.pids, "disk": spec.disk_mb << 20}
            self._reader, self._writer = await asyncio.open_unix_connection(path)
            self._writer.write(json.dumps(body | limits | {"bwrap": arguments(spec, self.state)}).encode() + b"\n")
            answer = json.loads(await self._reader.readline() or '{"error": "its keeper has ended"}')
        except OSError as e:
            fix = f"its sockets are in {tempfile.gettempdir()}: set TMPDIR to a folder of yours, of a short path"
            raise VimeError(f"sandbox: {said(e)}", fix) from e
        if error := answer.get("error"):
            fix = "give this process CAP_SYS_ADMIN (docker run --privileged), or use kind = docker:IMAGE" if "not permitted" in error else ""
            raise VimeError(f"sandbox: {error}", fix)
        self.mode, self.limited = answer["mode"], answer["limited"]

    async def _ask(self, body: object, fds: list[int]) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        line = socket.socket(socket.AF_UNIX)
        try:
            line.connect(f"{self.state}.sock")
            socket.send_fds(line, [json.dumps(body).encode() + b"\n"], fds)
        except OSError as e:
            line.close()
            raise VimeError("sandbox: it has ended") from e
        return await asyncio.open_unix_connection(sock=line)

    async def start(self, argv: list[str], cwd: str, env: dict[str, str]) -> Running:
        loop, pairs = asyncio.get_running_loop(), [os.pipe() for _ in range(3)]
        theirs, ours = [pairs[0][0], pairs[1][1], pairs[2][1]], [pairs[0][1], pairs[1][0], pairs[2][0]]
        try:
            reader, writer = await self._ask({"argv": argv, "cwd": cwd, "env": ENV | env}, theirs)
        except BaseException:
            for fd in ours:
                os.close(fd)
            raise
        finally:
            for fd in theirs:
                os.close(fd)
        # uvloop closes a pipe's number, and then its file: which may by then be another's of the same number, opened in another thread
        owned = not type(loop).__module__.startswith("uvloop")
        to, protocol = await loop.connect_write_pipe(asyncio.streams.FlowControlMixin, os.fdopen(ours[0], "wb", 0, closefd=owned))
        outs = (asyncio.StreamReader(), asyncio.StreamReader())
        pipes: list[asyncio.BaseTransport] = [to]
        for out, fd in zip(outs, ours[1:]):
            pipes.append((await loop.connect_read_pipe(lambda out=out: asyncio.StreamReaderProtocol(out), os.fdopen(fd, "rb", 0, closefd=owned)))[0])  # type: ignore[misc,arg-type]

        async def wait() -> int:
            return int(await reader.read() or -9)

        async def kill() -> None:
            if not writer.is_closing():
                writer.write_eof()
                await reader.read()

        def close() -> None:
            self.closes.discard(close)
            for pipe in pipes:
                pipe.close()
            writer.close()

        self.closes.add(close)
        return Running(asyncio.StreamWriter(to, protocol, None, loop), outs[0], outs[1], wait, kill, close)

    async def changes(self) -> dict[str, str]:
        reader, writer = await self._ask(None, [])
        text = await reader.read()
        writer.close()
        return dict(json.loads(text))

    async def stop(self) -> None:
        for close in [*self.closes]:  # of shells: what is left to the garbage collector is closed in any thread, at any time
            close()
        if hasattr(self, "_writer"):
            with contextlib.suppress(OSError):
                self._writer.write_eof()
                await self._reader.read()
            self._writer.close()
