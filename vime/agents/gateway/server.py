"""The Gateway: providers' APIs on one port, for the policy's harness; sessions, rewards and rows on another, with a secret, for whoever runs it."""

import asyncio
import hmac
import logging
import re
import secrets
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import ModuleType
from typing import Any

import orjson
from aiohttp import web

from vime.agents.gateway import parse, wire_anthropic, wire_chat, wire_gemini, wire_responses
from vime.agents.gateway.journal import Journal
from vime.agents.gateway.record import Asked, Refused, Session, Turn, digest
from vime.agents.gateway.render import Template
from vime.data.tokenizer import Tokenizer
from vime.errors import VimeError, said
from vime.rollout.http import EngineClient, EngineDown
from vime.sections import GatewayConfig

log = logging.getLogger("vime.gateway")
PATHS = {"/v1/messages": wire_anthropic, "/v1/messages/count_tokens": wire_anthropic, "/v1/chat/completions": wire_chat, "/v1/responses": wire_responses}
GEMINI = re.compile(r"/v1beta/models/([^/:]+):(generateContent|streamGenerateContent|countTokens)")
BASES = {"anthropic": "", "openai": "/v1", "responses": "/v1", "gemini": ""}  # what a provider's client appends its paths to
IDLE = 0.05  # seconds between two tries at a server that aborts what it runs


def _zip(raw: bytes, most: int) -> bytes:
    return zlib.decompressobj(zlib.MAX_WBITS | 32).decompress(raw, most)


def _zstd(raw: bytes, most: int) -> bytes:
    import zstandard

    return bytes(zstandard.ZstdDecompressor().stream_reader(raw).read(most))


UNPACK: dict[str, Callable[[bytes, int], bytes]] = {"identity": lambda raw, most: raw, "gzip": _zip, "deflate": _zip, "zstd": _zstd}


class Gateway:
    """One model behind the providers' APIs. Bound to the event loop of `open`; `tokenizer` and `template` are the model's."""

    def __init__(self, client: EngineClient, tokenizer: Tokenizer, template: Template, limits: GatewayConfig, model: str, context: int):
        self.client, self.tokenizer, self.template, self.limits = client, tokenizer, template, limits
        self.model, self.context = model, context
        self.parsing: EngineClient | None = None  # the server whose parsers are used
        self.timeout, self.secret = 600.0, secrets.token_hex(24)
        self.sampling: dict[str, Any] | None = None  # of sessions that are not given their own
        self.sessions: dict[str, Session] = {}  # open ones, by id and by token
        self.journal: Journal | None = None
        self.port = self.control_port = 0
        self._runners: list[web.AppRunner] = []

    @classmethod
    async def open(
        cls, engine: str, model: str, limits: GatewayConfig | None = None, *, template: str | None = None, journal: str | Path | None = None,
        context: int | None = None, timeout: float = 600,
    ) -> "Gateway":  # fmt: skip
        """A Gateway in front of the server or router at URL `engine`, for the model in folder `model`; sessions of `journal` are there again.
        `context`: the longest prompt and answer in tokens, by default as the server says. Raises: VimeError."""
        limits, client = limits or GatewayConfig(), EngineClient(engine)
        try:
            served = (await client.models() or [{}])[0]
            context = context or served.get("max_model_len")  # a router may not say
            if not isinstance(context, int) or context < 1:
                raise VimeError(f"{engine} does not say how long a context may be", "give context (--context)")
            tokenizer = await asyncio.to_thread(Tokenizer, model)
            found = await asyncio.to_thread(Template, tokenizer, template, limits.chat_template_kwargs)
            self = cls(client, tokenizer, found, limits, str(served.get("id") or model), int(context))
            self.timeout = timeout
            if limits.parser == "server":
                self.parsing = await parse.server_with_parsers(engine)
            if journal:
                self.journal = Journal(Path(journal), self)
        except BaseException:
            await client.close()
            raise
        return self

    async def start(self, port: int = 0, control_port: int = 0, host: str = "127.0.0.1") -> None:
        """Listen: `port` for harnesses, `control_port` on the loopback only; 0: a free one. Raises: VimeError where one is taken."""
        for name, handler, at, wanted in (("port", self._policy, host, port), ("control_port", self._control, "127.0.0.1", control_port)):
            app = web.Application(client_max_size=self.limits.max_body)
            app.router.add_route("*", "/{any:.*}", handler)
            runner = web.AppRunner(app, access_log=None, auto_decompress=False, shutdown_timeout=1)
            await runner.setup()
            self._runners.append(runner)
            try:
                await web.TCPSite(runner, at, wanted, backlog=1024).start()
            except (OSError, OverflowError) as e:
                raise VimeError(f"{name} {wanted}: {said(e)}", "free it, or leave it out to get a free one") from e
            setattr(self, name, runner.addresses[0][1])

    def session(self, *, sampling: dict[str, Any] | None = None, metadata: Any = None, limits: dict[str, Any] | None = None) -> Session:
        """A new rollout. `sampling`: vLLM's parameters, which then hold whatever the client asks for (its smaller max_tokens and its stop apart).
        Raises: ValueError for `limits` (keys of [gateway]) that are none."""
        sampling = self.sampling if sampling is None else sampling
        s = self.enrol(Session(self, sampling=sampling, metadata=metadata), limits)
        self.write({"e": "session", "session": s.id, "token": s.token, "sampling": sampling, "metadata": metadata, "limits": limits})
        return s

    def enrol(self, s: Session, limits: dict[str, Any] | None) -> Session:
        if limits:
            s.limits = GatewayConfig.model_validate(self.limits.model_dump() | limits)
            s.slots = asyncio.Semaphore(s.limits.max_concurrency)
        self.sessions |= {s.id: s, s.token: s}
        return s

    def base_url(self, session: Session, protocol: str = "openai", host: str = "127.0.0.1", port: int | None = None) -> str:
        """Base URL for a client of "anthropic", "openai", "responses" or "gemini" that can't be given the session's token as its API key."""
        return f"http://{host}:{port or self.port}/sessions/{session.token}{BASES[protocol]}"

    def write(self, event: dict[str, Any]) -> None:
        if self.journal:
            self.journal.write(event)

    def forget(self, session: Session) -> None:
        if self.sessions.pop(session.id, None):
            self.sessions.pop(session.token, None)
            self.write({"e": "closed", "session": session.id})

    async def close(self) -> None:
        """Stop listening; running requests end. Sessions of a journal are there again when it is opened."""
        for s in set(self.sessions.values()):
            for _, task in s.asked.values():
                task.cancel()
        for runner in self._runners:
            await runner.cleanup()
        for client in (self.client, self.parsing):
            if client:
                await client.close()
        if self.journal:
            self.journal.close()

    # ---- one turn

    async def sample(self, session: Session, turn: Turn, asked: Asked) -> None:
        """Fill in `turn`, whose prompt is known. Raises: Refused (context, budget), EngineDown, VimeError."""
        prompt = turn.prompt()
        room = self.context - len(prompt)
        if room <= 0:
            raise Refused(400, f"prompt is too long: {len(prompt)} tokens > {self.context - 1} maximum", "context_length_exceeded")
        own = {k: v for k, v in asked.params.items() if session.sampling is None or k in ("stop", "max_tokens")}
        params = {"temperature": 1.0} | own | (session.sampling or {})
        asks = [int(p["max_tokens"]) for p in (own, params) if "max_tokens" in p]
        most = min(room, session.limits.max_tokens - session.sampled, *asks)
        if most <= 0:
            raise Refused(400, f"this session has sampled its {session.limits.max_tokens} tokens (gateway.max_tokens)", "budget_exceeded")
        reason = await self._sample(session, turn, prompt, params, most)
        session.sampled += len(turn.output_ids)
        turn.ended = turn.finish_reason == "stop" and not isinstance(reason, str)
        turn.message = await self._message(turn, asked, prompt[-256:])

    async def _sample(self, session: Session, turn: Turn, prompt: list[int], params: dict[str, Any], most: int) -> int | str | None:
        """Up to `most` tokens, their logprobs and versions; returns what stopped them. What the server aborts goes on where it was."""
        c, got = None, turn.output_ids
        while c is None or (c.finish_reason == "abort" and len(got) < most):
            await asyncio.sleep(IDLE if c and not c.token_ids else 0)
            left = {"max_tokens": most - len(got)}
            c = (await self.client.generate(prompt + got, params | left, session_id=session.id, timeout=self.timeout))[0]
            got += c.token_ids
            turn.logprobs += c.log_probs
            turn.versions += c.versions
            if c.sampling_mask is not None:
                turn.sampling_mask = (turn.sampling_mask or []) + c.sampling_mask
        turn.finish_reason = "length" if c.finish_reason == "abort" else c.finish_reason
        return c.stop_reason

    async def _message(self, turn: Turn, asked: Asked, prompt: list[int]) -> dict[str, Any]:
        decode = self.tokenizer.decode
        ids = turn.output_ids[:-1] if turn.ended and not decode(turn.output_ids[-1:]) else turn.output_ids
        text = decode(ids, skip_special_tokens=False)
        tools = asked.tools if asked.tool_choice != "none" else []
        if self.parsing and ids:
            p = await parse.by_server(self.parsing, ids, prompt, tools, asked.tool_choice, text)
        else:
            thinking = decode(prompt[-16:], skip_special_tokens=False).rstrip().endswith("<think>")
            p = parse.own(self.limits.parser, text, tools, thinking)
        turn.ill_formed = p.ill_formed
        message: dict[str, Any] = {"role": "assistant", "content": p.content, "turn": turn.id}
        if p.reasoning:
            message["reasoning_content"] = p.reasoning
        calls = [{"id": f"call_{turn.id}_{k}", "type": "function", "function": {"name": n, "arguments": a}} for k, (n, a) in enumerate(p.calls)]
        if calls:
            message["tool_calls"] = calls
        return message

    # ---- the policy's port

    async def _policy(self, request: web.Request) -> web.StreamResponse:
        path, named = request.path, ""
        if m := re.fullmatch(r"/sessions/([^/]+)(/.*)?", path):
            named, path = m[1], m[2] or "/"
        gemini = GEMINI.fullmatch(path)
        wire = wire_gemini if gemini else PATHS.get(path, wire_anthropic if path.startswith("/v1/messages") else wire_chat)
        try:
            if request.method in ("GET", "HEAD"):
                return web.json_response(self._described(path))
            if request.method != "POST" or not (gemini or path in PATHS):
                raise Refused(404, f"{request.method} {path}: there is no such path", "not_found")
            session = self._session_of(request, named)
            body = await self._body(request)
            try:
                asked = wire.read(body, request.headers, path)
                if not asked.messages:
                    raise ValueError("no messages")
                key = digest({k: v for k, v in body.items() if k not in ("stream", "stream_options")}, asked.agent, asked.kind)
            except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as e:
                raise Refused(400, f"malformed request: {said(e)}") from e
            if path.endswith("count_tokens") or (gemini and gemini[2] == "countTokens"):
                n = len(await asyncio.to_thread(self.template.full, asked.messages, asked.tools))
                return web.json_response({"totalTokens": n} if gemini else {"input_tokens": n})
            asked.model = asked.model or self.model
            return await self._answer(request, wire, session, asked, key)
        except web.HTTPRequestEntityTooLarge:
            return _failed(wire, Refused(413, f"the request has more than {self.limits.max_body} bytes (gateway.max_body)", "request_too_large"))
        except VimeError as e:
            return _failed(wire, e)
        except Exception as e:  # whatever it is, the client gets it in its provider's form, and may try again
            log.exception("%s %s", request.method, path)
            return _failed(wire, Refused(500, f"the Gateway failed: {said(e)}", "server_error"))

    def _described(self, path: str) -> dict[str, Any]:
        if path == "/":
            return {"ok": True}
        about = {"id": self.model, "object": "model", "type": "model", "display_name": self.model, "created": 0, "owned_by": "vime"}
        if path == "/v1/models":
            return {"object": "list", "data": [about | {"max_model_len": self.context}], "has_more": False}
        if path.startswith("/v1/models/"):
            return about
        raise Refused(404, f"GET {path}: there is no such path", "not_found")

    def _session_of(self, request: web.Request, named: str) -> Session:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ").strip()
        keys = [given, request.headers.get("x-api-key", ""), request.headers.get("x-goog-api-key", ""), request.query.get("key", ""), named]
        for key in keys:
            if (s := self.sessions.get(key)) and s.token == key:
                return s
        raise Refused(401, "no open session has this key: it is wrong, or its session was closed", "invalid_api_key")

    async def _body(self, request: web.Request) -> dict[str, Any]:
        raw, encoding, most = await request.read(), request.headers.get("Content-Encoding", "identity").lower(), self.limits.max_body
        if encoding not in UNPACK:
            raise Refused(415, f"Content-Encoding {encoding!r:.40} is not understood")
        try:
            raw = UNPACK[encoding](raw, most + 1)
            if len(raw) > most:
                raise web.HTTPRequestEntityTooLarge(most, len(raw))
            body = orjson.loads(raw)
        except web.HTTPException:
            raise
        except ImportError as e:
            raise Refused(415, "zstd bodies need the package zstandard: pip install vime[agents]") from e
        except Exception as e:  # each packing has errors of its own
            raise Refused(400, f"the body is no JSON: {said(e)}") from e
        if not isinstance(body, dict):
            raise Refused(400, "the body is no JSON object")
        return body

    async def _answer(self, request: web.Request, wire: ModuleType, session: Session, asked: Asked, key: str) -> web.StreamResponse:
        turn, task = session.ask(asked, key)
        await asyncio.wait({task}, timeout=self.limits.ping if asked.stream else None)
        if task.done():
            _check(task)  # what failed so soon has a status of its own
        begun, kind = wire.opening(turn, asked), "text/event-stream" if asked.stream else "application/json"
        response = web.StreamResponse(headers={"Content-Type": kind, "Cache-Control": "no-cache"})
        try:
            await response.prepare(request)
            while not task.done():
                await response.write(begun or wire.PING)
                begun = b""
                await asyncio.wait({task}, timeout=self.limits.ping)
            try:
                _check(task)
            except VimeError as e:
                await response.write(wire.failure(_status(e), e.what, getattr(e, "code", "server_error")))
                return response
            await response.write(begun + b"".join(wire.events(turn, asked)) if asked.stream else orjson.dumps(wire.answer(turn, asked)))
            await response.write_eof()
        except ConnectionError:  # the answer waits for the client's retry, or for a request that shows it was read
            return response
        session.deliver(turn)
        return response

    # ---- the control port

    async def _control(self, request: web.Request) -> web.Response:
        given = request.headers.get("Authorization", "").removeprefix("Bearer ")
        if not hmac.compare_digest(given.encode(), self.secret.encode()):
            return web.json_response({"error": "the secret is wrong"}, status=401)
        try:
            m = re.fullmatch(r"/sessions(?:/([0-9a-f]+)(/finish|/reward)?)?", request.path)
            call = f"{request.method} {m[2] or ''}" if m else ""
            body = await self._body(request) if request.can_read_body else {}
            if m and call == "POST " and not m[1]:
                asked = {k: body[k] for k in ("sampling", "metadata", "limits") if body.get(k) is not None}
                if not all(isinstance(asked.get(k, {}), dict) for k in ("sampling", "limits")):
                    raise ValueError("sampling and limits must be objects")
                s = self.session(**asked)
                return web.json_response({"id": s.id, "token": s.token, "base_urls": {p: self.base_url(s, p) for p in BASES}})
            session = self.sessions.get(m[1]) if m else None
            if m is None or session is None or session.id != m[1] or call not in ("GET ", "DELETE ", "POST /finish", "POST /reward"):
                raise Refused(404, f"{request.method} {request.path}: there is no such call, or open session", "not_found")
            if call == "POST /reward":
                session.reward = body.get("reward")
                self.write({"e": "reward", "session": session.id, "reward": session.reward})
            rows = session.finish() if call == "POST /finish" else session.abort() if call == "DELETE " else None
            about = {k: getattr(session, k) for k in ("id", "state", "reward", "metadata")} | {"metrics": session.metrics(rows)}
            about |= {} if rows is None else {"trajectories": [asdict(r) for r in rows]}
            return web.Response(body=orjson.dumps(about), content_type="application/json")
        except web.HTTPRequestEntityTooLarge as e:
            return web.json_response({"error": e.reason}, status=413)
        except (VimeError, ValueError) as e:
            return web.json_response({"error": str(e)}, status=_status(e) if isinstance(e, VimeError) else 400)


def _check(task: asyncio.Future[Turn]) -> None:
    if task.cancelled():
        raise Refused(409, "the session is closed", "session_closed")
    task.result()


def _status(e: VimeError) -> int:
    return e.status if isinstance(e, Refused) else 529 if isinstance(e, EngineDown) else 400


def _failed(wire: ModuleType, e: VimeError) -> web.Response:
    status = _status(e)
    return web.json_response(wire.error(status, e.what, getattr(e, "code", "server_error")), status=status)
