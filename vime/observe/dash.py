"""`vime dash`: a web page over run folders. The server knows where things lie (an index of samples by byte offset) and hands out pieces of files;
what is shown is computed in the page, vime/observe/web/*.js. It reads only, and nothing outside the folders it was given."""

import asyncio
import hmac
import secrets
import socket
import tomllib
from collections.abc import Callable
from contextlib import suppress
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import orjson
from aiohttp import web
from tokenizers import Tokenizer

from vime.errors import VimeError, blamed, said
from vime.observe.diff import train_log_probs

WEB = Path(__file__).parent / "web"
CUT, CHUNK = b', "tokens": [', 32 << 20  # where a sample's line begins to be per-token arrays; bytes of a file given out at once
LOCAL = ("127.0.0.1", "localhost", "::1")
COLUMNS = ("step", "uid", "group_index", "reward", "response_length", "status", "removed", "blocked", "versions")
SAFE = {
    "Content-Security-Policy": "default-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:",
    "X-Content-Type-Options": "nosniff",
}


class Run:
    """A run's folder, and where each of its samples lies: file, offset and length of its line, with what a list of samples shows of it."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.looking: asyncio.Task[None] | None = None
        self.forget()

    def forget(self) -> None:
        self.known: dict[Path, int] = {}  # when each file was written
        self.places: list[tuple[Path, int, int]] = []
        self.columns: list[list[Any]] = [[] for _ in COLUMNS]
        self.bad = 0  # lines that are no sample

    def look(self) -> None:
        """Index the files that are new; all, where a known one was written anew."""
        files = {f: f.stat().st_mtime_ns for f in sorted((self.folder / "samples").glob("step_??????.jsonl"))}
        if any(files.get(f) != at for f, at in self.known.items()):
            self.forget()
        for file in (f for f in files if f not in self.known):
            at, step, self.known[file] = 0, int(file.stem[5:]), files[file]
            with open(file, "rb") as f:
                for line in f:
                    self.add(file, step, at, line.rstrip(b"\n"))
                    at += len(line)

    def add(self, file: Path, step: int, at: int, line: bytes) -> None:
        cut = line.find(CUT)
        whole = line.endswith(b"}")
        for text in (line[:cut] + b"}", line) if whole else ():  # the keys before the arrays are enough, where no text holds what looks like them
            with suppress(ValueError, KeyError, TypeError, AttributeError):
                row = orjson.loads(text)
                reward = row["reward"] if isinstance(row["reward"], int | float | None) else next((v for v in row["reward"].values()), None)
                given = (row.get("uid", row["index"]), row["group_index"], reward, row["response_length"], row["status"], row["removed"])
                values = (step, *given, text.count(b'"decision": "block"') + text.count(b'"status": "blocked"'), len(row["weight_versions"]))
                for column, value in zip(self.columns, values):
                    column.append(value)
                self.places.append((file, at, len(line)))  # last: other threads count these
                return
        self.bad += bool(line.strip())

    def search(self, text: bytes) -> list[int]:
        found, last, data = [], None, b""
        for i, (file, at, length) in enumerate(self.places):
            if file != last:
                last, data = file, file.read_bytes()
            if data.find(text, at, at + length) >= 0:
                found.append(i)
        return found

    def line(self, i: int) -> bytes:
        file, at, length = self.places[i]
        with open(file, "rb") as f:
            f.seek(at)
            return f.read(length)


tokenizer = lru_cache(maxsize=8)(Tokenizer.from_file)


def sample(run: Run, i: int) -> dict[str, Any]:
    """A sample in whole, with what the trainer made of its tokens (null: not recorded) and the text of each of its tokens (where the model is here)."""
    row, file = orjson.loads(run.line(i)), run.places[i][0]
    row["train_log_probs"] = train_log_probs(run.folder, int(file.stem[5:])).get(str(row.get("uid", row["index"])))
    with suppress(Exception):  # the tokenizer's own, of half a dozen types
        model = tomllib.loads((run.folder / "config.toml").read_text())["model"]
        row["pieces"] = [tokenizer(f"{model}/tokenizer.json").decode([t], skip_special_tokens=False) for t in row["tokens"]]
    return row


def live(folder: Path) -> bool:
    """Whether a run is at work in the folder: it holds the lock, which is not to be touched here, for a run may want it at this moment."""
    with suppress(OSError):
        end = f":{(folder / '.lock').stat().st_ino} 0 EOF"
        return any("FLOCK" in line and line.endswith(end) for line in Path("/proc/locks").read_text().splitlines())
    return False


def application(folders: list[Path], token: str, engines: Callable[[Path], Any]) -> web.Application:
    """The server's routes. `token`: asked for in ?token= or the cookie it sets, "" for none; then only local names may be asked for.
    `engines(folder)`: the servers of a live run."""
    runs, routes = [Run(f) for f in folders], web.RouteTableDef()

    def run_of(request: web.Request) -> Run:
        return runs[int(request.match_info["run"])]

    def answer(value: Any) -> web.Response:
        return web.Response(body=orjson.dumps(value), content_type="application/json")

    @web.middleware
    async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
        given = request.query.get("token") or request.cookies.get("vime_token", "")
        if token and not hmac.compare_digest(given.encode(), token.encode()):
            raise web.HTTPUnauthorized(text="this dashboard wants its token: open the link that `vime dash` printed")
        if not token and request.url.host not in LOCAL:  # another site's name that was pointed here
            raise web.HTTPForbidden(text="ask for it at 127.0.0.1")
        try:
            response = await handler(request)
        except (LookupError, ValueError, OSError) as e:  # no such run, sample or file, or not any more
            raise web.HTTPNotFound(text=said(e)) from e
        response.headers.update(SAFE)
        if token and "token" in request.query:
            response.set_cookie("vime_token", token, httponly=True, samesite="Strict")
        return response

    @routes.get("/api/runs")
    async def _runs(request: web.Request) -> web.Response:
        files = [sorted(p.name for p in (r.folder / "trace").glob("*.jsonl")) for r in runs]
        return answer([{"name": r.folder.name, "path": str(r.folder), "live": live(r.folder), "trace": t} for r, t in zip(runs, files)])

    @routes.get(r"/api/file/{run:\d+}/{name:metrics\.jsonl|ledger\.jsonl|trace/[\w.-]+\.jsonl}")
    async def _file(request: web.Request) -> web.Response:
        """What a file has from byte ?from= on, up to its last whole line; of a negative one so many bytes from the end. Header X-From says where it
        begins: 0 where the file was replaced."""
        path, start = run_of(request).folder / request.match_info["name"], int(request.query.get("from", 0))
        with open(path, "rb") as f:
            size = f.seek(0, 2)
            f.seek(max(0, size + start if start < 0 else start - 1))
            start = f.tell() + len(f.readline()) if -size < start < 0 else start if 0 < start <= size and f.read(1) == b"\n" else 0
            f.seek(start)
            data = f.read(CHUNK)
        whole = data[: data.rfind(b"\n") + 1]
        return web.Response(body=whole, content_type="text/plain", headers={"X-From": str(start), "X-Size": str(size)})

    @routes.get(r"/api/index/{run:\d+}")
    async def _index(request: web.Request) -> web.Response:
        """COLUMNS of the samples from number ?from= on; `first` is 0 where the index was made anew."""
        run, start = run_of(request), int(request.query.get("from", 0))
        if not run.looking or run.looking.done():
            run.looking = asyncio.create_task(asyncio.to_thread(run.look))
        await asyncio.wait({run.looking}, timeout=0.3)
        n = len(run.places)
        start = start if start <= n else 0
        return answer({"first": start, "columns": dict(zip(COLUMNS, (c[start:n] for c in run.columns))), "bad": run.bad, "whole": run.looking.done()})

    @routes.get(r"/api/heads/{run:\d+}")
    async def _heads(request: web.Request) -> web.Response:
        """Prompt, response and label of the samples ?ids=1,2,3."""
        run, keys = run_of(request), ("prompt", "response", "label")
        rows = [orjson.loads(run.line(int(i))) for i in request.query["ids"].split(",")[:500]]
        return answer([{k: str(r[k])[-300:] if k == "prompt" else str(r[k])[:300] for k in keys} for r in rows])

    @routes.get(r"/api/search/{run:\d+}")
    async def _search(request: web.Request) -> web.Response:
        return answer(await asyncio.to_thread(run_of(request).search, orjson.dumps(request.query["q"])[1:-1]))

    @routes.get(r"/api/sample/{run:\d+}/{id:\d+}")
    async def _sample(request: web.Request) -> web.Response:
        return answer(await asyncio.to_thread(sample, run_of(request), int(request.match_info["id"])))

    @routes.get(r"/api/engines/{run:\d+}")
    async def _engines(request: web.Request) -> web.Response:
        try:
            return answer({"engines": await asyncio.to_thread(engines, run_of(request).folder)})
        except VimeError as e:
            return answer({"error": e.what})

    @routes.get("/plotly.min.js")
    async def _plotly(request: web.Request) -> web.StreamResponse:
        where = str(find_spec("plotly").origin)  # type: ignore[union-attr]  # `serve` has looked
        return web.FileResponse(Path(where).parent / "package_data" / "plotly.min.js", headers={"Cache-Control": "max-age=86400"})

    @routes.get("/")
    async def _page(request: web.Request) -> web.StreamResponse:
        return web.FileResponse(WEB / "index.html")

    app = web.Application(middlewares=[guard])
    app.add_routes([*routes, web.static("/web", WEB)])
    return app


def serve(given: list[str], host: str, port: int, engines: Callable[[Path], Any]) -> int:
    """Until Ctrl-C. Raises: VimeError where a folder is no run, or the port is taken."""
    if not find_spec("plotly"):
        raise VimeError("`vime dash` draws with plotly, which is not installed", 'pip install "vime[observe]"')
    found = [p.parent for text in given for p in sorted([*Path(text).glob("config.toml"), *Path(text).glob("*/config.toml")])]
    if lacks := [text for text in given if not any(Path(text) in (f, f.parent) for f in found)]:
        raise VimeError(f"{lacks[0]} is no run's folder: no config.toml in it or one level below", "give <run_dir>/<name>, or <run_dir>")
    token = "" if host in LOCAL else secrets.token_urlsafe(24)
    with blamed(f"{host}:{port} cannot be bound", OSError, ValueError, fix="give another --port, or --port 0 for any free one"):
        sock = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    shown = f"[{host}]" if ":" in host else host
    query = f"?token={token}" if token else ""
    print(f"{len(found)} run(s) at http://{shown}:{sock.getsockname()[1]}/{query}  (Ctrl-C ends it)", flush=True)
    web.run_app(application(found, token, engines), sock=sock, print=None)
    return 0
