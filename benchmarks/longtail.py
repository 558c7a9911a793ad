"""Samples/s of sync, one-step-off, async and partial rollout where the environment is slow: same model, task, seeds, real vLLM.

    python benchmarks/longtail.py --model models/tiny --seeds 3

"Reverse the word" in turns of two tokens; before each turn the environment takes a log-normal time (median --median seconds, --sigma).
The time of a turn depends on the sample and the turn only, so every mode waits for the same things. Prints for each mode samples/s
(after the first --skip steps), its ratio to sync, the mean reward of the last ten steps, and the largest staleness of a trained token.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from vime.rollout.generate import generate, nap
from vime.sample import Status

ROOT = Path(__file__).resolve().parent.parent
LATE = ["algo.correction=tis"]
MODES = {
    "sync": [],
    "sync + partial": ["rollout.over_sampling_batch_size=16", "rollout.partial_rollout=true", "train.max_staleness=2", *LATE],
    "one-step-off": ["train.mode=async", "train.max_staleness=1", *LATE],
    "async": ["train.mode=async", "train.max_staleness=3", *LATE],
    "async + partial": ["train.mode=async", "train.max_staleness=3", "weights.in_flight=abort", *LATE],
}


async def slow_turns(args, sample, sampling_params):
    """A custom_generate plug-in: two tokens a turn, and an environment that is slow between them."""
    whole = sampling_params["max_new_tokens"]
    while sample.status in (Status.PENDING, Status.ABORTED):
        rng = random.Random(f"{sample.index}/{sample.response_length}")
        await nap(float(os.environ["LONGTAIL_MEDIAN"]) * rng.lognormvariate(0, float(os.environ["LONGTAIL_SIGMA"])))
        sample = await generate(args, sample, sampling_params | {"max_new_tokens": min(whole, sample.response_length + 2)})
        if sample.status is Status.ABORTED:
            return sample
        if sample.status is Status.TRUNCATED and sample.response_length < whole:
            sample.status = Status.PENDING  # only the turn has ended
    return sample


def measure(mode: str, seed: int, a: argparse.Namespace, url: str, folder: Path) -> dict[str, float]:
    name = f"{mode.replace(' + ', '-')}-{seed}"
    over = ["rollout.custom_generate=benchmarks.longtail:slow_turns", f"rollout.engines=['{url}']", f"train.steps={a.steps}", f"seed={seed}"]
    over += [f"model={a.model}", f"run_dir={folder}", f"name={name}", f"eval.interval={a.steps}", f"checkpoint.interval={a.steps}"]
    over += ["rollout.batch_size=8", "rollout.n_samples_per_prompt=8", "log.samples=false", "log.tensorboard=false", *MODES[mode]]
    env = os.environ | {"LONGTAIL_MEDIAN": str(a.median), "LONGTAIL_SIGMA": str(a.sigma), "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "vime.cli", "train", a.config, *over], check=True, cwd=ROOT, env=env, stdout=subprocess.DEVNULL)
    rows = [json.loads(x) for x in (folder / name / "metrics.jsonl").read_text().splitlines()]
    rows = [r for r in rows if "train/loss" in r]
    return {
        "samples_per_s": 64 * len(rows[a.skip :]) / sum(r["perf/step_s"] for r in rows[a.skip :]),
        "reward": statistics.fmean(r["rollout/raw_reward"] for r in rows[-10:]),
        "staleness": max(r["rollout/staleness_max"] for r in rows),
    }


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="models/tiny")
    p.add_argument("--config", default="examples/reverse/run.toml")
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--skip", type=int, default=3, help="first steps that are not counted")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--median", type=float, default=0.2, help="median seconds of a turn")
    p.add_argument("--sigma", type=float, default=1.0)
    p.add_argument("--modes", nargs="*", default=list(MODES), choices=list(MODES))
    a = p.parse_args()
    from vime import config
    from vime.rollout.engine import Engine

    cfg = config.load(ROOT / a.config, [f"model={a.model}"])
    with tempfile.TemporaryDirectory() as tmp:
        engine = Engine(cfg, 0, tmp)
        url, base = engine.start(), 0.0
        try:
            for mode in a.modes:
                got = [measure(mode, seed, a, url, Path(tmp)) for seed in range(a.seeds)]
                speed = statistics.median(g["samples_per_s"] for g in got)
                base = base or speed
                rewards = ", ".join(f"{g['reward']:.3f}" for g in got)
                stale, load = max(g["staleness"] for g in got), os.getloadavg()[0]
                print(f"{mode:16} {speed:6.1f} samples/s  {speed / base:5.2f} x  reward {rewards}  staleness <= {stale:.0f}  (load {load:.1f})", flush=True)
        finally:
            engine.stop()


if __name__ == "__main__":
    main()
