"""The `forksync` command. Exit codes: 0 fine, 1 unsigned differences, 2 usage, 3 work left, 4 gate 2, 5 not converged, 6 safety, 7 environment."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections import Counter
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

from forksync import base as knowledge
from forksync import people, report
from forksync.base import FOLDER
from forksync.fix import round_of
from forksync.gate import Result, check
from forksync.git import GATE, OPEN, ForksyncError, Git
from forksync.hunks import between
from forksync.sync import Pair, Plan, Run, fetched, open_run, pair, plan, sync
from forksync.verify import loop, unexecuted, verify

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

    def verb(name: str, about: str, *options: tuple[str, dict[str, Any]]) -> None:
        s = sub.add_parser(name, help=about, description=about)
        for flag, how in options:
            s.add_argument(*flag.split(), **how)

    many: dict[str, Any] = {"nargs": "*", "default": []}
    flag: dict[str, Any] = {"action": "store_true"}
    to = ("--to", {"default": "", "metavar": "COMMIT", "help": "upstream commit (default: its newest)"})
    tree = [("--staged", flag | {"help": "what is staged, for a pre-commit hook"}), ("--rev", {"default": "", "help": "a commit of the fork instead of its files as they are"})]
    who = [("--by", {"default": "", "help": "your name; asked for at a terminal"}), ("--yes", flag | {"help": "don't ask"}), ("--reason", {"default": ""})]
    verb("init", "write .forksync: where the fork stands, and its differences as a baseline",
         ("--upstream", {"required": True, "help": "path or URL of upstream's repository"}), ("--ref", {"default": "main"}), ("--branch", {"default": ""}),
         ("--table", {"default": "", "help": "a translation table to begin with"}), ("--rename", {"default": "", "metavar": "UPSTREAM=FORK"}),
         ("--at", {"default": "", "help": "the upstream commit the fork is at (default: found)"}), ("--last", {"type": int, "default": 200, "help": "commits to search"}))
    verb("learn", "rules that the remaining differences suggest", ("--least", {"type": int, "default": 2}))
    verb("mirror", "build upstream's mirror in the fork's names", to, ("--check", flag | {"help": "is it bit for bit what is there?"}))
    verb("status", "how far behind, and what differs", ("--exit-code", flag | {"help": "10 if behind"}))
    verb("diff", "all differences from the mirror", ("paths", many), ("--unsigned", flag), *tree)
    verb("check", "gate 1: fork = mirror + what was signed", *tree)
    verb("plan", "what a sync would do", to)
    verb("sync", "merge upstream on a new branch in a worktree of its own", to, ("--anew", flag | {"help": "leave an open sync"}))
    verb("fix", "let the fixers try each open item once")
    verb("verify", "gate 2: run the gates")
    verb("loop", "sync, fix, measure, until nothing is left", to)
    verb("sign", "accept differences, by path, glob or id", ("what", {"nargs": "+"}), *who, ("--class", {"dest": "klass", "default": ""}), ("--refs", many),
         ("--watch", many | {"help": "PATH or PATH::NAME of the mirror on which this depends"}), ("--pin", {"default": "", "help": "TEST::NAME that must exist"}),
         ("--expires", {"type": date.fromisoformat, "default": None, "metavar": "YYYY-MM-DD"}))
    verb("retire", "entries that no longer hold", ("what", {"nargs": "+"}), *who)
    verb("rebaseline", "carry the ledger over to a changed table", *who, ("--adopt", flag | {"help": "what is new now becomes baseline"}))
    verb("explain", "why PATH[:LINE] differs", ("place", {}))
    verb("report", "the last run", ("--format", {"choices": list(report.FORMATS), "default": "md"}), ("--out", {"default": ""}), ("--coverage", {"default": "", "help": "file of `coverage json`"}))
    return p


def fork_tree(p: Pair, args: argparse.Namespace) -> str:
    if getattr(args, "rev", ""):
        return p.fork.out("rev-parse", f"{p.fork.commit(args.rev)}^{{tree}}")
    if getattr(args, "staged", False):
        index = os.environ.get("GIT_INDEX_FILE")  # what git gives to a hook
        return p.fork.out("write-tree", env={"GIT_INDEX_FILE": str(Path(index).resolve())} if index else None)
    return p.fork.worktree_tree()


def done(p: Pair, verb: str, code: int, result: Result | None, run: Run | None, gates: list[Any], **extra: Any) -> int:
    """Keep and print the outcome."""
    lock = knowledge.read(Path(run.worktree)).lock if run else p.base.lock
    where = f"{run.branch} in {run.worktree}" if run else str(p.fork.path)
    last = report.record(p.state(), verb, code, f"{where} against upstream {lock.upstream_commit[:10]}", result, run.items if run else [], gates, extra)
    print(report.summary(last))
    return code


def person(args: argparse.Namespace, what: str) -> str:
    """Name of the person who decides. Raises: ForksyncError where there is no terminal and not both --by and --yes."""
    if args.by and args.yes:
        return str(args.by)
    if not sys.stdin.isatty():
        raise ForksyncError(f"`forksync {args.verb}` is for people", "at a terminal, or with --by NAME --yes")
    by = args.by or input("your name: ").strip()
    if not by or (not args.yes and input(f"{what}? [y/N] ").strip().lower() != "y"):
        raise ForksyncError("nothing was done")
    return by


def run_verb(args: argparse.Namespace) -> int:
    root = Path(args.root)
    if args.verb == "init":
        branch = args.branch or Git(root).out("rev-parse", "--abbrev-ref", "HEAD")
        base, frozen = people.init(root, args.upstream, args.ref, branch, args.table, args.rename, args.at, args.last)
        kinds = Counter(e.kind for f in base.ledger.values() for e in f.d)
        print(f"{base.folder}: the fork is at upstream {base.lock.upstream_commit[:10]}; {base.lock.baseline} differences in {len(base.ledger)} files are its baseline")
        print("  " + ", ".join(f"{k} {n}" for k, n in kinds.most_common()) + (f"; {len(frozen)} files equal an older upstream commit" if frozen else ""))
        print("  next: look at .forksync/config.toml, then git add .forksync && git commit, and forksync check")
        return 0
    p = pair(root)
    if args.verb == "report":
        return show_report(p, args)
    if args.verb in ("plan", "sync", "fix", "verify", "loop"):
        return ACTIONS[args.verb](p, args)
    if args.verb == "mirror":
        return mirror(p, args)
    if args.verb == "retire":
        print("retired " + " ".join(people.retire(p.base, args.what, person(args, f"retire {' '.join(args.what)}"), args.reason)))
        return 0
    if args.verb == "rebaseline":
        new = p.chain.tree(p.upstream.commit(p.base.lock.upstream_commit))
        counts = people.rebaseline(p.base, p.fork, new, p.fork.worktree_tree(), person(args, "rebaseline the ledger"), args.adopt)
        p.fork.run("update-ref", "refs/forksync/tree", new)
        print("carried over {}, retired {}, new in the baseline {}".format(*counts))
        return 0
    tree = fork_tree(p, args)
    if args.verb == "sign":
        fields = {k: getattr(args, k) for k in ("reason", "klass", "refs", "watch", "pin", "expires")}
        signed = people.sign(p.base, p.fork, p.mirror_tree(), tree, args.what, person(args, f"sign {' '.join(args.what)}"), **fields)
        print("\n".join(f"signed {e.id}  {path}: {e.reason}" for path, e in signed))
        return 0
    result = check(p.base, p.fork, p.mirror_tree(), tree)
    if args.verb == "check":
        notes = [f"baseline fell by {result.fell}: forksync rebaseline keeps it there"] * bool(result.fell)
        hint = "forksync sign PATH --reason WHY, or change the code; forksync explain PATH tells more" if result.findings else ""
        return done(p, "check", result.code, result, None, [], notes=notes, next=hint)
    return {"status": status, "diff": differences, "learn": learned, "explain": explained}[args.verb](p, args, result, tree)


def mirror(p: Pair, args: argparse.Namespace) -> int:
    start = p.upstream.commit(p.base.lock.upstream_commit)
    end = p.upstream.commit(args.to) if args.to else fetched(p)
    chain = p.chain
    made = chain.build(start, end)
    again = p.chain.build(next(iter(chain.commits)), end, "refs/forksync/check") if args.check else made
    if args.check:
        p.fork.run("update-ref", "-d", "refs/forksync/check")
    print(f"refs/forksync/mirror: {len(chain.commits)} commits, {made}" + (", reproduced" if args.check and again == made else ""))
    if chain.missing:
        print(f"  {len(chain.missing)} files are missing in the clone of upstream, first {min(chain.missing)}")
    if again != made:
        print(f"  made anew it is {again}: the table or git differs from what made the first")
    return int(again != made)


def outline(made: Plan) -> list[str]:
    m = made.merged
    kinds = ", ".join(f"{k} {n}" for k, n in Counter(i.kind for i in m.items).most_common())
    kept = [f"upstream changed, the fork keeps its own: {', '.join(m.kept[:6])}{' ...' if len(m.kept) > 6 else ''}"] * bool(m.kept)
    text = f"upstream {made.old[:10]}..{made.new[:10]}: {made.commits} commits change {len(m.changed)} files; {len(m.clean)} merge clean, {len(m.kept)} stay as they are"
    return [text, *kept, f"items: {kinds or 'none'}; about {made.minutes()} minutes of a person"]


def act_plan(p: Pair, args: argparse.Namespace) -> int:
    made = plan(p, args.to)
    work = Run(p.base.config.pair.branch, str(p.fork.path), made.fork, made.old, made.new, made.merged.items)
    code = OPEN if any(i.blocks for i in made.merged.items) else 0
    return done(p, "plan", code, None, work, [], notes=outline(made), next="forksync loop" if made.commits else "")


def act_sync(p: Pair, args: argparse.Namespace) -> int:
    made, run, result = sync(p, args.to, args.anew)
    code = OPEN if result.findings or any(i.blocks for i in run.items) else 0
    return done(p, "sync", code, result, run, [], notes=outline(made), next=f"forksync loop; or edit in {run.worktree}")


def needed(p: Pair) -> Run:
    run = open_run(p)
    if run is None:
        raise ForksyncError("no sync is open", "run `forksync sync` first")
    return run


def act_fix(p: Pair, args: argparse.Namespace) -> int:
    run = needed(p)
    base, here = knowledge.read(Path(run.worktree)), Git(run.worktree)
    said = round_of(p, run, check(base, here, base.lock.mirror_tree, "HEAD"))
    base = knowledge.read(Path(run.worktree))
    result = check(base, here, base.lock.mirror_tree, "HEAD")
    return done(p, "fix", OPEN if result.findings or any(i.blocks for i in run.items) else 0, result, run, [], notes=said)


def act_verify(p: Pair, args: argparse.Namespace) -> int:
    run = open_run(p)
    if run:
        base = knowledge.read(Path(run.worktree))
        verdicts = verify(Pair(base, p.fork, p.upstream, p.ref), Path(run.worktree), Git(run.worktree).worktree_tree())
    else:
        verdicts = verify(p, Path(p.fork.path), p.fork.worktree_tree())
    return done(p, "verify", 0 if all(v.ok for v in verdicts) else GATE, None, run, verdicts)


def act_loop(p: Pair, args: argparse.Namespace) -> int:
    run = open_run(p) or sync(p, args.to)[1]
    code, why, result, verdicts = loop(p, run, print)
    run.save(p.state())
    todo = f"git merge {run.branch}" if not code else f"look at {run.worktree}; sign or edit there, commit, and forksync loop again"
    return done(p, "loop", code, result, run, verdicts, notes=[why], next=todo)


ACTIONS = {"plan": act_plan, "sync": act_sync, "fix": act_fix, "verify": act_verify, "loop": act_loop}


def status(p: Pair, args: argparse.Namespace, result: Result, tree: str) -> int:
    tip = fetched(p)
    behind = len(p.chain.path(p.upstream.commit(p.base.lock.upstream_commit), tip))
    print(f"{p.fork.path} is at upstream {p.base.lock.upstream_commit[:10]}, {behind} commits behind {tip[:10]}")
    classes = Counter(e.klass or e.kind for f in p.base.ledger.values() for e in f.d if e.status == "signed")
    print(f"  signed {result.signed}: " + (", ".join(f"{k} {n}" for k, n in classes.most_common()) or "none") + f"; baseline {result.baseline}; findings {len(result.findings)}")
    top = Counter({path: n for path, n in Counter(h.path for h in result.hunks).items()}).most_common(9)
    print("\n".join(f"  {n:5d} hunks  {path}" for path, n in top))
    return 10 if args.exit_code and behind else 0


def differences(p: Pair, args: argparse.Namespace, result: Result, tree: str) -> int:
    shown = people.globbed({h.path for h in result.hunks}, args.paths) if args.paths else None
    for h in result.hunks:
        if (shown is None or h.path in shown) and not (args.unsigned and (h.path, h.fp) in result.held):
            e = next((e for e in p.base.active(h.path) if e.fp == h.fp), None)
            print(f"{h.place}  {h.kind}  {e.id + ' ' + e.status + ': ' + e.reason if e else 'S-' + h.fp[:8] + ' not in the ledger'}")
            print("".join(f"  - {x}\n" for x in h.old) + "".join(f"  + {x}\n" for x in h.new), end="")
    return 0


def learned(p: Pair, args: argparse.Namespace, result: Result, tree: str) -> int:
    words: Counter[str] = Counter()
    for path, (mode, oid) in p.fork.tree(tree).items():
        if mode != "160000" and not path.startswith(f"{FOLDER}/") and b"\0" not in (data := p.fork.read(oid) or b""):
            words.update(re.findall(r"--[\w-]+|\w+", data.decode("utf-8", "replace")))
    rules = people.learn(between(p.fork, p.mirror_tree(), tree), words, args.least)
    for old, new, n, share in rules:
        kind = "flag" if old.startswith("--") else "word"
        print(f'[[rule]]  # {share:.0%} of its occurrences\nkind = "{kind}"\nfrom = "{old}"\nto = "{new}"\nn = {n}')
    return 0


def explained(p: Pair, args: argparse.Namespace, result: Result, tree: str) -> int:
    path, _, line = args.place.rpartition(":") if re.search(r":\d+$", args.place) else (args.place, "", "0")
    print("\n".join(people.explain(p, result, path, int(line))))
    return 0


def show_report(p: Pair, args: argparse.Namespace) -> int:
    import json

    file = p.state() / "last.json"
    if not file.exists():
        raise ForksyncError("no run to report", "run `forksync check` first")
    last = json.loads(file.read_text("utf-8"))
    if args.coverage:
        run = open_run(p)
        changed = Git(run.worktree).out("diff", "--name-only", run.fork, "HEAD").splitlines() if run else [f["path"] for f in last["findings"]]
        last["unexecuted"] = unexecuted(Path(args.coverage), changed)
    text = report.FORMATS[args.format](last)
    if args.out:
        Path(args.out).write_text(text, "utf-8")
    else:
        print(text)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    try:
        return run_verb(parser().parse_args(argv))
    except ForksyncError as e:
        print(f"forksync: {e}", file=sys.stderr)
        return e.code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
