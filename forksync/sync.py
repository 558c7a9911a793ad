"""Merge upstream's move into the fork: a plan, or a new branch in a worktree of its own. The branch that is checked out is never touched."""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from forksync import base as knowledge
from forksync.base import FOLDER, Base, Ledgered, restored
from forksync.gate import Result, Sides, check, refreshed
from forksync.git import ENVIRONMENT, SAFETY, Entry, ForksyncError, Git, Tree, opened
from forksync.hunks import fingerprint
from forksync.mirror import Chain

MARK = 57  # width of conflict markers: no text has such lines
BOT = {f"GIT_{who}_{key}": value for who in ("AUTHOR", "COMMITTER") for key, value in (("NAME", "forksync"), ("EMAIL", "forksync@localhost"))}
MERGE = ["-c", "merge.directoryRenames=false", "-c", "merge.renames=true", "-c", "merge.conflictStyle=merge"]
MINUTES = {"content": 6, "both-added": 6, "fork-deleted": 2, "upstream-deleted": 4, "binary": 3, "other": 5, "new-file": 2, "review": 2, "vocabulary": 1}


@dataclass
class Item:
    """Something that a merge can't decide. Text sides are lines of one conflict; the fork's are in the tree until it is resolved."""

    id: str
    path: str
    kind: str  # see MINUTES; gate: a failing gate
    base: list[str] = field(default_factory=list)
    ours: list[str] = field(default_factory=list)
    theirs: list[str] = field(default_factory=list)
    line: int = 0
    proposal: list[str] | None = None  # a merge word by word, to look at
    commits: list[dict[str, str]] = field(default_factory=list)
    attempts: int = 0
    note: str = ""
    open: bool = True

    @property
    def blocks(self) -> bool:
        return self.open and self.kind not in ("new-file", "review", "vocabulary")


@dataclass
class Merged:
    tree: str
    items: list[Item]
    changed: set[str]  # paths that upstream changed
    kept: list[str]  # of those, where the fork keeps its own by policy or by a signed deletion

    @property
    def clean(self) -> set[str]:
        return self.changed - {i.path for i in self.items if i.blocks} - set(self.kept)


def merge(git: Git, fork: str, old: str, new: str, keep: set[str] | None = None) -> Merged:
    """Merge the mirror's move old -> new (commits) into the fork's tree. Conflicts become items, the tree keeps the fork's side.

    `keep`: paths where the fork's version stays whatever upstream does.
    """
    before, after, mine = git.tree(old), git.tree(new), git.tree(fork)
    changed = {p for p in before.keys() | after.keys() if before.get(p) != after.get(p)}
    kept = sorted(changed & (keep or set()))
    target = git.tree_with(new, {p: before.get(p) for p in kept})
    ours, theirs = (git.commit_tree(tree, [git.commit(old)], "side\n", env=BOT) for tree in (fork, target))
    code, out = git.run(*MERGE, "merge-tree", "--write-tree", "-z", "--no-messages", ours, theirs, ok=(0, 1))
    tree, *rest = out.decode("utf-8", "surrogateescape").split("\0")
    stages: dict[str, dict[int, Entry]] = defaultdict(dict)
    for line in rest:
        if line:
            meta, path = line.split("\t", 1)
            mode, oid, stage = meta.split()
            stages[path][int(stage)] = (mode, oid)
    if bool(stages) != bool(code):
        raise ForksyncError("git merge-tree and its list of conflicts disagree", "", ENVIRONMENT)
    final: dict[str, Entry | None] = {}
    items: list[Item] = []
    for path, sides in sorted(stages.items()):
        final[path], found = _resolved(git, path, sides)
        items += found
    for path in final:  # a conflict of a file with a folder leaves the fork's file under another name
        stem = path.rpartition("~")[0]
        if stem and stem not in final and path not in mine and stem in mine:
            final[path] = None
    items = [Item(f"I-{n + 1}", **{k: v for k, v in asdict(i).items() if k != "id"}) for n, i in enumerate(items)]
    return Merged(git.tree_with(tree, final), items, changed, kept)


def _resolved(git: Git, path: str, stages: dict[int, Entry]) -> tuple[Entry | None, list[Item]]:
    """What stands in the tree for a path in conflict (the fork's side), and its items."""
    have = set(stages)
    if have == {1, 3}:
        return None, [Item("", path, "fork-deleted", note="the fork deleted it, upstream changed it: stays deleted")]
    if have == {1, 2}:
        return stages[2], [Item("", path, "upstream-deleted", note="upstream deleted it, the fork changed it: stays")]
    if have == {1}:
        return None, []
    if not {2, 3} <= have:
        return stages.get(2, stages.get(3)), [Item("", path, "other", note="both sides moved or replaced it")]
    modes = {s[0] for s in stages.values()}
    blobs = [git.read(stages[n][1]) if n in stages and stages[n][0] != "160000" else b"" for n in (2, 1, 3)]
    if modes & {"120000", "160000"} or any(b is None or b"\0" in b for b in blobs):
        return stages[2], [Item("", path, "binary", note="no text: the fork's version stays")]
    kind = "content" if 1 in have else "both-added"
    text, items = merged_text(git, path, kind, *(b or b"" for b in blobs))
    mode = stages[2][0] if 1 not in stages or stages[2][0] != stages[1][0] else stages[3][0]
    return (mode, git.write(text)), items or [Item("", path, "other", note="both sides changed its mode or name")]


def merged_text(git: Git, path: str, kind: str, ours: bytes, base: bytes, theirs: bytes) -> tuple[bytes, list[Item]]:
    """Three versions merged line by line, the fork's side in conflicts."""
    out: list[str] = []
    items: list[Item] = []
    part = 0
    for line in _merge_file(git, ours, base, theirs, "--diff3"):
        mark = line[:1] if line.rstrip("\n")[:MARK] == line[:1] * MARK and line[:1] in "<|=>" else ""
        if mark == "<":
            items.append(Item("", path, kind, line=len(out) + 1))
            part = 1
        elif mark:
            part = {"|": 2, "=": 3, ">": 0}[mark]
        elif part == 0:
            out.append(line)
        else:
            (items[-1].ours, items[-1].base, items[-1].theirs)[part - 1].append(line)
            if part == 1:
                out.append(line)
    for i in items:
        i.proposal = by_words(git, i.ours, i.base, i.theirs)
    return "".join(out).encode("utf-8", "surrogateescape"), items


def _merge_file(git: Git, ours: bytes, base: bytes, theirs: bytes, *how: str) -> list[str]:
    with tempfile.TemporaryDirectory() as folder:
        names = [f"{folder}/{n}" for n in "obt"]
        for name, data in zip(names, (ours, base, theirs)):
            Path(name).write_bytes(data)
        code, text = git.run("merge-file", "-p", f"--marker-size={MARK}", *how, *names, ok=tuple(range(128)))
    parts = text.decode("utf-8", "surrogateescape").split("\n")
    return [p + "\n" for p in parts[:-1]] + ([parts[-1]] if parts[-1] else []) + (["\0"] if code and not how else [])


def by_words(git: Git, ours: list[str], base: list[str], theirs: list[str]) -> list[str] | None:
    """The conflict merged word by word, None where words conflict too. Equal to what a person wrote in about half of the cases: a proposal."""
    sides = ["".join(f"{json.dumps(t)}\n" for t in re.findall(r"\w+|\s+|.", "".join(s), re.S)).encode() for s in (ours, base, theirs)]
    merged = _merge_file(git, sides[0], sides[1], sides[2])
    if not base or "\0" in merged:
        return None
    return "".join(json.loads(t) for t in merged).splitlines(keepends=True)


@dataclass
class Pair:
    """A fork with its .forksync, and upstream."""

    base: Base
    fork: Git
    upstream: Git
    ref: str  # of upstream's branch, in `upstream`

    @property
    def chain(self) -> Chain:
        return Chain(self.fork, self.upstream, self.base.table, self.base.config.pair.first_parent)

    def mirror_tree(self) -> str:
        """Tree of the mirror at the lock's commit: as it is here, else made anew."""
        lock = self.base.lock
        if lock.table_sha == self.base.table.sha and lock.mirror_tree and self.fork.ref("refs/forksync/tree") == lock.mirror_tree:
            return lock.mirror_tree
        tree = self.chain.tree(self.upstream.commit(lock.upstream_commit, " of lock.toml"))
        if lock.mirror_tree and lock.table_sha == self.base.table.sha and tree != lock.mirror_tree:
            raise ForksyncError(f"the mirror of {lock.upstream_commit[:10]} is {tree[:10]}, lock.toml says {lock.mirror_tree[:10]}", "a clone of upstream without all files?", ENVIRONMENT)
        self.fork.run("update-ref", "refs/forksync/tree", tree)  # keeps it, and says that it is whole
        return tree

    def state(self) -> Path:
        folder = Path(self.fork.path, self.fork.out("rev-parse", "--git-common-dir"), "forksync")
        folder.mkdir(exist_ok=True)
        return folder


def pair(root: Path) -> Pair:
    """The pair of a fork's folder. An upstream that is a folder is read in place; anything else is fetched."""
    fork = opened(root, "the fork")
    root = Path(fork.out("rev-parse", "--show-toplevel"))
    fork = Git(root)
    base = knowledge.read(root)
    where = base.config.pair.upstream
    common = Path(root, fork.out("rev-parse", "--git-common-dir")).resolve()
    start = common.parent if common.name == ".git" else root  # a worktree lies elsewhere than the fork that config.toml speaks of
    if Path(start, where).is_dir():
        return Pair(base, fork, opened(Path(start, where), "pair.upstream"), base.config.pair.ref)
    return Pair(base, fork, fork, "refs/forksync/upstream")


def fetched(p: Pair) -> str:
    """Upstream's newest commit; a URL is asked, a local clone is as it is."""
    if p.upstream is p.fork:
        p.fork.run("fetch", "-q", "--no-tags", "--no-write-fetch-head", p.base.config.pair.upstream, f"+{p.base.config.pair.ref}:{p.ref}")
    return p.upstream.commit(p.ref, " (pair.ref in config.toml)")


def keep_paths(base: Base, paths: set[str]) -> set[str]:
    """Where upstream's changes are only told: own and drop policies, and deletions that somebody signed."""
    signed = {p for p, f in base.ledger.items() if any(e.kind == "file-dropped" and e.status == "signed" for e in f.d)}
    return {p for p in paths if p in signed or base.config.policy_of(p).mode in ("own", "drop") or p.startswith(f"{FOLDER}/")}


@dataclass
class Plan:
    old: str
    new: str
    fork: str  # commit of the fork's branch
    old_mirror: str
    new_mirror: str
    merged: Merged
    commits: int

    def minutes(self) -> int:
        return sum(MINUTES.get(i.kind, 5) for i in self.merged.items)


def plan(p: Pair, to: str = "") -> Plan:
    """What a sync would do; writes nothing but mirror objects."""
    tip = fetched(p)
    old = p.upstream.commit(p.base.lock.upstream_commit, " of lock.toml")
    new = p.upstream.commit(to) if to else tip
    if faults := p.base.faults():
        raise ForksyncError(f"{FOLDER}: {faults[0]}", "put .forksync in order before a sync")
    fork = p.fork.commit(p.base.config.pair.branch, " (pair.branch in config.toml)")
    chain = p.chain
    new_mirror = chain.build(old, new)
    old_mirror = chain.build(old, old) if old in chain.commits else new_mirror
    before, after = p.fork.tree(old_mirror), p.fork.tree(new_mirror)
    merged = merge(p.fork, f"{fork}^{{tree}}", old_mirror, new_mirror, keep_paths(p.base, before.keys() | after.keys()))
    merged.items += _to_review(p, merged, before, after, fork, new)
    for n, item in enumerate(merged.items):
        item.id = f"I-{n + 1}"
        if item.blocks:
            item.commits = touching(p.fork, old_mirror, new_mirror, item.path)
    return Plan(old, new, fork, old_mirror, new_mirror, merged, len(chain.path(old, new)))


def touching(git: Git, old: str, new: str, path: str) -> list[dict[str, str]]:
    """Upstream's commits that touch a path of the mirror, newest last, with their diffs in the fork's words."""
    out = []
    for line in reversed(git.out("log", "--format=%H%x00%s%x00%(trailers:key=Upstream-Commit,valueonly,separator=)", f"{old}..{new}", "--", path).splitlines()):
        made, subject, source = line.split("\0")
        diff = git.out("show", "--format=", "--no-ext-diff", "--no-textconv", made, "--", path)
        out.append({"commit": source.strip(), "subject": subject, "diff": diff[:20_000]})
    return out


def _to_review(p: Pair, merged: Merged, before: Tree, after: Tree, fork: str, new: str) -> list[Item]:
    """Clean merges that a person should look at all the same: new files, paths of policy review, names that the fork has never used."""
    out = []
    final, mine = p.fork.tree(merged.tree), p.fork.tree(fork)
    words = re.compile(r"[\w-]*[A-Za-z_]\w+")
    texts: list[tuple[str, list[str]]] = []
    for path in sorted(merged.clean):
        if path in after and path not in before and path in final and path not in mine:
            out.append(Item("", path, "new-file", note="new in upstream"))
        elif p.base.config.policy_of(path).mode == "review":
            out.append(Item("", path, "review", note="policy review"))
        if path in final and final[path] != mine.get(path) and b"\0" not in (data := p.fork.read(final[path][1]) or b""):
            old = set((p.fork.read(mine[path][1]) or b"").split(b"\n")) if path in mine else set()
            texts.append((path, [x.decode("utf-8", "replace") for x in data.split(b"\n") if x not in old]))
    if p.base.config.lint.vocabulary == "auto" and texts:
        used: set[str] = set()
        for path, (mode, oid) in mine.items():
            if mode != "160000" and not path.startswith(f"{FOLDER}/") and b"\0" not in (data := p.fork.read(oid) or b""):
                used |= set(words.findall(data.decode("utf-8", "replace")))
        known = p.base.root / p.base.config.lint.known
        used |= set(known.read_text("utf-8").split()) if p.base.config.lint.known else set()
        targets = {r.to.lower() for r in p.base.table.data.rule if len(r.to) > 2 and r.kind != "regex"}
        for path, added in texts:
            fresh = {w for line in added for w in words.findall(line)} - used
            odd = sorted(w for w in fresh if any(t in w.lower() for t in targets))
            if odd:
                out.append(Item("", path, "vocabulary", note=f"translated names that the fork has never used: {', '.join(odd[:6])}"))
    return out


@dataclass
class Run:
    """An open sync: a branch and its worktree, and what is still to do."""

    branch: str
    worktree: str
    fork: str
    old: str
    new: str
    items: list[Item]
    errors: list[list[float]] = field(default_factory=list)
    trees: list[str] = field(default_factory=list)
    tokens: int = 0

    def save(self, folder: Path) -> None:
        (folder / "run.json").write_text(json.dumps(asdict(self), indent=1), "utf-8")


def open_run(p: Pair) -> Run | None:
    """The run that `sync` began. Raises: ForksyncError (6) where the fork's branch has moved since."""
    file = p.state() / "run.json"
    if not file.exists():
        return None
    data: dict[str, Any] = json.loads(file.read_text("utf-8"))
    run = Run(**{**data, "items": [Item(**i) for i in data["items"]]})
    if not Path(run.worktree).is_dir():
        return None
    if p.fork.commit(p.base.config.pair.branch) != run.fork:
        raise ForksyncError(f"{p.base.config.pair.branch} has moved since this sync began ({run.fork[:10]})", "merge the branch or `forksync sync --anew`", SAFETY)
    return run


def sync(p: Pair, to: str = "", anew: bool = False) -> tuple[Plan, Run, Result]:
    """Make the branch forksync/<upstream commit>: one mechanical commit, conflicts with the fork's side. Raises: ForksyncError, 6 where the
    merge would lose a signed edit."""
    file = p.state() / "run.json"
    if file.exists() and not anew and open_run(p):
        raise ForksyncError("a sync is open", "`forksync loop` goes on with it; `forksync sync --anew` begins again")
    if p.fork.run("status", "--porcelain", "--", FOLDER)[1]:
        raise ForksyncError(f"{FOLDER} has changes that are not committed", "commit them first: the sync starts from the branch", ENVIRONMENT)
    made = plan(p, to)
    before = check(p.base, p.fork, made.old_mirror, made.fork)
    backup = p.state() / f"backup-{made.fork[:10]}.bundle"
    if not backup.exists():
        for older in sorted(p.state().glob("backup-*.bundle"), key=lambda f: f.stat().st_mtime)[:-1]:
            older.unlink()
        p.fork.run("bundle", "create", "-q", str(backup), p.base.config.pair.branch)
    if file.exists():
        old = json.loads(file.read_text("utf-8"))["worktree"]
        p.fork.run("worktree", "remove", "--force", old, ok=(0, 128))
        shutil.rmtree(old, ignore_errors=True)
    p.fork.run("worktree", "prune")
    names = (f"forksync/{made.new[:10]}{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    branch = next(n for n in names if not p.fork.ref(f"refs/heads/{n}"))
    place = p.state() / "worktrees" / branch.replace("/", "-")
    p.fork.run("worktree", "add", "-q", "-b", branch, str(place), made.fork)
    tree = Git(place)
    tree.run("read-tree", "-u", "--reset", made.merged.tree)
    base = knowledge.read(place)
    base.lock.upstream_commit, base.lock.mirror_tree = made.new, p.fork.out("rev-parse", f"{made.new_mirror}^{{tree}}")
    moved = follow(base, p.fork, made.old_mirror, made.new_mirror, made.merged.tree)
    after = check(base, p.fork, base.lock.mirror_tree, made.merged.tree)
    conflicts = {i.path for i in made.merged.items if i.blocks}
    held = {fp for path, fp in before.held if path not in conflicts}
    lost = [f for f in after.findings if f.kind in ("lost", "superseded") and f.fp in held]
    if lost:
        p.fork.run("worktree", "remove", "--force", str(place))
        p.fork.run("branch", "-q", "-D", branch)
        raise ForksyncError(f"the merge would lose {lost[0].id} in {lost[0].place}: {lost[0].text}", "sync to an earlier commit with --to, and look at it", SAFETY)
    refresh_whole(base, p.fork, base.lock.mirror_tree, made.merged.tree, after)
    base.log("sync", "forksync", old=made.old, new=made.new, before=made.fork, tree=made.merged.tree, signs=moved)
    base.save(everything=True)
    commit_all(tree, f"sync: upstream {made.old[:10]}..{made.new[:10]}, mechanical part\n\n{made.commits} commits; conflicts keep the fork's side.\n")
    run = Run(branch, str(place), made.fork, made.old, made.new, made.merged.items)
    run.save(p.state())
    return made, run, after


def follow(base: Base, git: Git, old: str, new: str, tree: str) -> list[list[str]]:
    """Let the ledger follow upstream's renames, where the merge took the fork's edits along: same text, other path. Returns [path, fingerprint]
    of the signed entries, for the audit."""
    rows = git.run("diff-tree", "-r", "-z", "-M", "--diff-filter=R", "--name-status", old, new)[1].decode("utf-8", "surrogateescape").split("\0")
    final, signs = git.tree(tree), []
    for a, b in zip(rows[1::3], rows[2::3]):
        if a in base.ledger and a not in final and b in final:
            entries, base.ledger[a] = base.ledger[a].d, Ledgered()
            for e in entries:
                e.fp = fingerprint(b, e.kind, restored(e.old), restored(e.new))
                e.id = f"S-{e.fp[:8]}"
                signs += [[b, e.fp]] if e.status == "signed" else []
            base.ledger.setdefault(b, Ledgered()).d += entries
    return signs


def refresh_whole(base: Base, git: Git, mirror: str, fork: str, result: Result) -> None:
    """Note both sides of the files that are in order, so that a later reordering in them shows."""
    sides, red = Sides(git, mirror, fork), {f.path for f in result.findings}
    for path in base.ledger.keys() - red:
        refreshed(base, sides, path, [h for h in result.hunks if h.path == path])


def commit_all(tree: Git, message: str, *paths: str) -> str:
    tree.run("add", "-f", "--", FOLDER, *paths)
    tree.run("commit", "-q", "--no-verify", "-F", "-", data=message.encode(), env=BOT)
    return tree.commit("HEAD")

