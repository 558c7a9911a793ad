"""`vime bench rollout`: a steady load on vLLM servers, and what they say of themselves meanwhile."""

import asyncio
import itertools
import json
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from rich.console import Console
from rich.table import Table

from vime import config
from vime.config import Config
from vime.data.prompts import Prompts
from vime.data.tokenizer import load
from vime.errors import VimeError
from vime.rollout.engine import Engine
from vime.rollout.gauges import Gauges, Meter, summary
from vime.rollout.generate import sampling_params
from vime.rollout.http import EngineClient
from vime.rollout.router import Router

MADE_UP = {"model": "-", "data": {"prompts": "-"}, "rollout": {"concurrency": 64, "max_response_len": 64, "n_samples_per_prompt": 8}}


def rollout(targets: list[str], seconds: float, as_json: bool) -> int:
    """Send groups of prompts to the servers for `seconds`, as many at a time as rollout.concurrency allows, through a router; print the
    report. Returns 0. Raises: VimeError where a server or a request fails."""
    urls = [t.rstrip("/") for t in targets if "://" in t]
    files = [t for t in targets if "://" not in t]
    if len(files) > 1:
        raise VimeError(f"{len(files)} configuration files were given: {', '.join(files)}", "one, or none")
    cfg = config.load(files[0]) if files else config.validate(MADE_UP, "bench")
    prompts = [[3 + (i * 7 + k) % 20 for k in range(32)] for i in range(64)]
    if files:
        room = cfg.rollout.max_context_len - cfg.rollout.max_response_len
        prompts = [g[0].tokens for g in Prompts(cfg.data, cfg.data.prompts, load(cfg.model), 1, cfg.seed, room).next(256)]
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        urls = urls or [*cfg.rollout.engines, *_start(cfg, folder, stack)]
        router = Router(cfg, urls, folder)
        stack.callback(router.stop)
        through = router.start()
        gauges = Gauges(lambda: dict(enumerate(urls)))
        stack.callback(gauges.close)
        time.sleep(1)  # the first look at each
        gauges.take()
        done, failed, took = asyncio.run(_load(cfg, prompts, through, seconds, cfg.rollout.concurrency * len(urls)))
        time.sleep(0.5)  # the counters of the last steps
        meters = gauges.take()
    out = report(meters, urls) | {"seconds": took, "samples": done, "failed": failed}
    print(json.dumps(out)) if as_json else show(out)
    return 0


def _start(cfg: Config, folder: str, stack: ExitStack) -> list[str]:
    engines = [Engine(cfg, i, folder) for i in range(len(cfg.servers))]
    for e in engines:
        stack.callback(e.stop)
    with ThreadPoolExecutor(len(engines) or 1) as pool:
        return list(pool.map(lambda e: e.start(), engines))


async def _load(cfg: Config, prompts: list[list[int]], url: str, seconds: float, slots: int) -> tuple[int, int, float]:
    """(samples that came back, requests that failed, seconds): each slot of n samples sends the next group when its last one is back."""
    client, n = EngineClient(url), min(cfg.rollout.n_samples_per_prompt, slots)
    params, turn = sampling_params(cfg) | {"n": n}, itertools.count()
    begun, done, failed = time.monotonic(), 0, 0

    async def one() -> None:
        nonlocal done, failed
        while time.monotonic() < begun + seconds:
            i = next(turn)
            room = min(params["max_tokens"], cfg.rollout.max_context_len - len(prompts[i % len(prompts)]))
            try:
                got = await client.generate(prompts[i % len(prompts)], params | {"max_tokens": room}, session_id=f"group-{i}", timeout=600)
                done += len(got)
            except VimeError:
                failed += 1
                if not done and failed >= 3:
                    raise

    try:
        await asyncio.gather(*(one() for _ in range(max(1, slots // n))))
    finally:
        await client.close()
    return done, failed, time.monotonic() - begun


def report(meters: dict[int, Meter], urls: list[str]) -> dict[str, Any]:
    """The numbers of each server, and of all together, named as a run's metrics are: rollout/engine_busy is `busy`."""

    def row(ms: list[Meter]) -> dict[str, float]:
        named = {k.removeprefix("rollout/").removeprefix("engine_"): v for k, v in summary(ms).items()}
        return {"tokens/s": sum(m.sums["tokens"] / m.seconds for m in ms)} | named

    if not meters:
        raise VimeError("no server gave its /metrics", "are they vLLM servers?")
    engines = [{"engine": i, "url": urls[i], **row([m])} for i, m in sorted(meters.items())]
    return {"engines": engines, "all": row(list(meters.values())) | {"tokens": sum(m.sums["tokens"] for m in meters.values())}}


def show(out: dict[str, Any]) -> None:
    names = [n for n in out["all"] if n not in ("balance", "busy_min", "tokens")]
    table = Table("engine", *names, box=None)
    for r in [*out["engines"], out["all"]]:
        table.add_row(f"{r['engine']} {r['url']}" if "url" in r else "all", *(f"{r.get(n, 0):.4g}" for n in names))
    console = Console(highlight=False)
    console.print(table)
    said = f"{out['samples']} samples, {out['all']['tokens']:.0f} tokens in {out['seconds']:.1f} s, {out['failed']} requests failed"
    console.print(f"{said}; balance {out['all']['balance']:.2f} (most over mean tokens per server; 1 is even)")
