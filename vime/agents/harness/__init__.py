"""Black boxes: somebody else's agent, run headless in a sandbox, that talks to the Gateway as to its provider. docs/harnesses.md.

What differs between them is data, harness.toml; here is what they have in common.
"""

import os
import re
import shutil
import subprocess
import tomllib
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, Literal

from vime.agents.sandbox import Sandbox, SandboxSpec
from vime.errors import VimeError, nearest

PREFIX = "~/.cache/vime/harness"
PORT = 8399  # of the Gateway, as the sandbox sees it
BUDGET = re.compile(r"this session has (made its \d+ requests|sampled its \d+ tokens)")  # what the Gateway answers then


@dataclass
class HarnessResult:
    """How a run ended. completed: by itself, without an error; budget: the Gateway's cap of requests or tokens ended it; timeout: killed when
    its time was up; failed: it says so, or by its exit code; crashed: by a signal, or it did not start. `seconds` of wall clock."""

    state: Literal["completed", "timeout", "failed", "budget", "crashed"]
    code: int | None
    seconds: float
    log_tail: str


@cache
def table() -> dict[str, dict[str, Any]]:
    return tomllib.loads(Path(__file__).with_name("harness.toml").read_text())


def known(name: str) -> dict[str, Any]:
    """A harness's part of harness.toml. Raises: VimeError."""
    if name not in table():
        raise VimeError(f"harness: there is no {name!r}", nearest(name, list(table())))
    return table()[name]


def where(name: str, prefix: str | None = None) -> Path:
    return Path(prefix or os.environ.get("VIME_HARNESS_PREFIX") or os.path.expanduser(PREFIX)).absolute() / name


def program(name: str, prefix: str | None = None) -> Path:
    """The installed program. Raises: VimeError with the command that installs it, at the version this was tested with."""
    found = where(name, prefix) / known(name)["program"]
    if not os.access(found, os.X_OK):
        packages = " ".join(known(name)["packages"])
        raise VimeError(f"harness {name}: {packages} is not installed in {found.parent.parent}", f"vime harness install {name}")
    return found


def install(name: str, prefix: str | None = None) -> Path:
    """Install a harness at the tested version by npm or pip into a folder of its own. Raises: VimeError with the tail of their log."""
    how, to = known(name), where(name, prefix)
    commands = [["npm", "install", "--global", "--no-fund", "--no-audit", "--prefix", str(to), *how["packages"]]]
    if "@" not in how["packages"][0]:
        commands = [[how.get("python", "python3"), "-m", "venv", str(to)], [f"{to}/bin/pip", "install", "-q", *how["packages"]]]
    for command in commands:
        if not shutil.which(command[0]):
            raise VimeError(f"harness {name}: there is no {command[0]} here", "install it first")
        done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise VimeError(f"harness {name}: {' '.join(command[:3])} failed with exit code {done.returncode}", log=done.stdout[-2000:])
    return program(name, prefix)


def fitted(spec: SandboxSpec, name: str, port: int) -> SandboxSpec:
    """`spec` with what the harness needs: its own folder and its interpreter, read-only, and the Gateway's `port` as PORT."""
    found = program(name)
    python = found.parent / "python"
    by = python if python.exists() else Path(shutil.which("node") or "/usr/bin/node")
    binds = {str(p): str(p) for p in (found.parent.parent, by.resolve().parent.parent) if p != Path("/usr")}
    return replace(spec, binds=binds | spec.binds, sockets={PORT: port} | spec.sockets)


async def run(name: str, prompt: str, sandbox: Sandbox, token: str, model: str, *, timeout: float = 1800) -> HarnessResult:
    """Run harness `name` in the sandbox's work folder, which was opened with `fitted`, for a session of the Gateway with `token`; caps of its
    requests and tokens are the session's. No process of the sandbox's user is left afterwards. Raises: VimeError where it can't be started."""
    how, found = known(name), program(name)
    fill = {"base_url": f"http://127.0.0.1:{PORT}", "token": token, "model": model, "prompt": prompt, "prefix": str(found.parent.parent)}
    home = (await sandbox.exec(["sh", "-c", f"test -x {found} && cd && pwd"])).output.strip()
    if not home:
        raise VimeError(f"harness {name}: the sandbox does not show {found}", "open it with fitted(spec, name, port)")
    for path, text in how.get("files", {}).items():
        await sandbox.write(f"{home}/{path}", Template(text).safe_substitute(fill).encode())
    env = {k: Template(v).safe_substitute(fill) for k, v in how.get("env", {}).items()}
    argv = [f"{home}/{a}" if a in how.get("files", {}) else Template(a).safe_substitute(fill) for a in how["argv"]]
    done = await sandbox.exec([str(found), *argv], env=env, timeout=timeout, max_output=16 << 20)
    await sandbox.killall()
    code = done.code or 0
    ends: dict[Any, Any] = {"timeout": done.timed_out, "budget": BUDGET.search(done.output), "crashed": code < 0 or code >= 126}
    ends |= {"failed": code or re.search(how["failed"], done.output), "completed": True}
    state = next(s for s, holds in ends.items() if holds)
    return HarnessResult(state, done.code, done.seconds, done.output[-8000:])


def command(what: str, name: str | None, prefix: str | None) -> str:
    """`vime harness list` and `vime harness install NAME`."""
    if what == "install":
        return str(install(name or "", prefix))
    rows = [f"{n:16}{'installed' if (where(n, prefix) / h['program']).exists() else '-':12}{' '.join(h['packages'])}" for n, h in table().items()]
    return "\n".join(rows)
