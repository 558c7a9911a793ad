"""How much of the time a server works during async training whose answers take longer to generate than to train on.

    python benchmarks/engine_busy.py --model models/tiny

Every answer has --tokens tokens (the end of a sequence is ignored). Prints the busy share by the server's own /metrics over all steps
after the first --skip, weighted with their length, and the lowest step's; both are of rollout/engine_busy (docs/engines.md says how a look
at a server is judged).
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from vime.rollout.generate import generate

ROOT = Path(__file__).resolve().parent.parent


async def long_answers(args, sample, sampling_params):
    return await generate(args, sample, sampling_params | {"ignore_eos": True})


def parity(args, sample):
    return float(sum(sample.tokens) % 2)


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="models/tiny")
    p.add_argument("--config", default="examples/reverse/run.toml")
    p.add_argument("--steps", type=int, default=25)
    p.add_argument("--skip", type=int, default=3, help="first steps that are not counted")
    p.add_argument("--tokens", type=int, default=100)
    a = p.parse_args()
    with tempfile.TemporaryDirectory() as tmp:
        over = [f"model={a.model}", f"run_dir={tmp}", "name=busy", f"train.steps={a.steps}", "train.mode=async", "train.max_staleness=3"]
        over += ["algo.correction=tis", "rollout.batch_size=8", "rollout.n_samples_per_prompt=8", "log.tensorboard=false", "train.lr=1e-6"]
        over += [f"rollout.max_response_len={a.tokens}", f"rollout.max_context_len={a.tokens + 28}", "eval.datasets=[]"]
        over += ["rollout.custom_generate=benchmarks.engine_busy:long_answers", "reward.function=benchmarks.engine_busy:parity"]
        env = os.environ | {"PYTHONPATH": str(ROOT)}
        subprocess.run([sys.executable, "-m", "vime.cli", "train", a.config, *over], check=True, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
        rows = [json.loads(x) for x in (Path(tmp) / "busy" / "metrics.jsonl").read_text().splitlines()]
    rows = [r for r in rows if "train/loss" in r and "rollout/engine_busy" in r][a.skip :]
    seconds = sum(r["perf/step_s"] for r in rows)
    busy = sum(r["rollout/engine_busy"] * r["perf/step_s"] for r in rows) / seconds
    train, sync = (sum(r[k] for r in rows) / seconds for k in ("perf/train_s", "weights/sync_s"))
    print(f"{len(rows)} steps in {seconds:.1f} s: busy {busy:.3f}, lowest step {min(r['rollout/engine_busy'] for r in rows):.3f}")
    print(f"share of the time in training {train:.2f}, in updates {sync:.2f}; load {os.getloadavg()[0]:.1f}")


if __name__ == "__main__":
    main()
