"""Throughput of the same requests through router + HTTP and through LLM.generate in process, on the same cores. Prints the ratio.

    python benchmarks/rollout_http.py --model models/smollm2-135m

Same model, dtype, server arguments, environment (threads, OpenMP) and prompts on both sides. Each side runs once to warm up, then
`--passes` times with other prompts; the ratio is of the medians.
"""

import argparse
import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from vime import config
from vime.rollout.engine import Engine
from vime.rollout.http import EngineClient
from vime.rollout.router import Router

IN_PROCESS = r"""
import json, sys, time
from vllm import LLM, SamplingParams
if __name__ == "__main__":
    args, batches, params = json.load(open(sys.argv[1]))
    llm = LLM(**args)
    times = []
    for prompts in batches:
        t = time.perf_counter()
        outs = llm.generate([{"prompt_token_ids": p} for p in prompts], SamplingParams(**params), use_tqdm=False)
        times.append((time.perf_counter() - t, sum(len(o.outputs[0].token_ids) for o in outs)))
    json.dump(times, open(sys.argv[2], "w"))
"""
SERVER_ONLY = ("host", "port", "enable_scale_out", "uvicorn_log_level", "weight_transfer_config")


async def over_http(url: str, batches: list[list[list[int]]], params: dict) -> list[tuple[float, int]]:
    client, times = EngineClient(url), []
    for prompts in batches:
        t = time.perf_counter()
        outs = await asyncio.gather(*(client.generate(p, params, timeout=600) for p in prompts))
        times.append((time.perf_counter() - t, sum(len(c.token_ids) for choices in outs for c in choices)))
    await client.close()
    return times


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--model", default="models/smollm2-135m")
    p.add_argument("--requests", type=int, default=256)
    p.add_argument("--prompt-tokens", type=int, default=32)
    p.add_argument("--max-tokens", type=int, default=32)
    p.add_argument("--passes", type=int, default=3)
    a = p.parse_args()
    tree = {"model": str(Path(a.model).resolve()), "data": {"prompts": "-"}, "rollout": {"max_context_len": 128, "max_response_len": a.max_tokens}}
    cfg = config.validate(tree, "benchmark")
    rng = random.Random(0)
    # the first batch is warm-up; every batch has prompts of its own, so that no prefix is cached
    batches = [[[rng.randrange(100, 20000) for _ in range(a.prompt_tokens)] for _ in range(a.requests)] for _ in range(a.passes + 1)]
    params = {"temperature": 1.0, "max_tokens": a.max_tokens, "ignore_eos": True}
    with tempfile.TemporaryDirectory() as tmp:
        engine = Engine(cfg, 0, tmp)
        env = os.environ | engine.environment()
        args = {k: v for k, v in engine.arguments(0).items() if k not in SERVER_ONLY}
        job, out = Path(tmp) / "job.json", Path(tmp) / "out.json"
        job.write_text(json.dumps([args, batches, {**params, "logprobs": 0}]))
        script = Path(tmp) / "in_process.py"
        script.write_text(IN_PROCESS)
        log = (Path(tmp) / "in_process.log").open("w")
        print(f"in process: LLM.generate ... (load {os.getloadavg()[0]:.1f})", flush=True)
        subprocess.run([sys.executable, str(script), str(job), str(out)], env=env, check=True, stdout=log, stderr=log)
        inside = json.loads(out.read_text())[1:]
        print(f"  {[f'{n / t:.0f} tok/s' for t, n in inside]}\nrouter + HTTP ... (load {os.getloadavg()[0]:.1f})", flush=True)
        router = None
        try:
            router = Router(cfg, [engine.start()], tmp)
            outside = asyncio.run(over_http(router.start(), batches, params))[1:]
        finally:
            if router:
                router.stop()
            engine.stop()
        print(f"  {[f'{n / t:.0f} tok/s' for t, n in outside]}")
    a_, b_ = (statistics.median(n / t for t, n in side) for side in (outside, inside))
    print(f"{a.requests} requests x {a.max_tokens} tokens: HTTP {a_:.0f} tok/s, in process {b_:.0f} tok/s, ratio HTTP/in-process {a_ / b_:.3f}")


if __name__ == "__main__":
    main()
