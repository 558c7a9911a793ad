"""A sandbox in a Docker or Podman container, by the command line of either (docs/sandboxes.md says with which runtimes)."""

import asyncio
import contextlib
import functools
import itertools
import os
import shutil
import tempfile

from vime.agents.sandbox import Running, Sandbox
from vime.errors import VimeError

# Between TCP inside and a unix socket that is mounted: the container has no network. Needs python3 in the image.
RELAY = """import asyncio,sys
async def copy(r, w):
    while d := await r.read(65536): w.write(d); await w.drain()
    w.write_eof()
async def serve(path, r, w):
    far, to = await asyncio.open_unix_connection(path)
    await asyncio.gather(copy(r, to), copy(far, w), return_exceptions=True)
    w.close(); to.close()
async def main():
    for port in sys.argv[1:]: await asyncio.start_server(lambda r, w, p=port: serve(f'/run/vime/{p}.sock', r, w), '127.0.0.1', int(port))
    print('ready', flush=True); await asyncio.sleep(1e9)
asyncio.run(main())"""
CAPS = [w for c in ("CHOWN", "DAC_OVERRIDE", "FOWNER", "SETGID", "SETUID") for w in ("--cap-add", c)]  # what package managers need
INIT = "trap exit TERM; while :; do sleep 3600 & wait; done"  # process 1, which `kill -9 -1` spares, and which reaps


class Container(Sandbox):
    """One container: kind = docker:IMAGE or podman:IMAGE. The image needs sh, tar and sha256sum, with `sockets` also python3."""

    name, own = "", 3

    async def begin(self) -> None:
        spec, (self.command, _, image) = self.spec, self.spec.kind.partition(":")
        if spec.protected:
            raise VimeError(f"sandbox {self.command}: protected paths need kind = local")
        self.folder, self.count = tempfile.mkdtemp(prefix="vime-container-"), itertools.count()  # of the unix sockets
        self.name = os.path.basename(self.folder)
        limits = ["--memory", f"{spec.memory_mb}m", "--pids-limit", str(spec.pids), "--security-opt", "no-new-privileges", "--cap-drop", "ALL", *CAPS]
        options = [*limits, *(() if spec.network else ("--network", "none")), "-v", f"{self.folder}:/run/vime:ro"]
        options += [w for host, inside in spec.binds.items() for w in ("-v", f"{os.path.abspath(host)}:{inside}:ro")]
        await self.tell("run", "-d", "--rm", "--name", self.name, *options, *spec.options, image, "sh", "-c", INIT)
        await self.tell("exec", self.name, "mkdir", "-p", spec.workdir)
        for near, far in spec.sockets.items():
            await asyncio.start_unix_server(functools.partial(relay, far), f"{self.folder}/{near}.sock")
        if spec.sockets:
            relaying = await self.start(["python3", "-c", RELAY, *map(str, spec.sockets)], "/", {})
            if not await relaying.stdout.readline():
                told = (await relaying.stderr.read()).decode(errors="replace")[-300:]
                raise VimeError(f"sandbox: {image} cannot relay: {told}", "it needs python3")
        if spec.base:
            await self.upload(spec.base, spec.workdir)
        self._first = await self.manifest()

    async def tell(self, *words: str) -> None:
        """Run docker or podman; VimeError with the last line of what it said where it fails."""
        try:
            process = await asyncio.create_subprocess_exec(self.command, *words, stdin=-3, stdout=-3, stderr=-1)
        except FileNotFoundError as e:
            raise VimeError(f"sandbox: there is no {self.command} here", "install it, or use kind = local") from e
        said = (await process.communicate())[1].decode(errors="replace").strip()
        if process.returncode:
            last = (said.splitlines() or ["?"])[-1][:300]
            raise VimeError(f"sandbox: {self.command} {words[0]}: {last}", "docs/sandboxes.md, Containers", said[-2000:])

    async def start(self, argv: list[str], cwd: str, env: dict[str, str]) -> Running:
        tag = f"VIME_COMMAND={next(self.count)}"
        words = ["exec", "-i", "-w", cwd, *(w for k, v in env.items() for w in ("-e", f"{k}={v}")), "-e", tag, self.name, *argv]
        process = await asyncio.create_subprocess_exec(self.command, *words, stdin=-1, stdout=-1, stderr=-1)
        assert process.stdin and process.stdout and process.stderr

        async def kill() -> None:  # all that has inherited the tag: the end of the client would end nothing inside
            script = f"for p in /proc/[0-9]*; do grep -qszx {tag} $p/environ && kill -9 ${{p#/proc/}}; done; true"
            with contextlib.suppress(VimeError, ProcessLookupError):
                await self.tell("exec", self.name, "sh", "-c", script)
                process.kill()

        return Running(process.stdin, process.stdout, process.stderr, process.wait, kill)

    async def stop(self) -> None:
        if self.name:
            with contextlib.suppress(VimeError):
                await self.tell("rm", "-f", self.name)
            shutil.rmtree(self.folder, ignore_errors=True)


async def relay(port: int, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Between one connection of the unix socket and a port of the host's loopback interface."""

    async def copy(source: asyncio.StreamReader, to: asyncio.StreamWriter) -> None:
        while data := await source.read(1 << 16):
            to.write(data)
            await to.drain()
        to.write_eof()

    with contextlib.closing(writer), contextlib.suppress(OSError):
        far, to = await asyncio.open_connection("127.0.0.1", port)
        with contextlib.closing(to):
            await asyncio.gather(copy(reader, to), copy(far, writer))
