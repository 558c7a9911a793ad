"""The assistant message that sampled tokens are: by the server's own parsers, or by one of a few small ones."""

import json
import re
from contextlib import suppress
from typing import Any, NamedTuple

import orjson

from vime.errors import VimeError
from vime.rollout.http import EngineClient

OPENERS = ("<tool_call>", "<function=", "[TOOL_CALLS]", "<|python_tag|>")  # text with one of these was meant as a call


class Parsed(NamedTuple):
    reasoning: str
    content: str
    calls: list[tuple[str, str]]  # name, arguments as JSON text
    ill_formed: bool


def _hermes(block: str, tools: list[dict[str, Any]]) -> tuple[str, str]:
    """{"name": ..., "arguments": {...}}"""
    got = orjson.loads(block)
    if not isinstance(got, dict) or not isinstance(got.get("name"), str) or not isinstance(got.get("arguments"), dict):
        raise ValueError(block)
    return got["name"], json.dumps(got["arguments"], ensure_ascii=False)


def _qwen_xml(block: str, tools: list[dict[str, Any]]) -> tuple[str, str]:
    """<function=name><parameter=key>value</parameter>...</function>; values that the tool does not want as strings are JSON."""
    m = re.fullmatch(r"\s*<function=([^>]+)>(.*)</function>\s*", block, re.S)
    if not m or re.sub(r"<parameter=[^>]+>.*?</parameter>", "", m[2], flags=re.S).strip():
        raise ValueError(block)
    wanted = next((t["function"]["parameters"].get("properties") or {} for t in tools if t["function"]["name"] == m[1]), {})
    given = re.findall(r"<parameter=([^>]+)>\n?(.*?)\n?</parameter>", m[2], re.S)
    kinds = {k: w.get("type", "string") if isinstance(w, dict) else "string" for k, w in wanted.items()}  # of a schema: a type, or several
    out = {k: v if "string" in kinds.get(k, "string") else orjson.loads(v) for k, v in given}
    return m[1], json.dumps(out, ensure_ascii=False)


OWN = {"hermes": _hermes, "qwen_xml": _qwen_xml}  # of what is between <tool_call> and </tool_call>
BLOCK = re.compile(r"<tool_call>(.*?)</tool_call>", re.S)


def own(name: str, text: str, tools: list[dict[str, Any]], thinking: bool = False) -> Parsed:
    """Take `text` apart by the parser `name`; `thinking`: the prompt ended inside <think>. What is malformed stays text, all of it."""
    reasoning = ""
    if name not in OWN:
        return Parsed("", text, [], False)
    if thinking or text.lstrip().startswith("<think>"):
        inside, closed, text = text.partition("</think>")
        reasoning, text = inside.replace("<think>", "", 1).strip(), text.lstrip("\n") if closed else ""
    rest = BLOCK.sub("", text)
    if not tools or (rest == text and not any(o in text for o in OPENERS)):
        return Parsed(reasoning, text, [], False)
    try:
        calls = [_sendable(*OWN[name](block, tools)) for block in BLOCK.findall(text)]
    except (ValueError, TypeError, AttributeError, RecursionError):
        calls = []
    broken = not calls or any(o in rest for o in OPENERS)
    return Parsed(reasoning, text if broken else rest.strip(), [] if broken else calls, broken)


def _sendable(name: str, arguments: str) -> tuple[str, str]:
    """Raises: ValueError, TypeError for arguments that are no object, or can't be in an answer: NaN, half a surrogate pair, endless nesting."""
    if not isinstance(got := orjson.loads(arguments), dict):
        raise ValueError(arguments)
    orjson.dumps([[[[[[[[[[[[[[[[got]]]]]]]]]]]]]]]])  # deeper than any provider's form has them
    return name, arguments


async def by_server(client: EngineClient, ids: list[int], prompt: list[int], tools: list[dict[str, Any]], choice: str, text: str) -> Parsed:
    """By the server's parsers; `ids`: one or more, without the token that ended them, which not every parser leaves out of the content;
    `text`: what they are, in which a malformed call stays."""
    chat = {"messages": [{"role": "user", "content": ""}], "tools": tools or None, "tool_choice": choice if tools else None}
    got = await client.derender(ids, {k: v for k, v in chat.items() if v is not None}, prompt[-256:])
    reasoning, content = got.get("reasoning") or got.get("reasoning_content") or "", got.get("content") or ""
    try:
        calls = [_sendable(c["function"]["name"], c["function"]["arguments"]) for c in got.get("tool_calls") or []]
    except (ValueError, TypeError):
        return Parsed("", text, [], True)
    content = content.strip("\n") if reasoning or calls else content
    return Parsed(reasoning.strip("\n"), content, calls, bool(tools) and not calls and any(o in content for o in OPENERS))


async def server_with_parsers(url: str) -> EngineClient:
    """A client of the server at `url`, or of one behind that router, which parses. Raises: VimeError where it has no parsers."""
    client, what = EngineClient(url), "was started without parsers for tool calls and reasoning"
    with suppress(VimeError):  # only a router has such
        for behind in (await client.workers())[:1]:
            await client.close()
            client = EngineClient(behind)
    try:
        await client.derender([0], None)
    except VimeError as e:
        if "chat_request is required" in e.what:
            return client
        what = f"does not parse: {e.what}"
    await client.close()
    how = "start it with --enable-auto-tool-choice --tool-call-parser NAME [--reasoning-parser NAME], or choose gateway.parser: text, "
    raise VimeError(f"{client.url} {what}", how + ", ".join(OWN))
