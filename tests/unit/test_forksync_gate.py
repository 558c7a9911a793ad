"""Gate 1 by properties: sign-offs outlive what upstream does elsewhere, and nothing inside a signed file passes unseen."""

import datetime
from pathlib import Path

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from forksync.base import Base, Config, Ledgered, Lock, Pair, entry
from forksync.gate import Sides, check, refreshed, watched_id
from forksync.git import Git
from forksync.hunks import Hunk, between, replays
from forksync.table import Table, TableFile
from tests.unit import forksync_kit as kit

WORDS = st.sampled_from(["a", "b", "", "  a", "}", "c d"])
TEXT = st.lists(WORDS, min_size=1, max_size=14)
FEW = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def git(tmp_path_factory):
    return Git(kit.repository(tmp_path_factory.mktemp("gate") / "r", {"f": "x\n"}))


def tree(git: Git, lines: list[str]) -> str:
    blob = git.write("".join(f"{x}\n" for x in lines).encode())
    return git.out("mktree", data=f"100644 blob {blob}\tf\n".encode())


def signed(git: Git, mirror: list[str], fork: list[str], root: Path, header: bool = True) -> Base:
    """A ledger that has signed all that differs."""
    table = Table(TableFile())
    base = Base(root, Config(pair=Pair(upstream="u")), table, Lock(upstream_commit="c", table_sha=table.sha), {}, [])
    hunks = between(git, tree(git, mirror), tree(git, fork))
    counts = {h.fp: sum(x.fp == h.fp for x in hunks) for h in hunks}
    entries = {h.fp: entry(h, counts[h.fp], reason="r", status="signed") for h in hunks}
    base.ledger["f"] = Ledgered(d=list(entries.values()))
    (root / ".forksync").mkdir(exist_ok=True)
    (root / ".forksync/audit.jsonl").unlink(missing_ok=True)
    base.log("sign", "ann", signs=[["f", fp] for fp in entries])
    if header:
        refreshed(base, Sides(git, tree(git, mirror), tree(git, fork)), "f", hunks)
    base.lock.ledger_sha, base.lock.audit = base.ledger_sha(), base.audit[-1]["hash"]
    return base


def common(hunks, mirror: list[str]) -> list[tuple[int, int]]:
    """(mirror index, fork index) of lines that no hunk covers."""
    gone = {i for h in hunks for i in range(h.old_at - 1, h.old_at - 1 + len(h.old))}
    out, shift = [], 0
    starts = {h.old_at - 1 if h.old else h.old_at: h for h in hunks}
    for i in range(len(mirror)):
        if i in starts:
            shift += len(starts[i].new) - len(starts[i].old)
        if i not in gone:
            out.append((i, i + shift))
    return out


@FEW
@given(TEXT, TEXT, st.data())
def test_a_sign_off_survives_any_upstream_edit_elsewhere(git, tmp_path, mirror, fork, data):
    hunks = between(git, tree(git, mirror), tree(git, fork))
    places = [(i, j) for i, j in common(hunks, mirror) if mirror[i] == fork[j]]
    assume(hunks and places)
    base = signed(git, mirror, fork, tmp_path)
    for i, j in sorted(data.draw(st.lists(st.sampled_from(places), min_size=1, max_size=3, unique=True)), reverse=True):
        new = data.draw(st.lists(st.sampled_from(["a", "b", "", "zz"]), max_size=3))
        mirror, fork = [*mirror[:i], *new, *mirror[i + 1 :]], [*fork[:j], *new, *fork[j + 1 :]]
    result = check(base, git, tree(git, mirror), tree(git, fork))
    assert result.findings == [], (mirror, fork)
    inside = [h for h in between(git, tree(git, mirror), tree(git, fork)) if h.new]
    for h in inside[:1]:  # and an edit inside a signed hunk shows, also after upstream has moved on
        at = h.new_at - 1 + len(h.new) // 2
        assert check(base, git, tree(git, mirror), tree(git, [*fork[:at], "never seen", *fork[at + 1 :]])).code


@FEW
@given(TEXT, TEXT, TEXT)
def test_no_edit_of_a_signed_file_passes_unseen(git, tmp_path, mirror, fork, other):
    """With the same mirror, any other content of the fork's file is a finding: also moved, swapped and indented lines."""
    assume(mirror != fork and [x.rstrip() for x in other] != [x.rstrip() for x in fork])
    base = signed(git, mirror, fork, tmp_path)
    assert check(base, git, tree(git, mirror), tree(git, fork)).findings == []
    assert check(base, git, tree(git, mirror), tree(git, other)).code in (1, 6)


@given(TEXT, st.lists(st.tuples(st.integers(0, 13), TEXT, st.integers(0, 3)), max_size=3))
def test_replay_accepts_what_was_applied(mirror, edits):
    fork, hunks, at = [], [], 0
    for start, new, length in sorted(edits, key=lambda e: e[0]):
        if start >= at and start + length <= len(mirror):
            fork += [*mirror[at:start], *new]
            hunks.append((tuple(mirror[start : start + length]), tuple(new)))
            at = start + length
    fork += mirror[at:]
    assert replays(mirror, fork, hunks)
    assert not replays(mirror, [*fork, "more"], hunks)


M = ["def f():", "    one()", "    two()", "", "def g():", "    three()"]
F = ["def f():", "    one()", "    mine()", "", "def g():", "    three()"]


def kinds(git, base, mirror, fork, **more):
    result = check(base, git, tree(git, mirror), tree(git, fork), **more)
    return sorted(f.kind for f in result.findings), result.code


def test_fates_of_a_signed_hunk(git, tmp_path):
    base = signed(git, M, F, tmp_path)
    swap = lambda text, old, new: [new if x == old else x for x in text]  # noqa: E731
    assert kinds(git, base, M, F) == ([], 0)
    assert kinds(git, base, M, M) == (["lost"], 6)
    assert kinds(git, base, F, F) == (["converged"], 1)
    assert kinds(git, base, M, swap(F, "    mine()", "    mine(1)")) == (["edited"], 1)
    assert kinds(git, base, M, swap(F, "    mine()", "mine()")) == (["edited"], 1), "indentation is behaviour"
    assert kinds(git, base, M, swap(F, "    mine()", "    mine()  ")) == ([], 0), "trailing blanks are not"
    assert kinds(git, base, swap(M, "    two()", "    two(2)"), F) == (["stale"], 1)
    assert kinds(git, base, M, swap(F, "    three()", "    4")) == (["new"], 1)
    up = swap(M, "    two()", "    three(3, 4, 5, 6)")
    assert kinds(git, base, up, up) == (["superseded"], 1), "a conflict resolved as upstream's"
    assert kinds(git, base, M, [*F[:2], *F[3:4], F[2], *F[4:]])[1] in (1, 6), "moved within the file"


def test_conditions_of_a_sign_off(git, tmp_path):
    base = signed(git, M, F, tmp_path)
    e = base.ledger["f"].d[0]
    e.expires = datetime.date(2026, 1, 1)
    assert kinds(git, base, M, F, today=datetime.date(2025, 12, 31)) == ([], 0)
    assert kinds(git, base, M, F, today=datetime.date(2026, 1, 2)) == (["expired"], 1)
    e.expires, e.pin = None, "f::g"
    assert kinds(git, base, M, F) == ([], 0)
    e.pin = "f::test_h"
    assert kinds(git, base, M, F) == (["pin"], 1)
    sides = Sides(git, tree(git, M), tree(git, F))
    e.pin, e.watch = "", ["f::g@" + watched_id(sides, "f::g")]
    assert kinds(git, base, M, F) == ([], 0)
    other = [*M[:-1], "    other()"]
    assert kinds(git, base, other, [*F[:-1], "    other()"]) == (["watched"], 1), "coupled hunks: a clean merge is not enough"


def test_forged_entries_and_audits_show(git, tmp_path):
    base = signed(git, M, F, tmp_path)
    h = between(git, tree(git, M), tree(git, [*F, "more"]))
    base.ledger["f"].d.append(entry(h[-1], 1, reason="trust me", status="signed"))
    assert kinds(git, base, M, [*F, "more"]) == (["base", "base", "moved"], 1), "not signed in the audit, not the ledger of the lock"
    base = signed(git, M, F, tmp_path)
    base.audit[0]["actor"] = "bob"
    assert "audit.jsonl line 1 does not follow from the lines before it: it was edited" in [f.text for f in check(base, git, tree(git, M), tree(git, F)).findings]
    base = signed(git, M, F, tmp_path)
    base.audit.clear()
    assert "audit.jsonl lacks its last line of lock.toml: it was shortened; restore it from git" in [f.text for f in check(base, git, tree(git, M), tree(git, F)).findings]
    base = signed(git, M, F, tmp_path)
    base.ledger["f"].d[0].new = ["    other()"]
    assert "don't have its fingerprint" in check(base, git, tree(git, M), tree(git, F)).findings[0].text


def test_undecodable_lines_come_back_from_the_ledger():
    line = b"caf\xe9 \xff".decode("utf-8", "surrogateescape")
    made = entry(Hunk("p", "add", (), (line,)), 1, reason="r")
    assert made.sides == ((), (line,)) and made.model_dump_json().encode("utf-8")
