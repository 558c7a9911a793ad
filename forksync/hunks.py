"""What differs between two trees, as hunks without context, and their fingerprints."""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from forksync.git import Git

OPTIONS = ["-r", "--no-renames", "--no-ext-diff", "--no-textconv", "--no-color", "--no-indent-heuristic", "--full-index", "--no-abbrev"]
PATCH = ["-p", "-U0", "--inter-hunk-context=0", "--text", "--histogram", "--ignore-space-at-eol", "--diff-filter=M", "--src-prefix=a/", "--dst-prefix=b/"]
EOL = " \t\r\n"  # what git counts as space at the end of a line
Lines = tuple[str, ...]


@dataclass(frozen=True)
class Hunk:
    """One difference. kind: rewrite, add, remove (text); file-only-fork, file-dropped; mode; binary, where old and new are '<mode> <object id>'."""

    path: str
    kind: str
    old: Lines  # the mirror's lines without trailing blanks
    new: Lines  # the fork's
    old_at: int = 0  # line numbers, from 1; 0: the whole file
    new_at: int = 0

    @cached_property
    def fp(self) -> str:
        return fingerprint(self.path, self.kind, self.old, self.new)

    @property
    def place(self) -> str:
        return f"{self.path}:{self.new_at}" if self.new_at else self.path


def fingerprint(path: str, kind: str, old: Sequence[str], new: Sequence[str]) -> str:
    """Without line numbers and context, so that upstream's edits elsewhere don't touch it; leading blanks count, since they matter in Python."""
    whole = kind if kind.startswith("file-") or kind in ("mode", "binary") else "text"
    text = "\0".join([path, whole, str(len(old)), *old, *new])
    return hashlib.sha256(text.encode("utf-8", "surrogateescape")).hexdigest()[:32]


def bag(old: Sequence[str], new: Sequence[str]) -> Counter[tuple[str, str]]:
    return Counter([("-", x) for x in old] + [("+", x) for x in new])


def lines(data: bytes) -> list[str]:
    """A file's lines as hunks have them."""
    parts = data.decode("utf-8", "surrogateescape").split("\n")
    return [p.rstrip(EOL) for p in (parts[:-1] if parts[-1] == "" else parts)]


def between(git: Git, mirror: str, fork: str, paths: Sequence[str] = ()) -> list[Hunk]:
    """All hunks from the mirror's tree to the fork's, in order of path and line."""
    out: list[Hunk] = []
    raw = git.run("diff-tree", *OPTIONS, "--raw", "-z", mirror, fork, "--", *paths)[1].split(b"\0")
    text: dict[str, tuple[str, str]] = {}
    for meta, name in zip(raw[0::2], raw[1::2]):
        old_mode, new_mode, old, new, status = meta.decode().lstrip(":").split()
        path = os.fsdecode(name)
        if status in "AD":
            out.append(Hunk(path, "file-only-fork" if status == "A" else "file-dropped", (), ()))
        elif status == "T" or new_mode == "160000":
            out.append(Hunk(path, "binary", (f"{old_mode} {old}",), (f"{new_mode} {new}",)))
        else:
            if old_mode != new_mode:
                out.append(Hunk(path, "mode", (old_mode,), (new_mode,)))
            if old != new:
                text[path] = (f"{old_mode} {old}", f"{new_mode} {new}")
    if text:
        out += _parsed(git.run("diff-tree", *OPTIONS, *PATCH, mirror, fork, "--", *paths)[1], text)
    return sorted(out, key=lambda h: (h.path, h.old_at, h.new_at))


def _parsed(patch: bytes, ids: dict[str, tuple[str, str]]) -> list[Hunk]:
    out: list[Hunk] = []
    binary: set[str] = set()
    path, head, old, new = "", b"", [], []  # type: ignore[var-annotated]

    def close() -> None:
        if head and (old or new) and not any("\0" in x for x in (*old, *new)):
            kind = "rewrite" if old and new else "remove" if old else "add"
            a, b = (int(x[1:].split(b",")[0]) for x in head.split()[1:3])
            out.append(Hunk(path, kind, tuple(old), tuple(new), a, b))
        elif head and (old or new):
            binary.add(path)

    in_hunk = [0, 0]  # lines still to come on either side: content can look like a header
    for line in patch.split(b"\n"):
        if in_hunk != [0, 0] and line[:1] in (b"-", b"+"):
            side = line[:1] == b"+"
            in_hunk[side] -= 1
            (new if side else old).append(line[1:].decode("utf-8", "surrogateescape").rstrip(EOL))
        elif line.startswith(b"@@ "):
            close()
            head, old, new = line, [], []
            in_hunk = [int(x.split(b",")[1]) if b"," in x else 1 for x in line.split()[1:3]]
        elif line.startswith(b"diff --git "):
            close()
            head, old, new = b"", [], []
            rest = line[len(b"diff --git ") :]
            path = _unquoted(rest)
    close()
    return [h for h in out if h.path not in binary] + [Hunk(p, "binary", (ids[p][0],), (ids[p][1],)) for p in sorted(binary)]


def _unquoted(rest: bytes) -> str:
    """Path of a `diff --git a/P b/P` line; both are the same, since renames are off."""
    if rest.startswith(b'"'):
        first = rest[1 : (len(rest) - 1) // 2 - 1]
        return os.fsdecode(first.decode("unicode_escape").encode("latin-1"))[2:]  # octal escapes of bytes
    return os.fsdecode(rest[2 : (len(rest) - 1) // 2])


def replays(mirror: Sequence[str], fork: Sequence[str], hunks: Sequence[tuple[Lines, Lines]]) -> bool:
    """Whether the fork's lines are exactly the mirror's with these hunks applied, each once and in this order, wherever they fit.

    A diff may align the same change differently once lines nearby change; a sign-off is about the change, so this asks the question
    without a diff. O(lines x hunks).
    """
    reach, shift = {0}, 0
    for old, new in hunks:
        found: set[int] = set()
        seen: set[int] = set()
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
