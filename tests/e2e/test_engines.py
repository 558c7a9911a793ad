"""Servers of two kinds in one job, and a person who takes one out, replaces it and adds another while it trains."""

import signal
import subprocess
import sys

import psutil

from tests.e2e.harness import job
from tests.e2e.test_async import check


def test_servers_come_and_go_while_a_job_runs(tmp_path, tiny_model, reverse_prompts, tiny_server):
    tables = [{"vllm": {"max_num_seqs": 64}}, {"vllm": {"max_num_seqs": 32, "enable_prefix_caching": False}}]
    changes = {"train": {"steps": 5000, "mode": "async", "max_staleness": 2}, "algo": {"correction": "tis"}, "checkpoint": {"interval": 10_000}}
    with job(tmp_path, tiny_model, reverse_prompts, engine=tables, **changes) as j:

        def vime(*words):
            command = [sys.executable, "-m", "vime.cli", "engines", str(j.folder), *words]
            done = subprocess.run(command, capture_output=True, text=True, timeout=200)
            assert done.returncode == 0, done.stderr
            return done.stdout

        j.start(start_new_session=True)
        j.wait_for_step(2)
        old = j.pids()
        assert "engine 1 (" in vime("drain", "1") and "serving" in vime("list")
        at = j.metrics[-1]["step"]
        j.wait_for_step(at + 2)
        assert "out" in vime("list").splitlines()[2]
        assert "serves weights v" in vime("replace", "1", "max_num_seqs=16")
        assert "serves weights v" in vime("add", tiny_server)
        at = j.metrics[-1]["step"]
        j.wait_for_step(at + 3)
        assert [line.split()[1] for line in vime("list").splitlines()[1:]] == ["serving"] * 3
        new = j.pids()
        assert new["engine-0"] == old["engine-0"] and new["engine-1"] != old["engine-1"]
        words = psutil.Process(new["engine-1"]).cmdline()
        assert words[words.index("--max-num-seqs") + 1] == "16" and "--no-enable-prefix-caching" in words
        j.process.send_signal(signal.SIGINT)
        assert j.wait(120) == 130, j.printed[-3000:]
        rows, _ = check(j, j.metrics[-1]["step"], 2)
        assert sum(m["rollout/retries"] + m["rollout/fenced"] for m in rows) == 0, "a request was lost on the way"
        busy = [m["rollout/engine_busy"] for m in rows if "rollout/engine_busy" in m]  # a step may be shorter than the time between two looks
        assert len(busy) > len(rows) / 2 and all(0 <= b <= 1 for b in busy) and max(busy) > 0
        assert rows[-1]["health/engine_restarts"] == 0 and not (j.folder / "control.sock").exists()
        assert j.left_behind() == []
