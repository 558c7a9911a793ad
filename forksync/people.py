"""What only people do: begin, sign, retire, rebaseline; and what helps them decide: learn, explain."""

from __future__ import annotations

import datetime
import re
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import tomli_w

from forksync import base as knowledge
from forksync.base import FOLDER, TOOL, Base, Config, Entry, Ledgered, Lock, Pair
from forksync.gate import Result, Sides, check, lint_places, refreshed, watched_id
from forksync.git import ForksyncError, Git, opened
from forksync.hunks import DIFF, Hunk, between
from forksync.mirror import REF, Chain
from forksync.sync import Pair as Both
from forksync.sync import refresh_whole, touching
from forksync.table import Table, TableFile, matches, parsed, renames

HANDED_ON = ("reason", "klass", "refs", "watch", "pin", "expires")  # from an entry to the one that replaces it


def best_commit(chain: Chain, tip: str, fork: str, last: int) -> tuple[str, dict[str, str]]:
    """The upstream commit that the fork's tree resembles most among the last ones (latest wins ties), and paths that equal an older commit's
    version instead: {path: that commit}."""
    log = chain.upstream.out("rev-list", "--reverse", "--topo-order", *["--first-parent"] * chain.first_parent, f"-{last}", tip)
    commits, mine = log.split(), chain.fork.tree(fork)
    chain.build(commits[0], tip)
    scores, seen = dict[str, int](), dict[str, str]()
    for c in commits:
        tree = chain.fork.tree(chain.commits[c])
        same = [p for p, e in tree.items() if mine.get(p) == e]
        scores[c] = len(same) - sum(p not in mine for p in tree)
        seen |= dict.fromkeys(same, c)

    def distance(c: str) -> int:
        rows = chain.fork.out("diff-tree", "-r", "--numstat", "--no-renames", chain.commits[c], fork).splitlines()
        return sum(int(n) for r in rows for n in r.split("\t")[:2] if n.isdigit())

    best = min(sorted(commits, key=lambda c: scores[c])[-5:], key=lambda c: (distance(c), -commits.index(c)))
    tree = chain.fork.tree(chain.commits[best])
    return best, {p: c for p, c in seen.items() if p in tree and tree[p] != mine.get(p) and commits.index(c) < commits.index(best)}


def init(root: Path, upstream: str, ref: str, branch: str, table: str, rename: str, at: str, last: int) -> tuple[Base, dict[str, str]]:
    """Write .forksync: configuration, table, lock at the best upstream commit, and every difference as an unsigned baseline."""
    fork = Git(opened(root, "the fork").out("rev-parse", "--show-toplevel"))
    folder, local = fork.path / FOLDER, Path(fork.path, upstream).is_dir()
    if folder.exists():
        raise ForksyncError(f"{folder} is there already", "remove it to begin again, or use `forksync rebaseline`")
    old, _, new = rename.partition("=")
    if rename and (not all(re.fullmatch(r"\w(?:[\w.-]*\w)?", name, re.A) for name in (old, new)) or old == new):
        raise ForksyncError(f"--rename {rename!r} is not UPSTREAM=FORK, two different names", "for example --rename slime=vime")
    part = fork.path / f"{FOLDER}.part"
    shutil.rmtree(part, ignore_errors=True)  # of an init that was killed
    if not local:
        fork.run("fetch", "-q", "--no-tags", upstream, f"+{ref}:refs/forksync/upstream")
    source = opened(Path(fork.path, upstream), "upstream") if local else fork
    text = Path(table).read_text("utf-8") if table else renames(old, new) if rename else ""
    chain = Chain(fork, source, Table(parsed(TableFile, text, table or "translation.toml")))
    tip, tree = source.commit(ref if local else "refs/forksync/upstream"), fork.worktree_tree()
    commit, frozen = (source.commit(at), {}) if at else best_commit(chain, tip, tree, last)
    chain.build(commit, tip)
    config = Config(pair=Pair(upstream=upstream, ref=ref, branch=branch))
    lock = Lock(upstream_commit=commit, mirror_tree=fork.tree_of(chain.commits[commit]), table_sha=chain.table.sha)
    base = Base(fork.path, config, chain.table, lock, {}, [], part.name)
    part.mkdir()
    template = Path(__file__).with_name("config.toml").read_text("utf-8")
    (part / "config.toml").write_text(tomli_w.dumps({"pair": config.pair.model_dump()}) + template, "utf-8")
    (part / "translation.toml").write_text(text, "utf-8")
    (part / ".gitattributes").write_text("audit.jsonl merge=union\n")
    add(base, between(fork, lock.mirror_tree, tree), "baseline", frozen)
    lock.baseline = base.baseline()
    base.log("init", "init", upstream=commit, baseline=lock.baseline)
    base.save()
    part.rename(folder)  # all of it, or nothing
    base.name = FOLDER
    return base, frozen


def add(base: Base, hunks: list[Hunk], klass: str, frozen: dict[str, str] | None = None) -> None:
    """Put hunks into the ledger as proposed entries."""
    counts = Counter((h.path, h.fp) for h in hunks)
    for h in hunks:
        if not h.path.startswith(f"{FOLDER}/") and base.config.mode(h.path) not in ("own", "drop") and (n := counts.pop((h.path, h.fp), 0)):
            why = f"{klass}; equals upstream {frozen[h.path][:10]}" if frozen and h.path in frozen else klass
            made = knowledge.entry(h, n, reason=why, klass=klass, upstream=base.lock.upstream_commit)
            base.ledger.setdefault(h.path, Ledgered()).d.append(made)


def fits(path: str, wanted: list[str]) -> bool:
    """Whether a path is, or is below, or matches one of these."""
    return any(matches(path, w) or path.startswith(w.rstrip("/") + "/") or path == w for w in wanted)


def sign(base: Base, git: Git, mirror: str, fork: str, wanted: list[str], by: str, **given: Any) -> list[tuple[str, Entry]]:
    """Sign differences by id, fingerprint, path, folder or glob. What a new one replaces hands on its reason, watches and pin.
    Raises: ForksyncError where nothing fits or a reason is missing."""
    result, sides = check(base, git, mirror, fork, lint=False), Sides(git, mirror, fork)
    counts = Counter((h.path, h.fp) for h in result.hunks)
    replaced = {(f.path, f.fp): f.id for f in result.findings if f.kind in ("stale", "edited", "regrouped")}
    signed: list[tuple[str, Entry]] = []
    for h in result.hunks:
        old_id, n = replaced.get((h.path, h.fp)), counts.pop((h.path, h.fp), 0)
        if not n or (h.path, h.fp) in result.held or not (fits(h.path, wanted) or {h.id, h.fp, old_id} & set(wanted)):
            continue
        file = base.ledger.setdefault(h.path, Ledgered())
        old = next((e for e in file.d if e.id in (h.id, old_id)), None)
        said = {k: getattr(old, k) for k in HANDED_ON if old and not old.baseline} | {k: v for k, v in given.items() if v}
        said["watch"] = [f"{t}@{watched_id(sides, t)}" for t in (w.partition("@")[0] for w in said.get("watch", []))]
        if missing := [w for w in said["watch"] if w.endswith("@")]:
            raise ForksyncError(f"--watch {missing[0][:-1]}: the mirror has no such file or name", "PATH or PATH::NAME, as the mirror calls them")
        if not str(said.get("reason", "")).strip():
            raise ForksyncError(f"{h.place}: a sign-off needs a --reason", "say why the fork differs, for whoever reads it in a year")
        said |= {"signed_by": by, "signed_at": datetime.date.today(), "status": "signed", "upstream": base.lock.upstream_commit}
        made = knowledge.entry(h, n, **said)
        file.d = [e for e in file.d if e is not old and e.fp != h.fp and not (old and e.id == old.replaces)] + [made]
        signed.append((h.path, made))
    if not signed:
        raise ForksyncError(f"nothing unsigned fits {' '.join(wanted)}", "`forksync check` lists what is open; give ids, paths or globs")
    paths = {p for p, _ in signed}
    for path in paths:
        refreshed(base, sides, path, [h for h in result.hunks if h.path == path])
    base.log("sign", by, signs=[[p, e.fp] for p, e in signed], reason=signed[0][1].reason)
    base.save(paths)
    return signed


def retire(base: Base, ids: list[str], by: str, reason: str) -> list[str]:
    """Entries that no longer count; they stay in the ledger as history."""
    found = [(p, e) for p, f in base.ledger.items() for e in f.d if e.id in ids and e.status != "retired"]
    if unknown := set(ids) - {e.id for _, e in found}:
        raise ForksyncError(f"no active entry {min(unknown)}", "`forksync check` and `forksync explain PATH` show ids")
    for path, e in found:
        e.status, base.ledger[path].fork = "retired", ""
    base.log("retire", by, entries=[[p, e.fp] for p, e in found], reason=reason)
    base.save({p for p, _ in found})
    return [e.id for _, e in found]


def rebaseline(base: Base, git: Git, mirror: str, fork: str, by: str, adopt: bool) -> tuple[int, int, int]:
    """Carry the ledger over to another table, or accept a merged ledger. Entries whose fork side stayed keep their signature, those that the
    table now explains retire, and new differences become baseline only where asked. Returns how many of each."""
    lock, hunks, carried, retired = base.lock, between(git, mirror, fork), 0, 0
    lock.table_sha, lock.mirror_tree, lock.diff, lock.tool = base.table.sha, mirror, DIFF, TOOL
    signs: list[list[str]] = []
    for path, file in base.ledger.items():
        here = {h.fp: h for h in hunks if h.path == path}
        free = [h for fp, h in here.items() if fp not in {e.fp for e in file.d}]
        for i, e in enumerate(file.d):
            if e.status == "retired" or e.fp in here:
                continue
            same = next((h for h in free if h.kind == e.kind and h.new == e.sides[1]), None)
            if same:
                free.remove(same)
                file.d[i] = knowledge.entry(same, e.count, **e.model_dump(exclude={"id", "fp", "count", "kind", "old", "new"}))
                signs += [[path, same.fp]] * (e.status == "signed")
            else:
                e.status = "retired"
            carried, retired = carried + bool(same), retired + (not same)
    before = base.baseline()
    if adopt:
        known = {(p, e.fp) for p, f in base.ledger.items() for e in f.d if e.status != "retired"}
        add(base, [h for h in hunks if (h.path, h.fp) not in known], "baseline")
        lock.baseline = base.baseline()
        lock.lints = {x.pattern: len(lint_places(base, git, git.tree(fork), x)) for x in base.config.lint.forbidden}
    base.log("rebaseline", by, signs=signs, carried=carried, retired=retired, adopted=base.baseline() - before)
    base.save()
    refresh_whole(base, git, mirror, fork, check(base, git, mirror, fork))
    base.save()
    return carried, retired, base.baseline() - before


def learn(hunks: list[Hunk], fork_words: Counter[str], least: int) -> list[tuple[str, str, int, float]]:
    """Rules that the residual suggests: (upstream's name, the fork's, how often, share of its occurrences), from lines that differ in names only."""
    seen, total = Counter[tuple[str, str]](), Counter[str]()
    token, name = re.compile(r"--[\w-]+|\w+|\s+|."), re.compile(r"(--)?[A-Za-z_]\w\w")
    for h in hunks:
        for a, b in zip(h.old, h.new) if len(h.old) == len(h.new) else []:
            x, y = token.findall(a), token.findall(b)
            seen.update({(s, t) for s, t in zip(x, y) if s != t and name.match(s) and name.match(t)} if len(x) == len(y) else ())
    for (s, _), n in seen.items():
        total[s] += n
    rows = [(s, t, n, n / (total[s] + fork_words[s])) for (s, t), n in seen.items() if n >= least]
    return sorted(rows, key=lambda r: (-r[2] * r[3], r[0]))


def explain(p: Both, result: Result, path: str, line: int) -> list[str]:
    """Why a path (or one of its lines) differs, who signed it, and what upstream did there since."""
    out: list[str] = []
    entries, findings = {e.fp: e for e in p.base.active(path)}, {f.fp: f for f in result.findings if f.path == path}
    for h in result.hunks:
        if h.path == path and (not line or not h.new_at or h.new_at <= line < h.new_at + max(1, len(h.new))):
            e, f = entries.get(h.fp), findings.get(h.fp)
            why = f"{e.id} {e.status}{f' by {e.signed_by} on {e.signed_at}' if e.signed_by else ''}: {e.reason} {' '.join(e.refs)}" if e else "not in the ledger"
            out += [f"{h.place}  {h.kind}  {why}".rstrip(), *[f"  {f.kind}: {f.text}" for f in [f] if f]]
            out += [f"  - {x}" for x in h.old[:12]] + [f"  + {x}" for x in h.new[:12]]
    at = p.chain.known().get(p.base.lock.upstream_commit)
    since = touching(p.fork, at, REF, path) if at else []
    out += [f"upstream since {p.base.lock.upstream_commit[:10]}: {c['commit'][:10]} {c['subject']}" for c in since]
    return out or [f"{path}: as the mirror has it"]
