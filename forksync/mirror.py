"""Knowledge base 3, the mechanical mirror: one synthetic commit per upstream commit, each the translated tree. It can be made again at any time."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from forksync.git import Entry, ForksyncError, Git
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

    def known(self) -> dict[str, str]:
        """What earlier runs have made under this table."""
        form = "%H %(trailers:key=Upstream-Commit,valueonly,separator=%x20) %(trailers:key=Table,valueonly,separator=%x20)"
        rows = [line.split() for line in reversed(self.fork.out("log", f"--format={form}", REF).splitlines())] if self.fork.ref(REF) else []
        self.commits = {source: made for made, source, *table in rows if table == [self.table.sha]}
        return self.commits

    def path(self, start: str, end: str) -> list[str]:
        """Upstream's commits after `start` up to `end`, oldest first."""
        return self.upstream.out("rev-list", "--reverse", "--topo-order", *["--first-parent"] * self.first_parent, f"{start}..{end}").split()

    def build(self, start: str, end: str, ref: str = REF) -> str:
        """Mirror commit of `end`; the chain from `start` is made as far as it is not there. A new chain replaces one of another table."""
        if ref == REF and not self.commits:
            self.known()
        wanted = [start, *self.path(start, end)]
        wanted += [end] * (wanted[-1] != end)  # upstream was rewound or rewritten: its trees still follow each other
        have = [c for c in wanted if c in self.commits]
        if len(have) < len(wanted):
            done = len(have) if wanted[: len(have)] == have else 0
            if done and ref == REF and self.commits[wanted[done - 1]] != self.fork.ref(ref):
                done = 0  # the tip is elsewhere: a chain is one line, so begin it again
            self.commits = self.commits if done else {}
            self._import(wanted[done:], wanted[done - 1] if done else None, ref)
        return self.commits[end]

    def _import(self, commits: list[str], last: str | None, ref: str) -> None:
        """Make mirror commits after that of `last`, by one fast-import."""
        temporary, old, marks = f"{ref}-new", self.fork.ref(ref), dict[str, int]()
        names = {self.table.path(p): p for p in self.upstream.tree(last)} if last else {}  # to find paths that collide
        blobs: dict[tuple[str, str], bytes] = {}  # (blob, upstream path) -> what stands for its translation in the stream
        count, parent = 0, self.commits[last] if last else ""
        self.fork.run("update-ref", "-d", temporary)
        stream: list[bytes] = []
        for commit in commits:
            changed = self._changes(last, commit)
            gone = {self.table.path(p) for p, e in changed.items() if e is None}
            names = {n: p for n, p in names.items() if n not in gone}
            lines = []
            for p, entry in ((p, e) for p, e in changed.items() if e):
                name = self.table.path(p)
                if {"", ".", ".."} & set(name.split("/")):
                    raise ForksyncError(f"{self.table.where}: {p} becomes {name!r}, which is no path inside a repository", "make a path rule narrower")
                if names.setdefault(name, p) != p:
                    raise ForksyncError(f"{self.table.where}: upstream's {names[name]} and {p} both become {name}", "make a path rule narrower")
                mode, oid = entry
                if mode == "160000":
                    blobs[oid, p] = oid.encode()
                elif (oid, p) not in blobs:
                    data = self.upstream.read(oid)
                    if data is None:  # partial clone, or a large file left out: equal ids stay equal
                        self.missing.add(p)
                    made = f"forksync: blob {oid} is missing in the clone of upstream\n".encode() if data is None else self.table.blob(data, p, mode)
                    count += 1
                    blobs[oid, p] = b":%d" % count
                    stream.append(b"blob\nmark :%d\ndata %d\n%s\n" % (count, len(made), made))
                lines.append(b"M %s %s %s\n" % (mode.encode(), blobs[oid, p], _quoted(name)))
            seconds, author, subject = self.upstream.out("log", "-1", "--format=%ct%x00%an%x00%s", commit).split("\0")
            message = os.fsencode(f"{subject}\n\nUpstream-Commit: {commit}\nUpstream-Author: {author}\nTable: {self.table.sha}\n")
            who = f"forksync <forksync@localhost> {seconds} +0000\n".encode()
            count += 1
            marks[commit] = count
            head = (temporary.encode(), count, who, who, len(message), message, f"from {parent}\n".encode() if parent else b"")
            stream.append(b"commit %s\nmark :%d\nauthor %scommitter %sdata %d\n%s\n%s" % head)
            stream += [b"D %s\n" % _quoted(n) for n in sorted(gone - names.keys())] + lines + [b"\n"]
            last, parent = commit, f":{count}"
        stream += [b"get-mark :%d\n" % n for n in marks.values()] + [b"done\n"]
        ids = self.fork.out("fast-import", "--quiet", "--force", "--done", "--date-format=raw-permissive", data=b"".join(stream)).split()
        self.commits |= dict(zip(marks, ids))
        self.fork.run("update-ref", ref, ids[-1], *([old] if old else []))
        self.fork.run("update-ref", "-d", temporary)

    def _changes(self, before: str | None, commit: str) -> dict[str, Entry | None]:
        if before is None:
            return dict(self.upstream.tree(commit))
        raw = self.upstream.run("diff-tree", "-r", "-z", "--raw", "--no-renames", "--no-abbrev", before, commit)[1].split(b"\0")
        rows = [(meta.decode().split(), os.fsdecode(path)) for meta, path in zip(raw[0::2], raw[1::2])]
        return {path: None if meta[4] == "D" else (meta[1], meta[3]) for meta, path in rows}


def _quoted(path: str) -> bytes:
    return b'"' + b"".join(b"\\%03o" % c if c < 32 or c > 126 or c in b'"\\' else b"%c" % c for c in os.fsencode(path)) + b'"'
