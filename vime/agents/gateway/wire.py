"""What the providers' forms have in common."""

import re
from collections.abc import Mapping
from typing import Any

import orjson

from vime.agents.gateway.record import Asked, Turn

TITLE = re.compile(r"(generate|create|write)\b.{0,40}\btitle\b", re.I)
SUMMARY = ("CONTEXT CHECKPOINT COMPACTION", "Your task is to create a detailed summary of the conversation")


def put(messages: list[dict[str, Any]], what: str, value: Any, turn: str | None) -> None:
    """Add a part of an assistant's answer ("content", "reasoning_content" or a "tool_calls" entry): to the last message, where that is part of
    the same answer, else as a new one."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    if last is None or (turn and last.get("turn") not in (None, turn)):
        last = {"role": "assistant", "content": ""}
        messages.append(last)
    if turn:
        last["turn"] = turn
    if what == "tool_calls":
        last.setdefault(what, []).append(value)
    else:
        last[what] = "\n".join(x for x in (last.get(what), value) if x)


def say(messages: list[dict[str, Any]], role: str, text: str, first: bool) -> None:
    """Add a text; those that follow one another in one message of the client's (`first`: its first part) are one message here."""
    if not first and messages[-1]["role"] == role:
        messages[-1]["content"] += "\n" + text
    else:
        messages.append({"role": role, "content": text})


def call(id: Any, name: Any, arguments: Any) -> dict[str, Any]:
    text = arguments if isinstance(arguments, str) else orjson.dumps(arguments or {}).decode()
    return {"id": str(id), "type": "function", "function": {"name": str(name), "arguments": text}}


def tool(name: Any, description: Any, parameters: Any) -> dict[str, Any]:
    schema = parameters if isinstance(parameters, dict) else {"type": "object", "properties": {}}
    return {"type": "function", "function": {"name": str(name), "description": str(description or ""), "parameters": schema}}


def numbers(body: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Sampling parameters under vLLM's names. Raises: ValueError where one is no number."""
    out = {ours: body[theirs] for theirs, ours in names.items() if body.get(theirs) is not None}
    for ours, value in out.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or (ours in ("max_tokens", "top_p") and value <= 0):
            raise ValueError(f"{ours} = {value!r:.80}")
    return out


def stops(value: Any) -> dict[str, Any]:
    found = [value] if isinstance(value, str) else [s for s in value or [] if isinstance(s, str) and s]
    return {"stop": found} if found else {}


def side_call(asked: Asked, schema: Any) -> str:
    """Title calls, and those that ask for a summary of the conversation, by what they say."""
    last = str(asked.messages[-1].get("content") or "") if asked.messages else ""
    if any(s in last for s in SUMMARY):
        return "compaction"
    told = any(m["role"] == "assistant" for m in asked.messages)
    titled = isinstance(schema, dict) and "title" in (schema.get("properties") or {})
    said = " ".join(str(m.get("content") or "")[:400] for m in asked.messages if m["role"] != "assistant")
    return "title" if not asked.tools and not told and (titled or TITLE.search(said)) else ""


def sse(data: Any, event: str = "") -> bytes:
    head = f"event: {event}\n".encode() if event else b""
    return head + b"data: " + (data if isinstance(data, bytes) else orjson.dumps(data)) + b"\n\n"


def parts(turn: Turn) -> tuple[str, list[str], list[tuple[str, str, str]]]:
    """The answer's reasoning, its text (none beside calls where it is empty), and (id, name, arguments) of its tool calls."""
    m = turn.message
    calls = [(c["id"], c["function"]["name"], c["function"]["arguments"]) for c in m.get("tool_calls") or []]
    return m.get("reasoning_content") or "", [m["content"]] if m["content"] or not calls else [], calls
