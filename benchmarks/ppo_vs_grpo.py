"""Held-out reward of PPO with a critic and of GRPO: same model, task, seeds, samples a step and optimizer, real vLLM.

    python benchmarks/ppo_vs_grpo.py --model models/tiny --seeds 3

"Reverse the word", `--steps` steps of 256 samples: 16 prompts x 16 for GRPO, 256 prompts x 1 for PPO. Prints for each seed the mean reward of
the last ten steps and the held-out one, then the means, their difference and its 90% confidence interval (paired by seed, Student's t): PPO reaches
GRPO's reward where the interval's lower end is above -`--margin`.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
SHAPES = {
    "grpo": ["rollout.batch_size=16", "rollout.n_samples_per_prompt=16"],
    "ppo": [
        *("rollout.batch_size=256", "rollout.n_samples_per_prompt=1", "algo.advantage_estimator=gae"),
        *("algo.lambd=0.95", "algo.critic_lr=1e-3"),
    ],
}
T90 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895}  # Student's t, 95% quantile, by degrees of freedom


def measure(kind: str, seed: int, a: argparse.Namespace, folder: Path) -> dict[str, float]:
    name = f"{kind}-{seed}"
    over = [f"model={a.model}", f"run_dir={folder}", f"name={name}", f"seed={seed}", f"train.steps={a.steps}", *SHAPES[kind]]
    over += [f"eval.interval={a.steps}", f"checkpoint.interval={a.steps}", "log.samples=false", "log.tensorboard=false"]
    subprocess.run([sys.executable, "-m", "vime.cli", "train", a.config, *over], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    rows = [json.loads(x) for x in (folder / name / "metrics.jsonl").read_text().splitlines()]
    trained = [r for r in rows if "rollout/raw_reward" in r]
    return {
        "train": statistics.fmean(r["rollout/raw_reward"] for r in trained[-10:]),
        "held_out": [r["eval/reward"] for r in rows if "eval/reward" in r][-1],
        "seconds": sum(r["perf/step_s"] for r in trained),
    }


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="models/tiny")
    p.add_argument("--config", default="examples/reverse/run.toml")
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--margin", type=float, default=0.05)
    a = p.parse_args()
    found: dict[str, list[dict[str, float]]] = {kind: [] for kind in SHAPES}
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(1, a.seeds + 1):
            for kind in SHAPES:
                found[kind].append(m := measure(kind, seed, a, Path(folder)))
                print(f"{kind:5} seed {seed}: last ten steps {m['train']:.3f}, held out {m['held_out']:.3f}, {m['seconds']:.0f} s", flush=True)
    for key in ("train", "held_out"):
        diffs = [ppo[key] - grpo[key] for ppo, grpo in zip(found["ppo"], found["grpo"])]
        mean = statistics.fmean(diffs)
        half = T90[len(diffs) - 1] * statistics.stdev(diffs) / len(diffs) ** 0.5 if len(diffs) > 1 else float("inf")
        means = ", ".join(f"{kind} {statistics.fmean(m[key] for m in found[kind]):.3f}" for kind in SHAPES)
        reached = "reaches" if mean - half > -a.margin else "does not provably reach"
        print(f"{key}: {means}; ppo - grpo = {mean:+.3f} [{mean - half:+.3f}, {mean + half:+.3f}]: ppo {reached} grpo within {a.margin}")


if __name__ == "__main__":
    main()
