"""Gate 1: what differs between mirror and fork is exactly what people signed. Everything else is a finding."""

from __future__ import annotations

import datetime
import difflib
import hashlib
import re
from collections import Counter, defaultdict
from dataclasses import dataclass, field

from forksync.base import FOLDER, Base, Entry, Ledgered, restored
from forksync.git import SAFETY, UNSIGNED, ForksyncError, Git, Tree
from forksync.hunks import Hunk, Lines, bag, between, lines, replays
from forksync.table import matches

MEANING = {  # kind of finding -> what it says; those of RED make the gate fail
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

    @property
    def place(self) -> str:
        return f"{self.path}:{self.line}" if self.line else self.path


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
        kinds = {f.kind for f in self.findings}
        return SAFETY if "lost" in kinds else UNSIGNED if kinds else 0

    def count(self, *kinds: str) -> int:
        return sum(f.kind in kinds for f in self.findings)


def content_id(text: list[str]) -> str:
    return hashlib.sha256("\n".join(text).encode("utf-8", "surrogateescape")).hexdigest()[:16]


class Sides:
    """Both trees, and lines of their files."""

    def __init__(self, git: Git, mirror: str, fork: str):
        self.git, self.mirror_tree, self.fork_tree = git, mirror, fork
        self.mirror, self.fork = git.tree(mirror), git.tree(fork)

    def lines(self, tree: Tree, path: str) -> list[str]:
        return lines(self.git.read(tree[path][1]) or b"") if path in tree else []

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
        if h.path.startswith(f"{FOLDER}/"):
            continue
        policy = base.config.policy_of(h.path)
        if policy.mode == "own" or (policy.mode == "drop" and h.kind == "file-dropped"):
            result.own += policy.mode == "own"
            continue
        by_path[h.path].append(h)
        result.hunks.append(h)
    for p in base.config.policy:
        if p.expires and p.expires < today:
            result.findings.append(Finding("expired", f"{FOLDER}/config.toml", f"policy {p.mode} of {p.glob} ended on {p.expires}"))
    for path in sorted(by_path.keys() | base.ledger.keys()):
        if base.config.policy_of(path).mode != "own":
            _path(base, sides, path, by_path.get(path, []), today, result)
    if lint and base.config.lint.forbidden:
        result.lints = lints(base, git, sides.fork)
        for pattern, n in result.lints.items():
            if n > base.lock.lints.get(pattern, 0):
                where = next(iter(lint_places(base, git, sides.fork, pattern)), ("", 0))
                result.findings.append(Finding("lint", where[0], f"{pattern!r}: {n} places, {base.lock.lints.get(pattern, 0)} allowed", where[1]))
    if result.baseline > base.lock.baseline:
        result.findings.append(Finding("base", FOLDER, f"{result.baseline} baseline entries, lock.toml allows {base.lock.baseline}: the baseline may only fall"))
    return result


def _path(base: Base, sides: Sides, path: str, hunks: list[Hunk], today: datetime.date, result: Result) -> None:
    entries = base.active(path)
    found = Counter(h.fp for h in hunks)
    left = {e.fp: e.count - found[e.fp] for e in entries}  # > 0: entries without a hunk, < 0: more hunks than entries
    extra = []
    for h in hunks:
        if left.get(h.fp, -1) < 0:
            extra.append(h)
            left[h.fp] = left.get(h.fp, 0) + (h.fp in left)
    answered = {e.replaces for e in entries if e.status == "proposed" and e.replaces}
    missing = [e for e in entries if left[e.fp] > 0 and e.id not in answered]
    text = [e for e in entries if not e.kind.startswith("file-") and e.kind not in ("mode", "binary")]
    if missing and all(e in text for e in missing) and path in sides.mirror and path in sides.fork:
        order = [(restored(e.old), restored(e.new)) for e in text for _ in range(e.count)]
        if all(h.kind in ("rewrite", "add", "remove") for h in extra) and replays(sides.lines(sides.mirror, path), sides.lines(sides.fork, path), order):
            missing, extra = [], []
    whole = not missing and not extra
    gone = {e.fp for e in missing}
    for e in entries:
        result.signed += e.status == "signed"
        if e.fp not in gone:
            result.baseline += e.count if e.baseline else 0
            if e.status == "signed":
                result.held.add((path, e.fp))
            elif not e.baseline:
                result.findings.append(Finding("proposed", path, e.reason, _line(hunks, e), e.id, e.fp))
            _conditions(base, sides, path, e, _line(hunks, e), today, result)
    if whole and entries:
        file = base.ledger[path]
        mirror, fork = sides.ids(path) if file.fork else ("", "")
        if file.fork and mirror == file.mirror and fork != file.fork:
            result.findings.append(Finding("moved", path, "mirror unchanged, same hunks, but another file"))
    if missing and extra and all(e in text for e in missing):
        lost_bag: Counter[tuple[str, str]] = sum((bag(restored(e.old), restored(e.new)) for e in missing for _ in range(left[e.fp])), Counter())
        if lost_bag == sum((bag(h.old, h.new) for h in extra), Counter()):
            result.findings += [Finding("regrouped", path, "same lines as signed", h.new_at, missing[0].id, h.fp) for h in extra]
            return
    for e in missing:
        kind, h = fate(e, extra, sides, path, base.ledger[path].mirror)
        if h:
            extra.remove(h)
        if e.baseline:
            result.fell += not h
            result.baseline += e.count if h else 0
            if h and kind == "edited":
                result.findings.append(Finding("new", path, "a baseline difference was edited", h.new_at, e.id, h.fp))
            elif h:
                result.findings.append(Finding("stale", path, f"was: {first_line(e.new or e.old)}", h.new_at, e.id, h.fp))
        else:
            text_ = f"{e.klass or e.kind}: {e.reason}; {first_line(e.new or e.old)}"
            result.findings.append(Finding(kind, path, text_, h.new_at if h else 0, e.id, h.fp if h else e.fp))
    result.findings += [Finding("new", path, summary(h), h.new_at, f"S-{h.fp[:8]}", h.fp) for h in extra]


def fate(e: Entry, extra: list[Hunk], sides: Sides, path: str, mirror_then: str) -> tuple[str, Hunk | None]:
    """What became of an entry that the diff no longer has, and the hunk that stands in its place."""
    old, new = restored(e.old), restored(e.new)
    if e.kind == "file-dropped":
        return ("converged", None) if path not in sides.mirror else ("lost", next(iter(extra), None))
    if e.kind == "file-only-fork":
        return ("lost", None) if path not in sides.fork else ("converged", None)
    if e.kind in ("mode", "binary"):
        near = next((h for h in extra if h.kind == e.kind), None)
        if near:
            return ("stale" if near.new == new else "edited"), near
        return ("converged" if path in sides.fork and _side(sides.fork[path], e.kind) == new else "lost"), None
    best, score = None, 0.0
    mine = bag(old, new)
    for h in extra:
        shared = max((mine & bag(h.old, h.new)).total() / max(1, mine.total()), min(alike(old, h.old), alike(new, h.new)) - 0.1)
        if shared > score:
            best, score = h, shared
    if best and new and contains(best.new, new) and score > 0:
        return "stale", best
    if best and score >= 0.5:
        return "edited", best
    fork, mirror = sides.lines(sides.fork, path), sides.lines(sides.mirror, path)
    if content_id(mirror) == mirror_then:
        return "lost", None  # upstream did nothing here, so it was the fork
    if path in sides.fork and contains(fork, new) and contains(mirror, new) and not (not new and contains(fork, old)):
        return "converged", None
    return ("superseded" if old and mirror and not contains(mirror, old) else "lost"), None


def alike(a: Lines, b: Lines) -> float:
    """Share of words in common, in order: 0 .. 1."""
    return difflib.SequenceMatcher(None, re.findall(r"\w+|\S", " ".join(a)), re.findall(r"\w+|\S", " ".join(b)), autojunk=True).ratio()


def _side(entry: tuple[str, str], kind: str) -> tuple[str, ...]:
    return (entry[0],) if kind == "mode" else (f"{entry[0]} {entry[1]}",)


def contains(whole: tuple[str, ...] | list[str], part: tuple[str, ...]) -> bool:
    """Whether the lines of part stand in whole, one after the other."""
    n = len(part)
    return n == 0 or any(whole[i] == part[0] and tuple(whole[i : i + n]) == part for i in range(len(whole) - n + 1))


def _line(hunks: list[Hunk], e: Entry) -> int:
    return next((h.new_at for h in hunks if h.fp == e.fp), 0)


def _conditions(base: Base, sides: Sides, path: str, e: Entry, line: int, today: datetime.date, result: Result) -> None:
    """What a sign-off was made to depend on."""
    if e.expires and e.expires < today:
        result.findings.append(Finding("expired", path, f"{e.reason}: ended on {e.expires}", line, e.id, e.fp))
    for watch in e.watch:
        target, _, seen = watch.partition("@")
        if watched_id(sides, target) != seen:
            result.findings.append(Finding("watched", path, f"{target} is not what it was when {e.id} was signed ({e.reason})", line, e.id, e.fp))
    if e.pin:
        file, _, name = e.pin.partition("::")
        if file not in sides.fork or (name and name.split("::")[-1] not in "\n".join(sides.lines(sides.fork, file))):
            result.findings.append(Finding("pin", path, f"{e.pin} guards {e.id}, and is not there", line, e.id, e.fp))


def watched_id(sides: Sides, target: str) -> str:
    """Hash of a file of the mirror, or of one function, class or assignment in it (path::name); "" where it is not there."""
    path, _, name = target.partition("::")
    text = sides.lines(sides.mirror, path)
    if name:
        head = re.compile(rf"^([ \t]*)(?:(?:async |pub |export |static )*(?:def|class|fn|func|function)\s+{re.escape(name)}\b|{re.escape(name)}\s*[:=])")
        start = next((i for i, x in enumerate(text) if head.match(x)), None)
        if start is None:
            return ""
        depth = len(text[start]) - len(text[start].lstrip())
        ends = (i for i in range(start + 1, len(text)) if text[i].strip() and len(text[i]) - len(text[i].lstrip()) <= depth and text[i].strip()[0] not in ")]}")
        text = text[start : next(ends, len(text))]
    return content_id(text)[:12] if text else ""


def lint_places(base: Base, git: Git, tree: Tree, pattern: str) -> list[tuple[str, int]]:
    try:
        wanted = re.compile(pattern)
    except re.error as e:
        raise ForksyncError(f"config.toml: lint.forbidden: {e} in {pattern!r}", "a Python regular expression is wanted") from e
    out = []
    for path, (mode, oid) in tree.items():
        if mode != "160000" and not path.startswith(f"{FOLDER}/") and base.config.policy_of(path).mode != "own":
            data = git.read(oid) or b""
            if b"\0" not in data:
                text = data.decode("utf-8", "surrogateescape")
                out += [(path, text.count("\n", 0, m.start()) + 1) for m in wanted.finditer(text)]
    return out


def lints(base: Base, git: Git, tree: Tree) -> dict[str, int]:
    return {p: len(lint_places(base, git, tree, p)) for p in base.config.lint.forbidden}


def first_line(text: tuple[str, ...] | list[str]) -> str:
    line = next((x.strip() for x in text if x.strip()), "(blank lines)" if text else "")
    return line if len(line) <= 60 else line[:57] + "..."


def summary(h: Hunk) -> str:
    if h.kind.startswith("file-"):
        return "a file that only the fork has" if h.kind == "file-only-fork" else "the fork lacks this file"
    if h.kind in ("mode", "binary"):
        return f"{h.kind}: {h.old[0]} -> {h.new[0]}"
    return f"+{len(h.new)} -{len(h.old)}: {first_line(h.new or h.old)}"


def refreshed(base: Base, sides: Sides, path: str, order: list[Hunk]) -> None:
    """Put a path's entries into the file's order, and note what both sides are now: they are right as they stand."""
    file = base.ledger.setdefault(path, Ledgered())
    rank = {h.fp: i for i, h in reversed(list(enumerate(order)))}
    file.d.sort(key=lambda e: (e.status == "retired", rank.get(e.fp, len(order))))
    file.mirror, file.fork = sides.ids(path) if path in sides.mirror and path in sides.fork else ("", "")


def globbed(paths: set[str], wanted: list[str]) -> list[str]:
    return sorted(p for p in paths if any(p == w or matches(p, w) or p.startswith(w.rstrip("/") + "/") for w in wanted))
