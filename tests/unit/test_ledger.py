"""The ledger alone; test_ledger_world.py has it in a world that hypothesis drives."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.ledger_world import unsettled
from vime.data.ledger import Ledger, insert, inside
from vime.data.plane import Ref
from vime.errors import VimeError

N = st.integers(0, 99)


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # a disk takes its time for each sync
        yield Path(folder) / "ledger.jsonl"


def ref(group, attempt=0, nbytes=10, owner=""):
    return Ref(f"run/g{group}/a{attempt}", nbytes, 7, owner)


def ready(ledger, *groups, attempt=0, owner="", version=0):
    for n in groups:
        assert ledger.reserve(n, "w0", 10)
        assert ledger.publish(n, ref(n, attempt, owner=owner), version)


def trained(ledger, step, *groups):
    assert ledger.lease(groups, f"step {step}", 1e9)
    assert ledger.ack(groups, step, f"step {step}") == []


@given(st.permutations(range(12)), st.integers(0, 12))
def test_intervals_are_the_set(order, end):
    edges, put = [], set()
    for n in order[:end]:
        insert(edges, n - 3)
        put.add(n - 3)
        assert [m for m in range(-5, 15) if inside(edges, m)] == sorted(put)
        assert edges == sorted(set(edges)), "neighbours are one interval"


def test_a_group_goes_its_way(path, clock):
    ledger = Ledger(100, path, clock=clock)
    ready(ledger, 0, 1)
    assert ledger.lease([1, 0], "step 1", 5.0) == [ref(1), ref(0)]
    assert [ledger.where(n) for n in range(3)] == ["leased", "leased", "new"]
    assert ledger.free() == []
    assert ledger.ack([0, 1], 1, "step 1") == [] == ledger.ack([0, 1], 1, "step 1")
    assert ledger.free() == [ref(0), ref(1)]
    assert ledger.free() == []
    stats = ledger.stats()
    assert (stats["done"], stats["stored_bytes"], stats["reserved_bytes"], stats["leased"]) == (2, 0, 0, 0)


def test_no_room_until_bytes_are_freed():
    ledger = Ledger(30)
    ready(ledger, 0, 1)
    assert ledger.reserve(2, "w1", 10)
    assert not ledger.reserve(3, "w1", 1), "reserved bytes count"
    assert ledger.reserve(2, "w1", 5), "in place of what it had"
    assert ledger.reserve(3, "w1", 5)
    trained(ledger, 1, 0, 1)
    assert not ledger.reserve(4, "w1", 10), "the store has them until they are handed out to be freed"
    ledger.free()
    assert ledger.reserve(4, "w1", 10)


def test_no_room_ever_is_an_error():
    ledger = Ledger(30)
    with pytest.raises(VimeError, match=r"group 0 may take 31 bytes .* over the budget of 30 \(raise data_plane.budget_bytes"):
        ledger.reserve(0, "w0", 31)
    for n in range(3):
        assert ledger.reserve(n, "w0", 10)
        assert ledger.publish(n, ref(n), 0, whole=False)
    with pytest.raises(VimeError, match="group 1 may take 10 bytes beside 30 of unfinished groups"):
        ledger.reserve(1, "w0", 10)
    assert ledger.where(1) == "open"
    ledger = Ledger(30)
    ready(ledger, 0, 1, 2)
    assert not ledger.reserve(3, "w0", 10), "once they are trained there will be"
    trained(ledger, 1, 0, 1, 2)
    assert not ledger.reserve(3, "w0", 10), "once they are freed"


def test_what_is_there_is_not_generated_again():
    ledger = Ledger(100)
    ready(ledger, 0, 1)
    ledger.drop([1], "stale")
    for n, where in ((0, "ready"), (1, "settled")):
        with pytest.raises(VimeError, match=f"group {n} is {where}"):
            ledger.reserve(n, "w0", 10)


def test_late_and_doubled_messages_only_free():
    ledger = Ledger(100)
    ready(ledger, 0)
    assert not ledger.publish(0, ref(0), 0), "the same message again"
    assert ledger.free() == [], "its bytes are those that are wanted"
    assert not ledger.publish(0, ref(0, 1), 0), "another attempt"
    assert not ledger.publish(0, ref(0, 1), 0)
    assert ledger.free() == [ref(0, 1)]
    assert ledger.lease([0], "t", 1e9) == [ref(0)]
    ledger.ack([0], 1, "t")
    assert not ledger.publish(0, ref(0, 2), 0)
    assert not ledger.publish(0, ref(0, 2), 0)
    assert ledger.stats()["stored_bytes"] == 20
    assert ledger.free() == [ref(0), ref(0, 2)]
    assert ledger.free() == []
    assert ledger.stats()["done"] == 1
    assert ledger.reserve(1, "w1", 10)
    assert not ledger.publish(1, ref(1), 0, by="w0"), "thought dead, another has the group now"
    assert ledger.publish(1, ref(1, 1), 0, by="w1")


def test_two_producers_interleaved_leave_groups_whole():
    ledger = Ledger(100)
    for n in range(4):
        assert ledger.reserve(n, f"w{n % 2}", 10)
    for n in (2, 1, 0, 3):
        assert ledger.publish(n, ref(n, owner=f"w{n % 2}"), 0, by=f"w{n % 2}")
    assert [r.key for r in ledger.lease(range(4), "t", 1e9)] == [f"run/g{n}/a0" for n in range(4)]


def test_a_part_goes_on_with_another_producer():
    ledger = Ledger(100)
    assert ledger.reserve(0, "w0", 10)
    assert ledger.publish(0, ref(0), 3, whole=False)
    assert (ledger.where(0), ledger.lease([0], "t", 1e9), ledger.free()) == ("open", [], [])
    assert ledger.reserve(0, "w1", 20)
    assert ledger.publish(0, ref(0, 1, 20), 4)
    assert ledger.free() == [ref(0)]
    assert ledger.lease([0], "t", 1e9) == [ref(0, 1, 20)]


def test_leases_are_whole_and_end(clock):
    ledger = Ledger(100, clock=clock)
    ready(ledger, 0, 1)
    assert ledger.lease([0, 1, 2], "a", 5.0) == ledger.lease([0, 0], "a", 5.0) == []
    assert ledger.where(0) == ledger.where(1) == "ready"
    assert ledger.lease([0, 1], "a", 5.0)
    assert ledger.lease([0], "b", 9.0) == []
    assert ledger.lease([0], "a", 5.0), "its own again"
    clock.now = 5.0
    assert ledger.where(0) == "ready"
    assert ledger.lease([0], "b", 9.0)
    assert ledger.ack([0, 1], 1, "a") == [0], "1 was late, but nobody else has trained it"
    assert ledger.ack([0], 2, "b") == []
    assert ledger.ack([0], 1, "a") == [0]
    counts = ledger.stats()
    assert (counts["done"], counts["ack_of_another"], counts["ack_settled"], counts["lease_expired"]) == (2, 1, 1, 1)
    ready(ledger, 2)
    ledger.lease([2], "c", 99.0)
    ledger.nack([2, 7], "b")
    assert ledger.where(2) == "leased"
    assert ledger.drop([2, 2, 0], "stale") == [2, 0]
    ledger.nack([2], "c")
    assert ledger.ack([2], 3, "c") == [2]
    assert ledger.stats()["ack_not_leased"] == 1


def test_deaths_and_losses_open_groups_again(clock):
    ledger = Ledger(100, clock=clock)
    ready(ledger, 0, 1, 2, owner="w0")
    ready(ledger, 3, owner="")
    ledger.lease([1, 2], "a", 50.0)
    assert ledger.reserve(4, "w0", 10)
    assert ledger.owner_died("w0") == [0, 1, 2, 4]
    assert ledger.stats()["reserved_bytes"] == 0
    assert ledger.owner_died("w0") == ledger.owner_died("") == []
    assert ledger.ack([1], 1, "a") == [], "it had read the group before: trained is trained"
    ready(ledger, 2, attempt=1)
    assert ledger.lease([2], "b", 50.0), "the bytes that a's lease was for are gone"
    assert ledger.ack([2], 1, "a") == [2]
    assert ledger.lost([2, 3, 3, 4, 9]) == [2, 3]
    assert ledger.lost([2, 3]) == [], "every rank says so"
    assert not ledger.publish(3, ref(3), 0), "its message again, without its bytes"
    assert ledger.reserve(3, "w1", 10) and not ledger.publish(3, ref(3), 0)
    assert {r.key for r in ledger.free()} == {"run/g0/a0", "run/g1/a0", "run/g2/a0", "run/g2/a1", "run/g3/a0"}
    assert [ledger.where(n) for n in range(5)] == ["open", "settled", "open", "open", "open"]


def test_another_producer_may_have_read_the_part_of_a_dead_one():
    ledger = Ledger(100)
    assert ledger.reserve(0, "w0", 10)
    assert ledger.publish(0, ref(0, owner="w0"), 0, whole=False)
    assert ledger.reserve(0, "w1", 10)
    assert ledger.owner_died("w0") == []
    assert ledger.publish(0, ref(0, 1), 0, by="w1")


def test_restart_without_checkpoint_takes_the_journal(path):
    ledger = Ledger(100, path)
    ready(ledger, 0, 1, 2)
    assert ledger.reserve(3, "w0", 10)
    ledger.lease([0, 1], "t", 1e9)
    ledger.ack([0], 1, "t")
    ledger.drop([2], "filtered")
    again = Ledger(100, path)
    assert [again.where(n) for n in range(4)] == ["settled", "ready", "settled", "new"]
    assert (unsettled(again, 5), again.stats()["stored_bytes"], again.stats()["reserved_bytes"]) == ([1, 3, 4], 30, 0)
    assert again.ack([1], 2, "t") == [1], "leases end with the controller"
    assert again.free() == [ref(0), ref(2)]
    assert Ledger(100, path).free() == [ref(0), ref(2)], "they may not have been freed"
    again = Ledger(100, path)
    again.free()
    again.free()
    assert Ledger(100, path).free() == []


def test_a_checkpoint_takes_later_acks_back(path):
    ledger = Ledger(100, path)
    ready(ledger, 0, 1, 2)
    trained(ledger, 1, 0)
    cursor = json.loads(json.dumps(ledger.state()))
    trained(ledger, 2, 1)
    ready(ledger, 3, version=1)
    ready(ledger, 4, version=2)
    ledger.drop([5], "filtered")
    ledger.free()
    for _ in range(2):
        ledger = Ledger(100, path, cursor)
        assert [ledger.where(n) for n in range(6)] == ["settled", "new", "ready", "ready", "new", "new"]
        assert unsettled(ledger, 6) == [1, 2, 3, 4, 5]
        assert ledger.stats()["done"] == 1 and "dropped_filtered" not in ledger.stats()
    ready(ledger, 1, 4, attempt=1)
    trained(ledger, 2, 1, 2, 3, 4)
    assert unsettled(ledger, 6) == [5]


def test_weights_roll_back_in_a_running_controller(path):
    ledger = Ledger(100, path)
    ready(ledger, 0, 1, 2, 3)
    trained(ledger, 1, 0)
    cursor = ledger.state()
    ledger.lease([1, 2], "t", 1e9)
    assert ledger.ack([1], 2, "t") == []
    assert ledger.reserve(4, "w0", 10)
    ledger.free()
    ledger.restore(cursor)
    assert [ledger.where(n) for n in range(5)] == ["settled", "new", "ready", "ready", "new"]
    assert (ledger.stats()["reserved_bytes"], ledger.stats()["stored_bytes"]) == (0, 40), "what was to be freed may be there still"
    assert ledger.ack([2, 1], 2, "t") == [2, 1], "the weights that trained them are gone"
    assert not ledger.publish(4, ref(4), 0)
    assert unsettled(Ledger(100, path), 5) == [1, 2, 3, 4]


def test_what_a_checkpoint_settled_is_settled_whatever_the_journal_says(path):
    ledger = Ledger(100, path)
    ready(ledger, 0, 1)
    before = path.read_bytes()
    trained(ledger, 1, 0)
    path.write_bytes(before)
    ledger = Ledger(100, path, ledger.state())
    assert (ledger.where(0), ledger.where(1), ledger.free()) == ("settled", "ready", [ref(0)])


def test_only_the_newest_ack_comes_twice():
    ledger = Ledger(100)
    ready(ledger, 0, 1, 2)
    ledger.lease([0], "a", 1e9)
    ledger.lease([1, 2], "b", 1e9)
    assert ledger.ack([1], 2, "b") == ledger.ack([2], 2, "b") == ledger.ack([1, 2], 2, "b") == []
    assert ledger.ack([0], 1, "a") == [], "an older step, which nobody overtook"
    assert ledger.ack([1], 2, "b") == [] and ledger.step == 2
    assert ledger.ack([1], 2, "a") == [1]
    ready(ledger, 3)
    trained(ledger, 3, 3)
    assert ledger.ack([1], 2, "b") == [1]
    assert ledger.stats()["done"] == 4


def test_only_an_ack_waits_for_the_disk_and_before_it_counts(path, monkeypatch):
    ledger, synced = Ledger(100, path), []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append((os.fstat(fd).st_size, ledger.where(0))))
    ready(ledger, 0)
    assert ledger.lease([0], "t", 1e9) and not synced
    ledger.ack([0], 1, "t")
    assert synced == [(path.stat().st_size, "leased")]
    ledger.drop([1], "filtered")
    ledger.free()
    ledger.free()
    assert len(synced) == 1


def test_torn_end_and_what_follows_it(path):
    ledger = Ledger(100, path)
    ready(ledger, 0, 1)
    whole = path.read_bytes()
    for cut in range(whole.index(b"\n") + 1, len(whole)):
        path.write_bytes(whole[:cut])
        again = Ledger(100, path)
        n = whole[:cut].count(b"\n") - 1
        assert [again.where(m) for m in range(2)] == ["ready"] * n + ["new"] * (2 - n)
        ready(again, 5)
        assert Ledger(100, path).where(5) == "ready", "appended where the tear was"


def test_damage_that_no_crash_makes_is_told(path):
    ledger = Ledger(100, path)
    ready(ledger, 0, 1)
    trained(ledger, 1, 0)
    cursor, whole = ledger.state(), path.read_bytes()
    lines = whole.splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], b"\0" * len(lines[1]), *lines[2:]]))
    with pytest.raises(VimeError, match=r"ledger.jsonl:2 is damaged"):
        Ledger(100, path)
    for rest in (b"", whole[:20], b"\0\n"):
        path.write_bytes(rest)
        with pytest.raises(VimeError, match="holds no snapshot"):
            Ledger(100, path)
        assert unsettled(Ledger(100, path, cursor), 2) == [1]


def test_a_full_disk_changes_nothing(path):
    ledger = Ledger(100, path)
    ready(ledger, 0)
    assert ledger.lease([0], "t", 1e9)
    whole = path.read_bytes()

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, line):
            return self.file.write(line[:10])

        def fileno(self):
            return self.file.fileno()

    ledger._file, file = Full(ledger._file), ledger._file
    with pytest.raises(VimeError, match=r"cannot be written: OSError: no space left \(is the disk full"):
        ledger.ack([0], 1, "t")
    assert (path.read_bytes(), ledger.where(0)) == (whole, "leased")
    ledger._file = file
    assert ledger.ack([0], 1, "t") == []
    assert Ledger(100, path).where(0) == "settled"


def test_what_an_ack_says_outlives_a_kill(path):
    code = """
import sys
from pathlib import Path
from tests.unit.test_ledger import Ledger, ready, trained
ledger = Ledger(1000, Path(sys.argv[1]), compact_at=2000)
for step in range(1, 1 << 30):
    ready(ledger, 2 * step, 2 * step + 1)
    trained(ledger, step, 2 * step, 2 * step + 1)
    print(step, flush=True)
    ledger.free()
"""
    process = subprocess.Popen([sys.executable, "-c", code, str(path)], stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    for line in process.stdout:
        if int(line) == 300:
            process.kill()
            break
    step = int([line, *process.stdout][-1])
    process.wait()
    ledger = Ledger(1000, path)
    assert ledger.step - step in (0, 1)
    assert unsettled(ledger, 2 * step + 2) == [0, 1]
    ready(ledger, 0)
    trained(ledger, step + 2, 0)


def test_a_ref_comes_back_without_what_only_its_process_could_use(path):
    ledger = Ledger(100, path)
    for n, at in enumerate((object(), "10.0.0.1:7000", None)):
        assert ledger.reserve(n, "w0", 10)
        assert ledger.publish(n, Ref(f"k{n}", 10, 1, "w0", 64, at), 0)
    assert [r.at for r in Ledger(100, path).lease(range(3), "t", 1e9)] == [None, "10.0.0.1:7000", None]
    assert ledger.reserve(3, "w0", 10)
    with pytest.raises(TypeError, match="numpy"):
        ledger.publish(3, ref(3), np.int64(1))
    assert ledger.publish(3, ref(3), 1)


def test_journal_and_cursor_stay_small(path):
    ledger = Ledger(1000, path, compact_at=10_000)
    for step in range(1, 400):
        groups = [3 * step, 3 * step + 1, 3 * step + 2]
        ready(ledger, *groups)
        ledger.drop(groups[:1], "filtered")
        trained(ledger, step, *groups[1:])
        ledger.free()
        assert path.stat().st_size < 11_000
    assert len(json.dumps(ledger.state())) < 200
    assert not ledger.live and len(ledger.unfreed) <= 3
