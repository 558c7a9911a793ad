"""A cleaned repository holds nothing of the fix, and the verifier finds every way in which one could."""

import io
import os
import py_compile
import shutil
import subprocess
import tarfile
import zipfile
from pathlib import Path

import pytest

from vime.agents.tasks import history

BASE = "def total(values):\n    out = 0\n    for v in values[1:]:\n        out += v\n    return out\n"
FIXED = "def total(values):\n    amount_of_all_values = sum(values)\n    return amount_of_all_values\n"
TEST = "from bank.ledger import total\n\n\ndef test_total_counts_the_first_value():\n    assert total([2, 3]) == 5\n"


def git(folder, *args, **kw):
    who = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
        "GIT_CONFIG_GLOBAL": os.devnull,
    }
    return subprocess.run(["git", "-C", str(folder), *args], check=True, capture_output=True, text=True, env=os.environ | who, **kw).stdout.strip()


def commit(folder, files, message):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", message)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def upstream(tmp_path_factory):
    """A project whose bug is fixed after base, tagged, branched and released."""
    repo = tmp_path_factory.mktemp("up") / "bank"
    repo.mkdir()
    git(repo, "init", "-qb", "main")
    first = commit(repo, {"bank/__init__.py": "", "bank/ledger.py": BASE.replace("[1:]", "[2:]")}, "first")
    base = commit(repo, {"bank/ledger.py": BASE}, "base")
    fix = commit(repo, {"bank/ledger.py": FIXED, "tests/test_ledger.py": TEST}, "fix: count the first value")
    git(repo, "tag", "v2")
    git(repo, "branch", "release")
    patches = [git(repo, "diff", base, fix, "--", p) + "\n" for p in ("bank", "tests")]
    return repo, first, base, fix, patches


@pytest.fixture
def tree(upstream, tmp_path):
    history.clean(upstream[0], upstream[2], tmp_path / "tree")
    return tmp_path / "tree"


def test_clean_keeps_the_past_and_nothing_of_the_fix(upstream, tree):
    _, first, base, fix, patches = upstream
    assert history.verify(tree, patches, fix) == []
    assert git(tree, "rev-list", "--all").split() == [base, first]
    assert git(tree, "status", "--porcelain") == ""


def test_a_plain_clone_with_everything_deleted_still_leaks(upstream, tmp_path):
    """What is usually done: clone, reset, drop refs and logs. Without gc the objects stay."""
    repo, _, base, fix, patches = upstream
    git(tmp_path, "clone", "-q", str(repo), "c")
    git(tmp_path / "c", "reset", "-q", "--hard", base)
    git(tmp_path / "c", "remote", "remove", "origin")
    git(tmp_path / "c", "tag", "-d", "v2")
    git(tmp_path / "c", "reflog", "expire", "--expire=now", "--all")
    found = history.verify(tmp_path / "c", patches, fix)
    assert any(fix in leak for leak in found)
    assert any("ledger.py as fixed" in leak for leak in found) and any("test_ledger.py as fixed" in leak for leak in found)


def fetched(tree, up):
    git(tree, "fetch", "-q", "--no-tags", "--no-write-fetch-head", str(up[0]), f"{up[3]}:refs/heads/x")
    git(tree, "update-ref", "-d", "refs/heads/x")
    shutil.rmtree(tree / ".git/logs", ignore_errors=True)


def reffed(ref):
    def plant(tree, up, _):
        fetched(tree, up)
        git(tree, "update-ref", ref, up[3])

    return plant


def packed_ref(tree, up, _):
    reffed("refs/remotes/origin/main")(tree, up, _)
    git(tree, "pack-refs", "--all")


def reflog(tree, up, _):
    fetched(tree, up)
    git(tree, "config", "core.logAllRefUpdates", "true")
    git(tree, "reset", "-q", "--hard", up[3])
    git(tree, "reset", "-q", "--hard", up[2])
    (tree / ".git/ORIG_HEAD").unlink()


def stash(tree, up, _):
    (tree / "bank/ledger.py").write_text(FIXED)
    git(tree, "stash", "-q")


def note(tree, up, _):
    git(tree, "notes", "add", "-m", FIXED)


def fetch_head(tree, up, _):
    git(tree, "fetch", "-q", "--no-tags", str(up[0]), up[3])


def alternates(tree, up, _):
    (tree / ".git/objects/info").mkdir(exist_ok=True)
    (tree / ".git/objects/info/alternates").write_text(f"{up[0]}/.git/objects\n")


def graft(tree, up, _):
    (tree / ".git/info").mkdir(exist_ok=True)
    (tree / ".git/info/grafts").write_text(f"{up[2]}\n")


def worktree(tree, up, at):
    fetched(tree, up)
    git(tree, "worktree", "add", "-q", "--detach", str(at / "other"), up[3])


def hook(tree, up, _):
    (tree / ".git/hooks").mkdir(exist_ok=True)
    (tree / ".git/hooks/post-checkout").write_text(f"#!/bin/sh\ncp {up[0]}/bank/ledger.py bank/\n")


def promisor(tree, up, _):
    git(tree, "fetch", "-q", "--no-tags", "--no-write-fetch-head", str(up[0]), up[2])
    pack = git(tree, "pack-objects", "-q", ".git/objects/pack/pack", input=f"{up[2]}\n")
    (tree / f".git/objects/pack/pack-{pack}.promisor").write_text("")


def remote(tree, up, _):
    git(tree, "remote", "add", "origin", str(up[0]))


def loose(tree, up, _):
    git(tree, "hash-object", "-w", "--stdin", input=FIXED)


def site_packages(tree, up, at):
    (at / "look/bank").mkdir(parents=True)
    (at / "look/bank/ledger.py").write_text("# of a later release\n" + FIXED + "\n\ndef later():\n    pass\n")


def wheel(tree, up, at):
    (at / "look").mkdir()
    with zipfile.ZipFile(at / "look/bank-2-py3-none-any.whl", "w") as z:
        z.writestr("bank/ledger.py", FIXED)


def pip_cache(tree, up, at):
    wheel(tree, up, at)
    whl = at / "look/bank-2-py3-none-any.whl"
    (at / "look/3f9a.body").write_bytes(b"cc=4,\x82\xa8response" + whl.read_bytes())
    whl.unlink()


def sdist(tree, up, at):
    (at / "look").mkdir()
    with tarfile.open(at / "look/bank-2.tar.gz", "w:gz") as t:
        member = tarfile.TarInfo("bank-2/tests/test_ledger.py")
        member.size = len(TEST)
        t.addfile(member, io.BytesIO(TEST.encode()))


def bytecode(tree, up, at):
    (at / "ledger.py").write_text(FIXED)
    py_compile.compile(str(at / "ledger.py"), cfile=str(tree / "bank/__pycache__/ledger.cpython-311.pyc"))


def build_folder(tree, up, _):
    (tree / "build/lib/bank").mkdir(parents=True)
    (tree / "build/lib/bank/ledger.py").write_text(FIXED)


PLANTS = {
    "branch": (reffed("refs/heads/release"), "ref: refs/heads/release"), "tag": (reffed("refs/tags/v2"), "ref: refs/tags/v2"),
    "packed ref": (packed_ref, "ref: refs/remotes"), "replaced object": (reffed("refs/replace/" + "1" * 40), "ref: refs/replace"),
    "reflog": (reflog, "git state: logs/HEAD"), "stash": (stash, "ref: refs/stash"), "notes": (note, "ref: refs/notes"),
    "FETCH_HEAD": (fetch_head, "git state: FETCH_HEAD"), "alternates": (alternates, "git state: objects/info/alternates"),
    "grafts": (graft, "git state: info/grafts"), "worktree": (worktree, "git state: worktrees/"), "hook": (hook, "git state: hooks/post-checkout"),
    "promisor pack": (promisor, ".promisor"), "remote": (remote, "git config: remote.origin"), "loose object": (loose, "ledger.py as fixed"),
    "site-packages": (site_packages, "copy: "), "wheel": (wheel, ".whl!/bank/ledger.py"), "pip cache": (pip_cache, ".body!/bank/ledger.py"),
    "sdist": (sdist, "test_ledger.py"), "bytecode": (bytecode, ".pyc"), "build folder": (build_folder, "build/lib/bank/ledger.py"),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTS)
def test_every_planted_leak_is_found(name, upstream, tree, tmp_path):
    plant, said = PLANTS[name]
    plant(tree, upstream, tmp_path)
    found = history.verify(tree, upstream[4], upstream[3], [tmp_path / "look"])
    assert any(said in leak for leak in found), found


def test_look_alikes_are_no_leaks(upstream, tree, tmp_path):
    """The base itself, installed and compiled, and another project's file of that name."""
    (tmp_path / "look/bank").mkdir(parents=True)
    (tmp_path / "look/bank/ledger.py").write_text(BASE)
    py_compile.compile(str(tree / "bank/ledger.py"), cfile=str(tree / "bank/__pycache__/ledger.cpython-311.pyc"))
    (tmp_path / "look/other").mkdir()
    (tmp_path / "look/other/ledger.py").write_text("def other():\n    return 1\n")
    (tmp_path / "look/log.gz").write_bytes(b"\x1f\x8b no tar")
    assert history.verify(tree, upstream[4], upstream[3], [Path(tmp_path / "look")]) == []
