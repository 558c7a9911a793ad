"""OpenAI's Responses, without stored state: the whole input comes each time. The turn's id is in every item's id and in call_id."""

import time
from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from vime.agents.gateway.record import Asked, Turn, minted, text_of
from vime.agents.gateway.wire import call, numbers, parts, put, side_call, sse, tool
from vime.agents.gateway.wire_chat import error

PING = b": ping\n\n"
CALLS = ("function_call", "custom_tool_call", "local_shell_call")
EMPTY: dict[str, dict[str, Any]] = {"reasoning": {"content": []}, "message": {"content": [], "status": "in_progress"}}
FREE = {"type": "object", "properties": {"input": {"type": "string"}}, "required": ["input"]}  # of a custom tool: any text


def read(body: dict[str, Any], headers: Mapping[str, str], path: str = "") -> Asked:
    if body.get("previous_response_id"):
        raise ValueError("previous_response_id: nothing is stored here, send the whole input")
    messages: list[dict[str, Any]] = []
    if body.get("instructions"):
        messages.append({"role": "system", "content": text_of(body["instructions"])})
    given = body["input"]
    for item in [{"role": "user", "content": given}] if isinstance(given, str) else given:
        kind, turn = item.get("type", "message"), minted(item.get("id")) or minted(item.get("call_id"))
        if kind == "message" and item["role"] == "assistant":
            put(messages, "content", text_of(item.get("content")), turn)
        elif kind == "message":
            role = "system" if item["role"] in ("developer", "system") else "user"
            messages.append({"role": role, "content": text_of(item.get("content"))})
        elif kind == "reasoning":
            put(messages, "reasoning_content", text_of(item.get("content") or item.get("summary")), turn)
        elif kind in CALLS:
            given = item.get("arguments") if kind == "function_call" else {"input": item.get("input", item.get("action"))}
            put(messages, "tool_calls", call(item["call_id"], item.get("name", "shell"), given), turn)
        elif kind.endswith("_output"):
            messages.append({"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": text_of(item.get("output"))})
        else:  # what the client made of its own tools, as web_search_call
            messages.append({"role": "user", "content": orjson.dumps(item).decode()})
    params = numbers(body, {"max_output_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p"})
    asked = Asked(messages, [], params, bool(body.get("stream")), str(body.get("model") or ""))
    asked.more |= {"space": {}, "custom": set()}
    for t in body.get("tools") or []:
        _tool(asked, t)
    asked.tool_choice = "none" if body.get("tool_choice") == "none" else "auto"
    asked.kind = side_call(asked, ((body.get("text") or {}).get("format") or {}).get("schema"))
    told = headers.get("x-codex-turn-metadata")
    if told:
        about = orjson.loads(told)
        asked.kind = "compaction" if about.get("request_kind") == "compaction" else asked.kind
        name = about.get("agent_name") or "/root"
        asked.agent = "" if name == "/root" and about.get("thread_source", "user") == "user" else str(name)
    return asked


def _tool(asked: Asked, t: dict[str, Any], space: str = "") -> None:
    """Functions, those in a namespace, and custom tools; what only OpenAI's servers can run (web_search, ...) is left out."""
    kind = t.get("type", "function")
    if kind == "namespace":
        for inner in t.get("tools") or []:
            _tool(asked, inner if isinstance(inner, dict) else {"name": inner}, t["name"])
    elif kind in ("function", "custom"):
        name = t["name"]
        if kind == "custom":
            asked.more["custom"].add(name)
        if space:
            asked.more["space"][name] = space
        asked.tools.append(tool(name, t.get("description"), FREE if kind == "custom" else t.get("parameters")))


def _items(turn: Turn, asked: Asked) -> list[dict[str, Any]]:
    (reasoning, texts, calls), out = parts(turn), list[dict[str, Any]]()
    if reasoning:
        content: list[dict[str, Any]] = [{"type": "reasoning_text", "text": reasoning}]
        out.append({"type": "reasoning", "id": f"rs_{turn.id}", "summary": [], "content": content, "encrypted_content": None})
    for text in texts:
        content = [{"type": "output_text", "text": text, "annotations": []}]
        out.append({"type": "message", "id": f"msg_{turn.id}", "status": "completed", "role": "assistant", "content": content})
    for k, (i, name, arguments) in enumerate(calls):
        known = {"id": f"fc_{turn.id}_{k}", "status": "completed", "call_id": i, "name": name}
        if name in asked.more["custom"]:
            out.append({"type": "custom_tool_call", **known, "input": str(orjson.loads(arguments).get("input", arguments))})
        else:
            space = {"namespace": asked.more["space"][name]} if name in asked.more["space"] else {}
            out.append({"type": "function_call", **known, "arguments": arguments, **space})
    return out


def _response(turn: Turn, asked: Asked, status: str, output: list[dict[str, Any]]) -> dict[str, Any]:
    out = {"id": f"resp_{turn.id}", "object": "response", "created_at": int(time.time()), "status": status, "model": asked.model, "output": output}
    out |= {"error": None, "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None, "parallel_tool_calls": True}
    out |= {"tool_choice": asked.tool_choice, "tools": [], "metadata": {}, "usage": None}
    if status in ("completed", "incomplete"):
        n, m = turn.prompt_tokens, len(turn.output_ids)
        details = {"input_tokens_details": {"cached_tokens": 0}, "output_tokens_details": {"reasoning_tokens": 0}}
        out["usage"] = {"input_tokens": n, "output_tokens": m, "total_tokens": n + m} | details
    return out


def _status(turn: Turn) -> str:
    return "incomplete" if turn.finish_reason == "length" else "completed"


def answer(turn: Turn, asked: Asked) -> dict[str, Any]:
    return _response(turn, asked, _status(turn), _items(turn, asked))


def opening(turn: Turn, asked: Asked) -> bytes:
    response = _response(turn, asked, "in_progress", [])
    kinds = enumerate(("response.created", "response.in_progress"))
    return b"".join(sse({"type": k, "sequence_number": i, "response": response}, k) for i, k in kinds)


def events(turn: Turn, asked: Asked) -> Iterator[bytes]:
    items = _items(turn, asked)
    for i, (kind, data) in enumerate(_told(turn, asked, items), start=2):
        yield sse({"type": kind, "sequence_number": i} | data, kind)


def _told(turn: Turn, asked: Asked, items: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for k, item in enumerate(items):
        at, kind = {"item_id": item["id"], "output_index": k}, item["type"]
        empty = EMPTY.get(kind, {"status": "in_progress"})
        blank = {key: "" for key in ("arguments", "input") if key in item}
        yield "response.output_item.added", {"output_index": k, "item": item | empty | blank}
        if kind in ("reasoning", "message"):
            part = item["content"][0]
            name, inside = "reasoning_text" if kind == "reasoning" else "output_text", {"content_index": 0}
            yield "response.content_part.added", at | inside | {"part": part | {"text": ""}}
            yield f"response.{name}.delta", at | inside | {"delta": part["text"]}
            yield f"response.{name}.done", at | inside | {"text": part["text"]}
            yield "response.content_part.done", at | inside | {"part": part}
        else:
            name, key = ("custom_tool_call_input", "input") if kind == "custom_tool_call" else ("function_call_arguments", "arguments")
            yield f"response.{name}.delta", at | {"delta": item[key]}
            yield f"response.{name}.done", at | {key: item[key]}
        yield "response.output_item.done", {"output_index": k, "item": item}
    status = _status(turn)
    yield f"response.{status}", {"response": _response(turn, asked, status, items)}


def failure(status: int, said: str, code: str) -> bytes:
    told = {"type": "response.failed", "sequence_number": 2, "response": {"status": "failed", "error": {"code": code, "message": said}}}
    return sse(told, "response.failed")


__all__ = ["PING", "answer", "error", "events", "failure", "opening", "read"]
