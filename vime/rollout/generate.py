"""Single-turn generation: token ids in, token ids with logprobs and weight versions out."""

import asyncio
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

from vime.config import Config
from vime.data import images, tokenizer
from vime.errors import VimeError
from vime.hooks import Args
from vime.observe import trace
from vime.rollout.http import EngineClient
from vime.sample import FINISHED, Sample, Status

T = TypeVar("T")
EVERY_TOKEN = 2**30  # a top_k beyond any vocabulary


class Slots:
    """A semaphore whose holders take several permits at once, first come first served; more than there are means all of them."""

    def __init__(self, size: int):
        self.size, self.held = size, 0
        self._turn = asyncio.Lock()  # its holder is the one that waits
        self._changed = asyncio.Event()

    @asynccontextmanager
    async def take(self, n: int) -> AsyncIterator[None]:
        async with self._turn:
            while self.held + (taken := min(n, self.size)) > self.size:
                self._changed.clear()
                await self._changed.wait()
            self.held += taken
        try:
            yield
        finally:
            self.held -= taken
            self._changed.set()

    def resize(self, size: int) -> None:
        """More permits at once, or fewer: those that are held stay so."""
        self.size = size
        self._changed.set()


class Link(NamedTuple):
    """What a running group talks to the servers with; once `stop` is set no new request is sent, and samples come back aborted."""

    client: EngineClient
    slots: Slots
    stop: asyncio.Event


link: ContextVar[Link] = ContextVar("link")


@dataclass
class Running:
    """The custom_generate call that runs now: its args, its session, which stays on one server, and the weight versions that sampled for it so far."""

    args: Args
    session: str
    versions: set[int] = field(default_factory=set)


running: ContextVar[Running] = ContextVar("running")


def sampling_params(cfg: Config | Args, evaluation: str = "", greedy: bool = False) -> dict[str, Any]:
    """vLLM's sampling parameters of this run, or of an eval dataset, for one sample; `max_tokens` shrinks where the context does not fit."""
    r = cfg.rollout
    given = {d.name: d for d in cfg.eval.datasets}[evaluation] if evaluation else r
    params: dict[str, Any] = {
        "temperature": 0.0 if greedy else given.temperature,
        "top_p": r.top_p if given.top_p is None else given.top_p,
        "top_k": r.top_k if given.top_k is None else given.top_k,
        "max_tokens": given.max_response_len or r.max_response_len,
        "repetition_penalty": 1.0,
    }
    if r.truncated:  # a server that returns sampling masks wants a temperature and a top_k: say greedy and "off" in those terms
        params |= {"temperature": 1.0, "top_k": 1} if params["temperature"] == 0 else {}
        params["top_k"] = params["top_k"] if params["top_k"] > 0 else EVERY_TOKEN
    return params | {k: v for k, v in {"stop": r.stop, "stop_token_ids": r.stop_token_ids}.items() if v}


def seed_of(sample: Sample, seed: int) -> int:
    """Of a request that goes on from a sample's tokens, with debug.deterministic; apart from those of other groups and turns."""
    return (seed * 1_000_003 + sample.group_index * 65_537 + sample.part * 8_191 + sample.index + sample.response_length * 31) % (1 << 31)


def for_plugin(params: dict[str, Any]) -> dict[str, Any]:
    """Sampling parameters as slime's plug-ins know them: vLLM's, but for the name of max_new_tokens, and special tokens stay in texts."""
    return {"skip_special_tokens": False} | {"max_new_tokens" if k == "max_tokens" else k: v for k, v in params.items()}


def for_server(params: dict[str, Any]) -> dict[str, Any]:
    """The way back: slime's (SGLang's) names become vLLM's. Of max_new_tokens and max_tokens the smaller one holds."""
    out = {k: v for k, v in params.items() if k not in ("max_new_tokens", "no_stop_trim") and v is not None}
    limits = [params[k] for k in ("max_new_tokens", "max_tokens") if params.get(k) is not None]
    return out | ({"max_tokens": min(limits)} if limits else {})


async def generate_group(samples: list[Sample], cfg: Config | Args, params: dict[str, Any]) -> None:
    """Generate, in place, the rest of every response; samples with equal tokens so far share one request with n choices. A sample that the server
    aborts keeps its tokens, as ABORTED: generate it again to continue it. Raises: as EngineClient.generate; samples may then be half done."""
    sharing: dict[Any, list[Sample]] = {}
    for s in samples:
        sharing.setdefault((tuple(s.tokens), *(i["sha256"] for i in s.images)), []).append(s)
    # vLLM refuses n > 1 for greedy sampling
    batches = list(sharing.values()) if params["temperature"] > 0 else [[s] for s in samples]
    await all_of(*(_request(batch, cfg, params) for batch in batches))


async def all_of(*coros: Coroutine[Any, Any, T]) -> list[T]:
    """Results in order; the first failure cancels the others, which would go on generating for a group that is redone."""
    tasks = [asyncio.ensure_future(c) for c in coros]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for t in tasks:
            t.cancel()


async def generate(args: Args, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Generate one turn of a sample on the running worker's servers. max_new_tokens counts the whole response, earlier turns included."""
    await generate_group([sample], args, for_server(sampling_params))
    return sample


async def nap(seconds: float) -> None:
    """Sleep, or less where the running group is interrupted meanwhile."""
    with suppress(TimeoutError):
        await asyncio.wait_for(link.get().stop.wait(), seconds)


async def _request(samples: list[Sample], cfg: Config | Args, params: dict[str, Any]) -> None:
    first, at = samples[0], link.get()
    # vLLM cuts silently at its context length, so the room is computed here.
    room = min(params["max_tokens"] - first.response_length, cfg.rollout.max_context_len - len(first.tokens))
    uids, waited = [s.uid for s in samples], time.time_ns()
    async with at.slots.take(len(samples)):
        trace.record("queue", waited, time.time_ns(), uids)
        if room <= 0 or at.stop.is_set():
            for s in samples:
                s.status = Status.TRUNCATED if room <= 0 else Status.ABORTED
            return
        replay = cfg.rollout.routing_replay
        routed = min(s.routed for s in samples)  # what is known need not be sent again
        given: dict[str, Any] = {}
        if cfg.debug.deterministic:  # the server adds i for choice number i
            params = params | {"seed": seed_of(first, cfg.seed)}
        if first.images:  # the server puts each image in place of its one placeholder, and says what the prompt became
            given["content_parts"] = await asyncio.to_thread(lambda: [images.content_part(i) for i in first.images])
        with trace.span("generate", uids):
            choices = await at.client.generate(
                _placeholders(first) + first.tokens[first.prompt_length :] if first.images else first.tokens,
                params | {"n": len(samples), "max_tokens": room} | ({"routed_experts_prompt_start": routed} if replay else {}),
                session_id=first.session_id or f"group-{first.group_index}",
                timeout=cfg.rollout.request_timeout,
                **given,
            )
    for s, c in zip(samples, choices):
        if c.prompt_ids is not None:
            _expand(s, c.prompt_ids)
        if cfg.rollout.truncated and c.sampling_mask is None and c.token_ids:
            what = f"{at.client.url}: no sampling_mask came back, which training with rollout.top_p or top_k needs"
            raise VimeError(what, "start the server with --return-sampling-mask --logprobs-mode processed_logprobs")
        if replay and c.routed_experts is None and c.token_ids:
            what = f"{at.client.url}: no routed_experts came back, which rollout.routing_replay needs"
            raise VimeError(what, "start the server with --enable-return-routed-experts, see docs/moe.md")
        known: dict[str, Any] = {"versions": c.versions, "sampling_mask": c.sampling_mask if cfg.rollout.truncated else None}
        known |= {"routed_experts": c.routed_experts[s.routed - routed :]} if replay and c.routed_experts is not None else {}
        s.append_tokens(c.token_ids, c.log_probs, **known)
        s.response = tokenizer.load(cfg.model).decode(s.tokens[s.prompt_length :])
        s.status = FINISHED.get(c.finish_reason, Status.FAILED)


def _placeholders(sample: Sample) -> list[int]:
    """The prompt with one placeholder per image; VimeError where a plug-in has changed the prompt or left it out."""
    ids = (sample.multimodal_inputs or {}).get("token_ids")
    if not ids:
        raise VimeError(f"sample {sample.index} has images, and no prompt with their placeholders (multimodal_inputs['token_ids'])")
    return list(ids)


def _expand(sample: Sample, prompt: list[int]) -> None:
    """Record the prompt as the server expanded it; the second time it must be the same."""
    response = sample.tokens[sample.prompt_length :]
    whole = prompt if not response else prompt[: -len(response)]
    if prompt[len(whole) :] != response or (response and whole != sample.tokens[: sample.prompt_length]):
        raise VimeError(f"sample {sample.index}: the server expanded its images to another prompt than before, or changed its response")
    sample.tokens = whole + response
