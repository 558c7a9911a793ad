"""What differs between two trees, as hunks without context, and their fingerprints."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from forksync.git import Git

DIFF = "git-histogram-u0-eol"  # how PATCH is called in the lock: fingerprints rest on it
OPTIONS = ["-r", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "--no-indent-heuristic", "--full-index", "--no-abbrev"]
PATCH = ["-p", "-U0", "--inter-hunk-context=0", "--text", "--histogram", "--ignore-space-at-eol", "--diff-filter=M", "--src-prefix=a/", "--dst-prefix=b/"]
EOL = " \t\r\n"  # what git counts as space at the end of a line
TEXT = ("rewrite", "add", "remove")
Lines = tuple[str, ...]
Bag = Counter[tuple[str, str]]


@dataclass(frozen=True)
class Hunk:
    """One difference. kind: one of TEXT; file-only-fork, file-dropped; mode; binary, where old and new are '<mode> <object id>'."""

    path: str
    kind: str
    old: Lines = ()  # the mirror's lines without trailing blanks
    new: Lines = ()  # the fork's
    old_at: int = 0  # line numbers, from 1; 0: the whole file
    new_at: int = 0

    @cached_property
    def fp(self) -> str:
        return fingerprint(self.path, self.kind, self.old, self.new)

    @property
    def id(self) -> str:
        return f"S-{self.fp[:8]}"

    @property
    def place(self) -> str:
        return f"{self.path}:{self.new_at}" if self.new_at else self.path


def fingerprint(path: str, kind: str, old: Sequence[str], new: Sequence[str]) -> str:
    """Without line numbers and context, so that upstream's edits elsewhere don't touch it; leading blanks count, since they matter in Python."""
    text = "\0".join([path, "text" if kind in TEXT else kind, str(len(old)), *old, *new])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def bag(pairs: Iterable[tuple[Lines, Lines]]) -> Bag:
    return Counter(line for old, new in pairs for line in [("-", x) for x in old] + [("+", x) for x in new])


def lines(text: str) -> list[str]:
    """A file's lines as hunks have them."""
    return [x.rstrip(EOL) for x in text.removesuffix("\n").split("\n")] if text else []


def between(git: Git, mirror: str, fork: str) -> list[Hunk]:
    """All hunks from the mirror's tree to the fork's, in order of path and line."""
    out: list[Hunk] = []
    raw = git.run("diff-tree", *OPTIONS, "--raw", "-z", mirror, fork)[1].split(b"\0")
    text: dict[str, Hunk] = {}  # path -> what it is if it is no text
    for meta, name in zip(raw[0::2], raw[1::2]):
        old_mode, new_mode, old, new, status = meta.decode().lstrip(":").split()
        path = os.fsdecode(name)
        whole = Hunk(path, "binary", (f"{old_mode} {old}",), (f"{new_mode} {new}",))
        if status in "AD":
            out.append(Hunk(path, "file-only-fork" if status == "A" else "file-dropped"))
        elif status == "T" or new_mode == "160000":
            out.append(whole)
        else:
            out += [Hunk(path, "mode", (old_mode,), (new_mode,))] * (old_mode != new_mode)
            text |= {path: whole} if old != new else {}
    found = _parsed(git.run("diff-tree", *OPTIONS, *PATCH, mirror, fork)[1]) if text else []
    binary = {h.path for h in found if any("\0" in x for x in (*h.old, *h.new))}
    out += [h for h in found if h.path not in binary] + [text[p] for p in binary]
    return sorted(out, key=lambda h: (h.path, h.old_at, h.new_at))


def _parsed(patch: bytes) -> list[Hunk]:
    """Hunks of a patch without context. Content can look like a header, so lines are counted."""
    out: list[Hunk] = []
    path, at, left, sides = "", [0, 0], [0, 0], ([], [])  # type: tuple[str, list[int], list[int], tuple[list[str], list[str]]]
    for line in patch.split(b"\n"):
        if any(left) and line[:1] in (b"-", b"+"):
            side = line[:1] == b"+"
            left[side] -= 1
            sides[side].append(line[1:].decode("utf-8", "surrogateescape").rstrip(EOL))
            if not any(left):
                kind = TEXT[0 if all(sides) else 1 if sides[1] else 2]
                out.append(Hunk(path, kind, tuple(sides[0]), tuple(sides[1]), *at))
        elif line.startswith(b"@@ "):
            spans = [[*map(int, x[1:].split(b",")), 1][:2] for x in line.split()[1:3]]
            at, left, sides = [s[0] for s in spans], [s[1] for s in spans], ([], [])
        elif line.startswith(b"diff --git "):  # both names are the same, since renames are off; odd ones are quoted
            name = line[11 : 11 + (len(line) - 12) // 2]
            path = os.fsdecode(name[1:-1].decode("unicode_escape").encode("latin-1") if name[:1] == b'"' else name)[2:]
    return out


def replays(mirror: Sequence[str], fork: Sequence[str], hunks: Sequence[tuple[Lines, Lines]]) -> bool:
    """Whether the fork's lines are exactly the mirror's with these hunks applied, each once and in this order, wherever they fit.

    A diff may align the same change differently once lines nearby change; a sign-off is about the change, so this asks the question
    without a diff. O(lines x hunks).
    """
    reach, shift = {0}, 0
    for old, new in hunks:
        found, seen = set[int](), set[int]()
        for i in sorted(reach):
            while i not in seen:
                seen.add(i)
                j = i + shift
                if tuple(mirror[i : i + len(old)]) == old and tuple(fork[j : j + len(new)]) == new:
                    found.add(i + len(old))
                if i < len(mirror) and 0 <= j < len(fork) and mirror[i] == fork[j]:
                    i += 1
        reach, shift = found, shift + len(new) - len(old)
    return any(list(mirror[i:]) == list(fork[i + shift :]) for i in reach)
