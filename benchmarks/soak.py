"""A long async run whose vLLM server is killed again and again: is any sample lost, doubled or too old? Prints a report; exit code 1 if so.

    python benchmarks/soak.py --model models/tiny --steps 200 --every 20

The run has its own server (a restart costs 30 to 60 s on two cores). A kill is SIGKILL of the API server, in the middle of a step.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def rows(folder: Path) -> list[dict]:
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [r for r in (json.loads(x) for x in lines if x.endswith("}")) if "train/loss" in r]


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="models/tiny")
    p.add_argument("--config", default="examples/reverse/run.toml")
    p.add_argument("--steps", type=int, default=200)
    p.add_argument("--every", type=int, default=20, help="steps between two kills")
    p.add_argument("--staleness", type=int, default=2)
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        folder = Path(tmp) / "soak"
        over = [f"model={a.model}", f"run_dir={tmp}", "name=soak", f"train.steps={a.steps}", "train.mode=async", "algo.correction=tis"]
        over += [f"train.max_staleness={a.staleness}", "rollout.batch_size=8", "rollout.n_samples_per_prompt=8", "log.tensorboard=false"]
        over += [f"eval.interval={a.steps}", f"checkpoint.interval={a.steps}"]
        begun, kills = time.monotonic(), 0
        job = subprocess.Popen([sys.executable, "-m", "vime.cli", "train", a.config, *over], cwd=ROOT, stdout=subprocess.DEVNULL)
        while job.poll() is None:
            done = len(rows(folder))
            if kills < done // a.every and done < a.steps:
                kills += 1
                os.kill(json.loads((folder / "processes.json").read_text())["engine-0"], signal.SIGKILL)
                print(f"step {done}: server killed", flush=True)
                while job.poll() is None and len(rows(folder)) < done + 2:  # it is back; processes.json then holds the new pid
                    time.sleep(0.2)
            time.sleep(0.1)
        got = rows(folder)
        dumps = [json.loads(x) for f in (folder / "samples").glob("step_*.jsonl") for x in f.read_text().splitlines()]
        ids = [d["index"] for d in dumps]
        state = json.loads((folder / "checkpoints" / f"step_{a.steps:06d}" / "state.json").read_text())
        under_way = {g["group_index"] for g in state["groups"]}
        trained = {d["group_index"] for d in dumps}
        lost = set(range(state["prompts"]["given"])) - trained - under_way
        restarts, stale = got[-1]["health/engine_restarts"], max(r["rollout/staleness_max"] for r in got)
        print(f"{len(got)} steps in {time.monotonic() - begun:.0f} s, {kills} kills, {restarts:.0f} restarts; exit code {job.returncode}")
        print(f"{len(ids)} samples trained, {len(ids) - len(set(ids))} doubled; groups: {len(trained)} trained, {len(under_way)} under way, {len(lost)} lost")
        print(f"staleness <= {stale:.0f} (bound {a.staleness}); largest mean |dlogp| of a step {max(r.get('train/logprob_abs_diff', 0.0) for r in got):.2g}")
        print(f"reward {got[0]['rollout/raw_reward']:.3f} -> {got[-1]['rollout/raw_reward']:.3f}  (load {os.getloadavg()[0]:.1f})")
        good = job.returncode == 0 and len(got) == a.steps and len(ids) == len(set(ids)) == 64 * a.steps and not lost and stale <= a.staleness
        return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
