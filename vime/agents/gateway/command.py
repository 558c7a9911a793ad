"""The two ways to have a Gateway: `vime gateway` in front of any vLLM, and the one of a rollout worker."""

import argparse
import asyncio
import os
import signal
from pathlib import Path
from weakref import WeakKeyDictionary

from vime.agents.gateway.server import BASES, Gateway
from vime.config import Config
from vime.errors import VimeError, said
from vime.hooks import Args
from vime.rollout.generate import link, sampling_params
from vime.sections import GatewayConfig

_opened: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Task[Gateway]] = WeakKeyDictionary()
VARIABLES = {"anthropic": "ANTHROPIC_BASE_URL", "openai": "OPENAI_BASE_URL", "gemini": "GOOGLE_GEMINI_BASE_URL"}


async def opened(cfg: Config | Args) -> Gateway:
    """The Gateway of the running rollout worker, listening on free ports of this host; opened the first time. Its sessions sample as the run
    does, unless they are given otherwise. Raises: VimeError."""
    loop = asyncio.get_running_loop()
    if loop not in _opened:
        _opened[loop] = loop.create_task(_open(cfg, link.get().client.url))
    try:
        return await asyncio.shield(_opened[loop])
    except VimeError:
        _opened.pop(loop, None)  # the next rollout tries again
        raise


async def _open(cfg: Config | Args, url: str) -> Gateway:
    r = cfg.rollout
    g = await Gateway.open(url, cfg.model, cfg.gateway, template=cfg.data.chat_template, context=r.max_context_len, timeout=r.request_timeout)
    g.sampling = sampling_params(cfg)  # the trainer divides by its temperature, whatever a harness asks for
    await g.start()
    return g


def command(args: argparse.Namespace) -> int:
    """Run a Gateway until it is interrupted. Raises: VimeError."""
    asyncio.run(_serve(args))
    return 0


async def _serve(args: argparse.Namespace) -> None:
    caps = {k: v for k in ("max_requests", "max_concurrency", "max_tokens") if (v := getattr(args, k)) is not None}
    try:
        limits = GatewayConfig(parser=args.parser, **caps)
    except ValueError as e:
        raise VimeError(f"vime gateway: {said(e)}") from e
    g = await Gateway.open(args.engine, args.model, limits, journal=args.journal, context=args.context)
    try:
        await g.start(args.port, args.control_port, args.host)
        try:
            Path(args.secret).unlink(missing_ok=True)
            with open(args.secret, "x", opener=lambda path, flags: os.open(path, flags, 0o600)) as f:
                f.write(g.secret)
        except OSError as e:
            raise VimeError(f"--secret {args.secret}: {said(e)}") from e
        print(f"{g.model}, {g.context} tokens, from {args.engine}; tool calls parsed by {args.parser}")
        for name, variable in VARIABLES.items():
            print(f"  {variable}=http://{args.host}:{g.port}{BASES[name]}")
        print(f"  control http://127.0.0.1:{g.control_port}, its secret is in {args.secret}; a session's token is the API key")
        for kind, how in g.template.report.items():
            print(f"  {kind} turns: {how}", flush=True)
        stop = asyncio.Event()
        for s in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(s, stop.set)
        await stop.wait()
    finally:
        await g.close()
