"""What plug-ins written for slime import, under slime's names: `from slime.utils.http_utils import post` becomes `from vime.slime import post`.

They speak SGLang's /generate; `post` translates it to vLLM's token-in, token-out endpoint. Import this module in plug-ins only.
"""

import asyncio
from functools import lru_cache
from typing import Any

import aiohttp

from vime.data import tokenizer
from vime.errors import VimeError
from vime.hooks import Args, DynamicFilterOutput, RolloutFnEvalOutput, RolloutFnTrainOutput, load
from vime.rollout.generate import Running, for_plugin, for_server, generate, link, running, sampling_params
from vime.rollout.http import GENERATE, version_of
from vime.sample import Sample

__all__ = [
    "DynamicFilterOutput", "GenerateState", "RolloutFnEvalOutput", "RolloutFnTrainOutput", "Sample", "generate", "get_model_url",
    "load_function", "load_tokenizer", "post",
]  # fmt: skip


def load_function(path: str) -> Any:
    """slime.utils.misc.load_function."""
    return load(path, "load_function")


@lru_cache(maxsize=4)
def load_tokenizer(path: str, trust_remote_code: bool = False) -> Any:
    """slime.utils.processing_utils.load_tokenizer: transformers' tokenizer of a model folder, one for the whole process."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)


class GenerateState:
    """slime.rollout.sglang_rollout.GenerateState as far as plug-ins use it: tokenizer, sampling_params, semaphore."""

    def __init__(self, args: Args):
        self.args, self.processor = args, None
        self.tokenizer = load_tokenizer(args.hf_checkpoint)
        self.sampling_params = for_plugin(sampling_params(args))
        self.semaphore = asyncio.Semaphore(args.rollout.concurrency)


def get_model_url(args: Args, model_name: str, endpoint: str = "/generate") -> str:
    """slime.rollout.sglang_rollout.get_model_url: there is one model, behind one router."""
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


async def post(url: str, payload: dict[str, Any] | None, max_retries: int = 60, headers: dict[str, str] | None = None) -> Any:
    """slime.utils.http_utils.post: the JSON answer to a JSON body, from any server.

    At the run's own router /generate takes and gives what SGLang does (one prompt; `input_ids`, or `text`, tokenized without special
    tokens), and keeps the weight versions for `Sample.append_response_tokens`. A server that fails is asked again by the worker there,
    and `max_retries` times, a second apart, elsewhere; a 4xx is an error at once. A group that is interrupted gets the finish reason
    "abort". Raises: VimeError.
    """
    now, body = running.get(None), payload or {}
    at_router = now is not None and url.startswith(link.get().client.url + "/")
    if now and at_router and url.endswith(("/generate", "/generate/")) and "token_ids" not in body:
        session = {k.lower(): v for k, v in (headers or {}).items()}
        return await _generate(now, body, session.get("x-session-id") or session.get("x-smg-routing-key") or now.session)
    while True:
        try:
            async with aiohttp.ClientSession() as http, http.post(url, json=body, headers=headers) as r:
                if r.status >= 400:
                    raise VimeError(f"POST {url}: HTTP {r.status}: {(await r.text())[:500]}") if r.status < 500 else OSError(r.status)
                got = await r.json(content_type=None)
                break
        except (aiohttp.ClientError, OSError) as e:
            if (max_retries := max_retries - 1) <= 0:
                raise VimeError(f"POST {url}: {type(e).__name__}: {e}") from e
            await asyncio.sleep(1)
    if now and at_router and url.endswith(GENERATE):  # vLLM's own body, as vime's public namesake sends it
        now.versions |= {version_of(span["version"]) for c in got["choices"] for span in c.get("weight_versions") or []}
    return got


async def _generate(now: Running, body: dict[str, Any], session: str) -> dict[str, Any]:
    if body.get("image_data"):
        raise VimeError("post to /generate takes no image_data", "generate from the sample with vime.slime.generate, which sends its images")
    args, text, at = now.args, tokenizer.load(now.args.model), link.get()
    ids = body.get("input_ids") or text.encode([body["text"]], special_tokens=False)[0]
    params = for_server(body.get("sampling_params") or {})
    room = min(params.get("max_tokens", args.rollout.max_response_len), args.rollout.max_context_len - len(ids))
    out, reason, log_probs, versions, mask, routing = [], {"type": "length", "length": 0}, [], [], None, None
    async with at.slots.take(1):
        if at.stop.is_set():
            reason = {"type": "abort"}
        elif room > 0:  # else the context is full, which is a response cut off at once
            (c,) = await at.client.generate(ids, params | {"max_tokens": room}, session, args.rollout.request_timeout)
            now.versions |= set(c.versions)
            out, log_probs, versions, reason = c.token_ids, c.log_probs, c.versions, {"type": c.finish_reason, "matched": c.stop_reason}
            mask = c.sampling_mask if args.rollout.truncated else None
            routing = c.routed_experts if args.rollout.routing_replay else None
    meta = {
        "finish_reason": reason, "prompt_tokens": len(ids), "completion_tokens": len(out), "token_versions": versions,
        "sampling_mask": mask, "routed_experts": routing,
        "output_token_logprobs": [[lp, t, None] for lp, t in zip(log_probs, out, strict=True)],
    }  # fmt: skip
    return {"text": text.decode(out, params.get("skip_special_tokens", True)), "output_ids": out, "meta_info": meta}
