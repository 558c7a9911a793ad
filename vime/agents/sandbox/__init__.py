"""Sandboxes: where an agent's commands run. One interface over local namespaces, containers, and what a user adds; docs/sandboxes.md.

A kind gives `start` (a command with pipes), `changes` and `stop`; all else is made of them, here, and so behaves the same everywhere.
Paths are resolved inside, with the agent's rights: the host never follows a link that an agent has made.
"""

import asyncio
import contextlib
import io
import os
import re
import secrets
import shlex
import subprocess
import tarfile
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from vime import hooks
from vime.errors import VimeError

SHELL = "PS1= PS2=; set +H +o history; exec 2>&1; read -r s </proc/$$/stat; set -- ${s##*) }; printf '\\n%s %d\\n' "
# To every process of a session. SIGINT to its leader, the shell, first: one that sees a child end by it without having got it runs the rest of its
# list. SIGKILL not to the leader
SIGNAL = """[ "$1" = KILL ] || kill -s "$1" "$2"; for p in /proc/[0-9]*; do read -r s 2>/dev/null <"$p/stat"; set -- "$1" "$2" ${s##*) }
[ "$6" = "$2" ] && [ "${p#/proc/}" != "$2" ] && kill -s "$1" "${p#/proc/}"; done"""
LIST = """find . -type f -exec sha256sum {} + && find . -type l -exec sh -c 'for f; do echo "$(readlink "$f")  $f"; done' sh {} +"""
CONTAINER = "vime.agents.sandbox.container:Container"
GRACE = 1.0  # seconds that a command which ran out of time has to end after SIGINT


@dataclass(frozen=True)
class SandboxSpec:
    """What a sandbox is to be. `base` is a host folder which the work folder starts as (copied on write; None: empty); `binds` are host
    paths shown read-only at a path inside; `prepare` is a command of the shell that runs inside first, and whose work counts as base;
    `protected` are globs below the work folder that can't be written; `sockets` maps a port of the sandbox's loopback interface to one of
    the host's: the only way out where `network` is false (with it all of them are seen as they are)."""

    kind: str = "local"  # or docker:IMAGE, podman:IMAGE, module:function
    base: str | None = None
    workdir: str = "/work"
    binds: dict[str, str] = field(default_factory=dict)
    protected: list[str] = field(default_factory=list)
    network: bool = False
    sockets: dict[int, int] = field(default_factory=dict)
    memory_mb: int = 2048
    pids: int = 256
    disk_mb: int = 1024
    env: dict[str, str] = field(default_factory=dict)
    timeout_s: float = 120
    prepare: str = ""
    options: list[str] = field(default_factory=list)  # more arguments of docker run or podman run


@dataclass
class Result:
    """What a command did: `code` is None where it ran out of time, negative or above 128 for a signal; `output` is stdout and stderr in the
    order in which they arrived, `truncated` where they were longer than `max_output` bytes."""

    code: int | None
    output: str
    stdout: bytes
    stderr: bytes
    timed_out: bool
    truncated: bool
    seconds: float


@dataclass
class Running:
    """A started command, in a backend's terms."""

    stdin: asyncio.StreamWriter
    stdout: asyncio.StreamReader
    stderr: asyncio.StreamReader
    wait: Callable[[], Awaitable[int]]
    kill: Callable[[], Awaitable[None]]  # with its descendants
    close: Callable[[], None] = lambda: None  # its pipes


class Sandbox(contextlib.AbstractAsyncContextManager["Sandbox"]):
    """What tasks, tools and harnesses know of a sandbox. A kind of its own gives `start`, `stop`, and `begin`, which makes it."""

    own = 2  # processes that `killall` leaves: process 1, and what asks

    def __init__(self, spec: SandboxSpec):
        self.spec, self.workdir, self._first = spec, spec.workdir, {}  # type: ignore[var-annotated]

    async def begin(self) -> None: ...

    async def stop(self) -> None: ...

    async def start(self, argv: list[str], cwd: str, env: dict[str, str]) -> Running:
        raise NotImplementedError

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def exec(
        self, argv: list[str], *, cwd: str | None = None, env: dict[str, str] | None = None, timeout: float | None = None,
        stdin: bytes | None = None, max_output: int = 1 << 20,
    ) -> Result:  # fmt: skip
        """Run a command to its end, or for `timeout` seconds (the spec's by default); then it and its descendants are killed."""
        began, kept, seen = time.monotonic(), [], 0
        run = await self.start(argv, cwd or self.workdir, self.spec.env | (env or {}))

        async def pump(stream: asyncio.StreamReader, which: int) -> None:
            nonlocal seen
            while chunk := await stream.read(1 << 16):
                kept.extend([(which, chunk[: max_output - seen])] if seen < max_output else [])
                seen += len(chunk)

        async def feed() -> None:
            with contextlib.suppress(ConnectionError):
                run.stdin.write(stdin or b"")
                await run.stdin.drain()
            run.stdin.close()

        tasks = [asyncio.ensure_future(t) for t in (pump(run.stdout, 1), pump(run.stderr, 2), feed())]
        code = None
        try:
            code = await asyncio.wait_for(run.wait(), timeout or self.spec.timeout_s)
        except TimeoutError:
            pass
        finally:
            try:
                if code is None:
                    await run.kill()
                # something that still runs may hold the pipes: its silence is the end, and more than pipes hold is not the command's
                before, most, until = -1, seen + (1 << 20), time.monotonic() + 5 * GRACE
                while before < seen < most and time.monotonic() < until:
                    before = seen
                    await asyncio.wait(tasks[:2], timeout=0.2)
            finally:
                for task in tasks:
                    task.cancel()
                run.close()
        out, err = (b"".join(c for w, c in kept if w == which) for which in (1, 2))
        text = b"".join(c for _, c in kept).decode(errors="replace")
        return Result(code, text, out, err, code is None, seen > max_output, time.monotonic() - began)

    async def shell(self) -> "Shell":
        return Shell(self)

    async def _must(self, what: str, argv: list[str], stdin: bytes | None = None) -> bytes:
        done = await self.exec(argv, stdin=stdin, max_output=1 << 34, timeout=max(600, self.spec.timeout_s))
        if done.code != 0:  # nor None
            raise VimeError(f"sandbox: cannot {what}: {done.stderr.decode(errors='replace').strip()[-300:] or f'exit code {done.code}'}")
        return done.stdout

    async def read(self, path: str) -> bytes:
        return await self._must(f"read {path}", ["cat", "--", path])

    async def write(self, path: str, data: bytes, mode: int | None = 0o644) -> None:
        """`mode`: its rights; None: those it has, or a new file's."""
        script = 'mkdir -p -- "$(dirname -- "$1")" && cat >"$1"' + (f' && chmod {mode:o} -- "$1"' if mode is not None else "")
        await self._must(f"write {path}", ["sh", "-c", script, "sh", path], data)

    async def upload(self, host: str, path: str) -> None:
        """A file as `path`; of a folder what is in it, into the folder `path`."""
        if os.path.isfile(host):
            with open(host, "rb") as f:
                return await self.write(path, f.read(), os.stat(host).st_mode & 0o777)
        packed = io.BytesIO()
        with tarfile.open(fileobj=packed, mode="w") as tar:
            await asyncio.to_thread(tar.add, host, ".")
        script = 'mkdir -p -- "$1" && tar -x --no-same-owner -C "$1"'
        await self._must(f"upload {host}", ["sh", "-c", script, "sh", path], packed.getvalue())

    async def download(self, path: str, host: str) -> None:
        """A file, or what is in a folder; unpacked by GNU tar, which writes nothing outside of `host` whatever the agent has linked."""
        packed = await self.exec(["tar", "-c", "-C", path, "."], max_output=1 << 34, timeout=max(600, self.spec.timeout_s))
        if packed.code:
            data = await self.read(path)
            with open(host, "wb") as f:
                f.write(data)
            return
        os.makedirs(host, exist_ok=True)
        command = ["tar", "-x", "--no-same-owner", "--no-same-permissions", "-C", host]
        done = await asyncio.to_thread(subprocess.run, command, input=packed.stdout, stderr=subprocess.PIPE)
        if done.returncode:
            raise VimeError(f"sandbox: cannot unpack {path} to {host}: {done.stderr.decode(errors='replace').strip()[-300:]}")

    async def snapshot(self, to: str) -> str:
        """The work folder as it is now, as a host folder `to`, which can be a `base`."""
        await self.download(self.workdir, to)
        return to

    async def killall(self) -> None:
        """End every process of the agent's, also what has left its session."""
        await self.exec(["sh", "-c", f"until kill -9 -1; set -- /proc/[0-9]*; [ $# -le {self.own} ]; do sleep 0.01; done"], timeout=10)

    async def manifest(self) -> dict[str, str]:
        """{path below the work folder: digest, or what it links to}."""
        lines = (await self._must("list files", ["sh", "-c", LIST])).decode(errors="surrogateescape").splitlines()
        return {path.removeprefix("./"): digest for digest, path in (line.lstrip("\\").split(maxsplit=1) for line in lines)}

    async def changes(self) -> dict[str, str]:
        """{path below the work folder: added, modified or deleted}, against `base`."""
        now, was = await self.manifest(), self._first
        found = {p: "modified" if p in was else "added" for p in now if now[p] != was.get(p)}
        return found | {p: "deleted" for p in was if p not in now}


class Shell:
    """A bash that keeps its folder and variables from one command to the next. A command that runs out of time gets SIGINT, then SIGKILL;
    a shell that this does not bring back, or that has ended, is replaced by a new one, which the output says."""

    def __init__(self, sandbox: Sandbox):
        self._sandbox, self._session, self._text, self._cut = sandbox, "", b"", False
        self._run: Running | None = None

    async def _until(self, mark: str, most: int) -> str | None:
        """Read up to the line of `mark`; returns its number, None where the shell has ended."""
        assert self._run
        while not (m := re.search(rb"\n%s (-?\d+)\n" % mark.encode(), self._text)):
            if not (chunk := await self._run.stdout.read(1 << 16)):
                return None
            self._text += chunk
            if len(self._text) > most + (1 << 17):
                self._text, self._cut = self._text[:most] + self._text[-4096:], True
        self._text = self._text[: m.start()]
        return m[1].decode()

    async def run(self, command: str, timeout: float | None = None, max_output: int = 1 << 20) -> Result:
        """Run `command`; stdin is empty; `stdout` holds stderr too. Raises VimeError where no shell starts."""
        began, mark, timed_out = time.monotonic(), secrets.token_hex(8), False
        if not self._run:
            argv = ["bash", "--noprofile", "--norc", "--noediting", "-i"]
            self._run = run = await self._sandbox.start(argv, self._sandbox.workdir, self._sandbox.spec.env)
            run.stdin.write(f"{SHELL}{mark} $4\n".encode())
            if (session := await asyncio.wait_for(self._until(mark, 4096), 60)) is None:
                raise VimeError(f"sandbox: bash does not start: {self._text.decode(errors='replace')[-300:]}")
            self._session, mark = session, secrets.token_hex(8)
        self._text, self._cut, run = b"", False, self._run
        run.stdin.write(f"eval {shlex.quote(command)} </dev/null\nprintf '\\n%s %d\\n' {mark} $?\n".encode())
        reading, code = asyncio.ensure_future(self._until(mark, max_output)), None
        try:
            done, _ = await asyncio.wait([reading], timeout=timeout or self._sandbox.spec.timeout_s)
            for signal in ("INT", "KILL") if not done else ():
                timed_out = True
                await self._sandbox.exec(["sh", "-c", SIGNAL, "sh", signal, self._session], timeout=10)
                if (await asyncio.wait([reading], timeout=GRACE))[0]:
                    break
        except BaseException:  # given up: the next command must not wait for this one
            await self.close()
            raise
        finally:
            reading.cancel()
        if reading.done() and not reading.cancelled() and (number := reading.result()) is not None:
            code = int(number)
        else:
            code = None if timed_out else await run.wait()
            await self.close()
            self._text += b"\n[the shell has ended; the next command gets a new one]"
        text, self._text = self._text, b""
        cut, out, seconds = self._cut or len(text) > max_output, text[:max_output], time.monotonic() - began
        return Result(None if timed_out else code, out.decode(errors="replace"), out, b"", timed_out, cut, seconds)

    async def close(self) -> None:
        if run := self._run:
            self._run = None
            await run.kill()
            run.close()


async def open_sandbox(spec: SandboxSpec) -> Sandbox:
    """A sandbox of `spec.kind`: local, docker:IMAGE, podman:IMAGE, or module:function, which takes the spec and gives a Sandbox that has not
    begun. Raises VimeError where it can't be made."""
    if spec.base and not os.path.isdir(spec.base):
        raise VimeError(f"sandbox: base {spec.base} is not a folder")
    if min(spec.memory_mb, spec.pids, spec.disk_mb) < 1 or not re.match("/+[^/]", spec.workdir):
        raise VimeError("sandbox: memory_mb, pids and disk_mb must be positive, and workdir an absolute path below /")
    kind, _, what = spec.kind.partition(":")
    if not what and kind != "local":
        raise VimeError(f"sandbox: there is no kind {spec.kind!r}", "valid: local, docker:IMAGE, podman:IMAGE, module:function")
    path = {"local": "vime.agents.sandbox.local:Local", "docker": CONTAINER, "podman": CONTAINER}.get(kind, spec.kind)
    box: Sandbox = hooks.load(path, "sandbox kind")(spec)
    try:
        await box.begin()
        if spec.prepare:
            await box._must("prepare it", ["sh", "-c", spec.prepare])
            box._first = await box.manifest()
    except BaseException:
        await box.stop()
        raise
    return box
