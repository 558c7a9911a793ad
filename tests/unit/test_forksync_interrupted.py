"""forksync after kills, and with odd settings: whole files or none, a name for what happened, one line with what to do."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
import tomllib

import pytest

from forksync.git import Git
from tests.unit import forksync_kit as kit
from tests.unit.forksync_kit import commit, configure, git, run


@pytest.fixture(scope="module")
def template(tmp_path_factory):
    folder = tmp_path_factory.mktemp("pair")
    kit.sign_all(kit.made(folder)[1])
    return folder


@pytest.fixture
def toy(template, tmp_path):
    return kit.copied(template, tmp_path)


def killed(fork, seconds, *args):
    """Start a real forksync, and end it by SIGKILL with its git children."""
    child = subprocess.Popen(
        [sys.executable, "-m", "forksync.cli", "-C", str(fork), *args], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    time.sleep(seconds)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    child.wait()


@pytest.mark.parametrize("seconds", [0.25, 0.4, 0.55, 0.7, 0.85])
def test_a_killed_command_leaves_whole_files(toy, seconds, capsys):
    """`rebaseline` rewrites every ledger file and the lock. Wherever it is killed, each parses; if they don't fit together, that is said with
    the way back, which works."""
    _, fork = toy
    killed(fork, seconds, "rebaseline", "--by", "ann", "--yes")
    files = [fork / ".forksync/lock.toml", *(fork / ".forksync/ledger").rglob("*.toml")]
    assert len(files) > 5
    for file in files:
        tomllib.loads(file.read_text())
    code = run(fork, "check")
    if code:
        assert "git checkout .forksync" in capsys.readouterr().out
        git(fork, "checkout", ".forksync")
        assert run(fork, "check") == 0


@pytest.mark.parametrize("seconds", [0.3, 0.45, 0.6])
def test_a_killed_init_can_be_run_again(toy, seconds):
    upstream, fork = toy
    git(fork, "rm", "-rqf", ".forksync")
    commit(fork, "without forksync")
    again = ("init", "--upstream", str(upstream), "--table", str(fork.parent / "table.toml"))
    killed(fork, seconds, *again)
    assert not (fork / ".forksync").exists() or (fork / ".forksync/lock.toml").exists()
    if not (fork / ".forksync").exists():
        (fork / ".forksync.part/ledger").mkdir(parents=True, exist_ok=True)  # as far as a later kill would have come
        assert run(fork, *again) == 0
    assert not (fork / ".forksync.part").exists()
    assert run(fork, "check") == 0, "the half-made folder is no difference"


def test_a_sync_killed_while_it_makes_its_backup(toy):
    upstream, fork = toy
    kit.upstream_moves(upstream)
    state = fork / ".git/forksync"
    state.mkdir(exist_ok=True)
    for left in ("backup.part", "backup.part.lock"):
        (state / left).write_text("half")
    assert run(fork, "sync") == 3
    assert len(list(state.glob("backup-*.bundle"))) == 1 and not (state / "backup.part").exists()
    assert git(fork, "bundle", "verify", "-q", str(next(state.glob("backup-*.bundle")))) == ""


def test_a_reset_upstream_is_named(toy, capsys):
    upstream, fork = toy
    kit.upstream_moves(upstream)
    run(fork, "sync")
    git(fork, "merge", "-q", next(line[2:].strip() for line in git(fork, "branch").splitlines() if "forksync/" in line))
    git(upstream, "reset", "-q", "--hard", "HEAD~2")
    capsys.readouterr()
    run(fork, "plan")
    assert "upstream was reset or its history rewritten: 2 commits up to" in capsys.readouterr().out
    run(fork, "status")
    assert "2 of its commits are no longer in upstream" in capsys.readouterr().out


def test_a_replaced_upstream_is_named(toy, capsys):
    upstream, fork = toy
    shutil.rmtree(upstream)
    kit.repository(upstream, {"acorn/core.py": "other = 1\n"})
    assert run(fork, "plan") == 7
    assert "of lock.toml (fetch it, or give another name; if upstream was replaced or rewritten" in capsys.readouterr().err


@pytest.mark.parametrize(
    "rename", ["acorn", "acorn=", "=birch", "acorn=..", "acorn=a/b", "acorn=acorn", "a=b=c", "acorn=birch ", "ac orn=birch", "acorn=-birch"]
)
def test_odd_renames_are_refused(toy, rename, capsys):
    upstream, fork = toy
    git(fork, "rm", "-rqf", ".forksync")
    commit(fork, "without forksync")
    assert run(fork, "init", "--upstream", str(upstream), f"--rename={rename}") == 2
    assert "UPSTREAM=FORK" in capsys.readouterr().err and not (fork / ".forksync").exists()


def test_a_path_rule_cannot_leave_the_repository(toy, capsys):
    upstream, fork = toy
    git(fork, "rm", "-rqf", ".forksync")
    commit(fork, "without forksync")
    (fork.parent / "odd.toml").write_text('[[path]]\nfrom = "^acorn"\nto = ".."\n')
    assert run(fork, "init", "--upstream", str(upstream), "--table", str(fork.parent / "odd.toml")) == 2
    assert "no path inside a repository" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[loop]\nmax_iterations = -1\nstall = 0\n", ["loop.max_iterations", "loop.stall"]),
        ('[lint]\nknown = "no/such"\n', ["lint.known = 'no/such': no such file"]),
        ('[[fixer]]\nkind = "openai"\n', ['fixer.0: a fixer of kind "openai" needs base_url and model']),
        ('[[fixer]]\nkind = "openai"\nmodel = "m"\nbase_url = "localhost:1"\n', ["is no http:// or https:// address"]),
        ('[[fixer]]\nkind = "command"\n', ["needs argv"]),
        (
            '[[gate]]\nname = "x"\nkind = "precision"\nrun = ""\ntimeout_s = 0\n[gate.metrics.m]\n',
            ["gate.0.run", "gate.0.timeout_s", "gate.0.metrics.m: give max"],
        ),
    ],
    ids=["loop", "known", "openai", "url", "command", "gate"],
)
def test_odd_settings_are_refused_all_at_once(toy, text, said, capsys):
    _, fork = toy
    configure(fork, text)
    assert run(fork, "check") == 2
    err = capsys.readouterr().err
    assert all(s in err for s in said) and err.count("\n") == 1, err


def test_no_git_outlives_its_reader(tmp_path):
    """The process that serves reads ends with the object that reads, and is reaped."""
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    repo = Git(tmp_path)
    assert repo.read(repo.write("text")) == b"text" and repo._cat
    process = repo._cat
    del repo
    assert process.returncode == 0
