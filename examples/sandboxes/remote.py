"""Sandboxes that someone else runs, by their SDKs: kind = "examples.sandboxes.remote:Modal", or "...:SweRex". docs/sandboxes.md says what was run.

They run a command to its end and have no pipes, so `exec` is theirs, and `shell` is missing; all else is made of `exec`.
"""

import asyncio
import base64
import shlex
import time
from typing import Any

from vime.agents.sandbox import Result, Sandbox, SandboxSpec, Shell
from vime.errors import VimeError, said


class Remote(Sandbox):
    """`once` runs (argv, cwd, env, timeout, stdin) and gives (code, stdout, stderr), or raises TimeoutError."""

    def __init__(self, spec: SandboxSpec):
        super().__init__(spec)
        if asked := [k for k in ("binds", "protected", "sockets") if getattr(spec, k)]:
            raise VimeError(f"sandbox {spec.kind}: {', '.join(asked)}: not possible there", "use kind = local")

    async def once(self, argv: list[str], cwd: str, env: dict[str, str], timeout: float, stdin: bytes) -> tuple[int, bytes, bytes]:
        raise NotImplementedError

    async def exec(self, argv: list[str], *, cwd=None, env=None, timeout=None, stdin=None, max_output=1 << 20) -> Result:
        began, limit = time.monotonic(), timeout or self.spec.timeout_s
        try:
            code, out, err = await asyncio.wait_for(self.once(argv, cwd or self.workdir, self.spec.env | (env or {}), limit, stdin or b""), limit + 5)
        except TimeoutError:
            return Result(None, "", b"", b"", True, False, time.monotonic() - began)
        text = (out + err)[:max_output].decode(errors="replace")
        return Result(code, text, out[:max_output], err[:max_output], False, len(out + err) > max_output, time.monotonic() - began)

    async def shell(self) -> Shell:
        raise VimeError(f"sandbox {self.spec.kind}: it has no persistent shell", "use exec, or kind = local or docker:IMAGE")

    async def fill(self) -> None:
        await self.exec(["mkdir", "-p", self.workdir], cwd="/")
        if self.spec.base:
            await self.upload(self.spec.base, self.workdir)
        self._first = await self.manifest()


class Modal(Remote):
    """Needs Modal's SDK and an account; the image is spec.options[0], a name in a registry."""

    async def begin(self) -> None:
        try:
            import modal
        except ImportError as e:
            raise VimeError("sandbox: there is no Modal SDK", "pip install modal && modal token new") from e
        image = modal.Image.from_registry((self.spec.options or ["python:3.11-slim"])[0])
        try:
            app = await modal.App.lookup.aio("vime", create_if_missing=True)
            how = {"memory": self.spec.memory_mb, "block_network": not self.spec.network, "timeout": 86_400}
            self.box: Any = await modal.Sandbox.create.aio(app=app, image=image, **how)
        except Exception as e:
            raise VimeError(f"sandbox: Modal: {said(e)}", "modal token new signs in") from e
        await self.fill()

    async def once(self, argv, cwd, env, timeout, stdin):
        process = await self.box.exec.aio(*argv, timeout=int(timeout) + 1, workdir=cwd, env=env, text=False)
        process.stdin.write(stdin)
        process.stdin.write_eof()
        await process.stdin.drain.aio()
        out, err = await asyncio.gather(process.stdout.read.aio(), process.stderr.read.aio())
        return await process.wait.aio(), out, err

    async def stop(self) -> None:
        if hasattr(self, "box"):
            await self.box.terminate.aio()


class SweRex(Remote):
    """A runtime that `swerex-remote` serves: spec.options = [host, port, token]."""

    async def begin(self) -> None:
        try:
            from swerex.runtime.remote import RemoteRuntime
        except ImportError as e:
            raise VimeError("sandbox: there is no SWE-ReX", "pip install swe-rex") from e
        host, port, token = self.spec.options
        self.runtime = RemoteRuntime(host=f"http://{host}", port=int(port), auth_token=token)
        if not (alive := await self.runtime.is_alive(timeout=20)):
            why = (alive.message.strip().splitlines() or ["?"])[-1]
            raise VimeError(f"sandbox: no SWE-ReX at {host}:{port}: {why}", "swerex-remote --auth-token TOKEN")
        await self.fill()

    async def once(self, argv, cwd, env, timeout, stdin):
        from swerex.exceptions import CommandTimeoutError
        from swerex.runtime.abstract import Command

        # it passes text, and no stdin: bytes go as base64
        words = ["env", *(f"{k}={v}" for k, v in env.items()), *argv]
        given = [stdin[at : at + 60_000] for at in range(0, len(stdin), 60_000)]
        for k, part in enumerate([b"", *given]):  # one argument may not have more than 128 KiB
            more = f"base64 -d >{'>' if k else ''}/tmp/.vime-in"
            await self.runtime.execute(Command(command=f"echo {base64.b64encode(part).decode()} | {more}", shell=True))
        script = f"{shlex.join(words)} </tmp/.vime-in >/tmp/.vime-out 2>/tmp/.vime-err; echo $?; base64 -w0 /tmp/.vime-out; echo; base64 -w0 /tmp/.vime-err"
        try:
            got = await self.runtime.execute(Command(command=["sh", "-c", script], timeout=timeout, cwd=cwd))
        except CommandTimeoutError as e:
            raise TimeoutError from e
        code, out, err = (got.stdout + "\n\n").split("\n")[:3]
        return int(code), base64.b64decode(out), base64.b64decode(err)

    async def stop(self) -> None:
        if hasattr(self, "runtime"):
            await self.runtime.close()
