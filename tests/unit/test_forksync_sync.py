"""Verbs on the toy pair, with real git: mirror, check, plan, sync, sign; what a sync must leave alone."""

import json
import os
import tempfile
import tomllib
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from forksync import base as knowledge
from forksync.git import ForksyncError, Git
from forksync.mirror import Chain
from forksync.sync import merge, open_run, pair
from forksync.table import Table, TableFile, parsed
from tests.unit import forksync_kit as kit
from tests.unit.forksync_kit import commit, edit, git, run, write


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    kit.sign_all(kit.made(folder)[1])
    return folder


@pytest.fixture
def toy(template, tmp_path):
    """(upstream, fork), all differences signed."""
    return kit.copied(template, tmp_path)


def findings(fork, capsys=None):
    run(fork, "check")
    return {(f["kind"], f["path"]) for f in json.loads((fork / ".git/forksync/last.json").read_text())["findings"]}


def test_mirror_is_the_fork_before_it_went_its_own_way(tmp_path):
    """Every kind of file: 50 paths, a link, a mode, binary, CRLF, empty, not UTF-8, blanks and accents in names."""
    _upstream, fork = kit.made(tmp_path, edits=False)
    assert run(fork, "check") == 0
    assert not (fork / ".forksync/ledger").exists(), "nothing differs"
    assert len(Git(fork).tree("HEAD^")) >= 40


def test_mirror_is_deterministic(toy):
    """At once, in two steps, in another repository: the same commits."""
    upstream, fork = toy
    kit.upstream_moves(upstream)
    p = pair(fork)
    start, end = p.upstream.commit(p.base.lock.upstream_commit), p.upstream.commit("main")
    middle = p.upstream.commit("main~2")
    ids = {Chain(p.fork, p.upstream, p.base.table).build(start, end, "refs/forksync/t1")}
    steps = Chain(p.fork, p.upstream, p.base.table)
    steps.build(start, middle, "refs/forksync/t2")
    ids.add(steps.build(start, end, "refs/forksync/t2"))
    other = Git(kit.repository(fork.parent / "other", {"x": "x"}))
    ids.add(Chain(other, p.upstream, p.base.table).build(start, end))
    assert len(ids) == 1
    assert run(fork, "mirror") == 0 and run(fork, "mirror", "--check") == 0


NAMES = st.sampled_from(["acorn/a.py", "acorn/b/c.txt", "docs/acorn.md", "x", "\u00e9 acorn"])
CONTENTS = st.sampled_from([None, "", "acorn\n", "Acorn --acorn-mem\r\n", b"acorn\0", b"caf\xe9 acorn"])


@settings(max_examples=5, deadline=None)
@given(st.lists(st.dictionaries(NAMES, CONTENTS, min_size=1), min_size=1, max_size=4), st.integers(0, 4))
def test_any_history_has_one_mirror(moves, cut):
    """Built at once or in two steps: the same commits; each mirrored tree has the same names and modes as upstream's, translated."""
    with tempfile.TemporaryDirectory() as folder:
        up = kit.repository(Path(folder, "u"), {"keep": "acorn\n"})
        for n, files in enumerate(moves):
            write(up, {k: v for k, v in files.items() if v is not None or (up / k).exists()} | {"keep": f"{n} acorn\n"})
            commit(up, f"move {n}")
        upstream, fork = Git(up), Git(kit.repository(Path(folder, "f"), {"x": ""}))
        table = Table(parsed(TableFile, kit.TABLE, "table"))
        log = upstream.out("rev-list", "--reverse", "HEAD").split()
        once, twice = Chain(fork, upstream, table), Chain(fork, upstream, table)
        made = once.build(log[0], log[-1], "refs/forksync/t1")
        twice.build(log[0], log[min(cut, len(log) - 1)], "refs/forksync/t2")
        assert twice.build(log[0], log[-1], "refs/forksync/t2") == made and once.commits == twice.commits
        for source, mirror in once.commits.items():
            assert {table.path(p): mode for p, (mode, _) in upstream.tree(source).items()} == {p: mode for p, (mode, _) in fork.tree(mirror).items()}
            assert all(b"acorn" not in fork.read(oid).lower() or b"\0" in fork.read(oid) for _, oid in fork.tree(mirror).values())


def test_colliding_paths_are_refused(toy):
    upstream, fork = toy
    write(upstream, {"birch/core.py": "x\n"})
    commit(upstream, "collide")
    with pytest.raises(ForksyncError, match=r"acorn/core.py and birch/core.py both become birch/core.py"):
        p = pair(fork)
        p.chain.build(p.base.lock.upstream_commit, p.upstream.commit("main"))


def test_a_blob_that_the_clone_lacks_is_opaque(tmp_path):
    upstream = kit.repository(tmp_path / "u", {"big.txt": "acorn\n" * 9, "a.txt": "acorn\n"})
    oid = git(upstream, "rev-parse", "HEAD:big.txt")
    os.remove(upstream / ".git/objects" / oid[:2] / oid[2:])
    fork = Git(kit.repository(tmp_path / "f", {"x": ""}))
    chain = Chain(fork, Git(upstream), Table(TableFile()))
    at = Git(upstream).commit("HEAD")
    tree = chain.build(at, at)
    assert chain.missing == {"big.txt"} and b"is missing" in fork.read(fork.tree(tree)["big.txt"][1])


def test_check_sees_what_is_staged_or_not(toy, capsys):
    _upstream, fork = toy
    edit(fork, "birch/part_9.py", "    return x + 9\n", "    return x + 9.5\n")
    assert run(fork, "check") == 1 and run(fork, "check", "--staged") == 0 and run(fork, "check", "--rev", "HEAD") == 0
    out = capsys.readouterr().out
    assert "birch/part_9.py:15  +1 -1: return x + 9.5" in out and "NOT SIGNED" in out and "next: forksync sign" in out
    git(fork, "add", "-A")
    assert run(fork, "check", "--staged") == 1
    git(fork, "checkout", "-q", "HEAD", "--", ".")
    edit(fork, "birch/engine.py", kit.ENGINE_NEW, kit.ENGINE_OLD)
    assert run(fork, "check") == 6, "a signed edit is gone"


def test_pre_commit_hook_stops_a_commit(toy):
    _upstream, fork = toy
    import subprocess
    import sys

    hook = fork / ".git/hooks/pre-commit"
    hook.write_text(f"#!/bin/sh\nexec {sys.executable} -m forksync.cli check --staged\n")
    hook.chmod(0o755)
    edit(fork, "birch/part_9.py", "    return x + 9\n", "    return x + 9.5\n")
    root = str(Path(__file__).parents[2])
    done = subprocess.run(["git", "-C", fork, "commit", "-qam", "x"], capture_output=True, text=True, env=os.environ | {"PYTHONPATH": root})
    assert done.returncode and "birch/part_9.py" in done.stdout + done.stderr


def test_new_files_and_baseline(tmp_path):
    _upstream, fork = kit.made(tmp_path)
    assert findings(fork) == set()
    write(fork, {"birch/extra.py": "X = 1\n"})
    assert findings(fork) == {("new", "birch/extra.py")}
    (fork / "birch/extra.py").unlink()
    edit(fork, "birch/engine.py", kit.ENGINE_NEW, kit.ENGINE_OLD)
    assert findings(fork) == set(), "a baseline difference that goes is no loss"
    assert run(fork, "rebaseline", "--by", "ann", "--yes") == 0
    assert knowledge.read(fork).lock.baseline == 9
    edit(fork, "birch/engine.py", kit.ENGINE_OLD, kit.ENGINE_NEW)
    assert findings(fork) == {("new", "birch/engine.py")}, "the baseline may only fall"


def test_plan_and_sync_leave_the_fork_alone(toy, capsys):
    upstream, fork = toy
    kit.upstream_moves(upstream)
    before = (git(fork, "for-each-ref", "refs/heads"), git(fork, "status", "--porcelain"), git(fork, "rev-parse", "HEAD"), git(upstream, "for-each-ref"))
    assert run(fork, "plan") == 3 and git(fork, "for-each-ref", "refs/heads") == before[0]
    assert run(fork, "status", "--exit-code") == 10 and run(fork, "status") == 0
    assert run(fork, "sync") == 3
    new = git(upstream, "rev-parse", "main")[:10]
    branches = git(fork, "for-each-ref", "refs/heads")
    assert before[0] in branches and f"refs/heads/forksync/{new}" in branches
    assert (git(fork, "status", "--porcelain"), git(fork, "rev-parse", "HEAD"), git(upstream, "for-each-ref")) == before[1:]
    work = fork / f".git/forksync/worktrees/forksync-{new}"
    show = lambda name: git(work, "show", f"HEAD:{name}")  # noqa: E731
    assert "FRESH = 'birch'" in show("birch/fresh.py") and "line three of birch" in show("docs/new_name.md")
    assert git(work, "ls-tree", "HEAD", "link", "run.sh").split()[0::4][:2] == ["120000", "100755"] and show("link") == "birch/engine.py"
    assert "birch.core.late(x)" in show("birch/engine.py") and "drain()" in show("birch/engine.py")
    names = git(work, "ls-tree", "-r", "--name-only", "HEAD").splitlines()
    assert "docs/gone_fork.md" not in names, "a signed deletion stays"
    assert not {"docs/gone_up.md", "docs/old_name.md"} & set(names)
    assert "<<<<" not in show("birch/pair_a.py") and "return x + 126.0" in show("birch/pair_a.py"), "conflicts keep the fork's side"
    assert tomllib.loads(show(".forksync/lock.toml"))["upstream_commit"] == git(upstream, "rev-parse", "main")
    items = json.loads((fork / ".git/forksync/run.json").read_text())["items"]
    blocking = [i for i in items if i["kind"] == "content"]
    assert [i["path"] for i in blocking] == ["birch/pair_a.py", "birch/part_4.py"]
    assert [c["subject"] for c in blocking[0]["commits"]] == ["scale both halves"], "attributed to the commit that touched it"
    assert run(fork, "sync") == 2, "one at a time"
    assert "a sync is open" in capsys.readouterr().err


def test_the_ledger_replays_a_signed_edit_and_a_person_signs_the_rest(toy, capsys):
    upstream, fork = toy
    kit.upstream_moves(upstream)
    kit.configure(fork, kit.GREEN + '[[fixer]]\nkind = "rules"\n')
    assert run(fork, "loop") == 5
    assert "oscillation" not in capsys.readouterr().out
    work = next((fork / ".git/forksync/worktrees").iterdir())
    assert "part 4, faster\n    y = x + 12\n    return y" in (work / "birch/part_4.py").read_text(), "upstream's words, the fork's edit"
    edit(work, "birch/pair_a.py", "    return x + 126.0\n", "    return (x + 126.0) * 2\n")
    assert run(fork, "loop") == run(fork, "sync", "--anew") == 7 and "(x + 126.0) * 2" in (work / "birch/pair_a.py").read_text(), "nothing of a person's is reset"
    assert run(work, "sign", "birch/pair_a.py", "--by", "ann", "--yes") == 0, "the reason is handed on"
    commit(work, "by hand")
    assert run(fork, "loop") == 0
    assert "git merge forksync/" in capsys.readouterr().out
    head = git(fork, "rev-parse", "HEAD")
    git(fork, "merge", "-q", "--ff-only", git(work, "rev-parse", "HEAD"))
    assert run(fork, "check") == 0 and git(fork, "rev-parse", "HEAD") != head
    assert run(fork, "plan") == 0, "nothing left"


def test_loop_stops_when_the_forks_branch_moves(toy):
    upstream, fork = toy
    kit.upstream_moves(upstream)
    assert run(fork, "sync") == 3
    write(fork, {"birch/part_1.py": (fork / "birch/part_1.py").read_text() + "# more\n"})
    commit(fork, "meanwhile")
    assert run(fork, "fix") == 6


def test_a_run_that_is_killed_while_it_is_saved_goes_on(toy, monkeypatch):
    upstream, fork = toy
    kit.upstream_moves(upstream)
    assert run(fork, "sync") == 3
    p, write_text = pair(fork), Path.write_text
    before = open_run(p)

    def killed(file, text, *args):
        write_text(file, text[: len(text) // 2], *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "write_text", killed)
    with pytest.raises(KeyboardInterrupt):
        before.save(p.state())
    assert open_run(p) == before


def test_kinds_of_conflicts(toy):
    """Both added, deleted on either side, binary, link, and a folder where a file was: the fork's version stays, each is an item."""
    upstream, fork = toy
    write(upstream, {"acorn/both.py": "A = 1\nUP = 2\n", "img/logo.png": kit.PNG + b"2", "docs/mode.sh": None, "with space.txt": None})
    write(upstream, {"acorn/part_3.py": kit.module(3) + "# acorn end\n", "with space.txt/inside.txt": "acorn\n"})
    commit(upstream, "many")
    write(fork, {"birch/both.py": "A = 1\nFORK = 3\n", "with space.txt": "birch ours\n"})
    (fork / "docs/mode.sh").write_text("echo birch ours\n")
    tree = commit(fork, "ours")
    p = pair(fork)
    old, new = p.base.lock.upstream_commit, p.upstream.commit("main")
    chain = p.chain
    made = merge(p.fork, f"{tree}^{{tree}}", chain.build(old, old), chain.build(old, new))
    found = {(i.path, i.kind) for i in made.items}
    assert {("birch/both.py", "both-added"), ("img/logo.png", "binary"), ("docs/mode.sh", "upstream-deleted")} <= found
    after = p.fork.tree(made.tree)
    assert "docs/mode.sh" in after and p.fork.read(after["img/logo.png"][1]) == kit.PNG.replace(b"acorn", b"birch")
    assert b"FORK = 3" in p.fork.read(after["birch/both.py"][1]) and b"<<<" not in p.fork.read(after["birch/both.py"][1])
    assert not [n for n in after if "~" in n]
    assert "birch/part_3.py" in made.clean


def test_changing_the_table_needs_a_rebaseline(toy, capsys):
    _upstream, fork = toy
    file = fork / ".forksync/translation.toml"
    file.write_text(file.read_text().replace('to = "--birch-memory"', 'to = "--birch-ram"'))
    assert run(fork, "check") == 1 and "run `forksync rebaseline`, in a commit of its own" in capsys.readouterr().out
    assert run(fork, "rebaseline", "--by", "ann", "--yes") == 0
    left = findings(fork)
    assert {k for k, _ in left} == {"new"} and len(left) == 35 and ("new", "birch/engine.py") in left, "the table's new flag is drift until somebody signs or edits"
    for path in [*(fork / "birch").glob("*.py"), fork / "run.sh"]:
        path.write_text(path.read_text().replace("--birch-memory", "--birch-ram"))
    assert findings(fork) == set()
    assert knowledge.read(fork).faults() == []


def test_policies_and_coupled_hunks(toy):
    upstream, fork = toy
    assert run(fork, "sign", "birch/engine.py", "--by", "ann", "--yes", "--reason", "x") == 2, "it is signed already"
    edit(fork, "birch/pair_b.py", "    return x + 301\n", "    return x + 301.0\n")
    ties = ["--watch", "birch/part_0.py::step_0", "--pin", "tests/test_core.py::test_steps"]
    assert run(fork, "sign", "birch/pair_b.py", "--by", "ann", "--yes", "--reason", "goes with pair_a", *ties) == 0
    config = fork / ".forksync/config.toml"
    config.write_text(config.read_text() + '[[policy]]\nglob = "docs/*"\nmode = "own"\n[[policy]]\nglob = "birch/part_0.py"\nmode = "review"\n')
    commit(fork, "policies")
    assert findings(fork) == set()
    kit.upstream_moves(upstream)
    assert run(fork, "sync") == 3
    last = json.loads((fork / ".git/forksync/last.json").read_text())
    assert ("watched", "birch/pair_b.py") in {(f["kind"], f["path"]) for f in last["findings"]}, "merged clean, and still to be looked at"
    assert ("birch/part_0.py", "review") in {(i["path"], i["kind"]) for i in last["items"]}
    work = next((fork / ".git/forksync/worktrees").iterdir())
    assert (work / "docs/gone_up.md").exists(), "own: upstream's deletion is only told"


def test_sign_is_for_people(toy, capsys):
    _upstream, fork = toy
    write(fork, {"birch/extra.py": "X = 1\n"})
    assert run(fork, "sign", "birch/extra.py", "--reason", "x") == 2
    assert "is for people" in capsys.readouterr().err
    assert run(fork, "sign", "birch/extra.py", "--by", "ann", "--yes") == 2
    assert "needs a --reason" in capsys.readouterr().err
    assert run(fork, "retire", "S-nothing", "--by", "ann", "--yes") == 2


def test_learn_and_explain_and_reports(toy, capsys):
    _upstream, fork = toy
    for n in range(5, 9):
        path = fork / f"birch/part_{n}.py"
        path.write_text(path.read_text().replace("step_1(", "stage_1("))
    capsys.readouterr()
    assert run(fork, "learn") == 0
    assert 'from = "step_1"\nto = "stage_1"\nn = 4' in capsys.readouterr().out
    assert run(fork, "explain", "birch/engine.py:19") == 0
    assert "signed by ann" in capsys.readouterr().out
    assert run(fork, "diff", "birch/part_5.py") == 0
    assert "  + def stage_1(x):" in capsys.readouterr().out
    assert run(fork, "check") == 1
    capsys.readouterr()
    assert run(fork, "report", "--format", "sarif") == 0
    sarif = json.loads(capsys.readouterr().out)
    assert len(sarif["runs"][0]["results"]) == 4 and sarif["runs"][0]["results"][0]["locations"][0]["physicalLocation"]["region"]["startLine"] > 1
    assert run(fork, "report", "--format", "junit") == 0
    from xml.etree import ElementTree

    assert ElementTree.fromstring(capsys.readouterr().out).get("failures") == "1"
    assert run(fork, "report", "--format", "md", "--out", str(fork / "r.md")) == 0
    assert "| new | birch/part_5.py:13 |" in (fork / "r.md").read_text()


def test_faults_of_files_are_one_line(toy, capsys):
    _upstream, fork = toy
    config = fork / ".forksync/config.toml"
    text = config.read_text()
    config.write_text(text.replace('branch = "main"', 'branch = "main"\nbrunch = 1'))
    assert run(fork, "check") == 2 and "config.toml: pair.brunch: no such key, did you mean branch?" in capsys.readouterr().err
    config.write_text(text.replace("../acorn", "../nowhere"))
    assert run(fork, "status") == 7
    config.write_text(text)
    assert run(fork.parent, "check") == 7 and "is no git repository" in capsys.readouterr().err
    assert run(fork, "sync", "--to", "no-such-commit") == 7
