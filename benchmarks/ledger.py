"""The data plane's ledger: is any group lost or trained twice, how fast is it, does it stay small?

    python benchmarks/ledger.py [--steps 10000] [--samples 1000000] [--seed 0]

A world of producers, a store, trainer steps, checkpoints and crashes runs at random for so many committed steps beside a plain model of what the
ledger must say. Then its calls a second with the journal on, and its resident memory while so many samples go through.
Ends with exit code 1 where something is wrong. tests/unit/test_ledger.py lets hypothesis drive the same world.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import time
from pathlib import Path

import psutil
from ledger_world import World, roam

from vime.data.ledger import Ledger
from vime.data.plane import Ref

GROUP, BATCH = 8, 64  # of the speed run: samples a group, groups a step


def long_run(steps: int, seed: int, folder: Path) -> str:
    """`steps` committed steps in one world."""
    world, rng, things, start = World(folder), random.Random(seed), 0, time.time()
    while world.commits < steps:
        roam(world, rng)
        things += 1
        world.check(whole=things % 500 == 0)
    world.finish()
    seen = ", ".join(f"{n} {what}" for what, n in sorted(world.seen.items()))
    return f"""{world.commits} committed steps, {things} random events, {world.crashes} crashes of which {world.rollbacks} back to a checkpoint, {time.time() - start:.0f} s
  {world.drawn} groups: {len(world.trained)} trained once, {world.drawn - len(world.trained)} dropped, none lost, none doubled
  on the way: {seen}"""


def speed(folder: Path, groups: int) -> str:
    """Publishes and leases a second, each with what belongs to it; the journal is a file on `folder`'s disk."""
    ledger = Ledger(1 << 60, folder / "speed.jsonl")
    refs = [Ref(f"run/g{n}/a0", 6_400_000, 0x12345678, "w0", 320) for n in range(groups)]
    t0 = time.perf_counter()
    for n, ref in enumerate(refs):
        ledger.reserve(n, "w0", 6_500_000)
        ledger.publish(n, ref, 0)
    t1 = time.perf_counter()
    for n in range(0, groups, BATCH):
        ledger.lease(range(n, n + BATCH), f"step {n}", 1e18)
    t2 = time.perf_counter()
    for n in range(0, groups, BATCH):
        assert not ledger.ack(range(n, n + BATCH), n // BATCH + 1, f"step {n}")
    t3 = time.perf_counter()
    assert ledger.stats()["done"] == groups
    return f"""with the journal on, {groups} groups of which each call names one, leases and acks {BATCH}:
  {groups / (t1 - t0):,.0f} reserve + publish/s, {groups / (t2 - t1):,.0f} groups leased/s,
  {groups / (t3 - t2):,.0f} groups acked/s in {groups // BATCH / (t3 - t2):,.0f} synced acks/s"""


def memory(folder: Path, samples: int) -> tuple[str, bool]:
    """Resident memory and journal while `samples` go through in groups of GROUP, every tenth group dropped."""
    ledger, process, rows = Ledger(1 << 40, folder / "memory.jsonl"), psutil.Process(), []
    steps, largest, start = samples // GROUP // BATCH, 0, time.time()
    for step in range(1, steps + 1):
        groups = range((step - 1) * BATCH, step * BATCH)
        for n in groups:
            ledger.reserve(n, f"w{n % 8}", 6_500_000)
            ledger.publish(n, Ref(f"run/g{n}/a0", 6_400_000, n, f"w{n % 8}", 320), step - 1)
        ledger.drop([n for n in groups if n % 10 == 0], "filtered")
        kept = [n for n in groups if n % 10]
        ledger.lease(kept, f"step {step}", 1e18)
        assert not ledger.ack(kept, step, f"step {step}")
        ledger.free()
        largest = max(largest, (folder / "memory.jsonl").stat().st_size)
        if step % max(1, steps // 10) == 0:
            rows.append((step * BATCH * GROUP, process.memory_info().rss / 2**20))
    took = time.time() - start
    grown = rows[-1][1] - rows[0][1]
    text = f"""{samples:,} samples in groups of {GROUP}, steps of {BATCH} groups, {took:.0f} s, {samples / took:,.0f} samples/s:
  resident MiB after 10 %, 20 %, ...: {" ".join(f"{mib:.1f}" for _, mib in rows)}; growth {grown:+.2f}
  journal at most {largest / 2**20:.2f} MiB; cursor in a checkpoint {len(json.dumps(ledger.state()))} bytes"""
    return text, grown < 2


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--samples", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=".") as here:
        folder = Path(here)
        print(speed(folder, 20_480), flush=True)
        text, flat = memory(folder, args.samples)
        print(text, flush=True)
    with tempfile.TemporaryDirectory() as here:
        print(long_run(args.steps, args.seed, Path(here)), flush=True)
    return 0 if flat else 1


if __name__ == "__main__":
    sys.exit(main())
