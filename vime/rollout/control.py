"""`vime engines RUN ...`: servers of a running job are taken out, replaced and added, from another terminal. The driver listens on a Unix
socket in the run's folder; a question is one JSON line, answers are lines, the last has "done" or "error". Changes happen under the fleet's
lock, so a publish never meets half of one; waiting for requests to end and for a server to start do not."""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from vime.config import parse_override
from vime.errors import VimeError
from vime.rollout.health import Fleet

NAME = "control.sock"
PATIENCE = 1800.0  # seconds that a server's last requests may take
Say = Callable[[str], None]


class Control:
    """The driver's side. `restart(i, changes)` starts server i anew with other vLLM arguments, `start(i, changes)` starts one more under
    that number and returns its URL."""

    def __init__(self, fleet: Fleet, folder: Path, restart: Callable[[int, dict[str, Any]], str], start: Callable[[int, dict[str, Any]], str]):
        self.fleet, self.restart, self.start = fleet, restart, start
        self._one = threading.Lock()
        with _at(folder) as path:
            with suppress(FileNotFoundError):
                os.unlink(path)
            self._socket = socket.socket(socket.AF_UNIX)
            mask = os.umask(0o177)
            try:
                self._socket.bind(path)
            except OSError as e:
                raise VimeError(f"{folder}/{NAME}: {e}") from e
            finally:
                os.umask(mask)
        self._file = folder / NAME
        self._socket.listen()
        threading.Thread(target=self._listen, daemon=True, name="control").start()

    def _listen(self) -> None:
        with suppress(OSError):  # closed
            while True:
                connection, _ = self._socket.accept()
                threading.Thread(target=self._answer, args=(connection,), daemon=True, name="control").start()

    def _answer(self, connection: socket.socket) -> None:
        with closing(connection), connection.makefile("rw") as line, suppress(OSError):  # whoever asked may be gone; what was begun is finished

            def tell(**what: Any) -> None:
                with suppress(OSError):
                    line.write(json.dumps(what) + "\n")
                    line.flush()

            try:
                asked = json.loads(line.readline())
                tell(done=self.do(asked["action"], asked.get("engine"), asked.get("url"), asked.get("vllm") or {}, lambda text: tell(say=text)))
            except VimeError as e:
                tell(error=[e.what, e.fix, e.log])
            except Exception as e:  # the run must not end for a bad question
                tell(error=[f"{type(e).__name__}: {e}", "", ""])

    def do(self, action: str, engine: int | None, url: str | None, vllm: dict[str, Any], say: Say) -> Any:
        """One command; `say` gets its progress. Raises: VimeError that says in what state it leaves the server."""
        if action == "list":
            return self.listed()
        if not self._one.acquire(blocking=False):
            raise VimeError("another `vime engines` command is under way", "wait for it")
        try:
            if action == "add":
                return self.add(url, vllm, say)
            if engine is None or not 0 <= engine < len(self.fleet.urls):
                raise VimeError(f"there is no engine {engine}", f"there are 0 to {len(self.fleet.urls) - 1}")
            if action == "drain":
                return self.drain(engine, say)
            return self.replace(engine, vllm, say)
        finally:
            self._one.release()

    def listed(self) -> list[dict[str, Any]]:
        fleet, out = self.fleet, []
        for i, url in enumerate(fleet.urls):
            row: dict[str, Any] = {"engine": i, "url": url, "state": "out" if i in fleet.out else "serving", "external": i in fleet.external}
            try:
                row |= {"requests": int(fleet.busy(i)), "version": fleet.version_at(i)}
            except VimeError:
                row["state"] += ", down"
            out.append(row)
        return out

    def drain(self, i: int, say: Say) -> str:
        """Take server i out and wait for its requests to end. The last one that serves stays."""
        if self.fleet.serving() == [i]:
            raise VimeError(f"{self.at(i)} is the only one that serves", "add another one first")
        self._empty(i, say)
        return f"{self.at(i)} is out: no requests, no weights; it may be stopped. `replace {i}` brings it back"

    def _empty(self, i: int, say: Say) -> None:
        if i not in self.fleet.out:
            say(f"{self.at(i)}: no new requests")
            self.fleet.take_out(i)
        end, quiet, last = time.monotonic() + PATIENCE, 0, -1.0
        while quiet < 2:  # a request may be on its way from the router
            try:
                now = self.fleet.busy(i)
            except VimeError:
                return  # a dead one has none: its requests failed and are redone elsewhere
            if now != last and now:
                say(f"{self.at(i)}: {now:.0f} requests to end")
            quiet, last = quiet + 1 if now == 0 else 0, now
            if time.monotonic() > end:
                raise VimeError(f"{self.at(i)} still has {now:.0f} requests after {PATIENCE:.0f} s; it gets no new ones", "try again, or replace it")
            time.sleep(0.3)

    def replace(self, i: int, vllm: dict[str, Any], say: Say) -> str:
        """Exchange server i's process for one with other arguments, without losing a request. One started elsewhere is only brought back in."""
        external = i in self.fleet.external
        if external and vllm:
            raise VimeError(f"{self.at(i)} was started elsewhere: its arguments are not ours to change", "start it anew there, then replace it")
        if not external or i not in self.fleet.out:
            self._empty(i, say)
        try:
            if not external:
                say(f"{self.at(i)}: starting anew" + (f" with {json.dumps(vllm)}" if vllm else ""))
                self.fleet.moved(i, self.restart(i, vllm))
            return self._join(i, say)
        except VimeError as e:
            raise VimeError(f"{self.at(i)} stays out: {e.what}", e.fix, e.log) from e

    def add(self, url: str | None, vllm: dict[str, Any], say: Say) -> str:
        if url and (vllm or url.rstrip("/") in self.fleet.urls):
            raise VimeError(f"{url}: " + ("its arguments are not ours to change" if vllm else "it is one of the run's already"))
        i = len(self.fleet.urls)
        say(f"engine {i}: " + (f"at {url}" if url else "starting"))
        self.fleet.append(url.rstrip("/") if url else self.start(i, vllm), external=bool(url))
        try:
            return self._join(i, say)
        except VimeError:
            self.fleet.pop()
            raise

    def _join(self, i: int, say: Say) -> str:
        say(f"{self.at(i)}: current weights")
        self.fleet.probe(i)
        self.fleet.bring_in(i)
        return f"{self.at(i)} serves weights v{self.fleet.version_at(i)}"

    def at(self, i: int) -> str:
        return f"engine {i} ({self.fleet.urls[i]})"

    def close(self) -> None:
        self._socket.close()
        self._file.unlink(missing_ok=True)


def ask(folder: Path, say: Say, **question: Any) -> Any:
    """The other side: put a question to the run in `folder`; its answer. Raises: VimeError of the run, or where none runs."""
    with socket.socket(socket.AF_UNIX) as s:
        try:
            with _at(folder) as path:
                s.connect(path)
        except OSError as e:
            raise VimeError(f"no run answers in {folder}: {e.strerror}", f"a running job listens at {folder}/{NAME}") from e
        with s.makefile("rw") as line:
            line.write(json.dumps(question) + "\n")
            line.flush()
            for answer in map(json.loads, line):
                if "say" in answer:
                    say(answer["say"])
                elif "error" in answer:
                    raise VimeError(*answer["error"])
                else:
                    return answer["done"]
    raise VimeError(f"the run in {folder} ended before it answered")


def listing(folder: Path) -> list[dict[str, Any]]:
    """What `vime engines RUN list` shows. Raises: VimeError where no run is at work in the folder."""
    return list(ask(folder, lambda text: None, action="list", vllm={}))


def command(folder: str, action: str, words: list[str]) -> str:
    """`vime engines`: put the words of the command line to the run; the text to print. Progress goes to stderr."""
    vllm = {keys[0]: value for keys, value in map(parse_override, (w for w in words if "=" in w and "://" not in w))}
    rest = [w for w in words if "=" not in w or "://" in w]
    wanted = {"list": "nothing more", "drain": "N", "replace": "N [KEY=VALUE ...]", "add": "[URL | KEY=VALUE ...]"}[action]
    numbered = action in ("drain", "replace")
    if len(rest) > (action != "list") or (numbered and not (rest and rest[0].isdecimal())) or (vllm and action in ("list", "drain")):
        raise VimeError(f"vime engines {folder} {action} {' '.join(words)}: {action} takes {wanted}", "see `vime engines --help`")
    question = {"engine": int(rest[0])} if numbered else {"url": rest[0]} if rest else {}
    got = ask(Path(folder), lambda text: print(text, file=sys.stderr, flush=True), action=action, vllm=vllm, **question)
    if action != "list":
        return str(got)
    lines = [f"{'engine':8}{'state':16}{'requests':>9}{'weights':>9}  url"]
    for row in got:
        said = [str(row.get(k, "-")) for k in ("requests", "version")]
        lines.append(f"{row['engine']:<8}{row['state']:16}{said[0]:>9}{said[1]:>9}  {row['url']}{' (started elsewhere)' if row['external'] else ''}")
    return "\n".join(lines)


@contextmanager
def _at(folder: Path) -> Iterator[str]:
    """A path of the socket short enough for any folder: a socket's address has 107 characters."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        yield f"/proc/self/fd/{fd}/{NAME}"
    finally:
        os.close(fd)
