"""The assistant message that sampled tokens are: by the server's own parsers, or by one of a few small ones."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from vime.errors import VimeError
from vime.rollout.http import DERENDER, EngineClient

OPENERS = ("<tool_call>", "<function=", "[TOOL_CALLS]", "<|python_tag|>")  # text with one of these was meant as a call


class Parsed(NamedTuple):
    reasoning: str
    content: str
    calls: list[tuple[str, str]]  # name, arguments as JSON text
    ill_formed: bool


class Malformed(ValueError):
    """A call that is none."""


def _call(value: Any, key: str = "arguments") -> tuple[str, str]:
    if not isinstance(value, dict) or not isinstance(value.get("name"), str) or not isinstance(value.get(key), dict):
        raise Malformed(value)
    return value["name"], json.dumps(value[key], ensure_ascii=False)


def _hermes(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number."""
    rest = re.sub(r"<tool_call>(.*?)</tool_call>", "", text, flags=re.S)
    if "<tool_call>" in rest:
        raise Malformed(rest)
    return rest, [_call(json.loads(m)) for m in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.S)]


def _qwen_xml(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """<tool_call><function=name><parameter=key>value</parameter>...</function></tool_call>; values that the tool does not want as strings are JSON."""
    declared = {t["function"]["name"]: t["function"].get("parameters") or {} for t in tools}

    def one(block: str) -> tuple[str, str]:
        m = re.fullmatch(r"\s*<function=([^>]+)>(.*)</function>\s*", block, re.S)
        if not m or re.sub(r"<parameter=[^>]+>.*?</parameter>", "", m[2], flags=re.S).strip():
            raise Malformed(block)
        out = {}
        for key, value in re.findall(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", m[2], re.S):
            kind = ((declared.get(m[1], {}).get("properties") or {}).get(key) or {}).get("type", "string")
            out[key] = value if kind == "string" else json.loads(value)
        return m[1], json.dumps(out, ensure_ascii=False)

    rest = re.sub(r"<tool_call>(.*?)</tool_call>", "", text, flags=re.S)
    if "<tool_call>" in rest or "<function=" in rest:
        raise Malformed(rest)
    return rest, [one(m) for m in re.findall(r"<tool_call>(.*?)</tool_call>", text, re.S)]


def _llama3_json(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """{"name": ..., "parameters": {...}}, alone, after <|python_tag|> or not."""
    body = text.strip().removeprefix("<|python_tag|>")
    if not re.match(r'\{\s*"name"', body):
        return text, []
    return "", [_call(json.loads(body), "parameters")]


def _mistral(text: str, tools: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...] at the end."""
    before, found, after = text.partition("[TOOL_CALLS]")
    return before, [_call(c) for c in json.loads(after)] if found else []


OWN: dict[str, Callable[[str, list[dict[str, Any]]], tuple[str, list[tuple[str, str]]]]] = {
    "hermes": _hermes, "qwen_xml": _qwen_xml, "llama3_json": _llama3_json, "mistral": _mistral, "text": lambda text, tools: (text, []),
}  # fmt: skip


def own(name: str, text: str, tools: list[dict[str, Any]], thinking: bool = False) -> Parsed:
    """Take `text` apart by the parser `name`; `thinking`: the prompt ended inside <think>. What is malformed stays text, all of it."""
    reasoning = ""
    if name != "text" and (thinking or text.lstrip().startswith("<think>")):
        inside, closed, text = text.partition("</think>")
        reasoning = inside.replace("<think>", "", 1).strip()
        text = text.lstrip("\n") if closed else ""
    try:
        content, calls = OWN[name](text, tools) if tools else (text, [])
    except ValueError:
        return Parsed(reasoning, text, [], True)
    return Parsed(reasoning, content.strip() if calls else content, calls, False)


async def by_server(client: EngineClient, ids: list[int], prompt: list[int], tools: list[dict[str, Any]], choice: str, text: str) -> Parsed:
    """By the server's parsers; `text`: what the tokens are, in which a malformed call stays."""
    chat = {"messages": [{"role": "user", "content": ""}], "tools": tools or None, "tool_choice": choice if tools else None}
    got = await client.derender(ids, {k: v for k, v in chat.items() if v is not None}, prompt[-256:])
    reasoning, content = got.get("reasoning") or got.get("reasoning_content") or "", got.get("content") or ""
    try:
        calls = [(c["function"]["name"], c["function"]["arguments"]) for c in got.get("tool_calls") or []]
        if any(not isinstance(json.loads(arguments), dict) for _, arguments in calls):
            raise Malformed
    except ValueError:
        return Parsed("", text, [], True)
    return Parsed(reasoning, content, calls, bool(tools) and not calls and any(o in content for o in OPENERS))


async def server_with_parsers(url: str) -> EngineClient:
    """A client of the server at `url`, or of one behind that router, which parses. Raises: VimeError where it has no parsers."""
    how = "start it with --enable-auto-tool-choice --tool-call-parser NAME [--reasoning-parser NAME], or choose gateway.parser: " + ", ".join(OWN)
    client = EngineClient(url)
    try:
        if DERENDER not in await client.paths():
            raise VimeError("no such path")
    except VimeError:
        try:
            urls = await client.workers()
        except VimeError:
            urls = []
        finally:
            await client.close()
        if not urls:
            raise VimeError(f"{url} has no {DERENDER}", how) from None
        client = EngineClient(urls[0])
    try:
        await client.derender([0], None)
    except VimeError as e:
        if "chat_request is required" in e.what:
            return client
        await client.close()
        raise
    await client.close()
    raise VimeError(f"{client.url} was started without parsers for tool calls and reasoning", how)
