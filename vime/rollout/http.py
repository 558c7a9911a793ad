"""The one client of every endpoint vime uses on a vLLM server (and, for generation, on the router in front of several)."""

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import aiohttp
import numpy as np
import orjson

from vime.errors import VimeError, nearest, said
from vime.sample import npy_array

GENERATE, HEALTH = "/inference/v1/generate", "/health"
PAUSE, RESUME, RESET_PREFIX_CACHE = "/pause", "/resume", "/reset_prefix_cache"
INIT, START, UPDATE = "/init_weight_transfer_engine", "/start_weight_update", "/update_weights"
FINISH, INFO, ABORT = "/finish_weight_update", "/weight_info", "/abort_requests"
DRAFT_START, SLEEP, WAKE_UP, METRICS, WORKERS = "/start_draft_weight_update", "/sleep", "/wake_up", "/metrics", "/workers"
MODELS, DERENDER = "/v1/models", "/v1/chat/completions/derender"
NEEDS = {ABORT, GENERATE, HEALTH, PAUSE, RESUME, RESET_PREFIX_CACHE, INIT, START, UPDATE, FINISH, INFO}

# vLLM ignores a sampling parameter it does not know, so a misspelt one would go unnoticed.
NAMES = """
    n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids ignore_eos max_tokens
    min_tokens logprobs prompt_logprobs detokenize skip_special_tokens spaces_between_special_tokens include_stop_str_in_output
    structured_outputs logit_bias allowed_token_ids bad_words extra_args routed_experts_prompt_start"""
SAMPLING = NAMES.split()


class EngineDown(VimeError):
    """The server failed or can't be reached: 5xx, transport error. The request may be redone."""


class EngineSlow(EngineDown):
    """No answer within the timeout; the server may only be busy."""


@dataclass(frozen=True)
class Choice:
    """One sampled continuation; `log_probs` (natural log) and `versions` (-1: unknown) have one entry per token."""

    token_ids: list[int]
    log_probs: list[float]
    versions: list[int]
    finish_reason: str
    stop_reason: int | str | None
    sampling_mask: list[list[int]] | None = None  # the ids each token was drawn from, of servers with --return-sampling-mask
    routed_experts: np.ndarray | None = None  # (tokens, layers, top_k) of servers with --enable-return-routed-experts, see docs/moe.md
    prompt_ids: list[int] | None = None  # the prompt with its images' placeholders expanded; None: it had none


def version_of(text: str | None) -> int:
    """Weight version from the server's string; -1 for the weights a server started with and for anything foreign."""
    return int(text) if text is not None and text.isdecimal() else -1


class EngineClient:
    """HTTP client of one server, bound to the event loop of its first call. Every method raises VimeError on a 4xx (never retried:
    the request is wrong) and EngineDown on a 5xx, transport error or timeout. `timeout` is in seconds, for the whole call."""

    def __init__(self, url: str):
        self.url = url.rstrip("/")
        self._session: aiohttp.ClientSession | None = None

    async def _call(
        self, method: str, path: str, body: Any = None, *, query: dict[str, str] | None = None, session: str = "", timeout: float = 60
    ) -> bytes:
        if self._session is None:  # proxies of the environment are not for our own servers: trust_env stays False
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2))
        where, headers = f"{method} {self.url}{path}", {"Content-Type": "application/json"}
        if session:
            headers["x-session-id"] = session
        if path not in (GENERATE, DERENDER):  # the server drops a connection after a 5xx: no later call may pick it up and mistake that for a death
            headers["Connection"] = "close"
        data, limit = None if body is None else orjson.dumps(body), aiohttp.ClientTimeout(total=timeout)
        try:
            async with self._session.request(method, self.url + path, params=query, data=data, headers=headers, timeout=limit) as r:
                raw = await r.read()
                if r.status < 400:
                    return raw
                said = f"{where}: HTTP {r.status}: {_message(raw)}"
                raise EngineDown(said) if r.status >= 500 else VimeError(said)
        except TimeoutError as e:
            raise EngineSlow(f"{where}: no answer within {timeout:.0f} s") from e
        except (aiohttp.ClientError, OSError) as e:
            raise EngineDown(f"{where}: {type(e).__name__}: {e}") from e

    async def _json(self, method: str, path: str, body: Any = None, **kw: Any) -> dict[str, Any]:
        raw = await self._call(method, path, body, **kw)
        got = None
        with suppress(orjson.JSONDecodeError):
            got = orjson.loads(raw)
        if not isinstance(got, dict):
            raise EngineDown(f"{method} {self.url}{path}: the answer is no JSON object: {_message(raw)}")
        return got

    async def close(self) -> None:
        if self._session:
            await self._session.close()
            self._session = None

    async def generate(
        self, token_ids: list[int], sampling_params: dict[str, Any], session_id: str | None = None, timeout: float = 600,
        content_parts: list[dict[str, str]] | None = None,
    ) -> list[Choice]:  # fmt: skip
        """Sample sampling_params["n"] (1) continuations of `token_ids`; `content_parts`: its images. `session_id` keeps requests on one server."""
        for name in sampling_params:
            if name not in SAMPLING:
                raise VimeError(f"unknown sampling parameter {name!r}", nearest(name, SAMPLING))
        params = {"logprobs": 0, "detokenize": bool(sampling_params.get("stop"))} | sampling_params
        body: dict[str, Any] = {"token_ids": token_ids, "sampling_params": params}
        body |= {"content_parts": content_parts, "return_token_ids": True} if content_parts else {}
        try:
            got = await self._json("POST", GENERATE, body, session=session_id or "", timeout=timeout)
        except EngineDown as e:
            if "No available workers" not in e.what:
                raise
            raise EngineDown(f"{e.what}: {await self._behind()}") from e
        expanded = got.get("prompt_token_ids") if content_parts else None
        if content_parts and not expanded:
            raise VimeError(f"POST {self.url}{GENERATE}: no prompt_token_ids came back for a prompt with images")
        try:
            choices = [self._choice(c, expanded) for c in sorted(got.get("choices") or [], key=lambda c: c["index"])]
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise EngineDown(f"POST {self.url}{GENERATE}: the answer is not of vLLM's form: {said(e)}") from e
        if len(choices) != sampling_params.get("n", 1):
            raise EngineDown(f"POST {self.url}{GENERATE}: {len(choices)} choices came back for n = {sampling_params.get('n', 1)}")
        return choices

    def _choice(self, c: dict[str, Any], prompt_ids: list[int] | None = None) -> Choice:
        ids = c.get("token_ids") or []
        content = (c.get("logprobs") or {}).get("content") or []
        if len(content) != len(ids) or any(x["token_id"] != t for x, t in zip(content, ids)):
            what = f"POST {self.url}{GENERATE}: {len(content)} logprobs came back for {len(ids)} sampled tokens"
            raise VimeError(what, "the server must return the logprob of every sampled token")
        if not c.get("finish_reason") or (not ids and c["finish_reason"] != "abort"):
            raise EngineDown(f"POST {self.url}{GENERATE}: ended early (finish_reason {c.get('finish_reason')!r}, {len(ids)} tokens)")
        versions = [-1] * len(ids)
        for span in c.get("weight_versions") or []:
            versions[span["start"] : span["end"]] = [version_of(span["version"])] * (span["end"] - span["start"])
        lps, mask = [float(x["logprob"]) for x in content], c.get("sampling_mask")
        routing = npy_array(c["routed_experts"]) if c.get("routed_experts") else None
        return Choice(ids, lps, versions[: len(ids)], c["finish_reason"], c.get("stop_reason"), mask, routing, prompt_ids)

    async def _behind(self) -> str:
        """Which servers the router would not use, and why, as it tells itself."""
        try:
            workers = (await self._json("GET", WORKERS, timeout=5)).get("workers") or []
        except VimeError as e:
            return f"and it does not say which ({e.what})"
        said = [f"{w.get('url')} {'is up, its circuit is open' if w.get('is_healthy') else 'is down'}" for w in workers]
        return ", ".join(said) or "all are taken out"

    async def models(self) -> list[dict[str, Any]]:
        """What the server serves: "id", and "max_model_len" where it says so."""
        return [m for m in (await self._json("GET", MODELS, timeout=10)).get("data") or [] if isinstance(m, dict)]

    async def workers(self) -> list[str]:
        """URLs of the servers behind this one, if it is a router."""
        return [str(w["url"]) for w in (await self._json("GET", WORKERS, timeout=10)).get("workers") or [] if w.get("is_healthy")]

    async def derender(self, token_ids: list[int], chat: dict[str, Any] | None, prompt_ids: list[int] | None = None) -> dict[str, Any]:
        """The assistant message that `token_ids` are, taken apart by the server's tool-call and reasoning parsers; `chat`: the request's tools
        and tool_choice. `prompt_ids`: the end of the prompt, which may have begun the reasoning."""
        choice = {"index": 0, "token_ids": token_ids, "finish_reason": "stop"}
        given = {"request_id": "r", "choices": [choice], "prompt_token_ids": prompt_ids}
        got = await self._json("POST", DERENDER, {"generate_response": given, "chat_request": chat})
        return dict(got["choices"][0]["message"])

    async def prompt_logprobs(self, token_ids: list[int], timeout: float = 120) -> list[float]:
        """Logprobs of tokens 1..n-1 given their prefix, at temperature 1, under the server's current weights."""
        params = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "prompt_logprobs": 0}  # servers that return masks want a top_k
        got = await self._json("POST", GENERATE, {"token_ids": token_ids, "sampling_params": params}, timeout=timeout)
        rows = got.get("prompt_logprobs") or []
        if len(rows) != len(token_ids) or any(str(t) not in (row or {}) for t, row in zip(token_ids[1:], rows[1:])):
            raise VimeError(f"POST {self.url}{GENERATE}: no prompt_logprobs for a prompt of {len(token_ids)} tokens")
        return [float(row[str(t)]["logprob"]) for t, row in zip(token_ids[1:], rows[1:])]

    async def health(self, timeout: float = 10) -> None:
        await self._call("GET", HEALTH, timeout=timeout)

    async def post(self, path: str, body: dict[str, Any] | None = None, timeout: float = 60, **query: str) -> None:
        """A control call without an answer: PAUSE and RESUME, SLEEP and WAKE_UP, and INIT, START, UPDATE, FINISH of a weight update."""
        await self._call("POST", path, body, query=query, timeout=timeout)

    async def metrics(self, timeout: float = 10) -> str:
        return (await self._call("GET", METRICS, timeout=timeout)).decode(errors="replace")

    async def weight_version(self, timeout: float = 60) -> int:
        return version_of((await self._json("GET", INFO, timeout=timeout)).get("weight_version"))

    async def world_size(self) -> int:
        return int((await self._json("GET", "/get_world_size"))["world_size"])

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix; running requests recompute theirs. Raises EngineDown where blocks can't be freed."""
        got = await self._json("POST", RESET_PREFIX_CACHE, query={"reset_running_requests": "true"})
        if not got.get("success"):
            raise EngineDown(f"POST {self.url}{RESET_PREFIX_CACHE}: the server could not reset its prefix cache")

    async def paths(self) -> set[str]:
        return set((await self._json("GET", "/openapi.json")).get("paths", {}))

    async def probe(self, needs: set[str] = NEEDS) -> None:
        """Raises VimeError naming every endpoint of `needs` that this server lacks."""
        if missing := sorted(needs - await self.paths()):
            raise VimeError(f"{self.url} lacks {', '.join(missing)}", "start vLLM with VLLM_SERVER_DEV_MODE=1 and --enable-scale-out")


def _message(raw: bytes) -> str:
    """The first line of a server's error message, whatever form it has."""
    got: Any = raw.decode(errors="replace")
    with suppress(orjson.JSONDecodeError):
        got = orjson.loads(raw)
    for key in ("error", "detail", "message"):
        got = got.get(key) or got if isinstance(got, dict) else got
    return " ".join(str(got).split())[:500]
