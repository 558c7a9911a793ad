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
WORDS = {0: "OK", 1: "NOT SIGNED", 3: "OPEN", 4: "BEHAVIOUR", 5: "NOT CONVERGED", 6: "SAFETY"}


def record(folder: Path, verb: str, code: int, heading: str, result: Result | None, items: list[Item], gates: list[Any], extra: Last) -> Last:
    """Keep a run's outcome for `forksync report`."""
    counts = {k: getattr(result, k) for k in ("files", "signed", "baseline", "own")} if result else {}
    last = {"verb": verb, "code": code, "pair": heading, "counts": counts, "findings": [vars(f) for f in result.findings] if result else []}
    last |= {"items": [vars(i) | {"blocks": i.blocks} for i in items], "gates": [vars(g) for g in gates], **extra}
    (folder / "last.json").write_text(json.dumps(last, indent=1, default=str), "utf-8")
    return last


def place(row: dict[str, Any]) -> str:
    return f"{row['path']}:{row['line']}" if row["line"] else str(row["path"])


def summary(last: Last, limit: int = 12) -> str:
    """What a person sees: the verdict, the counts, the first findings, what to do."""

    def colour(text: str, code: str) -> str:
        return f"\033[{code}m{text}\033[0m" if sys.stdout.isatty() else text

    def some(title: str, rows: list[str]) -> list[str]:
        more = [f"    ... and {len(rows) - limit} more: forksync report"] * (len(rows) > limit)
        return [f"  {title}", *(f"    {r.rstrip()}" for r in rows[:limit]), *more] if rows else []

    out = [f"{colour(WORDS[last['code']], '1;31' if last['code'] else '1;32')}  {last['pair']}"]
    if last["counts"]:
        out.append("  {files} mirrored files: {signed} signed differences, {baseline} baseline (unsigned, may only fall), {own} own".format(**last["counts"]))
    out += [f"  {x}" for x in last.get("notes", [])]
    kinds = Counter(f["kind"] for f in last["findings"])
    for kind in (k for k in MEANING if k in kinds):
        rows = [f"{place(f)}  {f['text']}  {f['id']}" for f in last["findings"] if f["kind"] == kind]
        out += some(f"{colour(kind, '31')} {len(rows)}: {MEANING[kind]}", rows)
    for title, blocks in (("to resolve", True), ("to look at", False)):
        rows = [f"{i['id']}  {place(i)}  {i['kind']}  {i['note']}" for i in last["items"] if i["open"] and i["blocks"] == blocks]
        out += some(f"{title}: {len(rows)}", rows)
    out += [f"  gate {g['name']} ({g['kind']}): {'passed' if g['ok'] else colour('failed', '31')}, {g['said']}, {g['seconds']} s" for g in last["gates"]]
    return "\n".join(out + [f"  next: {x}" for x in [last.get("next")] if x])


def markdown(last: Last) -> str:
    def table(title: str, head: str, rows: list[tuple[Any, ...]]) -> list[str]:
        cells = [" | ".join(str(x).replace("|", "\\|").replace("\n", " ").replace("<", "&lt;") for x in r) for r in rows]
        return ["", f"## {title}", "", f"| {head} |", "|---" * (head.count("|") + 1) + "|", *(f"| {c} |" for c in cells)] if rows else []

    out = [f"# forksync {last['verb']}: exit {last['code']}", "", last["pair"], "", ", ".join(f"{k} {v}" for k, v in last["counts"].items())]
    out += table("Findings", "kind | where | what | id", [(f["kind"], place(f), f["text"], f["id"]) for f in last["findings"]])
    rows = [(i["id"], i["path"], i["kind"], i["open"], i["note"], ", ".join(c["commit"][:10] for c in i["commits"])) for i in last["items"]]
    out += table("Work items", "id | path | kind | open | note | upstream commits", rows)
    out += table("Gates", "gate | kind | passed | said", [(g["name"], g["kind"], g["ok"], g["said"]) for g in last["gates"]])
    return "\n".join([*out, *(f"- changed, but no gate ran it: {p}" for p in last.get("unexecuted", []))])


def sarif(last: Last) -> str:
    rows = [(f["kind"], "error", f, f["text"]) for f in last["findings"]]
    rows += [(f"item-{i['kind']}", "warning", i, i["note"] or i["kind"]) for i in last["items"] if i["open"]]
    where = [{"artifactLocation": {"uri": r["path"]}, "region": {"startLine": max(1, r["line"])}} for _, _, r, _ in rows]
    results = [{"ruleId": k, "level": v, "message": {"text": t}, "locations": [{"physicalLocation": w}]} for (k, v, _, t), w in zip(rows, where)]
    rules = [{"id": k, "shortDescription": {"text": MEANING.get(k, k)}} for k in dict.fromkeys(r[0] for r in rows)]
    runs = [{"tool": {"driver": {"name": "forksync", "rules": rules}}, "results": results}]
    return json.dumps({"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": runs}, indent=1)


def junit(last: Last) -> str:
    cases = [(f"gate 1: {k}", "; ".join(f"{place(f)}: {f['text']}" for f in last["findings"] if f["kind"] == k)) for k in MEANING]
    cases += [(f"item {i['id']} {i['path']}", f"{i['kind']}: {i['note']}") for i in last["items"] if i["blocks"]]
    cases += [(f"gate 2: {g['name']}", "" if g["ok"] else g["said"]) for g in last["gates"]]
    rows = [f'<testcase classname="forksync" name={quoteattr(n)}>' + f"<failure message={quoteattr(x)}/>" * bool(x) + "</testcase>" for n, x in cases]
    text = f'<testsuite name="forksync" tests="{len(cases)}" failures="{sum(bool(x) for _, x in cases)}">{"".join(rows)}</testsuite>\n'
    return "".join(c for c in text if c >= " " or c in "\t\n")


FORMATS = {"md": markdown, "json": lambda last: json.dumps(last, indent=1), "sarif": sarif, "junit": junit}
