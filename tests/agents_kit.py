"""For tests of agents: tokenizers of four template families, and a scripted engine, which is a real HTTP server that speaks vLLM's API."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp import web
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from vime.agents.gateway import Gateway
from vime.rollout.http import GENERATE, MODELS
from vime.sections import GatewayConfig

TEMPLATES = Path(__file__).parent / "data" / "templates"
SPECIAL = {
    "chatml": ["<|im_end|>", "<|im_start|>"],
    "qwen3": ["<|im_end|>", "<|im_start|>"],
    "llama3": ["<|eot_id|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>"],
    "mistral": ["</s>", "<s>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
}
MARKS = ["<think>", "</think>", "<tool_call>", "</tool_call>", "[TOOL_CALLS]"]  # tokens that are not special
FAMILIES = list(SPECIAL)
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("\u0120", "the"), ('"', ":"), ("o", "n")]


def model_folder(folder: Path, family: str = "chatml") -> str:
    """A folder with the tokenizer (bytes and a few merges) and chat template of a family; its first special token ends an answer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {c: i for i, c in enumerate([*letters, *("".join(m) for m in MERGES)])}
    rust = Tokenizer(models.BPE(vocab=vocab, merges=MERGES))
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    rust.decoder = decoders.ByteLevel()
    rust.add_special_tokens(SPECIAL[family])
    rust.add_tokens([AddedToken(t, special=False) for t in MARKS])
    folder.mkdir(parents=True, exist_ok=True)
    rust.save(str(folder / "tokenizer.json"))
    config = {"eos_token": SPECIAL[family][0], "bos_token": SPECIAL[family][1]}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text((TEMPLATES / f"{family}.jinja").read_text().strip())
    return str(folder)


def said(text: str = "", calls: list[tuple[str, Any]] | None = None, reasoning: str = "") -> str:
    """What a model that speaks Hermes's form samples to say it, without the token that ends it."""
    thought = f"<think>\n{reasoning}\n</think>\n\n" if reasoning else ""
    return thought + text + "".join("\n<tool_call>\n" + json.dumps({"name": n, "arguments": a}) + "\n</tool_call>" for n, a in calls or [])


class ScriptedEngine:
    """Answers /inference/v1/generate with `script`: a list of outputs, one for each request, or a function of (request body, its number).

    An output is a text (encoded, and ended by the family's end token), a dict {"text" or "token_ids", "finish_reason", "stop_reason", "delay"},
    {"raw": what else it answers}, or an int, an HTTP status. Token number s of all that were sampled has the logprob -s / 1e6, so each is known wherever it turns up: `sampled`.
    """

    def __init__(self, folder: str, script: list[Any] | Callable[[dict[str, Any], int], Any] | None = None, context: int = 1 << 20):
        self.rust = Tokenizer.from_file(f"{folder}/tokenizer.json")
        config = json.loads((Path(folder) / "tokenizer_config.json").read_text())
        self.end = self.rust.token_to_id(config["eos_token"])
        self.script, self.context = script if script is not None else [], context
        self.requests: list[dict[str, Any]] = []
        self.sampled: list[int] = []
        self.spans: dict[int, tuple[int, int]] = {}  # number of the first token of an answer -> number of its request, tokens
        self.running = self.most = self.version = 0
        self.url = ""

    def encode(self, text: str, end: bool = True) -> list[int]:
        return [*self.rust.encode(text, add_special_tokens=False).ids, *([self.end] if end else [])]

    async def start(self, port: int = 0) -> ScriptedEngine:
        app = web.Application(client_max_size=1 << 28)
        app.router.add_post(GENERATE, self._generate)
        app.router.add_get(MODELS, self._models)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1, handler_cancellation=True)  # as vLLM: who leaves ends his request
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", port, backlog=4096).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        await self._runner.cleanup()

    async def _models(self, request: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": "scripted", "max_model_len": self.context}]})

    async def _generate(self, request: web.Request) -> web.Response:
        body = orjson.loads(await request.read())
        n = len(self.requests)
        self.requests.append(body)
        out = self.script(body, n) if callable(self.script) else self.script.pop(0)
        if isinstance(out, int):
            return web.json_response({"error": {"message": f"scripted {out}"}}, status=out)
        given = out if isinstance(out, dict) else {"text": out}
        if "raw" in given:
            return web.json_response(given["raw"])
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(given.get("delay", 0))
        finally:
            self.running -= 1
        reason = given.get("finish_reason", "stop")
        ended = reason == "stop" and given.get("stop_reason") is None
        ids = given["token_ids"] if "token_ids" in given else self.encode(given["text"], ended)
        if len(ids) > (most := body["sampling_params"]["max_tokens"]):
            ids, reason = ids[:most], "length"
        first = len(self.sampled)
        self.spans[first] = n, len(ids)
        self.sampled += ids
        content = [{"token_id": t, "logprob": -(first + k) / 1e6} for k, t in enumerate(ids)]
        choice = {"index": 0, "token_ids": ids, "logprobs": {"content": content}, "finish_reason": reason, "stop_reason": given.get("stop_reason")}
        choice["weight_versions"] = [{"start": 0, "end": len(ids), "version": str(self.version)}]
        return web.Response(body=orjson.dumps({"choices": [choice]}), content_type="application/json")


@contextlib.asynccontextmanager
async def gateway(engine: ScriptedEngine, folder: str, **kw: Any) -> AsyncIterator[Gateway]:
    """A Gateway that listens, in front of `engine`, which is started if it does not run; `kw`: keys of [gateway], and journal."""
    journal, start = kw.pop("journal", None), not engine.url
    if start:
        await engine.start()
    g = await Gateway.open(engine.url, folder, GatewayConfig(**{"parser": "hermes"} | kw), journal=journal)
    try:
        await g.start()
        yield g
    finally:
        await g.close()
        if start:
            await engine.stop()


def check(engine: ScriptedEngine, rows: list[Any], kinds: set[str] | None = None) -> set[int]:
    """The numbers of the sampled tokens that the rows train. Asserts that each is trained once, is the token that was sampled after just the
    tokens that come before it in the row, and that what is masked has no logprob and no version."""
    seen: set[int] = set()
    for row in rows:
        numbers = [round(-lp * 1e6) if mask else None for lp, mask in zip(row.logprobs, row.loss_mask)]
        for at, number in enumerate(numbers):
            if number in engine.spans and row.loss_mask[at]:
                n, length = engine.spans[number]
                assert row.tokens[: row.prompt_length + at] == engine.requests[n]["token_ids"], "not what the policy was asked"
                assert numbers[at : at + length] == list(range(number, number + length)), "an answer in pieces"
        assert len(row.tokens) - row.prompt_length == len(row.loss_mask) == len(row.logprobs) == len(row.versions)
        assert kinds is None or row.kind in kinds
        for token, mask, lp, version in zip(row.tokens[row.prompt_length :], row.loss_mask, row.logprobs, row.versions):
            if not mask:
                assert lp == 0.0 and version == -1
                continue
            number = round(-lp * 1e6)
            assert engine.sampled[number] == token and number not in seen and version >= 0
            seen.add(number)
    return seen


async def post(url: str, body: Any, token: str = "", **kw: Any) -> tuple[int, Any]:
    """Status and body (JSON, or the text of an event stream) of a POST."""
    headers = ({"Authorization": f"Bearer {token}"} if token else {}) | kw.pop("headers", {})
    data = body if isinstance(body, bytes) else orjson.dumps(body)
    async with aiohttp.ClientSession() as http, http.request(kw.pop("method", "POST"), url, data=data, headers=headers, **kw) as r:
        raw = await r.read()
        return r.status, orjson.loads(raw) if "json" in r.headers.get("Content-Type", "") else raw.decode()
