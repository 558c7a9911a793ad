"""python -m benchmarks.gateway_load: what the Gateway costs, and what it bears.

Sessions, each a conversation of tool calls, go through a Gateway of its own process (vime gateway): first all at once, for errors, turns/s and
what memory is left after they were finished; then a few at a time, in alternating rounds with the same requests sent to the engine itself, for
the latency that is added and the throughput that is kept. Without --engine the engine is scripted, in a process of its own; with it, it is a
vLLM server (its chat completions with tokens and logprobs are what the Gateway is compared with), and --model its folder. Exit code 1 where a request failed.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import secrets
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp
import orjson
import psutil
from rich.console import Console
from rich.table import Table

from tests.agents_kit import ScriptedEngine, model_folder, said
from vime.procs import Child, free_port, spawn

TOOLS = [
    {
        "type": "function",
        "function": {"name": "run", "description": "run a command", "parameters": {"type": "object", "properties": {"c": {"type": "string"}}}},
    }
]
SYSTEM = "You fix bugs. " * 40
WANTED = {"logprobs": True, "return_token_ids": True}  # what training needs of a server that is asked itself
RESULT = "line of output\n" * 20


async def engine(folder: str, port: int, delay: float) -> None:
    e = ScriptedEngine(folder, lambda body, n: {"text": said("next", [("run", {"c": f"make step {n}"})]), "delay": delay})
    await e.start(port)
    while True:
        await asyncio.sleep(60)
        e.requests, e.sampled, e.spans = [], [], {}


class Load:
    """`turns` turns of `n` sessions, through the Gateway or to the engine itself; the latency of each request, in seconds."""

    def __init__(self, http: aiohttp.ClientSession, turns: int, tokens: int):
        self.http, self.turns, self.tokens = http, turns, tokens
        self.seconds: list[float] = []
        self.errors: list[str] = []

    async def session(self, url: str, headers: dict[str, str], model: str, **more: Any) -> None:
        first = f"{secrets.token_hex(8)}: {SYSTEM}"  # of its own, or sessions would share what the server has cached
        messages: list[Any] = [{"role": "system", "content": first}, {"role": "user", "content": "fix it"}]
        for k in range(self.turns):
            body = {"model": model, "messages": messages, "tools": TOOLS, "max_tokens": self.tokens, "temperature": 1.0} | more
            start = time.perf_counter()
            try:
                async with self.http.post(url, json=body, headers=headers) as r:
                    got = orjson.loads(await r.read())
                if r.status != 200:
                    raise ValueError(f"{r.status}: {got}")
            except (aiohttp.ClientError, ValueError) as e:
                self.errors.append(str(e)[:200])
                return
            self.seconds.append(time.perf_counter() - start)
            m = got["choices"][0]["message"]
            calls = m.get("tool_calls") or []
            messages.append(
                {x: m[x] for x in ("role", "content", "tool_calls") if m.get(x)}
                | {"content": m.get("content") or (more and m.get("reasoning")) or ""}
            )
            messages += [{"role": "tool", "tool_call_id": c["id"], "content": RESULT} for c in calls] or [{"role": "user", "content": f"go on, {k}"}]

    async def tokens_in(self, url: str, prompts: list[list[int]]) -> None:
        """The same, for an engine that has no chat: prompts that the Gateway would send."""
        for ids in prompts:
            start = time.perf_counter()
            params = {"max_tokens": self.tokens, "temperature": 1.0, "logprobs": 0, "detokenize": False}
            async with self.http.post(f"{url}/inference/v1/generate", data=orjson.dumps({"token_ids": ids, "sampling_params": params})) as r:
                await r.read()
            self.seconds.append(time.perf_counter() - start)


class Proxy:
    """The Gateway in a process of its own, and its control port."""

    def __init__(self, tmp: Path, url: str, model: str, parser: str):
        self.port, self.control, self.file, self.log = free_port(), free_port(), tmp / "secret", tmp / "gateway.log"
        args = ["--engine", url, "--model", model, "--parser", parser, "--secret", str(self.file), "--max-requests", "100000"]
        ports = ["--port", str(self.port), "--control-port", str(self.control)]
        self.child: Child = spawn(
            [sys.executable, "-m", "vime.cli", "gateway", *args, *ports], self.log, {"PYTHONPATH": str(Path(__file__).parents[1])}
        )

    async def ready(self) -> None:
        while not (self.file.exists() and re.search("turns:", self.log.read_text())):
            assert self.child.alive(), self.log.read_text()
            await asyncio.sleep(0.1)

    async def call(self, http: aiohttp.ClientSession, method: str, path: str) -> Any:
        headers = {"Authorization": f"Bearer {self.file.read_text()}"}
        async with http.request(method, f"http://127.0.0.1:{self.control}{path}", json={}, headers=headers) as r:
            return orjson.loads(await r.read())

    def memory(self) -> float:
        return float(psutil.Process(self.child.pid).memory_info().rss / 2**20)


async def through(proxy: Proxy, http: aiohttp.ClientSession, load: Load, n: int, model: str) -> float:
    """Seconds that n sessions took; they are finished after."""
    made = [await proxy.call(http, "POST", "/sessions") for _ in range(n)]
    url, start = f"http://127.0.0.1:{proxy.port}/v1/chat/completions", time.perf_counter()
    await asyncio.gather(*(load.session(url, {"Authorization": f"Bearer {m['token']}"}, model) for m in made))
    took = time.perf_counter() - start
    for m in made:
        got = await proxy.call(http, "POST", f"/sessions/{m['id']}/finish")
        if got["metrics"]["agent/trainable_fraction"] != 1.0:
            load.errors.append(f"not all is trained: {got['metrics']}")
    return took


async def main(args: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as name:
        tmp, children = Path(name), list[Child]()
        url, model, parser = args.engine, args.model, args.parser
        try:
            if not url:
                model, port, parser = model_folder(tmp / "model"), free_port(), "hermes"
                url = f"http://127.0.0.1:{port}"
                command = [sys.executable, "-m", "benchmarks.gateway_load", "--serve", model, str(port), str(args.delay)]
                children.append(spawn(command, tmp / "engine.log", {"PYTHONPATH": str(Path(__file__).parents[1])}))
                await asyncio.sleep(2)
            proxy = Proxy(tmp, url, model, parser)
            children.append(proxy.child)
            await proxy.ready()
            timeout = aiohttp.ClientTimeout(total=3600)
            async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as http:
                return await measure(args, proxy, http, url, model)
        finally:
            for c in children:
                c.stop()


async def measure(args: argparse.Namespace, proxy: Proxy, http: aiohttp.ClientSession, url: str, model: str) -> int:
    async with http.get(f"{url}/v1/models") as r:
        served = (await r.json())["data"][0]["id"]
    table = Table("measured", "value")
    errors: list[str] = []
    if args.sessions:
        memory = []
        for _ in range(args.repeat):
            load = Load(http, args.turns, args.tokens)
            took = await through(proxy, http, load, args.sessions, served)
            errors += load.errors
            memory.append(proxy.memory())
        table.add_row(f"{args.sessions} sessions of {args.turns} turns at once, errors", str(len(errors)))
        table.add_row("turns/s", f"{len(load.seconds) / took:.0f}")
        table.add_row("memory after each time, all finished (MiB)", ", ".join(f"{m:.0f}" for m in memory))
    ways: dict[str, list[tuple[float, float]]] = {"gateway": [], "direct": []}
    prompts = [list(range(40, 90)) * (8 + 4 * k) for k in range(args.turns)]
    for k in range(2 * args.rounds):
        way = ("gateway", "direct")[(k + k // 2) % 2]
        load, start = Load(http, args.turns, args.tokens), time.perf_counter()
        if way == "gateway":
            took = await through(proxy, http, load, args.at_once, served)
        elif args.engine:
            await asyncio.gather(*(load.session(f"{url}/v1/chat/completions", {}, served, **WANTED) for _ in range(args.at_once)))
            took = time.perf_counter() - start
        else:
            await asyncio.gather(*(load.tokens_in(url, prompts) for _ in range(args.at_once)))
            took = time.perf_counter() - start
        errors += load.errors
        ways[way].append((statistics.median(load.seconds), len(load.seconds) / took))
    for way, rounds in ways.items() if args.rounds else ():
        p50, rate = (statistics.median(x) for x in zip(*rounds))
        table.add_row(f"{way}, {args.at_once} sessions: p50 (ms), turns/s", f"{1000 * p50:.1f}, {rate:.1f}")
    pairs = list(zip(ways["gateway"], ways["direct"]))
    if args.rounds:
        table.add_row("added to p50 (ms)", f"{1000 * statistics.median(g[0] - d[0] for g, d in pairs):.1f}")
        table.add_row("throughput kept", f"{statistics.median(g[1] / d[1] for g, d in pairs):.3f}")
    Console().print(table)
    for e in errors[:5]:
        print(e)
    return int(bool(errors))


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--engine", help="URL of a vLLM server (a scripted one)")
    p.add_argument("--model", help="its folder")
    p.add_argument("--parser", default="server", help="as vime gateway --parser")
    p.add_argument("--sessions", type=int, default=1000, help="at once, in the first part; 0: leave it out (1000)")
    p.add_argument("--turns", type=int, default=20, help="of each (20)")
    p.add_argument("--repeat", type=int, default=2, help="times of the first part (2)")
    p.add_argument("--at-once", type=int, default=64, help="sessions, in the second part (64)")
    p.add_argument("--rounds", type=int, default=5, help="of either way (5)")
    p.add_argument("--tokens", type=int, default=64, help="of an answer at most (64)")
    p.add_argument("--delay", type=float, default=0.05, help="seconds that the scripted engine takes (0.05)")
    p.add_argument("--serve", nargs=3, metavar=("DIR", "PORT", "DELAY"), help="be the scripted engine")
    given = p.parse_args()
    if given.serve:
        asyncio.run(engine(given.serve[0], int(given.serve[1]), float(given.serve[2])))
    sys.exit(asyncio.run(main(given)))
