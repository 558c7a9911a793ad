"""SIGKILL of every kind of process in the middle of a step: the run heals, or --resume continues, and no sample is lost or repeated."""

import os
import signal
import time

import pytest

from tests.e2e.harness import job

STEPS = 6


def check_complete(j, steps=STEPS):
    assert [m["step"] for m in j.metrics if "train/loss" in m] == list(range(1, steps + 1)), j.printed[-2000:]
    assert j.trained_ids() == j.expected_ids(steps)
    assert j.left_behind() == []


def test_engine_is_killed_and_the_run_goes_on(tmp_path, tiny_model, reverse_prompts):
    """Own server: SIGKILL of the API server mid-generation. EngineCore and Worker must not be orphaned."""
    with job(tmp_path, tiny_model, reverse_prompts, train={"steps": STEPS}) as j:
        j.start()
        j.wait_for_step(2)
        os.kill(j.pids()["engine-0"], signal.SIGKILL)
        assert j.wait(400) == 0, j.printed[-3000:]
        check_complete(j)
        assert j.metrics[-1]["health/engine_restarts"] == 1
        assert max(m["train/logprob_abs_diff"] for m in j.metrics if "train/loss" in m) < 1e-4


@pytest.mark.parametrize(("who", "counter"), [("router", "health/router_restarts"), ("worker-0", "health/groups_redone")])
def test_router_or_worker_is_killed_and_the_run_goes_on(tmp_path, tiny_model, reverse_prompts, tiny_server, who, counter):
    with job(tmp_path, tiny_model, reverse_prompts, train={"steps": STEPS}, rollout={"engines": [tiny_server]}) as j:
        j.start()
        j.wait_for_step(2)
        os.kill(j.pids()[who], signal.SIGKILL)
        assert j.wait(200) == 0, j.printed[-3000:]
        check_complete(j)
        assert j.metrics[-1][counter] >= 1


@pytest.mark.parametrize("who", ["trainer-1", "driver", "raylet"])
def test_rank_driver_or_ray_is_killed_and_resume_continues(tmp_path, tiny_model, reverse_prompts, tiny_server, who):
    changes = {"train": {"steps": STEPS}, "rollout": {"engines": [tiny_server]}, "parallel": {"fsdp": 2}}
    with job(tmp_path, tiny_model, reverse_prompts, **changes) as j:
        j.start()
        j.wait_for_step(2)
        time.sleep(0.3)
        os.kill(j.pids()[who], signal.SIGKILL)
        code = j.wait(120)
        assert code != 0
        assert j.left_behind() == []
        if who != "driver":
            last = [line for line in j.printed.splitlines() if line.startswith("vime: error")]
            assert len(last) == 1 and "--resume" in last[0], j.printed[-3000:]
            assert "Traceback" not in j.printed
        assert j.run("--resume") == 0, j.printed[-3000:]
        check_complete(j)


def test_ctrl_c_once_finishes_the_step_and_saves(tmp_path, tiny_model, reverse_prompts, tiny_server):
    with job(tmp_path, tiny_model, reverse_prompts, train={"steps": 50}, checkpoint={"interval": 100}, rollout={"engines": [tiny_server]}) as j:
        j.start(start_new_session=True)
        j.wait_for_step(2)
        os.killpg(j.process.pid, signal.SIGINT)  # what a terminal does: every process of the group gets it
        assert j.wait(60) == 130, j.printed[-3000:]
        assert j.left_behind() == []
        done = j.metrics[-1]["step"]
        assert [p.name for p in (j.folder / "checkpoints").iterdir()] == [f"step_{done:06d}"]
        assert j.run("--resume", f"train.steps={done + 2}") == 0, j.printed[-3000:]
        check_complete(j, done + 2)


def test_ctrl_c_twice_stops_now(tmp_path, tiny_model, reverse_prompts):
    with job(tmp_path, tiny_model, reverse_prompts, train={"steps": 500}) as j:
        j.start(start_new_session=True)
        j.wait_for_step(1)
        os.killpg(j.process.pid, signal.SIGINT)
        time.sleep(0.1)
        os.killpg(j.process.pid, signal.SIGINT)
        assert j.wait(30) == 130, j.printed[-3000:]
        assert "Traceback" not in j.printed
        assert j.left_behind() == []
