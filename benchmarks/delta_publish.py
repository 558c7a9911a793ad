"""Real GRPO steps in bf16: what a delta of the weights costs beside the whole weights, and whether a server ends up with the same bits.

    python benchmarks/delta_publish.py --model models/smollm2-135m

Rollouts from a real vLLM server, rewarded for even token ids; each step's weights are written whole and as a delta, and the server takes
the delta. After the last step the server's logprobs of fixed prompts, and vLLM's own checksums of what it computes with (on a CPU only of
what it doesn't pack), are compared with those after the whole weights. Ends with exit code 1 where they differ.
"""

import argparse
import asyncio
import os
import random
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from vime import config
from vime.procs import free_port
from vime.rollout.engine import Engine
from vime.rollout.health import Fleet
from vime.rollout.http import EngineClient
from vime.rollout.worker import RolloutWorker
from vime.sample import Sample, meta_of
from vime.trainer.advantage import grpo
from vime.trainer.batch import plan
from vime.trainer.engine import Trainer
from vime.weights.publish import Publisher

PROMPT, RESPONSE = 32, 64  # tokens


def even(args: Any, sample: Sample) -> float:
    """Reward: share of even token ids in the response."""
    ids = sample.tokens[-sample.response_length :]
    return sum(t % 2 == 0 for t in ids) / len(ids)


async def rollout(cfg: config.Config, url: str, groups: list[list[Sample]], version: int) -> list[list[Sample]]:
    worker = RolloutWorker(cfg, url, 0)
    done = await asyncio.gather(*(worker.run_group(g, version) for g in groups))
    await worker.close()
    return [samples for _, samples in done]


async def state(url: str, prompts: list[list[int]]) -> tuple[list[list[float]], dict[str, str]]:
    """The server's logprobs of `prompts`, one after the other, and vLLM's checksums of its tensors."""
    c = EngineClient(url)
    lps = [await c.prompt_logprobs(p) for p in prompts]
    sums = await c._json("POST", "/weight_checker", {"action": "checksum"})
    await c.close()
    return lps, sums["checksums"]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="models/smollm2-135m")
    p.add_argument("--steps", type=int, default=3)
    p.add_argument("--lr", type=float, default=1e-6)
    p.add_argument("--prompts", type=int, default=8)
    p.add_argument("--samples", type=int, default=4, help="per prompt")
    a = p.parse_args()
    tmp = tempfile.TemporaryDirectory()
    tree: dict[str, Any] = {
        "model": str(Path(a.model).resolve()), "run_dir": tmp.name, "data": {"prompts": "-"},
        "rollout": {"batch_size": a.prompts, "n_samples_per_prompt": a.samples, "max_response_len": RESPONSE, "max_context_len": 128},
        "reward": {"function": "delta_publish:even"},
        "train": {"lr": a.lr, "steps": a.steps, "dtype": "bfloat16"}, "weights": {"delta": True},
    }  # fmt: skip
    cfg = config.validate(tree, "benchmark")
    plain = Publisher(config.validate(tree | {"name": "whole", "weights": {}}, "benchmark"), 0)
    engine, trainer = Engine(cfg, 0, tmp.name), Trainer(cfg, 0, 1, "127.0.0.1", free_port())
    fleet = None
    try:
        url = engine.start()
        fleet = Fleet([url], None, None)
        trainer.setup()
        vocab = trainer.model.config.get_text_config().vocab_size
        rng = random.Random(0)
        fixed = [[rng.randrange(vocab) for _ in range(100)] for _ in range(8)]
        print(f"load {os.getloadavg()[0]:.1f}; lr {a.lr:g}\nstep  bytes      of whole   changed  write s  take s   whole: write s", flush=True)
        before = None
        for step in range(a.steps + 1):
            if step:
                before = asyncio.run(state(url, fixed))
                tokens = [[rng.randrange(vocab) for _ in range(PROMPT)] for _ in range(a.prompts)]
                groups = [
                    [Sample(group_index=g, index=g * a.samples + i, rollout_id=g * a.samples + i, prompt="", tokens=list(t)) for i in range(a.samples)]
                    for g, t in enumerate(tokens)
                ]
                groups = asyncio.run(rollout(cfg, url, groups, step - 1))
                metas = [meta_of(s) for g in groups for s in g]
                advantages = grpo([m.reward for m in metas], [m.group_index for m in metas], [m.rollout_id for m in metas]).tolist()
                trained = trainer.train(step, plan(metas, advantages, cfg, 1)[0], *groups)
                assert trained["train/grad_norm"] > 0
            t0 = time.perf_counter()
            whole = plain.publish(trainer.model, step)
            t1 = time.perf_counter()
            new = trainer.publisher.publish(trainer.model, step)
            t2 = time.perf_counter()
            assert whole and new
            fleet.publish(step, new.path, None, deltas=new.deltas)
            t3 = time.perf_counter()
            m = new.metrics
            shown = f"{m['weights/delta_fraction']:<9.4f}  {m.get('weights/changed_fraction', 1):<7.4f}  {t2 - t1:<7.2f}  {t3 - t2:<7.2f}  {t1 - t0:.2f}"
            print(f"{step:<4}  {m['weights/bytes']:<9.0f}  {shown}", flush=True)
        by_delta = asyncio.run(state(url, fixed))
        t0 = time.perf_counter()
        fleet.publish(a.steps + 1, whole.path, None)
        print(f"whole weights of the last step: taken in {time.perf_counter() - t0:.2f} s")
        by_whole = asyncio.run(state(url, fixed))
        same, moved = by_delta == by_whole, by_delta[0] != (before or by_delta)[0]
        print(f"{sum(map(len, by_whole[0]))} logprobs and {len(by_whole[1])} checksums after delta and after whole weights: {'equal' if same else 'DIFFERENT'}")
        print(f"logprobs before the last step: {'different, as they must be' if moved else 'the SAME: the comparison shows nothing'}")
        sys.exit(0 if same and moved else 1)
    finally:
        if fleet:
            fleet.close()
        for folder in (plain.folder, trainer.publisher.folder):
            shutil.rmtree(folder, ignore_errors=True)
        engine.stop()


if __name__ == "__main__":
    main()
