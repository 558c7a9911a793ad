"""`vime bench dataplane`: every way that samples can take from m producers to n consumers, measured side by side.

`lists`, `json`, `torch-ray`, `numpy`, `numpy-ray` go through the controller; `shm`, `ray`, `controller`, `mooncake`, `transferqueue` and
`transferqueue-mooncake` are the stores of vime/data/plane.py; `mmap` and `file` (files in shared memory, made by copies into a map or by write(),
read by mmap) and `zmq` (consumers pull from producers over TCP) are the anchors, the least that any path must do. Rounds of all paths alternate,
so that what else the machine does falls on all of them.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import secrets
import shutil
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import zmq
from rich import box
from rich.console import Console
from rich.table import Table

from benchmarks import dataplane_procs as procs_of
from benchmarks.hosts import Hosts
from vime.errors import VimeError
from vime.procs import Child, descendants, free_port, spawn

STORES = ["shm", "ray", "controller", "mooncake", "transferqueue", "transferqueue-mooncake"]
PATHS = [*procs_of.THROUGH, *STORES, "mmap", "file", "zmq"]
NETWORK = ["json", "numpy", "numpy-ray", "ray", "mooncake", "transferqueue", "zmq"]  # those that can leave a host
QUICK = ["json", "numpy", "shm", "mooncake", "mmap", "file", "zmq"]
LISTS_MB = 60  # Python lists of more than this, which take minutes and 20 times as much memory, only where --paths names them
CELLS = {
    "quick": ["text2k:64", "text16k:64", "routing:16", "pixels:32"],
    "full": ["text2k:64", "text2k:1024", "text16k:256", "text16k:1024", "routing:8", "routing:64", "pixels:64"],
    "hosts": ["text16k:64", "routing:16", "pixels:32"],
}
SWEEP = [(2, 2), (4, 2), (16, 8)]  # and the one of all cells; 4 items of routing per producer
SWEPT = ["numpy", "numpy-ray", "shm", "ray", "mooncake", "zmq"]
SLOW = 4.0  # seconds; a path that takes longer has two timed rounds
PATIENCE = 300.0  # seconds for one call


TOKEN = secrets.token_hex(32)  # of the Ray that a session starts


def get_node_ip() -> str:
    from ray.util import get_node_ip_address

    return str(get_node_ip_address())


class Session:
    """m producers, n consumers and a controller, and the stores they need: `rows = Session(...).run(...)` inside a `with`."""

    def __init__(self, m: int, n: int, paths: list[str], largest: int, hosts: Hosts | None = None):
        """`largest`: bytes of the largest cell. Raises: VimeError where a process or a store cannot start."""
        self.m, self.n, self.paths, self.stack = m, n, paths, ExitStack()
        self.folder = Path(self.stack.enter_context(tempfile.TemporaryDirectory(prefix="vb-", dir="/dev/shm")))
        self.stack.callback(self._sweep)
        self.children: dict[str, Child] = {}
        self.hosts, self.largest = hosts, largest

    def __enter__(self) -> Session:
        try:
            self._start()
        except BaseException:
            self.stack.close()
            raise
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        with self.stack, suppress(VimeError, RuntimeError):
            if kind is None:
                self.call("close_all")

    def _sweep(self) -> None:
        """What a store left that could not be closed."""
        for rest in self.folder.parent.glob(f"vime-{self.folder.name}*"):
            shutil.rmtree(rest, ignore_errors=True)

    def _spawn(self, name: str, host: int, cmd: list[str]) -> None:
        inside = self.hosts.inside(host) if self.hosts else []
        env = {"OMP_NUM_THREADS": "1", "RAY_USAGE_STATS_ENABLED": "0", "PYTHONPATH": str(Path(__file__).resolve().parent.parent), "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": TOKEN}
        self.children[name] = spawn([*inside, *cmd], self.folder / f"{name}.log", env)
        self.stack.callback(self.children[name].stop)

    def _start(self) -> None:
        m, n, hosts = self.m, self.n, self.hosts
        address = [hosts.address(i) for i in range(hosts.count)] if hosts else ["127.0.0.1"]
        of = hosts.of if hosts else lambda name: 0
        names = ["controller", *(f"producer{i}" for i in range(m)), *(f"consumer{i}" for i in range(n))]
        control, gcs = f"tcp://{address[0]}:{free_port()}", f"{address[0]}:{free_port()}"
        need_ray = any("-ray" in p or p.startswith(procs_of.ON_RAY) for p in self.paths)
        rays = address if hosts else [get_node_ip()] if need_ray else []  # Ray takes the loopback address for this one wherever it is named
        gcs = f"{rays[0]}:{gcs.rpartition(':')[2]}" if need_ray else gcs
        for i, ip in enumerate(rays) if need_ray else ():
            where = ["--head", f"--port={gcs.rpartition(':')[2]}", "--include-dashboard=false"] if i == 0 else [f"--address={gcs}"]
            memory = f"--object-store-memory={max(1 << 30, 3 * self.largest)}"
            ray = [sys.executable, "-m", "ray.scripts.scripts", "start", *where, f"--node-ip-address={ip}", memory, "--num-cpus=64", "--block"]
            again = ["bash", "-c", 'until "$@"; do sleep 1; done', "bash"]  # until the head is up
            self._spawn(f"ray{i}", i, [*ray, f"--temp-dir={self.folder}/ray"] if i == 0 else [*again, *ray])
        shared = {"m": m, "n": n, "address": control, "ipc": f"ipc://{self.folder}/control", "folder": str(self.folder), "ray": gcs}
        for name in names:
            spec = shared | {"name": name, "host": address[of(name)], "ray_host": rays[of(name)] if need_ray else ""}
            role = name.rstrip("0123456789")
            self._spawn(name, of(name), [sys.executable, "-m", "benchmarks.dataplane_procs", role, json.dumps(spec)])
        self.sock: Any = zmq.Context.instance().socket(zmq.DEALER)
        self.stack.callback(self.sock.close, 0)
        self.sock.setsockopt(zmq.IDENTITY, b"main")
        self.sock.connect(shared["ipc"])
        self.call("ready")
        for path in self.paths:
            try:
                self.call("open_all", path, self._settings(path) if path in STORES else None)
            except RuntimeError as e:
                raise VimeError(f"the path {path} cannot be measured: {e}", "leave it away with --paths") from e

    def _settings(self, path: str) -> dict[str, Any]:
        """[data_plane] of a store that has room for the largest cell."""
        backend, _, storage = path.partition("-")
        each = self.largest / (self.m + self.n if storage else self.m)  # TransferQueue's segments are of all processes
        segment = {"segment_bytes": int(1.5 * each) + (96 << 20)}
        return {
            "backend": backend, "budget_bytes": 3 * self.largest + (64 << 20), "timeout": PATIENCE / 3, "mooncake": segment,
            "transferqueue": {"storage": storage or "simple", "units": 4},
        }  # fmt: skip

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the controller. Raises: RuntimeError with what it says went wrong; VimeError where a process is gone or nothing comes."""
        procs_of.send(self.sock, (method, args))
        deadline = time.monotonic() + PATIENCE
        while not self.sock.poll(500):
            gone = [name for name, child in self.children.items() if not child.alive()]
            if gone or time.monotonic() > deadline:
                what = f"the benchmark's {gone[0]} ended" if gone else f"no answer to {method} {args[:1]} in {PATIENCE:.0f} s"
                raise VimeError(what, "", (self.folder / f"{gone[0] if gone else 'controller'}.log").read_text(errors="replace")[-2000:])
        fine, value = procs_of.load(self.sock.recv_multipart(copy=False))
        if not fine:
            raise RuntimeError(value)
        return value

    def run(self, cells: list[str], rounds: int, say: Any, lists_mb: float = LISTS_MB) -> list[dict[str, Any]]:
        """One row per cell and path. `say(text)` is told what goes on."""
        rows, m, n = [], self.m, self.n
        for cell in cells:
            kind, count, group = parse(cell)
            order = np.random.default_rng(0).permutation(count)
            who = [int(c) % n for c in order]
            made = self.call("ask", "producer", "make", [(kind, group, list(range(i, count, m))) for i in range(m)])
            sums = {j: s for d in made for j, s in d.items()}
            want = [sum(sums[j] for j in range(count) if who[j] == c) % 2**63 for c in range(n)]
            megabytes = procs_of.nbytes(kind, group) * count / 1e6
            shots: dict[str, list[dict[str, Any]]] = {p: [] for p in self.paths if p != "lists" or megabytes <= lists_mb}
            failed: dict[str, str] = {}
            for r in range(rounds + 1):  # the first is the warm-up
                say(f"{cell}, {megabytes:.0f} MB, m={m}, n={n}: round {r} of {rounds}")
                for path in shots:
                    if path in failed or (r > 2 and shots[path][-1]["wall"] > SLOW):
                        continue
                    try:
                        shots[path].append(self._round(path, f"{kind}{count}m{m}r{r}", who, want))
                    except RuntimeError as e:
                        failed[path] = str(e)
            for path, timed in shots.items():
                row: dict[str, Any] = {"cell": cell, "path": path, "m": m, "n": n, "MB": megabytes, "items": count, "load": os.getloadavg()[0]}
                rows.append(row | ({"error": failed[path]} if path in failed else _median(timed[1:], megabytes, count)))
            anchor = next((r["wall"] for r in rows if r["cell"] == cell and r["path"] == "zmq" and "wall" in r), math.nan)
            for row in rows[-len(shots) :]:
                row |= {"ratio": row["wall"] / anchor} if "wall" in row else {}
        return rows

    def _round(self, path: str, tag: str, who: list[int], want: list[int]) -> dict[str, Any]:
        before = usage(reset=True)
        out = self.call("round", path, tag, who)
        after = usage()
        if out.pop("sums") != want:
            raise RuntimeError("the consumers' checksums are not those of what the producers made")
        grown = {pid: peak - before.get(pid, (0.0, 0))[1] for pid, (_, peak) in after.items()}
        cpu = sum(seconds - before.get(pid, (0.0, 0))[0] for pid, (seconds, _) in after.items())
        return out | {"cpu": cpu, "controller_rss": grown[self.children["controller"].pid], "rss": sum(g for g in grown.values() if g > 0)}


def usage(reset: bool = False) -> dict[int, tuple[float, int]]:
    """pid -> (CPU seconds, peak of resident bytes) of all processes below this one; `reset` begins the peaks anew."""
    out = {}
    for pid in descendants(os.getpid()):
        cpu = 0
        with suppress(OSError):  # it ended meanwhile
            if reset:
                Path(f"/proc/{pid}/clear_refs").write_text("5")
            for task in os.listdir(f"/proc/{pid}/task"):
                with suppress(OSError):  # a thread did
                    cpu += int(Path(f"/proc/{pid}/task/{task}/schedstat").read_text().split()[0])
            _, _, peak = Path(f"/proc/{pid}/status").read_text().partition("VmHWM:")
            if peak:  # a zombie has none
                out[pid] = (cpu / 1e9, int(peak.split()[0]) * 1024)
    return out


def parse(cell: str) -> tuple[str, int, int]:
    """kind:count or kind:countxgroup -> (kind, items, samples in each). Raises: VimeError."""
    kind, _, number = cell.partition(":")
    count, _, group = number.partition("x")
    if kind not in ("text2k", "text16k", "routing", "pixels") or not count.isdigit() or not (group or "1").isdigit():
        raise VimeError(f"no cell {cell!r}", "as text2k:64, text16k:256, routing:64, pixels:64, or routing:8x8 for 8 groups of 8 samples")
    return kind, int(count), int(group or 1)


def _median(shots: list[dict[str, Any]], megabytes: float, items: int) -> dict[str, Any]:
    mid = {k: statistics.median(s[k] for s in shots) for k in shots[0]}
    walls = [s["wall"] for s in shots]
    per_gb = {"cpu_per_gb": mid["cpu"] / megabytes * 1e3, "controller_cpu_per_gb": mid["controller_cpu"] / megabytes * 1e3}
    return mid | per_gb | {"through_per_item": mid["through"] / items, "wall_min": min(walls), "wall_max": max(walls), "rounds": len(walls)}


# ---------------------------------------------------------------- what a person gets

SHOWN = {
    "wall s": ("wall", "{:.3g}"), "x zmq": ("ratio", "{:.2f}"), "controller CPU ms": ("controller_cpu", "ms"),
    "through it": ("through", "bytes"), "its RSS +MB": ("controller_rss", "MB"), "all RSS +MB": ("rss", "MB"), "all CPU s/GB": ("cpu_per_gb", "{:.2f}"),
}  # fmt: skip


def show(rows: list[dict[str, Any]], console: Console) -> None:
    """A Markdown table of each cell."""
    for cell, m, n in dict.fromkeys((r["cell"], r["m"], r["n"]) for r in rows):
        mine = [r for r in rows if (r["cell"], r["m"], r["n"]) == (cell, m, n)]
        console.print(f"\n{cell}: {mine[0]['items']} items, {mine[0]['MB']:.1f} MB, {m} producers, {n} consumers, load {mine[0]['load']:.1f}\n")
        table = Table("path", *SHOWN, "rounds", box=box.MARKDOWN)
        for r in mine:
            cells = ["failed: " + r["error"]] if "error" in r else [_text(r.get(key), how) for key, how in SHOWN.values()] + [str(r["rounds"])]
            table.add_row(r["path"], *cells)
        console.print(table)


def summary(rows: list[dict[str, Any]], console: Console) -> None:
    """Of all cells: wall time and its ratio to zmq's, a row for each path, as Markdown."""
    cells = list(dict.fromkeys((r["cell"], r["m"], r["n"], r["MB"]) for r in rows))
    table = Table("wall s (x zmq)", *(f"{cell}, {megabytes:.0f} MB, {m} to {n}" for cell, m, n, megabytes in cells), box=box.MARKDOWN)
    for path in dict.fromkeys(r["path"] for r in rows):
        of = {(r["cell"], r["m"], r["n"], r["MB"]): f"{r['wall']:.3g} ({r['ratio']:.2g})" for r in rows if r["path"] == path and "wall" in r}
        table.add_row(path, *(of.get(c, "-") for c in cells))
    console.print(table)


def _text(value: float | None, how: str) -> str:
    if value is None:
        return "-"
    units = {"ms": f"{value * 1e3:.1f}", "MB": f"{value / 1e6:.0f}", "bytes": f"{value / 1e6:.0f} MB" if value > 2e6 else f"{value / 1e3:.1f} kB"}
    return units.get(how) or how.format(value)


MODEL = """
COMPUTED, not measured: from this run's costs per GB, on cores like this machine's. Through the controller: GB per step x its CPU s/GB, on one core;
its RAM: GB x the most that its memory grew per GB; its link: GB each way at {:g} GB/s (200 Gb/s). Direct: half of the nodes send, GB / (nodes / 2),
at the speed of the link, or (TCP) at what all zmq processes of this machine reached together; CPU: all processes' s/GB of {}, over the nodes."""
CLUSTERS = {"16 x 4 GPUs, 512 samples": (16, 512), "128 x 8 GPUs, 8192 samples": (128, 8192)}
LINK = 25.0  # GB/s of a node's network card: 200 Gb/s
LOADS = {  # MB per sample, and the measured cell that stands for it
    "text 16k": (0.147, "text16k"), "+ routing 48 x 8 uint8": (6.44, "routing"), "+ routing 75 x 8 int32": (39.5, "routing"),
    "4 images + text 2k": (12.6, "pixels"),
}  # fmt: skip


def model(rows: list[dict[str, Any]], console: Console) -> None:
    """What the measured costs per GB mean for clusters: arithmetic, no measurement."""
    sure = [r for r in rows if "wall" in r and (r["m"], r["n"]) == (rows[0]["m"], rows[0]["n"])]
    of = {(r["cell"].partition(":")[0], r["path"]): r for r in sorted(sure, key=lambda r: r["MB"])}  # of each kind the largest
    through = [p for p in ("json", "torch-ray", "numpy-ray", "numpy") if any(path == p for _, path in of)]
    direct = next((p for p in ("mooncake", "ray", "shm") if any(path == p for _, path in of)), "")
    console.print(MODEL.format(LINK, direct))
    for name, (nodes, samples) in CLUSTERS.items():
        heads = [*(f"{p} s" for p in through), "its RAM GB", "its link s", "direct RDMA ms", "direct TCP ms", "CPU s/node", "metadata kB"]
        table = Table(name, "GB/step", *heads, box=box.MARKDOWN)
        for load, (megabytes, kind) in LOADS.items():
            if not {(kind, direct), (kind, "zmq")} <= of.keys():
                continue
            gb, past, wire = samples * megabytes / 1e3, of[kind, direct], of[kind, "zmq"]
            mine = [of.get((kind, p), {}) for p in through]
            ram = max((r["controller_rss"] / r["MB"] / 1e6 for r in mine if r), default=math.nan)
            values = [gb, *(gb * r.get("controller_cpu_per_gb", math.nan) for r in mine), gb * ram, gb / LINK, gb / (nodes / 2) / LINK * 1e3]
            values += [gb / (nodes / 2) / (wire["MB"] / wire["wall"]) * 1e6, gb * past["cpu_per_gb"] / nodes, past["through_per_item"] * samples / 1e3]
            table.add_row(load, *(f"{v:.3g}" for v in values))
        console.print(table)


def plot(rows: list[dict[str, Any]], file: str) -> None:
    """Wall time and the controller's CPU of each path, per cell."""
    from matplotlib.figure import Figure

    cells = list(dict.fromkeys((r["cell"], r["m"], r["n"]) for r in rows if "wall" in r))
    figure = Figure(figsize=(11, 1.2 + 1.9 * len(cells)), dpi=100, layout="constrained")
    for (cell, m, n), axes in zip(cells, figure.subplots(len(cells), 2, squeeze=False)):
        mine = [r for r in rows if (r["cell"], r["m"], r["n"]) == (cell, m, n) and "wall" in r][::-1]
        colors = ["tab:red" if r["path"] in procs_of.THROUGH else "tab:gray" if r["path"] in ("mmap", "file", "zmq") else "tab:blue" for r in mine]
        for axis, key, scale, label in ((axes[0], "wall", 1, "wall s"), (axes[1], "controller_cpu", 1e3, "controller CPU ms")):
            bars = axis.barh([r["path"] for r in mine], [r[key] * scale for r in mine], color=colors)
            axis.bar_label(bars, fmt="%.3g", fontsize=7, padding=2)
            axis.set(xscale="log", xlabel=label)
            axis.tick_params(labelsize=7)
            axis.tick_params(axis="x", which="minor", labelbottom=False)
            axis.margins(x=0.15)
        axes[0].set_title(f"{cell}, {mine[0]['MB']:.0f} MB, {m} to {n}", fontsize=9)
        axes[1].set_title("red: through the controller; blue: a store; gray: an anchor", fontsize=8)
    figure.savefig(file)


def options() -> argparse.ArgumentParser:
    about = "Move samples from producers over a controller, or past it, to consumers, each a process: time, CPU, memory and bytes of every path."
    told = f"{about} docs/data-plane.md says what they mean. Exit code 1 where a path failed."
    w = argparse.ArgumentParser(prog="vime bench dataplane", description=told)
    w.add_argument("--quick", action="store_true", help="a small cell of each payload, the main paths: about a minute. Without it all paths, large cells, m and n swept")
    w.add_argument("--cells", nargs="+", metavar="KIND:N", help="payloads: N items of text2k, text16k, routing or pixels; N x G: groups of G samples")
    w.add_argument("--paths", nargs="+", metavar="PATH", help="only these")
    w.add_argument("-m", type=int, default=8, help="producers (8)")
    w.add_argument("-n", type=int, default=4, help="consumers (4)")
    w.add_argument("--rounds", type=int, metavar="N", help="timed rounds of each path, after one more to warm up (5; 3 with --quick)")
    w.add_argument(
        "--hosts", nargs="?", const="1gbit", metavar="RATE", help="in network namespaces whose links have this rate (1gbit): 2 + 2 hosts and the controller's; root"
    )
    w.add_argument("--delay", metavar="TIME", help="with --hosts: of each link and direction, as 1ms; the kernel needs netem")
    w.add_argument("--model", action="store_true", help="also what this run's costs would mean for clusters: computed, not measured")
    w.add_argument("--json", action="store_true", help="print JSON in place of the tables")
    w.add_argument("--out", metavar="FILE", help="also write the JSON there")
    w.add_argument("--read", metavar="FILE", help="run nothing, show what an earlier --out wrote")
    w.add_argument("--plot", metavar="FILE", help="also draw a picture (.png, .svg)")
    return w


def command(words: list[str]) -> int:
    """`vime bench dataplane`. Returns 1 where a path failed."""
    args = options().parse_args(words)
    console, notes = Console(highlight=False, width=200), Console(stderr=True, highlight=False)
    if args.read:
        try:
            rows = json.loads(Path(args.read).read_text())
            if not (isinstance(rows, list) and rows and all(isinstance(r, dict) and "path" in r for r in rows)):
                raise ValueError("there are no rows of a --out in it")
        except (OSError, ValueError) as e:
            raise VimeError(f"--read {args.read}: {e}", "it must be what an earlier --out wrote") from e
    else:
        rows = measure(args, lambda text: notes.print(text, style="dim"))
        if args.out:
            Path(args.out).write_text(json.dumps(rows))
    if args.json:
        print(json.dumps(rows))
    else:
        show(rows, console)
        summary(rows, console)
        if args.model:
            model(rows, console)
    if args.plot:
        plot(rows, args.plot)
    return int(any("error" in r for r in rows))


def measure(args: Any, say: Any) -> list[dict[str, Any]]:
    kind = "hosts" if args.hosts else "quick" if args.quick else "full"
    cells = args.cells or CELLS[kind]
    paths = args.paths or {"quick": QUICK, "full": PATHS, "hosts": NETWORK}[kind]
    m, n = args.m, args.n
    faults = [f"no path {p!r}, of {', '.join(PATHS)}" for p in paths if p not in PATHS]
    faults += [f"{flag} {v}: at least 1" for flag, v in (("-m", m), ("-n", n), ("--rounds", args.rounds)) if v is not None and v < 1]
    for cell in cells:
        try:
            if parse(cell)[1] < max(m, n):
                faults.append(f"{cell} for {m} producers and {n} consumers: at least one item for each")
        except VimeError as e:
            faults.append(str(e))
    if faults:
        raise VimeError("; ".join(faults))
    if "transferqueue" in paths and "transferqueue-mooncake" in paths:  # there can be one in a Ray cluster
        plan = [(m, n, cells, [p for p in paths if p != "transferqueue-mooncake"]), (m, n, cells, ["zmq", "transferqueue-mooncake"])]
    else:
        plan = [(m, n, cells, paths)]
    plan += [(a, b, [f"routing:{4 * a}"], SWEPT) for a, b in SWEEP if kind == "full" and not (args.cells or args.paths)]
    rows: list[dict[str, Any]] = []
    for m, n, cells, paths in plan:
        if few := [c for c in cells if parse(c)[1] < max(m, n)]:
            raise VimeError(f"{few[0]} for {m} producers and {n} consumers", "at least one item for each")
        largest = max(procs_of.nbytes(k, group) * count for k, count, group in map(parse, cells))
        free = psutil.virtual_memory().available
        if free < 6 * largest:
            raise VimeError(f"{free / 1e9:.1f} GB of memory are free, the largest cell wants {6 * largest / 1e9:.1f}", "--cells with fewer items")
        with ExitStack() as stack:
            hosts = None
            if args.hosts:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="vime-bench-")))
                hosts = Hosts(stack, min(2, m), min(2, n), args.hosts, args.delay or "", folder)
            session = stack.enter_context(Session(m, n, paths, largest, hosts))
            new = session.run(cells, args.rounds or (3 if args.quick else 5), say, math.inf if args.paths else LISTS_MB)
            rows += new if paths[-1] != "transferqueue-mooncake" else [r for r in new if r["path"] != "zmq"]
    return [r | {"hosts": args.hosts, "delay": args.delay} for r in rows] if args.hosts else rows
