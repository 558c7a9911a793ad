"""Knowledge base 3, the mechanical mirror: one synthetic commit per upstream commit, each the translated tree. It can be made again at any time."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field

from forksync.git import ENVIRONMENT, OPTIONS, USAGE, Entry, ForksyncError, Git, blob_id_missing, environment
from forksync.table import Table

REF = "refs/forksync/mirror"


@dataclass
class Chain:
    """Mirror commits of one table in the fork's repository."""

    fork: Git
    upstream: Git
    table: Table
    first_parent: bool = True
    commits: dict[str, str] = field(default_factory=dict)  # upstream commit -> mirror commit, oldest first
    missing: set[str] = field(default_factory=set)  # upstream paths whose content the clone lacks

    def known(self) -> None:
        """Read what earlier runs have made under this table."""
        self.commits = {}
        if self.fork.ref(REF):
            form = "%H %(trailers:key=Upstream-Commit,valueonly,separator=%x20) %(trailers:key=Table,valueonly,separator=%x20)"
            for line in reversed(self.fork.out("log", f"--format={form}", REF).splitlines()):
                made, source, *table = line.split()
                if table == [self.table.sha]:
                    self.commits[source] = made

    def path(self, start: str, end: str) -> list[str]:
        """Upstream's commits after `start` up to `end`, oldest first."""
        first = ["--first-parent"] if self.first_parent else []
        return self.upstream.out("rev-list", "--reverse", "--topo-order", *first, f"{start}..{end}").split()

    def build(self, start: str, end: str, ref: str = REF) -> str:
        """Mirror commit of `end`; the chain from `start` is made as far as it is not there. A new chain replaces one of another table."""
        if ref == REF and not self.commits:
            self.known()
        wanted = [start, *self.path(start, end)]
        if wanted[-1] != end:
            wanted.append(end)  # upstream was rewound or rewritten: its trees still follow each other
        have = [c for c in wanted if c in self.commits]
        if len(have) == len(wanted):
            return self.commits[end]
        done = len(have) if wanted[: len(have)] == have else 0
        if done and ref == REF and self.commits[wanted[done - 1]] != self.fork.ref(ref):
            done = 0  # the tip is elsewhere: a chain is one line, so begin it again
        if not done:
            self.commits = {}
        self._import(wanted[done:], wanted[done - 1] if done else None, ref)
        return self.commits[end]

    def tree(self, commit: str, start: str | None = None) -> str:
        return self.fork.out("rev-parse", f"{self.build(start or commit, commit)}^{{tree}}")

    def _import(self, commits: list[str], before: str | None, ref: str) -> None:
        temporary = f"{ref}-new"
        old = self.fork.ref(ref)
        self.fork.run("update-ref", "-d", temporary)
        feed = _Feed(self.fork)
        last_tree, last = ({}, before)
        if before:
            last_tree = self.upstream.tree(before)
        names: dict[str, str] = {}  # fork path -> upstream path, to find collisions
        for p in last_tree:
            names[self.table.path(p)] = p
        marks: dict[tuple[str, str], bytes] = {}  # (blob, upstream path) -> what stands for its translation in the stream
        for commit in commits:
            changed = self._changes(last, commit)
            for p, entry in changed.items():  # removals first: a path may have moved
                name = self.table.path(p)
                if entry is None and names.get(name) == p:
                    del names[name]
            lines, removed = [], {self.table.path(p) for p, e in changed.items() if e is None}
            for p, entry in changed.items():
                if entry is None:
                    continue
                name = self.table.path(p)
                if names.setdefault(name, p) != p:
                    raise ForksyncError(f"{self.table.where}: upstream's {names[name]} and {p} both become {name}", "make a path rule narrower", USAGE)
                removed.discard(name)
                lines.append(b"M %s %s %s\n" % (entry[0].encode(), self._content(feed, entry, p, marks), _quoted(name)))
            lines = [b"D %s\n" % _quoted(name) for name in sorted(removed)] + lines
            seconds, author, subject = self.upstream.out("log", "-1", "--format=%ct%x00%an%x00%s", commit).split("\0")
            message = os.fsencode(f"{subject}\n\nUpstream-Commit: {commit}\nUpstream-Author: {author}\nTable: {self.table.sha}\n")
            parent = os.fsencode(f"from {self.commits[before]}\n") if before and before == last and before in self.commits else b""
            who = f"forksync <forksync@localhost> {seconds} +0000\n".encode()
            feed.commit(commit, b"author %scommitter %sdata %d\n%s\n%s" % (who, who, len(message), message, parent), lines, temporary)
            last = commit
        self.commits |= feed.end()
        self.upstream.close()
        self.fork.run("update-ref", ref, self.commits[commits[-1]], *([old] if old else []))
        self.fork.run("update-ref", "-d", temporary)

    def _changes(self, before: str | None, commit: str) -> dict[str, Entry | None]:
        if before is None:
            return dict(self.upstream.tree(commit))
        out: dict[str, Entry | None] = {}
        raw = self.upstream.run("diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", before, commit)[1].split(b"\0")
        for meta, path in zip(raw[0::2], raw[1::2]):
            _, mode, _, oid, status = meta.decode().split()
            out[os.fsdecode(path)] = None if status == "D" else (mode, oid)
        return out

    def _content(self, feed: _Feed, entry: Entry, path: str, marks: dict[tuple[str, str], bytes]) -> bytes:
        mode, oid = entry
        if mode == "160000":
            return oid.encode()  # a submodule's commit
        if (oid, path) not in marks:
            data = self.upstream.read(oid)
            if data is None:
                self.missing.add(path)
            made = blob_id_missing(oid) if data is None else self.table.blob(data, path, mode)
            marks[oid, path] = feed.blob(made)
        return marks[oid, path]


class _Feed:
    """A fast-import process of the fork."""

    def __init__(self, fork: Git):
        command = ["git", *OPTIONS, "-C", str(fork.path), "fast-import", "--quiet", "--force", "--done", "--date-format=raw-permissive"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment())
        self.count = 0
        self.marks: dict[str, int] = {}

    def _send(self, data: bytes) -> None:
        assert self.process.stdin
        try:
            self.process.stdin.write(data)
        except BrokenPipeError:
            self.end()

    def blob(self, data: bytes) -> bytes:
        self.count += 1
        self._send(b"blob\nmark :%d\ndata %d\n%s\n" % (self.count, len(data), data))
        return b":%d" % self.count

    def commit(self, source: str, head: bytes, lines: list[bytes], ref: str) -> None:
        self.count += 1
        self.marks[source] = self.count
        self._send(b"commit %s\nmark :%d\n%s%s\n" % (ref.encode(), self.count, head, b"".join(lines)))

    def end(self) -> dict[str, str]:
        """{upstream commit: mirror commit}."""
        assert self.process.stdin
        asked = b"".join(b"get-mark :%d\n" % n for n in self.marks.values())
        out, err = self.process.communicate(asked + b"done\n")
        if self.process.returncode:
            raise ForksyncError(f"git fast-import failed: {err.decode(errors='replace').strip().splitlines()[:1]}", "", ENVIRONMENT)
        return dict(zip(self.marks, out.decode().split()))


def _quoted(path: str) -> bytes:
    raw = os.fsencode(path)
    return b'"' + b"".join(b"\\%03o" % c if c < 32 or c > 126 or c in b'"\\' else b"%c" % c for c in raw) + b'"'
