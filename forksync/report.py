"""The last run as Markdown, JSON, SARIF (code scanning) and JUnit (CI), and a summary for a terminal."""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path
from typing import Any
from xml.sax.saxutils import quoteattr

from forksync.gate import MEANING, Result
from forksync.sync import Item

Last = dict[str, Any]  # verb, code, pair, counts, findings, items, gates, unexecuted


def record(folder: Path, verb: str, code: int, heading: str, result: Result | None, items: list[Item], gates: list[Any], extra: dict[str, Any]) -> Last:
    """Keep a run's outcome for `forksync report`."""
    counts = {k: getattr(result, k) for k in ("files", "signed", "baseline", "fell", "own", "code")} if result else {}
    found = [vars(f) for f in result.findings] if result else []
    last = {"verb": verb, "code": code, "pair": heading, "counts": counts, "findings": found, "items": [vars(i) for i in items], "gates": [vars(g) for g in gates], **extra}
    (folder / "last.json").write_text(json.dumps(last, indent=1, default=str), "utf-8")
    return last


def colour(text: str, code: str) -> str:
    return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() else text


def summary(last: Last, limit: int = 12) -> str:
    """What a person sees: the verdict, the counts, the first findings, what to do."""
    counts, code = last["counts"], last["code"]
    word = colour("OK", "1;32") if not code else colour({1: "NOT SIGNED", 3: "OPEN", 4: "BEHAVIOUR", 5: "NOT CONVERGED", 6: "SAFETY"}.get(code, "FAILED"), "1;31")
    out = [f"{word}  {last['pair']}"]
    if counts:
        out.append(f"  {counts['files']} mirrored files: {counts['signed']} signed differences, {counts['baseline']} baseline (unsigned, may only fall), {counts['own']} own")
    out += [f"  {x}" for x in last.get("notes", [])]
    kinds = Counter(f["kind"] for f in last["findings"])
    for kind in (k for k in MEANING if k in kinds):
        out.append(f"  {colour(kind, '31')} {kinds[kind]}: {MEANING[kind]}")
        rows = [f for f in last["findings"] if f["kind"] == kind]
        out += [f"    {place(f)}  {f['text']}  {f['id']}".rstrip() for f in rows[:limit]]
        out += [f"    ... and {len(rows) - limit} more: forksync report --format md"] if len(rows) > limit else []
    rows = [i for i in last["items"] if i["open"]]
    for title, some in (("to resolve", [i for i in rows if Item(**i).blocks]), ("to look at", [i for i in rows if not Item(**i).blocks])):
        out += [f"  {title}: {len(some)}"] * bool(some) + [f"    {i['id']}  {i['path']}{':' + str(i['line']) if i['line'] else ''}  {i['kind']}  {i['note']}".rstrip() for i in some[:limit]]
        out += [f"    ... and {len(some) - limit} more"] if len(some) > limit else []
    out += [f"  gate {g['name']} ({g['kind']}): {'passed' if g['ok'] else colour('failed', '31')}, {g['said']}, {g['seconds']} s" for g in last["gates"]]
    return "\n".join([*out, *(f"  next: {x}" for x in [last.get("next", "")] if x)])


def place(f: dict[str, Any]) -> str:
    return f"{f['path']}:{f['line']}" if f["line"] else str(f["path"])


def markdown(last: Last) -> str:
    def cell(x: Any) -> str:
        return str(x).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;")

    out = [f"# forksync {last['verb']}: exit {last['code']}", "", last["pair"], "", ", ".join(f"{k} {v}" for k, v in last["counts"].items()), ""]
    tables = [
        ("Findings", ("kind", "where", "what", "id"), [(f["kind"], place(f), f["text"], f["id"]) for f in last["findings"]]),
        ("Work items", ("id", "path", "kind", "open", "note", "upstream commits"),
         [(i["id"], i["path"], i["kind"], i["open"], i["note"], ", ".join(c["commit"][:10] for c in i["commits"])) for i in last["items"]]),
        ("Gates", ("gate", "kind", "passed", "said"), [(g["name"], g["kind"], g["ok"], g["said"]) for g in last["gates"]]),
    ]  # fmt: skip
    for title, head, rows in tables:
        if rows:
            out += [f"## {title}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|", *(f"| {' | '.join(map(cell, r))} |" for r in rows), ""]
    return "\n".join([*out, *(f"- changed, but no gate ran it: {p}" for p in last.get("unexecuted", []))])


def sarif(last: Last) -> str:
    rows = [(f["kind"], f["path"], f["line"], f["text"]) for f in last["findings"]]
    rows += [(f"item-{i['kind']}", i["path"], i["line"], i["note"] or i["kind"]) for i in last["items"] if i["open"]]
    results = [
        {"ruleId": kind, "level": "error" if not kind.startswith("item") else "warning", "message": {"text": text},
         "locations": [{"physicalLocation": {"artifactLocation": {"uri": path}, "region": {"startLine": max(1, line)}}}]}
        for kind, path, line, text in rows
    ]  # fmt: skip
    rules = [{"id": k, "shortDescription": {"text": MEANING.get(k, k)}} for k in dict.fromkeys(r[0] for r in rows)]
    driver = {"name": "forksync", "informationUri": "https://github.com", "rules": rules}
    return json.dumps({"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [{"tool": {"driver": driver}, "results": results}]}, indent=1)


def junit(last: Last) -> str:
    cases = [(f"gate 1: {k}", [f"{place(f)}: {f['text']}" for f in last["findings"] if f["kind"] == k]) for k in MEANING]
    cases += [(f"item {i['id']} {i['path']}", [f"{i['kind']}: {i['note']}"]) for i in last["items"] if Item(**i).blocks]
    cases += [(f"gate 2: {g['name']}", [] if g["ok"] else [g["said"]]) for g in last["gates"]]
    rows = [f"<testcase classname=\"forksync\" name={quoteattr(n)}>" + "".join(f"<failure message={quoteattr(x)}/>" for x in bad[:1]) + "</testcase>" for n, bad in cases]
    text = f"<testsuite name=\"forksync\" tests=\"{len(cases)}\" failures=\"{sum(bool(b) for _, b in cases)}\">" + "".join(rows) + "</testsuite>\n"
    return "".join(c for c in text if c >= " " or c in "\t\n")


FORMATS = {"md": markdown, "json": lambda last: json.dumps(last, indent=1), "sarif": sarif, "junit": junit}
