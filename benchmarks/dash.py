"""How fast `vime dash` opens a run of 100,000 samples, and whether its list scrolls without dropped frames, in a real headless Chromium.

    python benchmarks/dash.py                     100,000 samples of 256 response tokens in 400 steps, made in a temporary folder
    python benchmarks/dash.py --samples 20000 --shots docs/img

Measured from the request for the page: until the last values of metrics are there, until the first curve is drawn, and until the list shows the first sample's
text and the count of all.
Scrolling: frame by frame over requestAnimationFrame, in steps of a wheel and in leaps over the whole list. A frame counts as dropped where it
took longer than 1.5 times what the browser's own frames take when nothing happens. All of that is wall time, so it wants an idle machine; *_cpu_*
are the page's main thread alone, by its CPU clock, which other work hardly changes: a frame has 16.7 ms.
"""

import argparse
import json
import math
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
from tokenizers import Tokenizer, models

ROOT = Path(__file__).resolve().parents[1]
TEXT = "so the sum of both sides is then we can write this as let me check again , answer . therefore x equals two carry one and 42 41 = + ( )"
WORDS = [" " + w for w in TEXT.split()]  # one token each


def make_run(folder: Path, samples: int, steps: int, tokens: int, seed: int = 0, group: int = 8) -> None:
    """A run's folder as a real one leaves it: metrics, samples, the trainer's logprobs, spans. `samples` are dealt out evenly to `steps`."""
    rng = random.Random(seed)
    for part in ("samples", "trace", "model"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    (folder / "config.toml").write_text(f'name = "{folder.name}"\nmodel = "{folder}/model"\n')
    Tokenizer(models.WordLevel({w: i for i, w in enumerate(WORDS)}, "?")).save(str(folder / "model" / "tokenizer.json"))
    per_step, at, rows = samples // steps, 1.8e18, []
    spans: list[dict] = []
    for step in range(1, steps + 1):
        lines, seen, rewards = [], {}, []
        for k in range(per_step):
            uid, n = (step - 1) * per_step + k, max(4, min(tokens, int(rng.gauss(tokens * 0.7, tokens * 0.2))))
            good = rng.random() < 0.15 + 0.7 * step / steps
            log_probs = [-round(rng.expovariate(2.5), 5) for _ in range(n)]
            agent = uid % 5 == 0
            mask = [0 if agent and n // 3 <= i < n // 2 else 1 for i in range(n)]
            ids = rng.choices(range(len(WORDS)), k=n)
            metadata: dict = {"level": rng.randrange(5)}
            if agent:
                asked = [
                    ("bash", {"command": "pytest -q"}, "ok", {}),
                    ("edit", {"path": "tests/test_a.py"}, "blocked", {"rule": "tests-are-read-only"}),
                ]
                calls = [{"tool": t, "arguments": a, "status": s, "seconds": 1.25, "metadata": m} for t, a, s, m in asked[: 1 + (uid % 50 == 0)]]
                turns = [{"turn": f"t{k}", "tokens": n // 3, "seconds": 0.5, "ill_formed": False, "calls": [call]} for k, call in enumerate(calls)]
                metadata["agent"] = {"status": "answered", "error": "", "answer": "42", "notes": {"tests": "3 of 3"}, "steps": turns}
            lines.append(
                {"index": uid, "uid": uid, "group_index": uid // group, "rollout_id": uid, "prompt": f"<|user|>What is {uid % 97} + {step}? Think it through.<|assistant|>",
                 "response": "".join(WORDS[i] for i in ids), "label": "42", "reward": float(good),
                 "status": "completed" if n < tokens else "truncated", "prompt_length": 24, "response_length": n,
                 "weight_versions": [step - 1], "removed": uid % 41 == 0, "metadata": metadata, "tokens": ids, "log_probs": log_probs,
                 "loss_mask": mask, "prompt_tokens": list(range(24)), "version_runs": [[step - 1, n]]}
            )  # fmt: skip
            rewards.append(float(good))
            if step > steps - 20:
                seen[uid] = [round(x + rng.gauss(0, 0.02) + (0.5 if rng.random() < 0.01 else 0), 5) for x, m in zip(log_probs, mask) if m]
        (folder / "samples" / f"step_{step:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in lines))
        if seen:
            (folder / "samples" / f"step_{step:06d}.train-0.json").write_text(json.dumps(seen))
        wave = math.sin(step / 9)
        phases = {"rollout": 20 + 3 * wave, "train": 14 - wave, "sync": 2.5, "rest": 1.0}
        rows.append(
            {"step": step, "rollout/raw_reward": sum(rewards) / len(rewards), "rollout/response_len": tokens * (0.6 + 0.1 * step / steps) + rng.gauss(0, 4),
             "rollout/truncated": rng.random() * 0.1, "rollout/dropped_zero_std": rng.randrange(6), "rollout/dropped_reward_error": int(rng.random() < 0.05),
             "rollout/retries": int(rng.random() < 0.03), "rollout/engine_busy": 0.8 + 0.1 * rng.random(), "rollout/engine_running": 200 + 20 * wave,
             "train/entropy": 0.9 * math.exp(-step / steps) + rng.gauss(0, 0.02), "train/logprob_abs_diff": 10 ** rng.gauss(-3, 0.15),
             "train/grad_norm": abs(rng.gauss(1, 0.3)), "train/loss": rng.gauss(0, 0.01), "perf/rollout_s": phases["rollout"], "perf/train_s": phases["train"],
             "weights/sync_s": 2.5, "perf/step_s": sum(phases.values()), "perf/rollout_tokens_per_s": 9000 + 500 * wave, "weights/version": step,
             "data/stored_bytes": 0, "health/engine_restarts": 0}
            | ({"eval/reward": min(1, 0.1 + 0.8 * step / steps + rng.gauss(0, 0.02))} if step % 20 == 0 else {})
        )  # fmt: skip
        if step <= 20:  # spans of the first steps
            for name, seconds in phases.items():
                spans.append({"name": name, "process": "controller", "start": at, "end": at + seconds * 1e9, "attributes": {"step": step}})
                if name == "train":
                    spans += [dict(spans[-1], process=f"trainer-{r}", end=at + (seconds - rng.random()) * 1e9) for r in range(4)]
                if name == "rollout":
                    for w in range(4):
                        for k in range(12):
                            a, b = at + rng.random() * 3e9, at + rng.uniform(8, seconds) * 1e9
                            uid = (step - 1) * per_step + w * 12 + k
                            of = {"process": f"worker-{w}", "attributes": {"sample": uid, "step": step}}
                            spans += [
                                {"name": "generate", "start": a, "end": b} | of,
                                {"name": "reward", "start": b, "end": b + rng.random() * 2e9} | of,
                            ]
                            spans.append({"name": "sample", "start": at, "end": at + sum(phases.values()) * 1e9} | of | {"process": "controller"})
                at += seconds * 1e9
    for process in {s["process"] for s in spans}:
        own = [{k: int(v) if k in ("start", "end") else v for k, v in s.items() if k != "process"} for s in spans if s["process"] == process]
        (folder / "trace" / f"{process}.jsonl").write_text("".join(json.dumps(s) + "\n" for s in own))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


# every frame's length while `move` is called at its begin; in the page
FRAMES = """async ([frames, kind]) => {
  const list = document.getElementById('list'), out = [];
  let last = await new Promise(requestAnimationFrame);
  for (let k = 0; k < frames; k++) {
    if (kind === 'wheel') list.scrollTop += 120;
    if (kind === 'leap') list.scrollTop = (list.scrollHeight - list.clientHeight) * ((k * 0.381966) % 1);
    const now = await new Promise(requestAnimationFrame);
    out.push(now - last);
    last = now;
  }
  return out;
}"""


def cpu(page: Any) -> Callable[[], float]:
    """A function that says how many CPU seconds the page's main thread has spent."""
    session = page.context.new_cdp_session(page)
    session.send("Performance.enable", {"timeDomain": "threadTicks"})
    return lambda: next(m["value"] for m in session.send("Performance.getMetrics")["metrics"] if m["name"] == "TaskDuration")


def measure(url: str, samples: int, shots: Path | None) -> dict[str, float]:
    from playwright.sync_api import sync_playwright

    out: dict[str, float] = {}
    with sync_playwright() as p:
        browser = p.chromium.launch(executable_path=os.environ.get("CHROMIUM", "/usr/bin/chromium"), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        page.goto(url + "web/style.css")  # a browser that is open already
        spent = cpu(page)
        begun, before = time.monotonic(), spent()
        page.goto(url, wait_until="commit")
        page.wait_for_selector(".chart h3 span:not(:empty)")
        out["values_s"] = time.monotonic() - begun
        page.wait_for_selector("#charts .main-svg")
        out |= {"curves_s": time.monotonic() - begun, "curves_cpu_s": spent() - before}
        if shots:
            page.locator("#smooth").fill("0.8")
            page.wait_for_timeout(800)
            page.screenshot(path=shots / "dash-curves.png")
        page.close()
        page = browser.new_page(viewport={"width": 1440, "height": 900})
        spent = cpu(page)
        begun, before = time.monotonic(), spent()
        page.goto(url + "#samples", wait_until="commit")
        page.wait_for_selector("#list .row span:last-child:not(:empty)")
        out["first_text_s"] = time.monotonic() - begun
        page.get_by_text(f"{samples} samples", exact=True).wait_for()
        out |= {"whole_s": time.monotonic() - begun, "whole_cpu_s": spent() - before}
        page.wait_for_timeout(1000)
        for kind, frames in (("idle", 120), ("wheel", 600), ("leap", 300)):
            before = spent()
            taken = sorted(page.evaluate(FRAMES, [frames, kind]))
            out[f"{kind}_cpu_ms_a_frame"] = (spent() - before) / frames * 1e3
            out |= {f"{kind}_median_ms": taken[len(taken) // 2], f"{kind}_p99_ms": taken[int(len(taken) * 0.99)], f"{kind}_max_ms": taken[-1]}
            out[f"{kind}_dropped"] = sum(t > 1.5 * out["idle_median_ms"] for t in taken) / len(taken)
        if shots:
            page.locator("#f-flag").select_option("blocked")
            page.locator("#list").press("j")
            page.wait_for_selector("#detail .tokens")
            page.wait_for_timeout(500)
            page.screenshot(path=shots / "dash-samples.png")
        browser.close()
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--samples", type=int, default=100_000)
    p.add_argument("--steps", type=int, default=400)
    p.add_argument("--tokens", type=int, default=256, help="of a response at most")
    p.add_argument("--folder", type=Path, help="make the run here, or use what was made here before, and keep it")
    p.add_argument("--shots", type=Path, help="also write dash-curves.png and dash-samples.png into this folder")
    args = p.parse_args()
    folder = args.folder or Path(tempfile.mkdtemp(prefix="vime-dash-")) / "synthetic"
    if not (folder / "metrics.jsonl").exists():
        make_run(folder, args.samples, args.steps, args.tokens)
        for seed in (1, 2):  # to be compared with
            make_run(folder.with_name(f"seed-{seed}"), 16 * args.steps, args.steps, args.tokens, seed)
    size = sum(f.stat().st_size for f in (folder / "samples").iterdir())
    print(f"{args.samples} samples in {args.steps} steps, {size / 1e6:.0f} MB; load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    runs = [str(f) for f in (folder, *sorted(folder.parent.glob("seed-*")))]
    server = subprocess.Popen([sys.executable, "-m", "vime.cli", "dash", *runs, "--port", "0"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        assert server.stdout
        url = server.stdout.readline().split(" at ")[1].split()[0]
        for name, value in measure(url, args.samples, args.shots).items():
            print(f"{name:21} {f'{value:.2%}' if name.endswith('dropped') else f'{value:.2f}'}")
        times = psutil.Process(server.pid).cpu_times()
        print(f"{'server_cpu_s':21} {times.user + times.system:.2f}")
    finally:
        server.terminate()
        server.wait()
        if not args.folder:
            shutil.rmtree(folder.parent)


if __name__ == "__main__":
    main()
