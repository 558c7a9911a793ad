"""What a local sandbox costs: time to make one and run its first command, to run another, to end it; and N at once.

python benchmarks/sandbox.py [--n 30] [--at-once 100] [--json]
"""

import argparse
import asyncio
import json
import os
import statistics
import tempfile
import time
from pathlib import Path

from vime.agents.sandbox import SandboxSpec, open_sandbox


async def one(base: str) -> dict[str, float]:
    began = time.perf_counter()
    box = await open_sandbox(SandboxSpec(base=base, memory_mb=256, disk_mb=64))
    made = time.perf_counter()
    await box.exec(["true"])
    first = time.perf_counter()
    await box.exec(["true"])
    again = time.perf_counter()
    await box.stop()
    return {"create": made - began, "create and first command": first - began, "another command": again - first, "stop": time.perf_counter() - again}


async def measure(n: int, at_once: int, base: str) -> dict[str, float]:
    await one(base)  # starts the zygote
    rows = [await one(base) for _ in range(n)]
    out = {f"{k}, median ms": statistics.median(r[k] for r in rows) * 1e3 for k in rows[0]}
    began = time.perf_counter()
    rows = await asyncio.gather(*(one(base) for _ in range(at_once)))
    out[f"{at_once} at once, s in all"] = time.perf_counter() - began
    out[f"{at_once} at once, create and first command, median ms"] = statistics.median(r["create and first command"] for r in rows) * 1e3
    return out


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--n", type=int, default=30, help="sandboxes, one after another (30)")
    p.add_argument("--at-once", type=int, default=100, help="(100)")
    p.add_argument("--json", action="store_true")
    args = p.parse_args()
    with tempfile.TemporaryDirectory() as base:
        for k in range(200):
            Path(base, f"file{k}.py").write_text("x = 1\n" * 100)
        got = asyncio.run(measure(args.n, args.at_once, base)) | {"cores": os.cpu_count() or 0, "load before": os.getloadavg()[0]}
    print(json.dumps(got) if args.json else "\n".join(f"{k:55} {v:8.1f}" for k, v in got.items()))


if __name__ == "__main__":
    main()
