"""samples/s of vime and of TRL's GRPOTrainer: same model, task, batch, cores. Prints each pair and the median ratio.

    python benchmarks/vs_trl.py --model models/smollm2-135m --pairs 3

TRL runs with transformers generation and without gradient checkpointing, its fastest setting that runs on a CPU (its vLLM modes
need an accelerator); all 64 samples in one micro-batch, fp32. Both do one warm-up step that is not counted; vime's count covers the
whole step: rollout over HTTP, reward, training, publishing. TRL is installed beside vime, into .cache/trl, by this script.
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
TRL = ROOT / ".cache" / "trl"
PACKAGES = ["trl==1.16.0", "datasets==5.2.0", "dill==0.4.1", "multiprocess==0.70.19", "xxhash", "pandas", "python-dateutil", "pytz", "tzdata", "httpx"]

TRL_SIDE = r'''
import json, re, sys, time, warnings
warnings.filterwarnings("ignore")
model, data, out, steps, template = sys.argv[1:6]
import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
rows = [json.loads(x) for x in open(data)]
tok = AutoTokenizer.from_pretrained(model); tok.chat_template = template
ds = Dataset.from_list([{"prompt": [{"role": "user", "content": r["prompt"]}], "label": r["label"]} for r in rows])
def reward(completions, label, **kw):
    return [float((re.findall(r"\d+", c[0]["content"]) or [None])[-1] == str(x)) for c, x in zip(completions, label)]
cfg = GRPOConfig(
    output_dir=out, use_cpu=True, bf16=False, per_device_train_batch_size=64, num_generations=8, max_completion_length=16, max_steps=int(steps),
    learning_rate=2e-5, temperature=1.0, beta=0.0, gradient_checkpointing=False, report_to=[], save_strategy="no", logging_steps=1,
    dataloader_num_workers=0, dataloader_pin_memory=False, model_init_kwargs={"dtype": "float32"}, disable_tqdm=True, seed=0,
)
times, rewards = [], []
class Clock(TrainerCallback):
    def on_step_begin(self, *a, **k): self.t = getattr(self, "t", None) or time.monotonic()
    def on_step_end(self, *a, **k):
        now = time.monotonic(); times.append(now - self.t); self.t = now
    def on_log(self, args, state, control, logs=None, **k): rewards.append((logs or {}).get("reward"))
GRPOTrainer(model=model, reward_funcs=reward, args=cfg, train_dataset=ds, processing_class=tok, callbacks=[Clock()]).train()
json.dump({"times": times, "rewards": rewards}, open(out + "/times.json", "w"))
'''


def run_trl(model: str, data: str, steps: int, template: str, folder: Path) -> list[float]:
    env = os.environ | {"PYTHONPATH": str(TRL), "OMP_NUM_THREADS": str(os.cpu_count()), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    folder.mkdir(parents=True)
    subprocess.run([sys.executable, "-c", TRL_SIDE, model, data, str(folder), str(steps), template], env=env, check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "times.json").read_text())["times"]


def run_vime(model: str, data: str, steps: int, config: str, folder: Path) -> list[float]:
    cmd = [sys.executable, "-m", "vime.cli", "train", config, f"model={model}", f"data.prompts={data}", f"train.steps={steps}", "name=vs-trl"]
    # skip_zero_advantage is left at its default: it changes no gradient. No evaluation, and the checkpoint comes after the last step.
    cmd += [f"run_dir={folder}", f"eval.interval={steps + 1}", f"checkpoint.interval={steps + 1}", "--overwrite"]
    subprocess.run(cmd, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    rows = [json.loads(x) for x in (folder / "vs-trl" / "metrics.jsonl").read_text().splitlines()]
    return [r["perf/rollout_s"] + r["perf/train_s"] + r["weights/sync_s"] for r in rows if "train/loss" in r]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="models/smollm2-135m")
    p.add_argument("--config", default="examples/arithmetic/run.toml")
    p.add_argument("--pairs", type=int, default=3)
    p.add_argument("--steps", type=int, default=3, help="steps per run, the first of which is warm-up")
    a = p.parse_args()
    if not (TRL / "trl").exists():
        subprocess.run([sys.executable, "-m", "uv", "pip", "install", "-q", "--no-deps", "--target", str(TRL), *PACKAGES], check=True)
    from vime import config

    cfg = config.load(ROOT / a.config)
    data = str(ROOT / cfg.data.prompts)
    ratios = []
    with tempfile.TemporaryDirectory() as tmp:
        for i in range(a.pairs):
            load = os.getloadavg()[0]
            ours = 64 / statistics.mean(run_vime(str(Path(a.model).resolve()), data, a.steps, a.config, Path(tmp) / f"vime{i}")[1:])
            theirs = 64 / statistics.mean(run_trl(a.model, data, a.steps, cfg.data.chat_template or "", Path(tmp) / f"trl{i}")[1:])
            ratios.append(ours / theirs)
            print(f"pair {i}: vime {ours:.2f} samples/s, TRL {theirs:.2f} samples/s, ratio {ours / theirs:.2f} (load before: {load:.1f})", flush=True)
    print(f"median ratio vime/TRL over {a.pairs} pairs: {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
