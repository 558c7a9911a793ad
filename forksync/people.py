"""What only people do: begin, sign, retire, rebaseline; and what helps them decide: learn, explain."""

from __future__ import annotations

import datetime
import re
from collections import Counter
from pathlib import Path
from typing import Any

import tomli_w

from forksync import base as knowledge
from forksync.base import FOLDER, Base, Config, Entry, Ledgered, Lock, Pair
from forksync.gate import Result, Sides, check, globbed, lints, refreshed, watched_id
from forksync.git import ForksyncError, Git, opened
from forksync.hunks import Hunk, between
from forksync.mirror import Chain
from forksync.sync import Pair as Sides2
from forksync.sync import refresh_whole, touching
from forksync.table import load, read, renames


def best_commit(chain: Chain, tip: str, fork: str, last: int) -> tuple[str, dict[str, str]]:
    """The upstream commit that the fork's tree resembles most among the last ones (latest wins ties), and paths that equal an older commit's
    version instead: {path: that commit}."""
    commits = chain.upstream.out("rev-list", "--reverse", "--topo-order", *(["--first-parent"] if chain.first_parent else []), f"-{last}", tip).split()
    chain.build(commits[0], tip)
    mine, scores, seen = chain.fork.tree(fork), {}, {}
    trees = {c: chain.fork.tree(chain.commits[c]) for c in commits}
    for c, tree in trees.items():
        same = [p for p, e in tree.items() if mine.get(p) == e]
        scores[c] = len(same) - sum(p not in mine for p in tree)
        seen |= dict.fromkeys(same, c)
    near = sorted(commits, key=lambda c: scores[c])[-5:]

    def distance(c: str) -> int:
        rows = chain.fork.out("diff-tree", "-r", "--numstat", "--no-renames", chain.commits[c], fork).splitlines()
        return sum(int(n) for r in rows for n in r.split("\t")[:2] if n.isdigit())

    best = min(near, key=lambda c: (distance(c), -commits.index(c)))
    return best, {p: c for p, c in seen.items() if p in trees[best] and trees[best][p] != mine.get(p) and commits.index(c) < commits.index(best)}


def init(root: Path, upstream: str, ref: str, branch: str, table: str, rename: str, at: str, last: int) -> tuple[Base, dict[str, str]]:
    """Write .forksync: configuration, table, lock at the best upstream commit, and every difference as an unsigned baseline."""
    fork = opened(root, "the fork")
    root = Path(fork.out("rev-parse", "--show-toplevel"))
    folder = root / FOLDER
    if folder.exists():
        raise ForksyncError(f"{folder} is there already", "remove it to begin again, or use `forksync rebaseline`")
    if not Path(root, upstream).is_dir():
        fork.run("fetch", "-q", "--no-tags", upstream, f"+{ref}:refs/forksync/upstream")
    source, name = (opened(Path(root, upstream), "upstream"), ref) if Path(root, upstream).is_dir() else (fork, "refs/forksync/upstream")
    if rename and "=" not in rename:
        raise ForksyncError(f"--rename {rename!r} is not UPSTREAM=FORK", "for example --rename slime=vime")
    text = Path(table).read_text("utf-8") if table else renames(*rename.split("=", 1)) if rename else ""
    chain = Chain(fork, source, read(text, table or "translation.toml"))
    tip, tree = source.commit(name), fork.worktree_tree()
    commit, frozen = (source.commit(at), {}) if at else best_commit(chain, tip, tree, last)
    mirror = chain.build(commit, tip) and fork.out("rev-parse", f"{chain.commits[commit]}^{{tree}}")
    folder.mkdir()
    config = Config(pair=Pair(upstream=upstream, ref=ref, branch=branch))
    (folder / "config.toml").write_text(tomli_w.dumps({"pair": config.pair.model_dump()}) + CONFIG, "utf-8")
    (folder / "translation.toml").write_text(text, "utf-8")
    (folder / ".gitattributes").write_text("audit.jsonl merge=union\n")
    base = Base(root, config, load(folder / "translation.toml"), Lock(upstream_commit=commit, mirror_tree=mirror, table_sha=chain.table.sha), {}, [])
    add(base, between(fork, mirror, tree), "baseline", frozen)
    base.lock.baseline = base.baseline()
    base.log("init", "init", upstream=commit, baseline=base.lock.baseline)
    base.save(everything=True)
    return base, frozen


CONFIG = """
# own: the fork's version stays, upstream's changes are only told. drop: the fork doesn't have it. review: a person looks at every change.
# [[policy]]
# glob = ["docker/*", ".github/*", "README*"]
# mode = "own"

# Gate 2: what must pass before a sync is done. See docs/forksync.md for precision and convergence.
# [[gate]]
# name = "unit"
# kind = "functional"
# run = "python -m pytest -q"

[[fixer]]
kind = "rules"
"""


def add(base: Base, hunks: list[Hunk], klass: str, frozen: dict[str, str] | None = None, reason: str = "baseline") -> None:
    """Put hunks into the ledger as proposed entries."""
    counts = Counter((h.path, h.fp) for h in hunks)
    for h in hunks:
        if (n := counts.pop((h.path, h.fp), 0)) and not h.path.startswith(f"{FOLDER}/") and base.config.policy_of(h.path).mode not in ("own", "drop"):
            why = f"baseline; equals upstream {frozen[h.path][:10]}" if frozen and h.path in frozen else reason
            made = knowledge.entry(h, n, reason=why, klass=klass, upstream=base.lock.upstream_commit)
            base.ledger.setdefault(h.path, Ledgered()).d.append(made)


def sign(base: Base, git: Git, mirror: str, fork: str, wanted: list[str], by: str, **fields: Any) -> list[tuple[str, Entry]]:
    """Sign differences by id, fingerprint, path, folder or glob. What a new one replaces hands on its reason, watches and pin.
    Raises: ForksyncError where nothing fits or a reason is missing."""
    result, sides = check(base, git, mirror, fork, lint=False), Sides(git, mirror, fork)
    paths = set(globbed({h.path for h in result.hunks}, wanted))
    counts = Counter((h.path, h.fp) for h in result.hunks)
    replaced = {(f.path, f.fp): f.id for f in result.findings if f.kind in ("stale", "edited", "regrouped")}
    signed: list[tuple[str, Entry]] = []
    for h in result.hunks:
        ids = {f"S-{h.fp[:8]}", h.fp, replaced.get((h.path, h.fp))}
        if (h.path, h.fp) in result.held or not counts.pop((h.path, h.fp), 0) or not (h.path in paths or ids & set(wanted)):
            continue
        file = base.ledger.setdefault(h.path, Ledgered())
        old = next((e for e in file.d if e.id == f"S-{h.fp[:8]}" or e.id == replaced.get((h.path, h.fp))), None)
        handed = {k: getattr(old, k) for k in ("reason", "klass", "refs", "watch", "pin", "expires")} if old and not old.baseline else {}
        given = {k: v for k, v in fields.items() if v}
        watches = [f"{w.partition('@')[0]}@{watched_id(sides, w.partition('@')[0])}" for w in {**handed, **given}.get("watch", [])]
        if missing := [w for w in watches if w.endswith("@")]:
            raise ForksyncError(f"--watch {missing[0][:-1]}: the mirror has no such file or name", "PATH or PATH::NAME, as the mirror calls them")
        said = {**handed, **given, "watch": watches, "signed_by": by, "signed_at": datetime.date.today(), "status": "signed", "upstream": base.lock.upstream_commit}
        if not str(said.get("reason", "")).strip():
            raise ForksyncError(f"{h.place}: a sign-off needs a --reason", "say why the fork differs, for whoever reads it in a year")
        made = knowledge.entry(h, sum(x.fp == h.fp and x.path == h.path for x in result.hunks), **said)
        file.d = [e for e in file.d if e is not old and e.fp != h.fp and not (old and e.id == old.replaces)] + [made]
        signed.append((h.path, made))
    if not signed:
        raise ForksyncError(f"nothing unsigned fits {' '.join(wanted)}", "`forksync check` lists what is open; give ids, paths or globs")
    order = {p: [h for h in result.hunks if h.path == p] for p, _ in signed}
    for path, hunks in order.items():
        refreshed(base, sides, path, hunks)
    base.lock.baseline = min(base.lock.baseline, base.baseline())
    base.log("sign", by, signs=[[p, e.fp] for p, e in signed], reason=signed[0][1].reason)
    base.save(order)
    return signed


def retire(base: Base, ids: list[str], by: str, reason: str) -> list[str]:
    """Entries that no longer count; they stay in the ledger as history."""
    found = [(p, e) for p, f in base.ledger.items() for e in f.d if e.id in ids and e.status != "retired"]
    if unknown := set(ids) - {e.id for _, e in found}:
        raise ForksyncError(f"no active entry {sorted(unknown)[0]}", "`forksync check` and `forksync explain PATH` show ids")
    for path, e in found:
        e.status, base.ledger[path].fork = "retired", ""
    base.lock.baseline = min(base.lock.baseline, base.baseline())
    base.log("retire", by, entries=[[p, e.fp] for p, e in found], reason=reason)
    base.save({p for p, _ in found})
    return [e.id for _, e in found]


def rebaseline(base: Base, git: Git, mirror: str, fork: str, by: str, adopt: bool) -> tuple[int, int, int]:
    """Carry the ledger over to another table, or accept a merged ledger. Entries whose fork side stayed keep their signature, those that the
    table now explains retire, and new differences become baseline only where asked. Returns how many of each."""
    base.lock.table_sha, base.lock.mirror_tree = base.table.sha, mirror
    base.lock.diff, base.lock.tool = Lock(upstream_commit="", table_sha="").diff, Lock(upstream_commit="", table_sha="").tool
    hunks, carried, retired = between(git, mirror, fork), 0, 0
    signs: list[list[str]] = []
    for path, file in base.ledger.items():
        here = [h for h in hunks if h.path == path]
        free = [h for h in here if h.fp not in {e.fp for e in file.d}]
        for i, e in enumerate(file.d):
            if e.status == "retired" or any(h.fp == e.fp for h in here):
                continue
            same = next((h for h in free if h.kind == e.kind and h.new == knowledge.restored(e.new)), None)
            if same:
                free.remove(same)
                kept = e.model_dump(exclude={"id", "fp", "count", "kind", "old", "new"})
                file.d[i] = knowledge.entry(same, e.count, **kept)
                signs += [[path, same.fp]] if e.status == "signed" else []
                carried += 1
            else:
                e.status = "retired"
                retired += 1
    before = base.baseline()
    if adopt:
        known = {(p, e.fp) for p, f in base.ledger.items() for e in f.d if e.status != "retired"}
        add(base, [h for h in hunks if (h.path, h.fp) not in known], "baseline")
    base.lock.baseline = base.baseline() if adopt else min(base.lock.baseline, base.baseline())
    base.lock.lints = lints(base, git, git.tree(fork)) if adopt else base.lock.lints
    base.log("rebaseline", by, signs=signs, carried=carried, retired=retired, adopted=base.baseline() - before)
    base.save(everything=True)
    refresh_whole(base, git, mirror, fork, check(base, git, mirror, fork))
    base.save(everything=True)
    return carried, retired, base.baseline() - before


def learn(hunks: list[Hunk], fork_words: Counter[str], least: int = 2) -> list[tuple[str, str, int, float]]:
    """Rules that the residual suggests: (upstream's name, the fork's, how often, share of its occurrences), from lines that differ in names only."""
    seen: Counter[tuple[str, str]] = Counter()
    token = re.compile(r"--[\w-]+|\w+|\s+|.")
    for h in hunks:
        for a, b in zip(h.old, h.new) if len(h.old) == len(h.new) else []:
            x, y = token.findall(a), token.findall(b)
            if len(x) == len(y):
                seen.update({(s, t) for s, t in zip(x, y) if s != t and len(s) > 2 and re.match(r"(--)?[A-Za-z_]", s) and re.match(r"(--)?[A-Za-z_]", t)})
    total = Counter[str]()
    for (s, _), n in seen.items():
        total[s] += n
    rows = [(s, t, n, n / (total[s] + fork_words[s])) for (s, t), n in seen.items() if n >= least]
    return sorted(rows, key=lambda r: (-r[2] * r[3], r[0]))


def explain(p: Sides2, result: Result, path: str, line: int) -> list[str]:
    """Why a path (or one of its lines) differs, who signed it, and what upstream did there since."""
    out = []
    states = {(f.path, f.fp): f"{f.kind}: {f.text}" for f in result.findings}
    entries = {e.fp: e for e in p.base.active(path)}
    for h in [h for h in result.hunks if h.path == path and (not line or not h.new_at or h.new_at <= line < h.new_at + max(1, len(h.new)))]:
        e = entries.get(h.fp)
        who = f"{e.id} signed by {e.signed_by} on {e.signed_at}: {e.reason}" if e and e.status == "signed" else f"{e.id} {e.status}: {e.reason}" if e else "not in the ledger"
        out += [f"{h.place}  {h.kind}  {who}", *(f"  refs {' '.join(e.refs)}" for _ in [0] if e and e.refs), *(f"  {s}" for s in [states.get((path, h.fp))] if s)]
        out += [f"  - {x}" for x in h.old[:12]] + [f"  + {x}" for x in h.new[:12]]
    known = p.chain
    known.known()
    if p.base.lock.upstream_commit in known.commits and len(known.commits) > 1:
        since = touching(p.fork, known.commits[p.base.lock.upstream_commit], p.fork.ref("refs/forksync/mirror"), path)
        out += [f"upstream since {p.base.lock.upstream_commit[:10]}: {c['commit'][:10]} {c['subject']}" for c in since]
    return out or [f"{path}: as the mirror has it"]
