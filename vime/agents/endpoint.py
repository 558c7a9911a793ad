"""A model behind any OpenAI-compatible chat endpoint, as the agent loop takes one. Nothing is trained from it: no token ids are kept."""

import asyncio
import os
import time
from typing import Any

import aiohttp

from vime.agents.gateway.record import Turn
from vime.errors import VimeError, said
from vime.sections import EndpointConfig

WAIT = (1.0, 30.0)  # seconds before the first retry, and at most; doubled each time


async def ask(http: aiohttp.ClientSession, cfg: EndpointConfig, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Turn:
    """One turn; its `output_ids` are as many as the server counted, all -1. Raises: VimeError with the server's words; a 4xx other than 429 is
    never tried again."""
    url, key, began, wait, last = f"{cfg.url.rstrip('/')}/chat/completions", os.environ.get(cfg.key_env), time.monotonic(), WAIT[0], ""
    body = {"model": cfg.name, "messages": messages} | ({"tools": tools} if tools else {}) | cfg.sampling
    for n in range(cfg.retries + 1):
        try:
            limit = aiohttp.ClientTimeout(total=cfg.timeout)
            async with http.post(url, json=body, timeout=limit, headers={"Authorization": f"Bearer {key}"} if key else {}) as answer:
                text = await answer.text()
                if answer.ok:
                    got = await answer.json()
                    choice, count = got["choices"][0], (got.get("usage") or {}).get("completion_tokens") or 0
                    message, reason = {"role": "assistant"} | choice["message"], choice.get("finish_reason") or "stop"
                    return Turn(got.get("id", ""), message, [-1] * count, finish_reason=reason, seconds=time.monotonic() - began)
                if answer.status == 400 and "context" in text and "length" in text:
                    return Turn("", {"role": "assistant", "content": ""}, finish_reason="length", seconds=time.monotonic() - began)
                last = f"{answer.status} {text[:300]}"
                if answer.status < 500 and answer.status != 429:
                    break
        except (aiohttp.ClientError, TimeoutError, ValueError, KeyError, IndexError, TypeError, AttributeError) as e:
            last = said(e)
        if n < cfg.retries:
            await asyncio.sleep(wait)
            wait = min(2 * wait, WAIT[1])
    raise VimeError(f"{url}: {last}", f"is model.name {cfg.name!r} served there, and the key in ${cfg.key_env}?")
