"""python -m benchmarks.gateway_replay FILE...: recorded traffic of agent harnesses, replayed against the Gateway.

A recording is a JSON list of requests {"method", "path", "query", "headers", "body"} of one run, in order. The answer to a request is what a later
one echoes in its history; a scripted engine samples it, with the arguments of its calls written otherwise than the client writes them; the ids in
later requests become those that the Gateway gave. A table tells, for each recording, what is trained. Exit code 1 where anything failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
import sys
import tempfile
from pathlib import Path
from typing import Any

import aiohttp
from rich.console import Console
from rich.table import Table

from tests.agents_kit import ScriptedEngine, check, gateway, model_folder, said
from vime.agents.gateway import Trajectory
from vime.sample import Status

IDS = ("id", "call_id", "tool_use_id", "tool_call_id", "signature", "thoughtSignature", "encrypted_content")
Answer = tuple[str, str, list[tuple[str, Any]]]  # reasoning, text, calls


def history(body: dict[str, Any]) -> list[Any]:
    """The messages, with those of an assistant's answer joined into one list."""
    out: list[Any] = []
    for m in body.get("messages") or body.get("input") or body.get("contents") or []:
        if isinstance(m, str):
            m = {"role": "user", "content": m}
        mine = m.get("role") in ("assistant", "model") or m.get("type") in ("reasoning", "function_call", "custom_tool_call")
        if mine and "type" in m and out and isinstance(out[-1], list):
            out[-1].append(m)
        else:
            out.append([m] if mine else m)
    return out


def plain(value: Any) -> Any:
    """Without what moves from request to request, and contents as lists of blocks."""
    if isinstance(value, dict):
        return {
            k: plain([{"type": "text", "text": v}] if k == "content" and isinstance(v, str) else v) for k, v in value.items() if k != "cache_control"
        }
    return [plain(v) for v in value] if isinstance(value, list) else value


def said_by(parts: list[Any]) -> Answer:
    """Reasoning, text and calls of an echoed answer, of whatever provider."""
    thought, text, calls = list[str](), list[str](), list[tuple[str, Any]]()
    for p in parts:
        if p.get("type") == "reasoning":
            thought += [c["text"] for c in p.get("content") or p.get("summary") or []]
        elif p.get("type") in ("function_call", "custom_tool_call"):
            calls.append((p["name"], loaded(p.get("arguments", {"input": p.get("input")}))))
        else:
            thought += [p["reasoning_content"]] if p.get("reasoning_content") else []
            content = p.get("content", p.get("parts")) or []
            for b in [{"type": "text", "text": content}] if isinstance(content, str) else content:
                if b.get("type") == "thinking" or b.get("thought"):
                    thought.append(b.get("thinking") or b.get("text") or "")
                elif b.get("type") == "tool_use":
                    calls.append((b["name"], b["input"]))
                elif "functionCall" in b:
                    calls.append((b["functionCall"]["name"], b["functionCall"].get("args") or {}))
                elif b.get("text"):
                    text.append(b["text"])
            calls += [(c["function"]["name"], loaded(c["function"]["arguments"])) for c in p.get("tool_calls") or []]
    return "\n".join(thought), "\n".join(text), calls


def loaded(arguments: Any) -> Any:
    try:
        got = json.loads(arguments) if isinstance(arguments, str) else arguments
    except ValueError:  # shortened in the recording
        got = {"text": arguments}
    return got if isinstance(got, dict) else {"value": got}


def as_sampled(answer: Answer) -> str:
    """As a policy would have sampled it: keys in another order, and defaults that the client adds left out."""
    thought, text, calls = answer
    turned = [(n, {k: v for k, v in reversed(list(a.items())) if v is not False}) for n, a in calls]
    return said(text, turned, thought)


def ids_in(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [v for k, v in value.items() if k in IDS and isinstance(v, str)] + [i for v in value.values() for i in ids_in(v)]
    return [i for v in value for i in ids_in(v)] if isinstance(value, list) else []


def pair(posts: list[dict[str, Any]]) -> list[list[Any] | None]:
    """For each request the echoed parts of its answer; None where none is."""
    told = [plain(history(p["body"])) for p in posts]
    raw = [history(p["body"]) for p in posts]
    out: list[list[Any] | None] = []
    for k, mine in enumerate(told):
        later = (
            j for j in range(k + 1, len(posts)) if told[j][: len(mine)] == mine and len(told[j]) > len(mine) and isinstance(told[j][len(mine)], list)
        )
        j = next(later, None)
        out.append(raw[j][len(mine)] if j is not None else None)
    found = {i for parts in out if parts for i in ids_in(parts)}
    for j, items in enumerate(raw):  # answers that turn up in another history only: of the first request of the same tools that has none
        for parts in (x for x in items if isinstance(x, list)):
            ids = ids_in(parts)
            if ids and not found & set(ids):
                same = (k for k in range(j) if out[k] is None and posts[k]["body"].get("tools") == posts[j]["body"].get("tools"))
                if (k := next(same, None)) is not None:
                    out[k] = parts
                    found |= set(ids)
    return out


def schema(t: dict[str, Any], path: str) -> dict[str, Any]:
    """A recorded tool, which is shortened, in its provider's form."""
    if "params" not in t:
        return t
    kinds = {k: {"type": v} if v in ("string", "number", "integer", "boolean", "array", "object") else {} for k, v in t["params"].items()}
    parameters = {"type": "object", "properties": kinds, "required": t.get("required") or []}
    about = {"name": t["name"], "description": f"{t.get('desc_len', 0)} characters"}
    if path.endswith("/messages"):
        return about | {"input_schema": parameters}
    if path.endswith("/completions"):
        return {"type": "function", "function": about | {"parameters": parameters}}
    inner = [{"type": "function", "name": n} for n in t.get("tools") or []]
    return {"type": t["type"]} | about | ({"tools": inner} if inner else {"parameters": parameters})


def swapped(value: Any, ids: dict[str, str], marks: dict[str, str]) -> Any:
    """`value` with the Gateway's ids; a signature, which the recording has in common for all, is that of its message's calls."""
    if isinstance(value, list):
        owner = next((marks[i] for i in ids_in(value) if i in marks), None)
        new = [swapped(v, ids, marks) for v in value]
        for v in new:
            if isinstance(v, dict) and v.get("type") == "thinking" and owner:
                v["signature"] = owner
        return new
    if isinstance(value, dict):
        return {k: ids.get(v, v) if k in IDS and isinstance(v, str) else swapped(v, ids, marks) for k, v in value.items()}
    return value


def answered(path: str, text: Any) -> list[Any]:
    """The Gateway's answer, in the form that a client echoes it in."""
    if isinstance(text, str):
        events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
        if path.endswith("/responses"):
            return [e["item"] for e in events if e["type"] == "response.output_item.done"]
        if path.endswith("/messages"):
            blocks = [e["content_block"] for e in events if e["type"] == "content_block_start"]
            for e in events:
                if e["type"] == "content_block_delta" and e["delta"]["type"] == "signature_delta":
                    blocks[e["index"]]["signature"] = e["delta"]["signature"]
            return blocks
        if path.endswith("/completions"):
            return [c for e in events for x in e.get("choices", []) for c in x["delta"].get("tool_calls") or [] if "id" in c]
        return [p for e in events for p in e["candidates"][0]["content"]["parts"]]
    if path.endswith("/completions"):
        return list(text["choices"][0]["message"].get("tool_calls") or [])
    return list(text.get("content") or text.get("output") or text["candidates"][0]["content"]["parts"])


def learn(parts: list[Any], got: list[Any], ids: dict[str, str], marks: dict[str, str]) -> None:
    """Which of the Gateway's ids stand for the recording's: those of things of a kind, in order."""
    mark = next((b["signature"] for b in got if b.get("signature")), None)
    for kind in ("tool_use", "reasoning", "message", "function_call", "custom_tool_call", "call", "functionCall"):
        pick = [x for p in parts for x in _things(p, kind)], [x for p in got for x in _things(p, kind)]
        for old, new in zip(*pick):
            for key in ("id", "call_id"):
                if old.get(key) and new.get(key):
                    ids[old[key]] = new[key]
                    if mark:
                        marks[old[key]] = mark


def _things(p: dict[str, Any], kind: str) -> list[dict[str, Any]]:
    if p.get("type") == kind:
        return [p]
    inside = [b for b in p.get("content") or p.get("parts") or [] if isinstance(b, dict)] if not isinstance(p.get("content"), str) else []
    if kind == "call":
        return list(p.get("tool_calls") or []) + ([p] if p.get("type") == "function" else [])
    if kind == "functionCall":
        return [x["functionCall"] for x in [p, *inside] if "functionCall" in x]
    return [b for b in inside if b.get("type") == kind]


async def replay(recording: list[dict[str, Any]], folder: str, **limits: Any) -> dict[str, Any]:
    """Raises AssertionError where the Gateway refuses a request, or trains what was not sampled."""
    posts = [r for r in recording if r["method"] == "POST"]
    answers = pair(posts)
    called = sorted({n for parts in answers if parts for n, _ in said_by(parts)[2]})  # Gemini's tools, which recordings shorten in other ways
    nexts: list[str] = []
    engine = ScriptedEngine(folder, lambda body, n: nexts[-1])
    ids: dict[str, str] = {}
    marks: dict[str, str] = {}
    async with gateway(engine, folder, **limits) as g, aiohttp.ClientSession() as http:
        begun = await _control(http, g, "POST", "/sessions", {})
        token, k = begun["token"], 0
        for r in recording:
            body = swapped(r["body"], ids, marks)
            headers = {n: v for n, v in r["headers"].items() if n.lower().startswith(("x-c", "anthropic", "session", "thread"))}
            headers |= {
                n: re.sub("<token>", token, v) for n, v in r["headers"].items() if n.lower() in ("authorization", "x-api-key", "x-goog-api-key")
            }
            if isinstance(body, dict) and "contents" in body:
                body["tools"] = [{"functionDeclarations": [{"name": n} for n in called]}] if called else []
            elif isinstance(body, dict) and isinstance(body.get("tools"), list):
                body["tools"] = [schema(t, r["path"]) for t in body["tools"]]
            url = f"http://127.0.0.1:{g.port}{r['path']}" + (f"?{r['query']}" if r.get("query") else "")
            parts = answers[k] if r["method"] == "POST" else None
            nexts.append(as_sampled(said_by(parts)) if parts else f"Done, {k}.")
            async with http.request(r["method"], url, json=body, headers=headers) as answer:
                assert answer.status == 200, f"{r['method']} {r['path']}: {answer.status} {(await answer.text())[:300]}"
                kind = answer.headers["Content-Type"]
                text = await answer.json() if "json" in kind and r["method"] == "POST" else await answer.text()
            if r["method"] == "POST":
                k += 1
                if parts:
                    learn(parts, answered(r["path"], text), ids, marks)
        done = await _control(http, g, "POST", f"/sessions/{begun['id']}/finish", {})
    rows = [Trajectory(**(t | {"status": Status(t["status"])})) for t in done["trajectories"]]
    seen = check(engine, rows)
    metrics = done["metrics"]
    assert len(seen) == metrics["agent/trained_tokens"], "what the metrics say is trained is not"
    return {"requests": len(posts), "sampled": len(engine.sampled)} | metrics


async def _control(http: aiohttp.ClientSession, g: Any, method: str, path: str, body: Any) -> Any:
    url = f"http://127.0.0.1:{g.control_port}{path}"
    async with http.request(method, url, json=body, headers={"Authorization": f"Bearer {g.secret}"}) as r:
        assert r.status == 200, await r.text()
        return await r.json()


def main(files: list[str]) -> int:
    columns = ["requests", "turns", "rows", "sampled", "trained_tokens", "masked_tokens", "trainable_fraction", "fork_rate", "retries", "echo_edited"]
    columns += ["subagent_turns", "compaction_turns", "title_turns"]
    table, failed = Table("recording", *(c.removesuffix("_tokens").replace("_", " ") for c in columns)), 0
    with tempfile.TemporaryDirectory() as tmp:
        folder = model_folder(Path(tmp))
        for f in files:
            try:
                got = asyncio.run(replay(json.loads(Path(f).read_text()), folder))
                table.add_row(Path(f).stem, *(f"{got.get(c, got.get(f'agent/{c}')):g}" for c in columns))
            except AssertionError as e:
                failed += 1
                table.add_row(Path(f).stem, f"FAILED: {e}"[:100])
    Console(width=180).print(table)
    return int(failed > 0)


if __name__ == "__main__":
    p = argparse.ArgumentParser("python -m benchmarks.gateway_replay", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("files", nargs="+", metavar="FILE", help="a recording")
    sys.exit(main(p.parse_args().files))
