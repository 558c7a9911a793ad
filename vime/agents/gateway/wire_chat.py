"""OpenAI's Chat Completions. The turn's id is in tool_calls[].id; an answer without calls has none, so it is known by its place and text."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

from vime.agents.gateway.record import Asked, Turn, minted, text_of
from vime.agents.gateway.wire import call, numbers, put, side_call, sse, stops, tool

PING = b": ping\n\n"
NUMBERS = {"max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "seed": "seed", "presence_penalty": "presence_penalty"}
KINDS = {401: "authentication_error", 429: "rate_limit_error"}
ROLES = {"developer": "system", "function": "tool"}


def read(body: dict[str, Any], headers: Mapping[str, str], path: str = "") -> Asked:
    messages: list[dict[str, Any]] = []
    for m in body["messages"]:
        role = ROLES.get(m["role"], m["role"])
        if role == "assistant":
            new: list[dict[str, Any]] = [{"role": "assistant", "content": text_of(m.get("content"))}]
            if m.get("reasoning_content") or m.get("reasoning"):
                new[0]["reasoning_content"] = text_of(m.get("reasoning_content") or m.get("reasoning"))
            for c in m.get("tool_calls") or []:
                put(new, "tool_calls", call(c["id"], c["function"]["name"], c["function"].get("arguments")), minted(c["id"]))
            messages += new
        elif role == "tool":
            messages.append({"role": "tool", "tool_call_id": str(m.get("tool_call_id") or ""), "content": text_of(m.get("content"))})
        elif role in ("system", "user"):
            messages.append({"role": role, "content": text_of(m.get("content"))})
        else:
            raise ValueError(f"role {role!r:.40}")
    if body.get("n") not in (None, 1):
        raise ValueError("n must be 1")
    tools = [tool(f["name"], f.get("description"), f.get("parameters")) for f in (t.get("function", t) for t in body.get("tools") or [])]
    params = numbers({"max_tokens": body.get("max_completion_tokens")} | {k: v for k, v in body.items() if v is not None}, NUMBERS)
    asked = Asked(messages, tools, params | stops(body.get("stop")), bool(body.get("stream")), str(body.get("model") or ""))
    asked.tool_choice = "none" if body.get("tool_choice") == "none" else "auto"
    asked.kind = side_call(asked, ((body.get("response_format") or {}).get("json_schema") or {}).get("schema"))
    asked.more["usage"] = bool((body.get("stream_options") or {}).get("include_usage"))
    return asked


def _ended(turn: Turn) -> str:
    return "length" if turn.finish_reason == "length" else "tool_calls" if turn.message.get("tool_calls") else "stop"


def _usage(turn: Turn) -> dict[str, int]:
    n, m = turn.prompt_tokens, len(turn.output_ids)
    return {"prompt_tokens": n, "completion_tokens": m, "total_tokens": n + m}


def answer(turn: Turn, asked: Asked) -> dict[str, Any]:
    message = {k: v for k, v in turn.message.items() if k in ("role", "content", "reasoning_content")}
    if calls := turn.message.get("tool_calls"):
        message |= {"tool_calls": calls, "content": message["content"] or None}
    choice = {"index": 0, "message": message, "finish_reason": _ended(turn), "logprobs": None}
    return _chunk(turn, asked, "chat.completion") | {"choices": [choice], "usage": _usage(turn)}


def _chunk(turn: Turn, asked: Asked, kind: str = "chat.completion.chunk") -> dict[str, Any]:
    return {"id": f"chatcmpl-{turn.id}", "object": kind, "created": int(time.time()), "model": asked.model}


def _delta(turn: Turn, asked: Asked, delta: dict[str, Any], reason: str | None = None) -> bytes:
    return sse(_chunk(turn, asked) | {"choices": [{"index": 0, "delta": delta, "finish_reason": reason}]})


def opening(turn: Turn, asked: Asked) -> bytes:
    return _delta(turn, asked, {"role": "assistant", "content": ""})


def events(turn: Turn, asked: Asked) -> Iterator[bytes]:
    for name in ("reasoning_content", "content"):
        if turn.message.get(name):
            yield _delta(turn, asked, {name: turn.message[name]})
    for k, c in enumerate(turn.message.get("tool_calls") or []):
        yield _delta(turn, asked, {"tool_calls": [{"index": k} | c]})
    yield _delta(turn, asked, {}, _ended(turn))
    if asked.more["usage"]:
        yield sse(_chunk(turn, asked) | {"choices": [], "usage": _usage(turn)})
    yield sse(b"[DONE]")


def error(status: int, said: str, code: str) -> dict[str, Any]:
    kind = KINDS.get(status) or ("invalid_request_error" if status < 500 else "server_error")
    return {"error": {"message": said, "type": kind, "param": None, "code": code}}


def failure(status: int, said: str, code: str) -> bytes:
    return sse(error(status, said, code))
