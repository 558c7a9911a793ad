"""Gate 1: what differs between mirror and fork is exactly what people signed. Everything else is a finding."""

from __future__ import annotations

import datetime
import difflib
import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from forksync.base import FOLDER, Base, Entry, Ledgered
from forksync.git import SAFETY, UNSIGNED, Git, Tree
from forksync.hunks import TEXT, Hunk, Lines, bag, between, lines, replays

MEANING = {  # kind of finding -> what it says
    "lost": "a signed edit is gone from the fork",
    "new": "differs from the mirror, and nobody signed it",
    "edited": "a signed edit was changed after it was signed",
    "superseded": "upstream changed the lines of a signed edit, and the fork took upstream's: retire the entry, or bring it back",
    "stale": "upstream changed the lines below a signed edit",
    "regrouped": "the same lines as signed, but in another order or grouping",
    "moved": "signed edits in a file that otherwise changed: moved or reordered lines",
    "proposed": "a fixer proposes to sign this; a person must decide",
    "converged": "upstream now has the signed edit itself: retire the entry",
    "expired": "the date given for it has passed",
    "watched": "upstream changed what this sign-off depends on",
    "pin": "the test that guards it does not exist",
    "lint": "forbidden name",
    "base": "the folder .forksync is not in order",
}


@dataclass
class Finding:
    kind: str
    path: str
    text: str
    line: int = 0
    id: str = ""
    fp: str = ""


@dataclass
class Result:
    findings: list[Finding] = field(default_factory=list)
    hunks: list[Hunk] = field(default_factory=list)
    held: set[tuple[str, str]] = field(default_factory=set)  # (path, fingerprint) of signed entries that are there
    signed: int = 0
    baseline: int = 0  # unsigned baseline entries still there
    fell: int = 0  # baseline entries that are gone
    files: int = 0
    own: int = 0  # files with own policy that differ
    lints: dict[str, int] = field(default_factory=dict)

    @property
    def code(self) -> int:
        return SAFETY if self.count("lost") else UNSIGNED if self.findings else 0

    def count(self, *kinds: str) -> int:
        return sum(f.kind in kinds for f in self.findings)

    def add(self, kind: str, path: str, text: str, line: int = 0, e: Entry | None = None, h: Hunk | None = None) -> None:
        self.findings.append(Finding(kind, path, text, h.new_at if h else line, e.id if e else h.id if h else "", h.fp if h else e.fp if e else ""))


def content_id(text: Sequence[str]) -> str:
    return hashlib.sha256("\n".join([*text, ""]).encode("utf-8", "surrogateescape")).hexdigest()[:16]


class Sides:
    """Both trees, and lines of their files."""

    def __init__(self, git: Git, mirror: str, fork: str):
        self.git, self.mirror, self.fork = git, git.tree(mirror), git.tree(fork)

    def lines(self, tree: Tree, path: str) -> list[str]:
        return lines(self.git.text(tree.get(path)) or "")

    def ids(self, path: str) -> tuple[str, str]:
        return content_id(self.lines(self.mirror, path)), content_id(self.lines(self.fork, path))


def check(base: Base, git: Git, mirror: str, fork: str, today: datetime.date | None = None, lint: bool = True) -> Result:
    """Compare the fork's tree with the mirror's and the ledger."""
    today = today or datetime.date.today()
    sides, result = Sides(git, mirror, fork), Result()
    result.files = len(sides.mirror)
    result.findings += [Finding("base", FOLDER, text) for text in base.faults()]
    by_path: dict[str, list[Hunk]] = defaultdict(list)
    for h in between(git, mirror, fork):
        mode = base.config.mode(h.path)
        result.own += mode == "own"
        if not h.path.startswith(f"{FOLDER}/") and mode != "own" and (mode, h.kind) != ("drop", "file-dropped"):
            by_path[h.path].append(h)
            result.hunks.append(h)
    for p in base.config.policy:
        if p.expires and p.expires < today:
            result.add("expired", f"{FOLDER}/config.toml", f"policy {p.mode} of {p.glob} ended on {p.expires}")
    for path in sorted(by_path.keys() | base.ledger.keys()):
        if base.config.mode(path) != "own":
            _path(base, sides, path, by_path.get(path, []), today, result)
    for wanted in base.config.lint.forbidden if lint else []:
        places, allowed = lint_places(base, git, sides.fork, wanted), base.lock.lints.get(wanted.pattern, 0)
        result.lints[wanted.pattern] = len(places)
        if len(places) > allowed:
            result.add("lint", places[0][0], f"{wanted.pattern!r}: {len(places)} places, {allowed} allowed", places[0][1])
    if result.baseline > base.lock.baseline:
        result.add("base", FOLDER, f"{result.baseline} baseline entries, lock.toml allows {base.lock.baseline}: the baseline may only fall")
    return result


def _path(base: Base, sides: Sides, path: str, hunks: list[Hunk], today: datetime.date, result: Result) -> None:
    entries, file = base.active(path), base.ledger.get(path, Ledgered())
    answered = {e.replaces for e in entries if e.status == "proposed" and e.replaces}
    found, spare = Counter(h.fp for h in hunks), Counter({e.fp: e.count for e in entries})
    missing = [e for e in entries if e.count > found[e.fp] and e.id not in answered]
    extra = []
    for h in hunks:
        spare[h.fp] -= 1
        extra += [h] * (spare[h.fp] < 0)
    if missing and {*(e.kind for e in missing), *(h.kind for h in extra)} <= set(TEXT) and path in sides.mirror and path in sides.fork:
        order = [e.sides for e in entries if e.kind in TEXT for _ in range(e.count)]
        if replays(sides.lines(sides.mirror, path), sides.lines(sides.fork, path), order):
            missing, extra = [], []
    for e in entries:
        result.signed += e.status == "signed"
        if e not in missing:
            line = next((h.new_at for h in hunks if h.fp == e.fp), 0)
            result.baseline += e.count if e.baseline else 0
            if e.status == "signed":
                result.held.add((path, e.fp))
            elif not e.baseline:
                result.add("proposed", path, e.reason, line, e)
            _conditions(sides, path, e, line, today, result)
    if entries and file.fork and not missing and not extra:
        mirror, fork = sides.ids(path)
        if mirror == file.mirror and fork != file.fork:
            result.add("moved", path, "mirror unchanged, same hunks, but another file")
    if missing and extra and bag(e.sides for e in missing for _ in range(e.count - found[e.fp])) == bag((h.old, h.new) for h in extra):
        for h in extra:
            result.add("regrouped", path, "same lines as signed", e=missing[0], h=h)
        return
    for e in missing:
        kind, near = fate(e, extra, sides, path, file.mirror)
        if near:
            extra.remove(near)
        if not e.baseline:
            result.add(kind, path, f"{e.klass or e.kind}: {e.reason}; {first_line(e.new or e.old)}", e=e, h=near)
        elif near:
            result.baseline += e.count
            what = "a baseline difference was edited" if kind == "edited" else f"was: {first_line(e.new or e.old)}"
            result.add("new" if kind == "edited" else "stale", path, what, e=e, h=near)
        else:
            result.fell += 1
    for h in extra:
        result.add("new", path, summary(h), h=h)


def fate(e: Entry, extra: list[Hunk], sides: Sides, path: str, mirror_then: str) -> tuple[str, Hunk | None]:
    """What became of an entry that the diff no longer has, and the hunk that stands in its place."""
    old, new = e.sides
    if e.kind == "file-dropped":
        return ("lost" if path in sides.mirror else "converged"), None
    if e.kind == "file-only-fork":
        return ("converged" if path in sides.fork else "lost"), None
    if e.kind in ("mode", "binary"):
        near = next((h for h in extra if h.kind == e.kind), None)
        now = sides.fork.get(path, ("", ""))
        gone = "converged" if new in ((now[0],), (" ".join(now),)) else "lost"
        return (gone if near is None else "stale" if near.new == new else "edited"), near
    best, score, mine = None, 0.0, bag([(old, new)])
    for h in extra:
        shared = max((mine & bag([(h.old, h.new)])).total() / max(1, mine.total()), min(alike(old, h.old), alike(new, h.new)) - 0.1)
        best, score = (h, shared) if shared > score else (best, score)
    if best and (score >= 0.5 or (new and contains(best.new, new))):
        return ("stale" if new and contains(best.new, new) else "edited"), best
    fork, mirror = sides.lines(sides.fork, path), sides.lines(sides.mirror, path)
    if content_id(mirror) == mirror_then:
        return "lost", None  # upstream did nothing here, so it was the fork
    if path in sides.fork and contains(fork, new) and contains(mirror, new) and (new or not contains(fork, old)):
        return "converged", None
    return ("superseded" if old and mirror and not contains(mirror, old) else "lost"), None


def alike(a: Lines, b: Lines) -> float:
    """Share of words in common, in order: 0 .. 1."""
    x, y = (re.findall(r"\w+|\S", " ".join(side)) for side in (a, b))
    return difflib.SequenceMatcher(None, x, y).ratio()


def contains(whole: Sequence[str], part: Lines) -> bool:
    """Whether the lines of part stand in whole, one after the other."""
    return not part or any(x == part[0] and tuple(whole[i : i + len(part)]) == part for i, x in enumerate(whole))


def _conditions(sides: Sides, path: str, e: Entry, line: int, today: datetime.date, result: Result) -> None:
    """What a sign-off was made to depend on."""
    if e.expires and e.expires < today:
        result.add("expired", path, f"{e.reason}: ended on {e.expires}", line, e)
    for target, _, seen in (w.partition("@") for w in e.watch):
        if watched_id(sides, target) != seen:
            result.add("watched", path, f"{target} is not what it was when {e.id} was signed ({e.reason})", line, e)
    file, _, name = e.pin.partition("::")
    if file and name.split("::")[-1] not in (sides.git.text(sides.fork.get(file)) or ""):
        result.add("pin", path, f"{e.pin} guards {e.id}, and is not there", line, e)


def watched_id(sides: Sides, target: str) -> str:
    """Hash of a file of the mirror, or of one function, class or assignment in it (path::name); "" where it is not there."""
    path, _, name = target.partition("::")
    text = sides.lines(sides.mirror, path)
    if name:
        head = re.compile(rf"^[ \t]*(?:(?:async |pub |export |static )*(?:def|class|fn|func|function)\s+{re.escape(name)}\b|{re.escape(name)}\s*[:=])")
        start = next((i for i, x in enumerate(text) if head.match(x)), len(text))
        depth = len(text[start]) - len(text[start].lstrip()) if start < len(text) else 0
        ends = (i for i, x in enumerate(text) if i > start and x.strip() and len(x) - len(x.lstrip()) <= depth and x.strip()[0] not in ")]}")
        text = text[start : next(ends, len(text))]
    return content_id(text)[:12] if text else ""


def lint_places(base: Base, git: Git, tree: Tree, wanted: re.Pattern[str]) -> list[tuple[str, int]]:
    """Path and line of each match in the fork's text files."""
    texts = [(p, git.text(e) or "") for p, e in tree.items() if not p.startswith(f"{FOLDER}/") and base.config.mode(p) != "own"]
    return [(p, text.count("\n", 0, m.start()) + 1) for p, text in texts for m in wanted.finditer(text)]


def first_line(text: Sequence[str]) -> str:
    line = next((x.strip() for x in text if x.strip()), "(blank lines)" if text else "")
    return line if len(line) <= 60 else line[:57] + "..."


def summary(h: Hunk) -> str:
    if h.kind in TEXT:
        return f"+{len(h.new)} -{len(h.old)}: {first_line(h.new or h.old)}"
    named = {"file-only-fork": "a file that only the fork has", "file-dropped": "the fork lacks this file"}
    return named.get(h.kind) or f"{h.kind}: {h.old[0]} -> {h.new[0]}"


def refreshed(base: Base, sides: Sides, path: str, order: list[Hunk]) -> None:
    """Put a path's entries into the file's order, and note what both sides are now: they are right as they stand."""
    file = base.ledger[path]
    rank = {h.fp: i for i, h in reversed(list(enumerate(order)))}
    file.d.sort(key=lambda e: (e.status == "retired", rank.get(e.fp, len(order))))
    file.mirror, file.fork = sides.ids(path) if path in sides.mirror and path in sides.fork else ("", "")
