"""Whole runs over every backend of the data plane: the same weights bit by bit, and what is lost is generated again."""

import hashlib
import os
import signal

import pytest

from tests.e2e.harness import job
from tests.e2e.test_async import state

PLUGINS = "tests.e2e.plane_plugins"
BACKENDS = {
    "shm": {"backend": "shm"},
    "ray": {"backend": "ray"},
    "controller": {"backend": "controller"},
    "mooncake": {"backend": "mooncake", "mooncake": {"segment_bytes": 1 << 26}},
    "transferqueue": {"backend": "transferqueue"},
}


def check_complete(j, steps):
    assert [m["step"] for m in j.metrics if "train/loss" in m] == list(range(1, steps + 1)), j.printed[-2000:]
    assert j.trained_ids() == j.expected_ids(steps)
    assert j.left_behind() == []


def made_up(engine, **plane):
    return {"rollout": {"engines": [engine], "custom_generate": f"{PLUGINS}:made_up"}, "train": {"steps": 2}, "data_plane": plane}


def test_training_is_the_same_bit_by_bit_over_every_backend(tmp_path, tiny_model, reverse_prompts, tiny_server):
    found = {}
    for name, plane in BACKENDS.items():
        with job(tmp_path, tiny_model, reverse_prompts, name, parallel={"fsdp": 2}, **made_up(tiny_server, **plane)) as j:
            assert j.run() == 0, j.printed[-3000:]
            check_complete(j, 2)
            (weights,) = (j.folder / "checkpoints" / "step_000002" / "hf").glob("*.safetensors")
            found[name] = hashlib.sha256(weights.read_bytes()).hexdigest()
            rows = [m for m in j.metrics if "train/loss" in m]
            assert all(0 < m["data/controller_bytes"] / 64 < 2048 for m in rows) and all(m["data/stored_bytes"] == 0 for m in rows[-1:])
    assert len(set(found.values())) == 1, found


def test_ranks_that_train_the_same_samples_share_one_pull(tmp_path, tiny_model, reverse_prompts, tiny_server):
    """Two ranks of one replica: over the network one reads and the other gets its bytes, in shared memory both read. The same weights."""
    found = set()
    for name in ("shm", "mooncake"):
        with job(tmp_path, tiny_model, reverse_prompts, name, parallel={"tp": 2}, **made_up(tiny_server, **BACKENDS[name])) as j:
            assert j.run() == 0, j.printed[-3000:]
            check_complete(j, 2)
            (weights,) = (j.folder / "checkpoints" / "step_000002" / "hf").glob("*.safetensors")
            found.add(hashlib.sha256(weights.read_bytes()).hexdigest())
    assert len(found) == 1


def test_bytes_that_are_lost_are_generated_again(tmp_path, tiny_model, reverse_prompts, tiny_server, monkeypatch):
    """A group of step 2 loses its bytes between rollout and training: the step waits for it, every sample is trained once."""
    monkeypatch.setenv("LOST_ONCE", str(tmp_path / "lost"))
    changes = made_up(tiny_server) | {"reward": {"post_process": f"{PLUGINS}:lose_one"}, "train": {"steps": 3}}
    with job(tmp_path, tiny_model, reverse_prompts, "loses", **changes) as j:
        assert j.run() == 0, j.printed[-3000:]
        assert (tmp_path / "lost").exists()
        check_complete(j, 3)
        assert [m.get("rollout/lost", 0) for m in j.metrics if "train/loss" in m] == [0, 1, 0]


@pytest.mark.parametrize("backend, who", [("mooncake", "mooncake_master"), ("ray", "worker-0")])
def test_what_holds_bytes_is_killed_and_the_run_goes_on(tmp_path, tiny_model, reverse_prompts, tiny_server, backend, who):
    """Async: finished groups wait in the store when the store's master, or the worker that owns them, dies."""
    changes = {"train": {"steps": 10, "mode": "async", "max_staleness": 3}, "algo": {"correction": "tis"}, "data_plane": BACKENDS[backend]}
    with job(tmp_path, tiny_model, reverse_prompts, **changes, rollout={"engines": [tiny_server]}) as j:
        j.start()
        j.wait_for_step(3)
        os.kill(j.pids()[who], signal.SIGKILL)
        assert j.wait(200) == 0, j.printed[-3000:]
        rows = [m for m in j.metrics if "train/loss" in m]
        assert [m["step"] for m in rows] == list(range(1, 11))
        ids, missing = j.trained_ids(), rows[-1].get("health/groups_not_dumped", 0)  # trained, then lost before they were written
        assert len(ids) == len(set(ids)) == 640 - 8 * missing and missing <= 32
        assert state(j)["ledger"]["counts"]["done"] == 80
        assert rows[-1]["health/groups_redone" if who == "worker-0" else "health/data_plane_restarts"] >= 1
        assert j.left_behind() == []
