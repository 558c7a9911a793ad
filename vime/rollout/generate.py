"""Single-turn generation: token ids in, token ids with logprobs and weight versions out."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

from vime.config import Config
from vime.rollout.http import EngineClient
from vime.sample import Sample, Status

T = TypeVar("T")
STATUS = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}

# The client of the worker that runs now: what a custom_generate plug-in talks to the servers with.
current_client: ContextVar[EngineClient] = ContextVar("current_client")


@lru_cache(maxsize=2)
def tokenizer(model: str) -> Any:
    """What decodes for the folder `model`: the Rust tokenizer of tokenizer.json, or transformers (seconds to import) where there is none."""
    if (file := Path(model) / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(file))
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(model)


def sampling_params(cfg: Config, evaluation: bool) -> dict[str, Any]:
    """vLLM's sampling parameters of this run, for one sample without a prompt; `max_tokens` shrinks where the context does not fit."""
    r = cfg.rollout
    max_tokens = (cfg.eval.max_response_len or r.max_response_len) if evaluation else r.max_response_len
    params: dict[str, Any] = {
        "temperature": cfg.eval.temperature if evaluation else r.temperature,
        "top_p": r.top_p,
        "top_k": r.top_k,
        "max_tokens": max_tokens,
        "repetition_penalty": 1.0,
    }
    return params | {k: v for k, v in {"stop": r.stop, "stop_token_ids": r.stop_token_ids}.items() if v}


async def generate_group(client: EngineClient, samples: list[Sample], cfg: Config, params: dict[str, Any]) -> None:
    """Generate, in place, the response of every sample; those that share their tokens so far share one request with n choices.

    Raises: VimeError, EngineDown as EngineClient.generate; samples may then be half done.
    """
    sharing: dict[tuple[int, ...], list[Sample]] = {}
    for s in samples:
        sharing.setdefault(tuple(s.tokens), []).append(s)
    # vLLM refuses n > 1 for greedy sampling
    batches = list(sharing.values()) if params["temperature"] > 0 else [[s] for s in samples]
    await all_of(*(_request(client, batch, cfg, params) for batch in batches))


async def all_of(*coros: Coroutine[Any, Any, T]) -> list[T]:
    """Results in order; the first failure cancels the others, which would go on generating for a group that is redone."""
    tasks = [asyncio.ensure_future(c) for c in coros]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for t in tasks:
            t.cancel()


async def generate(args: Config, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate one sample with the running worker's client: the default that a custom_generate plug-in can build on."""
    await generate_group(current_client.get(), [sample], args, sampling_params)
    return sample


async def _request(client: EngineClient, samples: list[Sample], cfg: Config, params: dict[str, Any]) -> None:
    first = samples[0]
    # vLLM cuts silently at its context length, so the room is computed here.
    room = min(params["max_tokens"] - first.response_length, cfg.rollout.max_context_len - len(first.tokens))
    if room <= 0:
        for s in samples:
            s.status = Status.TRUNCATED
        return
    choices = await client.generate(
        first.tokens,
        params | {"n": len(samples), "max_tokens": room},
        session_id=first.session_id or f"group-{first.group_index}",
        timeout=cfg.rollout.request_timeout,
    )
    for s, c in zip(samples, choices):
        s.append_tokens(c.token_ids, c.log_probs, versions=c.versions)
        s.response = tokenizer(cfg.model).decode(s.tokens[s.prompt_length :], skip_special_tokens=True)
        s.status = STATUS.get(c.finish_reason, Status.FAILED)
