"""Generation that goes on while the trainer trains, and generation that is interrupted: nothing is lost, trained twice or too old."""

import json
import os
import signal
import time

from tests.e2e.harness import job
from vime.trainer.checkpoint import latest

# Twenty tokens in ten short turns: at any moment many requests run, so that every update cuts some.
ROLLOUT = {"custom_generate": "tests.e2e.odd_reward:long_turns", "max_response_len": 20, "dynamic_filter": "nonzero_std"}


def state(j):
    return json.loads((latest(j.folder / "checkpoints") / "state.json").read_text())


def check(j, steps, bound):
    rows = [m for m in j.metrics if "train/loss" in m]
    assert [m["step"] for m in rows] == list(range(1, steps + 1)), j.printed[-2000:]
    assert max(m["rollout/staleness_max"] for m in rows) <= bound
    trained = {g // 8 for g in j.trained_ids()}
    assert len(j.trained_ids()) == len(set(j.trained_ids())) == 64 * steps
    kept = state(j)
    under_way = {g["group_index"] for g in kept["groups"]} | set(kept["fresh"])
    assert not trained & under_way
    dropped = int(sum(v for m in rows for k, v in m.items() if k.startswith("rollout/dropped")))
    dropped += sum(n for k, n in kept["counts"].items() if k.startswith("dropped"))
    assert len(trained | under_way) + dropped == kept["prompts"]["given"]
    return rows, under_way


def test_async_survives_its_driver_and_goes_on_as_partial_rollout(tmp_path, tiny_model, reverse_prompts, tiny_server, monkeypatch):
    monkeypatch.setenv("LONGTAIL_MEDIAN", "0.1")
    monkeypatch.setenv("LONGTAIL_SIGMA", "1.0")
    changes = {"train": {"steps": 8, "mode": "async", "max_staleness": 2}, "algo": {"correction": "tis"}, "weights": {"in_flight": "abort"}}
    changes |= {"rollout": ROLLOUT | {"engines": [tiny_server]}, "reward": {"function": "benchmarks.engine_busy:parity"}}
    with job(tmp_path, tiny_model, reverse_prompts, **changes) as j:
        j.start()
        j.wait_for_step(4)
        time.sleep(0.1)
        os.kill(j.pids()["driver"], signal.SIGKILL)
        j.wait(120)
        assert j.left_behind() == []
        assert state(j)["groups"] or state(j)["fresh"], "no group was under way"
        assert j.run("--resume") == 0, j.printed[-3000:]
        rows, under_way = check(j, 8, 2)
        assert max(m["rollout/staleness_max"] for m in rows) > 0
        assert sum(m.get("rollout/continued", 0) for m in rows) > 0, "no request was cut by an update and went on"
        assert under_way
        sync = ["train.mode=sync", "rollout.partial_rollout=true", "rollout.over_sampling_batch_size=16", "train.steps=12"]
        assert j.run("--resume", *sync) == 0, j.printed[-3000:]
        rows, _ = check(j, 12, 2)
        assert sum(m.get("rollout/interrupted", 0) for m in rows[8:]) > 0
        assert j.left_behind() == []
