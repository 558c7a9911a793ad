"""SIGKILL of every kind of process in the middle of a step: the run heals, or --resume continues, and no sample is lost or repeated.

Runs are chained, since each start costs half a minute on two cores.
"""

import os
import signal
import time

from tests.e2e.harness import job


def check_complete(j, steps):
    """The trained ids are those of an undisturbed run: each of the steps' 64 samples once, in steps numbered without a gap."""
    assert [m["step"] for m in j.metrics if "train/loss" in m] == list(range(1, steps + 1)), j.printed[-2000:]
    assert j.trained_ids() == j.expected_ids(steps)
    assert max(m.get("train/logprob_abs_diff", 0) for m in j.metrics) < 1e-4  # the healed server has the right weights
    assert j.left_behind() == []


def test_router_worker_and_engine_are_killed_the_run_goes_on_and_ctrl_c_ends_it(tmp_path, tiny_model, reverse_prompts):
    """Own server: SIGKILL of the API server mid-generation; what it leaves must not be orphaned, it comes back with current weights.
    Then Ctrl-C once: the step is finished and saved, and the server ends with the run."""
    with job(tmp_path, tiny_model, reverse_prompts, train={"steps": 500}, checkpoint={"interval": 1000}) as j:
        j.start(start_new_session=True)
        for step, who in ((2, "router"), (4, "worker-0"), (6, "engine-0")):
            j.wait_for_step(step)
            os.kill(j.pids()[who], signal.SIGKILL)
        j.wait_for_step(10, 400)
        os.killpg(j.process.pid, signal.SIGINT)  # what a terminal does: every process of the group gets it
        assert j.wait(120) == 130, j.printed[-3000:]
        last = j.metrics[-1]
        check_complete(j, last["step"])
        assert [p.name for p in (j.folder / "checkpoints").iterdir()] == [f"step_{last['step']:06d}"]
        assert last["health/engine_restarts"] == 1 and last["health/router_restarts"] == 1 and last["health/groups_redone"] >= 1


def test_rank_driver_and_ray_are_killed_and_resume_continues(tmp_path, tiny_model, reverse_prompts, tiny_server):
    """With async_save: wherever the kill falls, the newest whole checkpoint is resumed from."""
    changes = {"train": {"steps": 10}, "rollout": {"engines": [tiny_server]}, "parallel": {"fsdp": 2}, "checkpoint": {"async_save": True}}
    with job(tmp_path, tiny_model, reverse_prompts, **changes) as j:
        for step, who in ((2, "trainer-1"), (4, "driver"), (6, "raylet")):
            j.start(*(["--resume"] if step > 2 else []))
            j.wait_for_step(step)
            time.sleep(0.1)
            os.kill(j.pids()[who], signal.SIGKILL)
            assert j.wait(120) != 0
            assert j.left_behind() == []
            if who != "driver":
                said = [line for line in j.printed.splitlines() if line.startswith("vime: error")][-1]
                assert "--resume" in said and ("trainer rank 1 died" in said if who == "trainer-1" else "Ray is gone" in said), said
            assert "Traceback" not in j.printed
        assert j.run("--resume") == 0, j.printed[-3000:]
        check_complete(j, 10)


def test_ctrl_c_twice_stops_now(tmp_path, tiny_model, reverse_prompts, tiny_server):
    with job(tmp_path, tiny_model, reverse_prompts, rollout={"engines": [tiny_server]}, train={"steps": 500}) as j:
        j.start(start_new_session=True)
        j.wait_for_step(2)
        os.killpg(j.process.pid, signal.SIGINT)
        time.sleep(0.1)
        os.killpg(j.process.pid, signal.SIGINT)
        assert j.wait(120) == 130, j.printed[-3000:]
        assert "Traceback" not in j.printed
        assert j.left_behind() == []
