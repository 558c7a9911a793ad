"""What spans cost: of one sample's way with [trace] on, in CPU time, and what share of a run that is.

    python benchmarks/trace_overhead.py                                   cost of a way, file alone, and with an OTLP endpoint that takes everything
    python benchmarks/trace_overhead.py --run examples/reverse/run.toml   two real runs, one with trace.file, in turns; KEY=VALUE changes both

The first measures what `vime.observe.trace` spends on the ten spans of a sample (in groups of 8) by the process's CPU clock, and divides by what
a sample costs in the real run of --seconds-per-sample (by default 25 ms: 512 samples in the 12.8 s of a step of a busy 8-GPU host). The second
compares medians of perf/step_s of runs in turns (ABAB); their spread says how far to trust the difference.
"""

import argparse
import http.server
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

from vime import config
from vime.observe import trace

GROUP, ROUNDS = 8, 400


def one_group(g: int) -> None:
    """All that the processes record of a group, here in one."""
    uids = list(range(g * GROUP, (g + 1) * GROUP))
    now = time.time_ns()
    trace.record("prompt", now, now + 1, uids)
    trace.record("queue", now, now + 1, uids)
    for name in ("generate", "put", "load", "train"):
        with trace.span(name, uids):
            pass
    for uid in uids:
        with trace.span("reward", [uid]):
            pass
    metas = [SimpleNamespace(index=u, reward=1.0, status="completed", response_length=100) for u in uids]
    t = time.monotonic()
    trace.step(g, {"sync": (t, t)}, [SimpleNamespace(metas=metas, group_index=g, born=now, ready=now, taken=now)])


def cost(**keys: object) -> float:
    """CPU seconds a sample; 0 keys: with tracing off."""
    with tempfile.TemporaryDirectory() as folder:
        trace.start(config.validate({"name": "r", "run_dir": folder, "model": "m", "data": {"prompts": "p"}, "trace": keys}, "benchmark"), "p")
        one_group(0)
        begun = time.process_time()
        for g in range(ROUNDS):
            one_group(g)
        trace.stop()
        return (time.process_time() - begun) / (ROUNDS * GROUP)


class Collector(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def runs(toml: str, overrides: list[str], pairs: int) -> None:
    found: dict[str, list[float]] = {"false": [], "true": []}
    with tempfile.TemporaryDirectory() as folder:
        for k in range(2 * pairs):
            on = ("false", "true")[k % 2]
            own = [f"run_dir={folder}", f"name=r{k}", f"trace.file={on}", "eval.datasets=[]", "checkpoint.interval=1000", *overrides]
            subprocess.run([sys.executable, "-m", "vime.cli", "train", toml, *own], check=True, stdout=subprocess.DEVNULL)
            rows = [json.loads(line) for line in (Path(folder) / f"r{k}/metrics.jsonl").read_text().splitlines()]
            found[on].append(statistics.median(r["perf/step_s"] for r in rows[2:]))
    off, on_ = (statistics.median(found[k]) for k in ("false", "true"))
    print(f"median step: {off:.4f} s without, {on_:.4f} s with trace.file: {on_ / off - 1:+.2%}; each run: {found}")


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("overrides", nargs="*", metavar="KEY=VALUE")
    p.add_argument("--seconds-per-sample", type=float, default=0.025)
    p.add_argument("--run", metavar="TOML")
    p.add_argument("--pairs", type=int, default=3)
    args = p.parse_args()
    if args.run:
        return runs(args.run, args.overrides, args.pairs)
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    off, file = cost(), cost(file=True)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        collector = multiprocessing.get_context("fork").Process(target=server.serve_forever, daemon=True)  # its work is not a run's
        collector.start()
        otlp = cost(file=True, otlp=f"http://127.0.0.1:{server.server_port}/v1/traces")
        collector.terminate()
        collector.join()
    for name, value in (("off", off), ("file", file), ("file + OTLP", otlp)):
        print(f"{name:12} {value * 1e6:7.1f} us a sample, {value / args.seconds_per_sample:.3%} of {args.seconds_per_sample * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
