"""`vime train` on a Ray cluster of several hosts, one of which is cut off in the middle: root, python benchmarks/multinode.py --model models/tiny

The hosts are network namespaces of this machine: addresses of their own, links limited by tc. Processes, files and memory are this machine's, so
that what is shown is the network: who listens where, who reaches whom, and what happens when nobody answers. A head, which has the driver and
the router, and three nodes with servers, workers and two trainer ranks. First the cable of the node without a rank is pulled: the run must go on.
Then that of a node with a rank: it must stop with one line, and --resume must finish it on what is left.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import secrets
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import tomli_w

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
from benchmarks.hosts import Hosts
from vime.errors import VimeError
from vime.procs import free_port, spawn

NODES = 3
ROLLOUT = {"batch_size": 6, "n_samples_per_prompt": 4, "max_response_len": 7, "max_context_len": 32, "concurrency": 8, "num_engines": 3}


class Cluster:
    def __init__(self, stack: ExitStack, folder: Path, rate: str):
        self.folder, self.stack = folder, stack
        self.hosts = Hosts(stack, NODES, 0, rate, "", folder)
        self.address = f"{self.hosts.address(0)}:{free_port()}"
        self.env = {
            "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(16), "RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(Path(__file__).resolve().parent.parent), "RAY_kill_child_processes_on_worker_exit": "false",
            # how soon Ray gives up a node: 3 looks of 2 seconds
            "RAY_health_check_period_ms": "1000", "RAY_health_check_timeout_ms": "2000", "RAY_health_check_failure_threshold": "3",
        }  # fmt: skip
        self.rays: list[Any] = []
        for i in range(1 + NODES):
            where = ["--head", f"--port={self.address.rpartition(':')[2]}", "--include-dashboard=false", f"--temp-dir={folder}/ray", "--num-cpus=0"]
            join = [f"--address={self.address}", "--num-cpus=4"]
            start = [sys.executable, "-m", "ray.scripts.scripts", "start", *(join if i else where), f"--node-ip-address={self.hosts.address(i)}"]
            start += ["--object-store-memory=200000000", "--block"]
            again = ["bash", "-c", 'until "$@"; do sleep 1; done', "bash"] if i else []  # until the head is up
            self.rays.append(spawn([*self.hosts.inside(i), *again, *start], folder / f"ray{i}.log", self.env))
            stack.callback(self.rays[-1].stop)
        self._wait_for_nodes()

    def _wait_for_nodes(self) -> None:
        ask = f"import ray; ray.init('{self.address}', log_to_driver=False); print('alive', sum(n['Alive'] for n in ray.nodes()))"
        end = time.monotonic() + 180
        while time.monotonic() < end:
            done = subprocess.run(
                [*self.hosts.inside(0), sys.executable, "-c", ask], capture_output=True, text=True, env=os.environ | self.env, cwd=self.folder
            )
            if f"alive {1 + NODES}" in done.stdout:
                return
        raise VimeError("the Ray cluster did not come up", f"see {self.folder}/ray*.log", done.stderr[-2000:])

    def train(self, config: Path, *args: str) -> subprocess.Popen[bytes]:
        out = open(config.with_suffix(".out"), "ab")  # noqa: SIM115 (the process's)
        cmd = [*self.hosts.inside(0), sys.executable, "-m", "vime.cli", "train", str(config), *args]
        job = subprocess.Popen(cmd, stdout=out, stderr=subprocess.STDOUT, env=os.environ | self.env)
        self.stack.callback(lambda: job.poll() is None and (job.terminate(), job.terminate(), job.wait(60)))
        return job

    def host_of(self, pid: int) -> int:
        """Number of the host that a process is on."""
        net = os.readlink(f"/proc/{pid}/ns/net")
        return next(i for i, p in enumerate(self.hosts.pids) if os.readlink(f"/proc/{p}/ns/net") == net)


class Run:
    def __init__(self, cluster: Any, name: str, model: str, steps: int, **changes: Any):
        self.cluster, self.steps = cluster, steps
        folder = cluster.folder
        r = random.Random(7)
        words = ["".join(r.choices("abcdefghij", k=4)) for _ in range(512)]
        (folder / "prompts.jsonl").write_text("".join(json.dumps({"prompt": w, "label": w[::-1]}) + "\n" for w in words))
        tree: dict[str, Any] = {
            "name": name, "run_dir": str(folder / "runs"), "model": str(Path(model).resolve()), "data": {"prompts": str(folder / "prompts.jsonl")},
            "rollout": ROLLOUT,
            "reward": {"function": "exact"}, "train": {"steps": steps, "lr": 1e-4}, "checkpoint": {"interval": 1}, "log": {"tensorboard": False},
            "parallel": {"fsdp": 2}, "ray": {"address": cluster.address, "placement": "spread"}, "data_plane": {"backend": "ray"},
            "weights": {"transport": "file"},
        }  # fmt: skip
        self.config, self.folder = folder / f"{name}.toml", folder / "runs" / name
        self.config.write_text(tomli_w.dumps(tree | changes))

    def printed(self) -> str:
        return self.config.with_suffix(".out").read_text(errors="replace")

    def metrics(self) -> list[dict[str, float]]:
        path = self.folder / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")] if path.exists() else []

    def wait_for_step(self, job: subprocess.Popen[bytes], step: int, timeout: float = 600) -> None:
        end = time.monotonic() + timeout
        while not any(m["step"] >= step for m in self.metrics()):
            if job.poll() is not None or time.monotonic() > end:
                raise VimeError(f"step {step} was not reached (exit code {job.poll()})", "", self.printed()[-3000:])
            time.sleep(0.1)

    def where(self) -> dict[str, int]:
        """Host of each process of the run."""
        pids = json.loads((self.folder / "processes.json").read_text())
        return {name: self.cluster.host_of(pid) for name, pid in pids.items() if pid and pid > 0 and os.path.exists(f"/proc/{pid}")}

    def ids(self) -> list[int]:
        """Of the trained samples, by the dumps of the steps."""
        return sorted(json.loads(line)["index"] for f in (self.folder / "samples").glob("step_*.jsonl") for line in f.read_text().splitlines())


def refused(cluster: Cluster, model: str) -> dict[str, Any]:
    """What is of one host only, a cluster must not be started with."""
    run = Run(cluster, "refused", model, 1, data_plane={"backend": "shm"}, weights={"transport": "shm"})
    code = cluster.train(run.config).wait(120)
    return {
        "what": "stores of one host",
        "exit": code,
        "said": run.printed()[-600:],
        "ok": code == 1 and "is the memory of one host" in run.printed(),
    }


def engine_lost(cluster: Cluster, model: str) -> dict[str, Any]:
    run = Run(cluster, "engine", model, 8)
    begin = time.monotonic()
    job = cluster.train(run.config)
    run.wait_for_step(job, 2)
    started, places = time.monotonic() - begin, run.where()
    ranks = {host for name, host in places.items() if name.startswith("trainer")}
    victim = next(h for h in range(1, 1 + NODES) if h not in ranks)
    lost = sorted(name for name, host in places.items() if host == victim)
    before = len(run.metrics())
    cluster.hosts.cut(victim)
    cut = time.monotonic()
    while len(run.metrics()) < before + 2 and job.poll() is None:
        time.sleep(0.1)
    back, code = time.monotonic() - cut, job.wait(600)
    last = run.metrics()[-1]
    again = {k: last[f"health/{k}"] for k in ("engine_restarts", "router_restarts", "groups_redone")}
    per_step = len(run.ids()) / max(1, len(run.metrics()))
    ok = code == 0 and len(run.metrics()) == run.steps and len(set(run.ids())) == len(run.ids())
    row = {"what": "a node with servers and workers only is cut off", "places": places, "victim": victim, "lost": lost, "exit": code, "ok": ok}
    return row | {"2 steps after the start": round(started, 1), "2 steps after the cut": round(back, 1), "samples a step": per_step} | again


def rank_lost(cluster: Cluster, model: str) -> dict[str, Any]:
    run = Run(cluster, "rank", model, 6, rollout=ROLLOUT | {"num_engines": 1})
    job = cluster.train(run.config)
    run.wait_for_step(job, 2)
    places = run.where()
    victim = places["trainer-1"]
    if victim == places["trainer-0"]:
        raise VimeError(f"both ranks are on host {victim}")
    cluster.hosts.cut(victim)
    cut = time.monotonic()
    code = job.wait(600)
    stopped, said = time.monotonic() - cut, [x for x in run.printed().splitlines() if x.startswith("vime: error")]
    again = cluster.train(run.config, "--resume").wait(900)
    ids, ok = run.ids(), code == 1 and len(said) == 1
    ok = ok and again == 0 and len(set(ids)) == len(ids) and {m["step"] for m in run.metrics()} == set(range(1, run.steps + 1))
    row = {
        "what": "a node with a trainer rank is cut off",
        "places": places,
        "victim": victim,
        "exit": code,
        "said": said,
        "seconds": round(stopped, 1),
    }
    return row | {"exit of --resume": again, "steps": len(run.metrics()), "ok": ok}


class Bare:
    """Hosts without Ray."""

    def __init__(self, stack: ExitStack, folder: Path, rate: str):
        self.folder, self.address = folder, "unused"
        folder.mkdir(parents=True, exist_ok=True)
        self.hosts = Hosts(stack, 1, 0, rate, "", folder)


def launched(stack: ExitStack, folder: Path, rate: str, model: str) -> dict[str, Any]:
    """The script of `vime launch ssh`, with nsenter as its ssh."""
    bare = Bare(stack, folder / "launch", rate)
    run = Run(bare, "launched", model, 2, rollout=ROLLOUT | {"num_engines": 1})
    cases = "\n".join(f"  {bare.hosts.address(i)}) pid={pid} ;;" for i, pid in enumerate(bare.hosts.pids))
    ssh, job = bare.folder / "ssh.sh", bare.folder / "job.sh"
    root = Path(__file__).resolve().parent.parent
    ssh.write_text(f'case "$1" in\n{cases}\nesac\nshift\nexec nsenter --net=/proc/$pid/ns/net env PYTHONPATH={root} OMP_NUM_THREADS=1 "$@"\n')
    made = [
        sys.executable,
        "-m",
        "vime.cli",
        "launch",
        "ssh",
        str(run.config),
        "ray.address=",
        "--nodes",
        "2",
        "--gpus-per-node",
        "0",
        "--out",
        str(job),
    ]
    subprocess.run(made, check=True, env=os.environ | {"PYTHONPATH": str(root)})
    begin = time.monotonic()
    env = os.environ | {"SSH": f"bash {ssh}", "PORT": str(free_port())}
    with open(run.config.with_suffix(".out"), "ab") as out:
        child = subprocess.Popen(["bash", str(job), *map(bare.hosts.address, (0, 1))], stdout=out, stderr=subprocess.STDOUT, env=env)
        code = child.wait(900)
    seconds = time.monotonic() - begin
    time.sleep(10)
    left = [p for p in os.listdir("/proc") if p.isdecimal() and any(_on(p, q) for q in bare.hosts.pids)]
    left = [p for p in left if int(p) not in bare.hosts.pids]
    ok = code == 0 and len(run.metrics()) == 2 and not left
    return {
        "what": "vime launch ssh, two hosts",
        "exit": code,
        "steps": len(run.metrics()),
        "seconds": round(seconds, 1),
        "left behind": left,
        "ok": ok,
    }


def _on(pid: str, holder: int) -> bool:
    try:
        return os.readlink(f"/proc/{pid}/ns/net") == os.readlink(f"/proc/{holder}/ns/net")
    except OSError:
        return False


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="models/tiny", help="a small model: vime model tiny --out models/tiny")
    p.add_argument("--rate", default="1gbit", help="of each host's link (1gbit)")
    p.add_argument("--keep", metavar="DIR", help="keep logs and runs there")
    p.add_argument(
        "--parts",
        nargs="+",
        default=["launch", "refused", "engine", "rank"],
        help="what is tried: launch refused engine rank; each of the last two costs a node",
    )
    args = p.parse_args()
    with ExitStack() as stack:
        folder = Path(args.keep or stack.enter_context(tempfile.TemporaryDirectory(prefix="vm-", dir="/tmp")))
        folder.mkdir(parents=True, exist_ok=True)
        rows, cluster = [], None
        for name in args.parts:
            if name == "launch":
                rows.append(launched(stack, folder, args.rate, args.model))
            else:
                cluster = cluster or Cluster(stack, folder, args.rate)
                rows.append({"refused": refused, "engine": engine_lost, "rank": rank_lost}[name](cluster, args.model))
            print(json.dumps(rows[-1], indent=1), flush=True)
    return 0 if all(r["ok"] for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
