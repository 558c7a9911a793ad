"""Whether a multi-turn tool-use task trains: examples/tools with several seeds, real vLLM, first and last reward of each.

    python examples/tools/make_model.py && python examples/tools/make_data.py
    python benchmarks/agent_learns.py --seeds 3

A character-level model that has seen mostly wrong demonstrations learns which operation a word asks for, and to repeat what the calculator says.
Exit code 1 where a seed's last three steps are not at least `--rise` above its first three.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def measure(a: argparse.Namespace, seed: int, folder: Path) -> tuple[float, float, dict]:
    """Mean reward of the first three steps and of the last three, and the last step's metrics."""
    over = [f"model={a.model}", f"data.prompts={a.prompts}", f"run_dir={folder}", f"name=s{seed}", f"seed={seed}"]
    over += ["eval.datasets=[]", "log.tensorboard=false"]
    command = [sys.executable, "-m", "vime.cli", "train", str(ROOT / "examples/tools/run.toml"), *over, *a.overrides]
    subprocess.run(command, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL)
    rows = [json.loads(x) for x in (folder / f"s{seed}/metrics.jsonl").read_text().splitlines()]
    curve = [r["rollout/raw_reward"] for r in rows if "rollout/raw_reward" in r]
    return statistics.fmean(curve[:3]), statistics.fmean(curve[-3:]), rows[-1]


def main() -> int:
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="models/tiny-tools")
    p.add_argument("--prompts", default="examples/tools/data/train.jsonl")
    p.add_argument("--seeds", type=int, default=3)
    p.add_argument("--rise", type=float, default=0.3)
    p.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    a = p.parse_args()
    rises = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(a.seeds):
            first, last, m = measure(a, seed, Path(folder))
            rises.append(last - first)
            print(
                f"seed {seed}: reward {first:.3f} -> {last:.3f}, trainable fraction {m['agent/trainable_fraction']:.3f}, {m['step']} steps",
                flush=True,
            )
    return 0 if min(rises) >= a.rise else 1


if __name__ == "__main__":
    sys.exit(main())
