"""Gemini's generateContent. The turn's id is in functionCall.id and in thoughtSignature."""

from collections.abc import Iterator, Mapping
from typing import Any

import orjson

from vime.agents.gateway.record import Asked, Turn, minted, text_of
from vime.agents.gateway.wire import call, numbers, parts, put, say, side_call, sse, stops, tool

PING = b": ping\n\n"
STATUS = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED", 529: "UNAVAILABLE"}
NUMBERS = {"maxOutputTokens": "max_tokens", "temperature": "temperature", "topP": "top_p", "topK": "top_k", "seed": "seed"}


def read(body: dict[str, Any], headers: Mapping[str, str], path: str = "") -> Asked:
    messages: list[dict[str, Any]] = []
    body = body.get("generateContentRequest") or body  # how countTokens may wrap it
    if system := body.get("systemInstruction") or body.get("system_instruction"):
        messages.append({"role": "system", "content": text_of(system.get("parts") if isinstance(system, dict) else system)})
    named: dict[str, str] = {}  # the newest call of each function
    for c in body["contents"]:
        given = c.get("parts") or []
        if c.get("role") == "model":
            messages += (answers := _answer(given))
            named |= {k["function"]["name"]: k["id"] for a in answers for k in a.get("tool_calls") or []}
            continue
        for p in given:
            if result := p.get("functionResponse"):
                id = str(result.get("id") or named.get(result["name"], result["name"]))
                said = result.get("response")
                text = said["output"] if isinstance(said, dict) and isinstance(said.get("output"), str) else orjson.dumps(said).decode()
                messages.append({"role": "tool", "tool_call_id": id, "name": str(result["name"]), "content": text})
            else:
                say(messages, "user", _text(p), p is given[0])
    config = body.get("generationConfig") or {}
    declared = [d for t in body.get("tools") or [] for d in t.get("functionDeclarations") or t.get("function_declarations") or []]
    tools = [tool(d["name"], d.get("description"), d.get("parametersJsonSchema") or d.get("parameters")) for d in declared]
    params = numbers(config, NUMBERS) | stops(config.get("stopSequences"))
    model, _, action = path.rpartition("/")[2].partition(":")
    asked = Asked(messages, tools, params, action == "streamGenerateContent", model)
    mode = ((body.get("toolConfig") or {}).get("functionCallingConfig") or {}).get("mode")
    asked.tool_choice = "none" if mode == "NONE" else "auto"
    asked.kind = side_call(asked, config.get("responseSchema") or config.get("responseJsonSchema"))
    return asked


def _text(part: dict[str, Any]) -> str:
    return "[image omitted]" if "inlineData" in part or "fileData" in part else text_of(part)


def _answer(parts: list[dict[str, Any]]) -> list[dict[str, Any]]:
    out: list[dict[str, Any]] = []
    for p in parts:
        turn = minted(p.get("thoughtSignature"))
        if c := p.get("functionCall"):
            put(out, "tool_calls", call(c.get("id") or c["name"], c["name"], c.get("args")), minted(c.get("id")) or turn)
        else:
            put(out, "reasoning_content" if p.get("thought") else "content", text_of(p), turn)
    return out or [{"role": "assistant", "content": ""}]


def _parts(turn: Turn) -> list[dict[str, Any]]:
    (reasoning, texts, calls), mark = parts(turn), {"thoughtSignature": f"sig_{turn.id}"}
    out: list[dict[str, Any]] = [{"text": reasoning, "thought": True}] if reasoning else []
    out += [{"text": text} | mark for text in texts]
    return out + [{"functionCall": {"id": i, "name": n, "args": orjson.loads(a)}} | mark for i, n, a in calls]


def answer(turn: Turn, asked: Asked) -> dict[str, Any]:
    reason = "MAX_TOKENS" if turn.finish_reason == "length" else "STOP"
    n, m = turn.prompt_tokens, len(turn.output_ids)
    usage = {"promptTokenCount": n, "candidatesTokenCount": m, "totalTokenCount": n + m}
    candidate = {"index": 0, "content": {"role": "model", "parts": _parts(turn)}, "finishReason": reason}
    return {"responseId": turn.id, "modelVersion": asked.model, "candidates": [candidate], "usageMetadata": usage}


def opening(turn: Turn, asked: Asked) -> bytes:
    return b""


def events(turn: Turn, asked: Asked) -> Iterator[bytes]:
    yield sse(answer(turn, asked))


def error(status: int, said: str, code: str) -> dict[str, Any]:
    return {"error": {"code": status, "message": said, "status": STATUS.get(status, "INTERNAL" if status >= 500 else "INVALID_ARGUMENT")}}


def failure(status: int, said: str, code: str) -> bytes:
    return sse(error(status, said, code))
