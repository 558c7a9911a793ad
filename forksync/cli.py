"""The `forksync` command. Exit codes: 0 fine, 1 unsigned differences, 2 usage, 3 work left, 4 gate 2, 5 not converged, 6 safety, 7 environment."""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

from forksync import base as knowledge
from forksync import people, report
from forksync.base import FOLDER
from forksync.fix import round_of
from forksync.gate import Result, check
from forksync.git import GATE, LOCKED, OPEN, ForksyncError, Git
from forksync.sync import MINUTES, Pair, Plan, Run, open_run, pair, plan, sync
from forksync.verify import gates, loop, verify

STEPS = """a first sync:
  forksync init --upstream ../upstream --rename old=new    where the fork stands; every difference becomes baseline
  forksync check                                           gate 1: is anything different that nobody signed?
  forksync plan                                            what would upstream's news do here?
  forksync loop                                            merge on a branch of its own, fix, test, until nothing is left
"""


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="forksync", description="Keep a fork aligned with its upstream.", epilog=STEPS, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("-C", dest="root", default=".", metavar="DIR", help="the fork's folder (default: here)")
    sub = p.add_subparsers(dest="verb", required=True, metavar="VERB")

    def verb(name: str, about: str, *options: tuple[str, str, dict[str, Any]]) -> None:
        s = sub.add_parser(name, help=about, description=about)
        for flag, text, how in options:
            s.add_argument(flag, help=text or None, **how)

    yes, some, text = {"action": "store_true"}, {"nargs": "*", "default": []}, {"default": ""}
    to = ("--to", "upstream commit (default: its newest)", text)
    tree = [("--staged", "what is staged, for a pre-commit hook", yes), ("--rev", "a commit of the fork instead of its files as they are", text)]
    who = [("what", "ids, paths, folders or globs", {"nargs": "+"}), ("--reason", "why the fork differs", text)]
    name = [("--by", "your name; asked for at a terminal", text), ("--yes", "don't ask", yes)]
    verb("init", "write .forksync: where the fork stands, and its differences as a baseline", ("--upstream", "path or URL", {"required": True}),
         ("--ref", "upstream's branch", {"default": "main"}), ("--branch", "the fork's (default: the current one)", text),
         ("--table", "a translation table to begin with", text), ("--rename", "UPSTREAM=FORK: begin with a plain renaming", text),
         ("--at", "the upstream commit the fork is at (default: found)", text), ("--last", "commits to search", {"type": int, "default": 200}))
    verb("learn", "rules that the remaining differences suggest", ("--least", "occurrences", {"type": int, "default": 2}))
    verb("mirror", "build upstream's mirror in the fork's names", to, ("--check", "is it bit for bit what is there?", yes))
    verb("status", "how far behind, and what differs", ("--exit-code", "10 if behind", yes))
    verb("diff", "all differences from the mirror", ("paths", "", some), ("--unsigned", "without those that are signed", yes), *tree)
    verb("check", "gate 1: fork = mirror + what was signed", *tree)
    verb("plan", "what a sync would do", to)
    verb("sync", "merge upstream on a new branch in a worktree of its own", to, ("--anew", "leave an open sync", yes))
    verb("fix", "let the fixers try each open item once")
    verb("verify", "gate 2: run the gates")
    verb("loop", "sync, fix, measure, until nothing is left", to)
    verb("sign", "accept differences", *who, *name, ("--class", "", {"dest": "klass", **text}), ("--refs", "issues, pull requests", some),
         ("--watch", "PATH or PATH::NAME of the mirror on which this depends", some), ("--pin", "TEST::NAME that must exist", text),
         ("--expires", "YYYY-MM-DD", {"type": date.fromisoformat}))
    verb("retire", "entries that no longer hold", *who, *name)
    verb("rebaseline", "carry the ledger over to a changed table", *name, ("--adopt", "what is new now becomes baseline", yes))
    verb("explain", "why PATH[:LINE] differs", ("place", "", {}))
    verb("report", "the last run", ("--format", "", {"choices": list(report.FORMATS), "default": "md"}), ("--out", "a file", text), ("--coverage", "file of `coverage json`", text))
    return p


def done(p: Pair, verb: str, code: int, result: Result | None, run: Run | None, gates: Sequence[Any] = (), **extra: Any) -> int:
    """Keep and print the outcome."""
    where, upstream = (f"{run.branch} in {run.worktree}", run.new) if run else (str(p.fork.path), p.base.lock.upstream_commit)
    last = report.record(p.state(), verb, code, f"{where} against upstream {upstream[:10]}", result, run.items if run else [], list(gates), extra)
    print(report.summary(last))
    return code


def person(args: argparse.Namespace) -> str:
    """Name of the person who decides. Raises: ForksyncError where there is no terminal and not both --by and --yes."""
    if not (args.by and args.yes) and not sys.stdin.isatty():
        raise ForksyncError(f"`forksync {args.verb}` is for people", "at a terminal, or with --by NAME --yes")
    by = args.by or input("your name: ").strip()
    if not by or (not args.yes and input(f"{args.verb} {' '.join(getattr(args, 'what', []))}? [y/N] ").strip().lower() != "y"):
        raise ForksyncError("nothing was done")
    return str(by)


def act_init(args: argparse.Namespace) -> int:
    branch = args.branch or Git(args.root).out("symbolic-ref", "--short", "HEAD")
    base, frozen = people.init(Path(args.root), args.upstream, args.ref, branch, args.table, args.rename, args.at, args.last)
    kinds = Counter(e.kind for f in base.ledger.values() for e in f.d)
    print(f"{base.folder}: the fork is at upstream {base.lock.upstream_commit[:10]}; {base.lock.baseline} differences in {len(base.ledger)} files are its baseline")
    print("  " + ", ".join(f"{k} {n}" for k, n in kinds.most_common()) + f"; {len(frozen)} files equal an older upstream commit" * bool(frozen))
    print("  next: look at .forksync/config.toml, then git add .forksync && git commit, and forksync check")
    return 0


def act_mirror(p: Pair, args: argparse.Namespace) -> int:
    chain, end = p.chain, p.upstream.commit(args.to) if args.to else p.tip()
    made = again = chain.build(p.upstream.commit(p.base.lock.upstream_commit, LOCKED), end)
    if args.check:
        again = p.chain.build(next(iter(chain.commits)), end, "refs/forksync/check")
        p.fork.run("update-ref", "-d", "refs/forksync/check")
    print(f"refs/forksync/mirror: {len(chain.commits)} commits, {made}" + (", reproduced" if args.check and again == made else ""))
    if chain.missing:
        print(f"  {len(chain.missing)} files are missing in the clone of upstream, first {min(chain.missing)}")
    print(f"  made anew it is {again}: the table or git differs from what made the first\n" * (again != made), end="")
    return int(again != made)


def outline(made: Plan) -> list[str]:
    m, kinds = made.merged, Counter(i.kind for i in made.merged.items)
    text = f"upstream {made.old[:10]}..{made.new[:10]}: {made.commits} commits change {len(m.changed)} files; {len(m.clean)} merge clean, {len(m.kept)} stay as they are"
    back = f"upstream was reset or its history rewritten: {made.gone} commits up to {made.old[:10]}, which the fork follows, are not in {made.new[:10]}"
    kept = [back] * bool(made.gone)
    kept += [f"upstream changed, the fork keeps its own: {', '.join(m.kept[:6])}{' ...' * (len(m.kept) > 6)}"] * bool(m.kept)
    minutes = sum(MINUTES[i.kind] for i in m.items)
    return [text, *kept, f"items: {', '.join(f'{k} {n}' for k, n in kinds.most_common()) or 'none'}; about {minutes} minutes of a person"]


def act_plan(p: Pair, args: argparse.Namespace) -> int:
    made = plan(p, args.to)
    run = Run(p.base.config.pair.branch, str(p.fork.path), made.fork, made.old, made.new, made.merged.items)
    return done(p, "plan", OPEN * any(i.blocks for i in run.items), None, run, notes=outline(made), next="forksync loop" * bool(made.commits))


def act_sync(p: Pair, args: argparse.Namespace) -> int:
    made, run, result = sync(p, args.to, args.anew)
    code = OPEN * bool(result.findings or any(i.blocks for i in run.items))
    return done(p, "sync", code, result, run, notes=outline(made), next=f"forksync loop; or edit in {run.worktree}")


def act_fix(p: Pair, args: argparse.Namespace) -> int:
    run = open_run(p)
    if run is None:
        raise ForksyncError("no sync is open", "run `forksync sync` first")

    def now() -> Result:
        base = knowledge.read(Path(run.worktree))
        return check(base, Git(run.worktree), base.lock.mirror_tree, "HEAD")

    said, result = round_of(p, run, now()), now()
    return done(p, "fix", OPEN * bool(result.findings or any(i.blocks for i in run.items)), result, run, notes=said)


def act_verify(p: Pair, args: argparse.Namespace) -> int:
    run = open_run(p)
    root = Path(run.worktree) if run else p.fork.path
    verdicts = verify(Pair(knowledge.read(root), p.fork, p.upstream, p.ref), root, Git(root).worktree_tree())
    return done(p, "verify", GATE * any(not v.ok for v in verdicts), None, run, verdicts)


def act_loop(p: Pair, args: argparse.Namespace) -> int:
    gates(p.base.config)  # no tests, no loop: said before anything is made
    run = open_run(p) or sync(p, args.to)[1]
    code, why, result, verdicts = loop(p, run, print)
    run.save(p.state())
    todo = f"look at {run.worktree}; sign or edit there, commit, and forksync loop again" if code else f"git merge {run.branch}"
    return done(p, "loop", code, result, run, verdicts, notes=[why], next=todo)


def act_report(p: Pair, args: argparse.Namespace) -> int:
    file, run = p.state() / "last.json", open_run(p) if args.coverage else None
    if not file.exists():
        raise ForksyncError("no run to report", "run `forksync check` first")
    last = json.loads(file.read_text("utf-8"))
    if args.coverage:
        changed = Git(run.worktree).out("diff", "--name-only", run.fork, "HEAD").splitlines() if run else [f["path"] for f in last["findings"]]
        ran = json.loads(Path(args.coverage).read_text("utf-8"))["files"]
        last["unexecuted"] = [x for x in changed if x.endswith(".py") and not ran.get(x, {}).get("executed_lines")]
    text = report.FORMATS[args.format](last)
    print(text) if not args.out else Path(args.out).write_text(text, "utf-8")
    return 0


def act_retire(p: Pair, args: argparse.Namespace) -> int:
    print("retired " + " ".join(people.retire(p.base, args.what, person(args), args.reason)))
    return 0


def act_rebaseline(p: Pair, args: argparse.Namespace) -> int:
    at = p.upstream.commit(p.base.lock.upstream_commit, LOCKED)
    mirror = p.fork.tree_of(p.chain.build(at, at))
    counts = people.rebaseline(p.base, p.fork, mirror, p.fork.worktree_tree(), person(args), args.adopt)
    p.fork.run("update-ref", "refs/forksync/tree", mirror)
    print("carried over {}, retired {}, new in the baseline {}".format(*counts))
    return 0


def fork_tree(p: Pair, args: argparse.Namespace) -> str:
    if getattr(args, "rev", ""):
        return p.fork.tree_of(p.fork.commit(args.rev))
    if getattr(args, "staged", False):
        index = os.environ.get("GIT_INDEX_FILE")  # what git gives to a hook
        return p.fork.out("write-tree", env={"GIT_INDEX_FILE": str(Path(index).resolve())} if index else None)
    return p.fork.worktree_tree()


def act_sign(p: Pair, args: argparse.Namespace) -> int:
    given = {k: getattr(args, k) for k in people.HANDED_ON}
    for path, e in people.sign(p.base, p.fork, p.mirror_tree(), fork_tree(p, args), args.what, person(args), **given):
        print(f"signed {e.id}  {path}: {e.reason}")
    return 0


def act_check(p: Pair, args: argparse.Namespace) -> int:
    tree = fork_tree(p, args)
    result = check(p.base, p.fork, p.mirror_tree(), tree)
    if args.verb == "check":
        notes = [f"baseline fell by {result.fell}: forksync rebaseline keeps it there"] * bool(result.fell)
        hint = "forksync sign PATH --reason WHY, or change the code; forksync explain PATH tells more"
        return done(p, "check", result.code, result, None, notes=notes, next=hint * bool(result.findings))
    if args.verb == "status":
        behind = len(p.chain.path(p.upstream.commit(p.base.lock.upstream_commit, LOCKED), p.tip()))
        classes = Counter(e.klass or e.kind for f in p.base.ledger.values() for e in f.d if e.status == "signed")
        gone = len(p.chain.path(p.tip(), p.upstream.commit(p.base.lock.upstream_commit, LOCKED)))
        away = f"; {gone} of its commits are no longer in upstream, which was reset or rewritten" * bool(gone)
        print(f"{p.fork.path} is at upstream {p.base.lock.upstream_commit[:10]}, {behind} commits behind{away}")
        print(f"  signed {result.signed} ({', '.join(f'{k} {n}' for k, n in classes.most_common())}), baseline {result.baseline}, findings {len(result.findings)}")
        print("\n".join(f"  {n:5d} hunks  {path}" for path, n in Counter(h.path for h in result.hunks).most_common(9)))
        return 10 if args.exit_code and behind else 0
    if args.verb == "explain":
        path, line = (args.place.rsplit(":", 1)) if re.search(r":\d+$", args.place) else (args.place, "0")
        print("\n".join(people.explain(p, result, path, int(line))))
    elif args.verb == "learn":
        files = [e for path, e in p.fork.tree(tree).items() if not path.startswith(f"{FOLDER}/")]
        words = Counter(w for e in files for w in re.findall(r"--[\w-]+|\w+", p.fork.text(e) or ""))
        for old, new, n, share in people.learn(result.hunks, words, args.least):
            kind = "flag" if old.startswith("--") else "word"
            print(f'[[rule]]  # {share:.0%} of its occurrences\nkind = "{kind}"\nfrom = "{old}"\nto = "{new}"\nn = {n}')
    else:
        entries = {(path, e.fp): e for path in p.base.ledger for e in p.base.active(path)}
        for h in (h for h in result.hunks if not args.paths or people.fits(h.path, args.paths)):
            e = entries.get((h.path, h.fp))
            if not (args.unsigned and (h.path, h.fp) in result.held):
                print(f"{h.place}  {h.kind}  {h.id} {f'{e.status}: {e.reason}' if e else 'not in the ledger'}")
                print("".join(f"  - {x}\n" for x in h.old) + "".join(f"  + {x}\n" for x in h.new), end="")
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    args = parser().parse_args(argv)
    try:
        act: Callable[[Pair, argparse.Namespace], int] = globals().get(f"act_{args.verb}", act_check)
        return act_init(args) if args.verb == "init" else act(pair(Path(args.root)), args)
    except (ForksyncError, OSError, ValueError, LookupError, TypeError, AssertionError) as e:  # 1 would be a verdict
        print(f"forksync: {e if isinstance(e, ForksyncError) else f'{type(e).__name__}: {e}'}", file=sys.stderr)
        return e.code if isinstance(e, ForksyncError) else 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
