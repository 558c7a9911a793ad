"""Train both arms over three seeds and draw docs/img/hacking.png: training reward, true pass rate, turns. Finished runs are not repeated.

python examples/hacking/figure.py [--seeds 0 1 2] [--steps N] [--draw-only]
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[2]
ARMS = {"hacking": ("believes the test in the agent's tree", "#c44e52"), "mitigated": ("guard + clean room", "#4c72b0")}
PANELS = {"reward": "training reward", "true": "true pass rate", "turns": "turns of an episode"}


def train(arm: str, seed: int, a: argparse.Namespace) -> list[dict[str, float]]:
    """The steps of one run, from its hacking.jsonl."""
    found = a.runs / f"hacking-{arm}-{seed}" / "hacking.jsonl"
    if not a.draw_only and (not found.exists() or len(found.read_text().splitlines()) < a.steps):
        over = [
            f"args.arm={arm}",
            f"seed={seed}",
            f"run_dir={a.runs}",
            f"name=hacking-{arm}-{seed}",
            f"train.steps={a.steps}",
            f"model={a.model}",
            f"data.prompts={a.data}",
        ]
        subprocess.run([sys.executable, "-m", "vime.cli", "train", "examples/hacking/run.toml", *over, "--overwrite"], check=True, cwd=ROOT)
    return [json.loads(line) for line in found.read_text().splitlines()] if found.exists() else []


def main() -> None:
    p = argparse.ArgumentParser()
    p.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--runs", type=Path, default=Path("runs"))
    p.add_argument("--model", type=Path, default=Path("models/hacking"))
    p.add_argument("--data", type=Path, default=Path("examples/hacking/data/train.jsonl"))
    p.add_argument("--out", type=Path, default=ROOT / "docs/img/hacking.png")
    p.add_argument("--draw-only", action="store_true", help="what there is, and train nothing")
    a = p.parse_args()
    for script, made in (("make_data.py", a.data.parent), ("make_model.py", a.model)):
        if not made.exists():
            subprocess.run([sys.executable, f"examples/hacking/{script}", str(made)], check=True, cwd=ROOT)
    runs = {arm: [r for seed in a.seeds if (r := train(arm, seed, a))] for arm in ARMS}

    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, 3, figsize=(12, 3.4), layout="constrained")
    for axis, (key, title) in zip(axes, PANELS.items()):
        for arm, (label, colour) in ARMS.items():
            for steps in runs[arm]:
                axis.plot([s["step"] for s in steps], [s[key] for s in steps], color=colour, alpha=0.25, linewidth=1)
            longest = min(map(len, runs[arm]), default=0)
            axis.plot(range(longest), [fmean(r[i][key] for r in runs[arm]) for i in range(longest)], color=colour, linewidth=2, label=label)
        axis.set(title=title, xlabel="step", ylim=(0, None if key == "turns" else 1.03))
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False, loc="lower right")
    a.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(a.out, dpi=130)
    for arm in ARMS:
        for key in ("reward", "true", "turns", "tampered"):
            ends = [[fmean(s[key] for s in part) for r in runs[arm] if (part := r[cut])] for cut in (slice(0, 3), slice(-3, None))]
            print(
                f"{arm:9} {key:8} first three steps {fmean(ends[0]):.2f}, last three {fmean(ends[1]):.2f} (by seed: {', '.join(f'{x:.2f}' for x in ends[1])})"
            )


if __name__ == "__main__":
    main()
