"""Anthropic's Messages. The turn's id is in tool_use.id and in the signature of its thinking."""

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from vime.agents.gateway.record import Asked, Turn, minted, text_of
from vime.agents.gateway.wire import call, numbers, parts, put, say, side_call, sse, stops, tool

PING = sse({"type": "ping"}, "ping")
BILLING = "x-anthropic-billing-header"  # a block of the system prompt that is no text for the model, and may differ each time
EMPTY: dict[str, dict[str, Any]] = {"thinking": {"thinking": "", "signature": ""}, "text": {"text": ""}, "tool_use": {"input": {}}}
KINDS = {400: "invalid_request_error", 401: "authentication_error", 404: "not_found_error", 413: "request_too_large", 429: "rate_limit_error"}


def read(body: dict[str, Any], headers: Mapping[str, str], path: str = "") -> Asked:
    messages: list[dict[str, Any]] = []
    system = body.get("system") or []
    blocks = [system] if isinstance(system, str) else [b for b in system if not text_of(b).startswith(BILLING)]
    if blocks:
        messages.append({"role": "system", "content": text_of(blocks)})
    for m in body["messages"]:
        content = [{"type": "text", "text": m["content"]}] if isinstance(m["content"], str) else m["content"]
        if m["role"] == "assistant":
            messages += _answer(content)
        else:
            role = "system" if m["role"] == "system" else "user"
            for b in content:
                if b.get("type") == "tool_result":
                    messages.append({"role": "tool", "tool_call_id": str(b["tool_use_id"]), "content": text_of(b.get("content"))})
                else:
                    say(messages, role, text_of(b), b is content[0])
    choice = body.get("tool_choice") or {}
    params = numbers(body, {"max_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p", "top_k": "top_k"})
    tools = [tool(t["name"], t.get("description"), t.get("input_schema")) for t in body.get("tools") or []]
    asked = Asked(messages, tools, params | stops(body.get("stop_sequences")), bool(body.get("stream")), str(body.get("model") or ""))
    asked.tool_choice = "none" if isinstance(choice, dict) and choice.get("type") == "none" else "auto"
    asked.agent = headers.get("x-claude-code-agent-id", "")
    asked.kind = side_call(asked, ((body.get("output_config") or {}).get("format") or {}).get("schema"))
    return asked


def _answer(blocks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for b in blocks:
        kind = b.get("type")
        if kind == "thinking":
            put(out, "reasoning_content", str(b.get("thinking") or ""), minted(b.get("signature")))
        elif kind == "tool_use":
            put(out, "tool_calls", call(b["id"], b["name"], b.get("input")), minted(b["id"]))
        elif kind != "redacted_thinking":
            put(out, "content", text_of(b), None)
    return out or [{"role": "assistant", "content": ""}]


def _blocks(turn: Turn) -> list[dict[str, Any]]:
    reasoning, texts, calls = parts(turn)
    out: list[dict[str, Any]] = [{"type": "thinking", "thinking": reasoning, "signature": f"sig_{turn.id}"}] if reasoning else []
    out += [{"type": "text", "text": text} for text in texts]
    return out + [{"type": "tool_use", "id": i, "name": n, "input": orjson.loads(a)} for i, n, a in calls]


def _ended(turn: Turn) -> dict[str, Any]:
    reason = "max_tokens" if turn.finish_reason == "length" else "tool_use" if turn.message.get("tool_calls") else "end_turn"
    return {"stop_reason": reason, "stop_sequence": None}


def _begun(turn: Turn, asked: Asked) -> dict[str, Any]:
    usage = {"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0} | _usage(turn)
    return {"id": f"msg_{turn.id}", "type": "message", "role": "assistant", "model": asked.model, "usage": usage}


def _usage(turn: Turn) -> dict[str, int]:
    return {"input_tokens": turn.prompt_tokens, "output_tokens": len(turn.output_ids)}


def answer(turn: Turn, asked: Asked) -> dict[str, Any]:
    return _begun(turn, asked) | {"content": _blocks(turn)} | _ended(turn)


def opening(turn: Turn, asked: Asked) -> bytes:
    message = _begun(turn, asked) | {"content": [], "stop_reason": None, "stop_sequence": None}
    return sse({"type": "message_start", "message": message}, "message_start")


def events(turn: Turn, asked: Asked) -> Iterator[bytes]:
    for i, b in enumerate(_blocks(turn)):
        kind = b["type"]
        text = orjson.dumps(b["input"]).decode() if kind == "tool_use" else b[kind]
        deltas = [{"type": "input_json_delta", "partial_json": text} if kind == "tool_use" else {"type": f"{kind}_delta", kind: text}]
        deltas += [{"type": "signature_delta", "signature": b["signature"]}] if kind == "thinking" else []
        yield sse({"type": "content_block_start", "index": i, "content_block": b | EMPTY[kind]}, "content_block_start")
        for d in deltas:
            yield sse({"type": "content_block_delta", "index": i, "delta": d}, "content_block_delta")
        yield sse({"type": "content_block_stop", "index": i}, "content_block_stop")
    yield sse({"type": "message_delta", "delta": _ended(turn), "usage": _usage(turn)}, "message_delta")
    yield sse({"type": "message_stop"}, "message_stop")


def error(status: int, said: str, code: str) -> dict[str, Any]:
    kind = KINDS.get(status) or ("overloaded_error" if status == 529 else "api_error" if status >= 500 else "invalid_request_error")
    return {"type": "error", "error": {"type": kind, "message": said}}


def failure(status: int, said: str, code: str) -> bytes:
    return sse(error(status, said, code), "error")
