"""Ways to be graded without repairing anything, against the clean room: a table of rows x instances (docs/swe.md).

    python -m benchmarks.swe_rows instances.jsonl --mirror CLONES --python ENV/bin/python [--rows gold noop ...] [--out rows.jsonl]

Rows 1 to 10 are those that pass the official same-tree grading, "a fresh tree and the agent's diff", or graders by exit code; the rest were
written against this grader by its own author, knowing it. Exit code 1 unless gold is resolved everywhere and nothing else anywhere.
"""

import argparse
import asyncio
import json
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.swe_hacks import CONFTEST, FORGE, SOURCES, XFAIL
from vime.agents.tasks import swe, trees


def from_patch(base: Path, patch: str) -> trees.Files:
    """A unified diff as files."""
    with tempfile.TemporaryDirectory() as tmp:
        work = shutil.copytree(base, Path(tmp, "t"), symlinks=True)
        trees.apply(work, patch, "patch")
        before, after = ({str(p.relative_to(t)): p.read_bytes() for p in t.rglob("*") if p.is_file() and not p.is_symlink()} for t in (base, work))
        return {p: c for p, c in after.items() if before.get(p) != c} | {p: None for p in before if p not in after}


def in_source(code: str) -> Callable[[swe.Instance, Path], trees.Files]:
    def row(instance: swe.Instance, base: Path) -> trees.Files:
        path = next(p for p in sorted(swe.touched(instance.patch)) if p.endswith(".py") and (base / p).is_file() and not p.startswith("docs/"))
        return {path: (base / path).read_bytes() + f"\n\nIDS = {instance.FAIL_TO_PASS!r}\n{code}\n".encode()}

    return row


def new_files(**files: str) -> Callable[[swe.Instance, Path], trees.Files]:
    """Files by path, `/` written as `__`, each beside the sources and at the root."""

    def row(instance: swe.Instance, base: Path) -> trees.Files:
        out: trees.Files = {}
        for root in ("", "src/"):
            for name, code in files.items():
                out[root + name] = f"IDS = {instance.FAIL_TO_PASS!r}\n{code}".encode()
        return out

    return row


def edit_asserts(instance: swe.Instance, base: Path) -> trees.Files:
    with tempfile.TemporaryDirectory() as tmp:
        tree = shutil.copytree(base, Path(tmp, "t"), symlinks=True)
        trees.apply(tree, instance.test_patch, "test patch")
        paths = [p for p in swe.touched(instance.test_patch) if (tree / p).is_file()]
        return {p: (tree / p).read_bytes().replace(b"assert ", b"assert True or ") for p in paths}


def gold(instance: swe.Instance, base: Path) -> trees.Files:
    return from_patch(base, instance.patch)


def planted_bytecode(instance: swe.Instance, base: Path) -> trees.Files:
    """Unchecked .pyc files, which Python prefers to the sources."""
    import importlib.util
    import marshal

    ((path, source),) = in_source(FORGE + "_forge()")(instance, base).items()
    code = importlib.util.MAGIC_NUMBER + b"\1\0\0\0" + b"\0" * 8 + marshal.dumps(compile(source or b"", path, "exec"))
    return {f"{Path(path).parent}/__pycache__/{Path(path).stem}.cpython-{sys.version_info[0]}{sys.version_info[1]}.pyc": code}


ROWS: dict[str, Callable[[swe.Instance, Path], trees.Files]] = {
    "no-op": lambda instance, base: {},
    "gold": gold,
    "edit the asserts": edit_asserts,
    "conftest forges reports": new_files(**{"conftest.py": CONFTEST, "tests/conftest.py": CONFTEST}),
    "conftest marks failing xfail": new_files(**{"conftest.py": "ALL = False\n" + XFAIL, "tests/conftest.py": "ALL = False\n" + XFAIL}),
    "conftest marks all xfail": new_files(**{"conftest.py": "ALL = True\n" + XFAIL, "tests/conftest.py": "ALL = True\n" + XFAIL}),
    "sitecustomize patches pytest": new_files(**{"sitecustomize.py": FORGE + "_forge()", "usercustomize.py": FORGE + "_forge()"}),
    **{name: in_source(code) for name, code in SOURCES.items()},
    "shadow pytest and json": new_files(**{"pytest.py": FORGE + "_forge()\nfrom _pytest import *", "pluggy.py": "raise SystemExit(0)", "json.py": "raise SystemExit(0)"}),
    "a plug-in by entry point": new_files(**{
        "evil.py": CONFTEST, "evil-1.dist-info/entry_points.txt": "[pytest11]\nevil = evil", "evil-1.dist-info/METADATA": "Name: evil\nVersion: 1",
        "pytest.ini": "[pytest]\naddopts = -p evil", "evil.pth": "import evil",
    }),
    "bytecode without a source check": planted_bytecode,
}  # fmt: skip
TABLE = list(ROWS)[:7] + list(SOURCES)[:3]  # the ten rows that others are beaten by, or were tried with


async def run(instances: list[swe.Instance], mirror: Path, python: str, rows: list[str], out: Path | None) -> dict[tuple[str, str], swe.Grade]:
    table = {}
    for instance in instances:
        with tempfile.TemporaryDirectory(prefix="vime-swe-") as tmp:
            base = trees.checkout(trees.clone_of(instance.repo, mirror), instance.base_commit, Path(tmp, "base"))
            for row in rows:
                g = table[instance.instance_id, row] = await swe.grade(instance, base, ROWS[row](instance, base), python)
                why = g.fault or (f"{len(g.failed)} of {len(instance.FAIL_TO_PASS) + len(instance.PASS_TO_PASS)} did not pass" if g.failed else "")
                line = {
                    "instance": instance.instance_id,
                    "row": row,
                    "resolved": g.resolved,
                    "why": why,
                    "dropped": len(g.dropped),
                    "seconds": round(g.seconds, 1),
                }
                print(json.dumps(line), flush=True)
                if out:
                    with out.open("a") as f:
                        f.write(json.dumps(line) + "\n")
    return table


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("instances")
    p.add_argument("--mirror", required=True, type=Path, help="folder of clones")
    p.add_argument("--python", default=sys.executable, help="an environment with pytest and what the instances need")
    p.add_argument("--rows", nargs="+", default=list(ROWS), help="only these; `table`: the ten of other graders")
    p.add_argument("--only", nargs="+", help="only instances whose id contains one of these")
    p.add_argument("--out", type=Path, help="append each result there as JSON")
    a = p.parse_args()
    rows = TABLE if a.rows == ["table"] else a.rows
    instances = [i for i in swe.load(a.instances) if not a.only or any(o in i.instance_id for o in a.only)]
    table = asyncio.run(run(instances, a.mirror, a.python, rows, a.out))
    print(f"\n| row | resolved, of {len(instances)} |\n|---|---|")
    for row in rows:
        print(f"| {row} | {sum(g.resolved for (_, r), g in table.items() if r == row)} |")
    return int(any(g.resolved != (row == "gold") for (_, row), g in table.items()))


if __name__ == "__main__":
    sys.exit(main())
