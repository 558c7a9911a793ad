"""Make the instances of manifest.toml from clones of its repositories: python examples/swe/build.py --mirror CLONES --out instances.jsonl

Each project gets a virtual environment in --envs. An instance that is in --out already is kept; exit code 1 where one could not be made.
"""

import argparse
import dataclasses
import json
import subprocess
import sys
import tomllib
from pathlib import Path

from vime.agents.tasks import swe, trees
from vime.errors import VimeError


def environment(folder: Path, needs: list[str]) -> str:
    """The Python of a virtual environment with these packages, made once."""
    python = folder.resolve() / "bin/python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        subprocess.run([str(python), "-m", "pip", "install", "-q", *needs], check=True)
    return str(python)


def main() -> int:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--manifest", type=Path, default=Path(__file__).with_name("manifest.toml"))
    p.add_argument("--mirror", type=Path, required=True, help="folder of clones: owner/name, owner+name, owner__name or name, bare or not")
    p.add_argument("--envs", type=Path, default=Path("swe-envs"))
    p.add_argument("--out", type=Path, default=Path("instances.jsonl"))
    p.add_argument("--only", help="only projects whose name contains this")
    a = p.parse_args()
    there = {i.instance_id for i in swe.load(a.out)} if a.out.exists() else set()
    failed = 0
    for project in tomllib.loads(a.manifest.read_text())["project"]:
        if a.only and a.only not in project["repo"]:
            continue
        python = environment(a.envs / project["repo"].replace("/", "__"), project["env"])
        for fix in project["fixes"]:
            if f"{project['repo'].replace('/', '__')}-{fix[:8]}" in there:
                continue
            try:
                i = dataclasses.replace(swe.build(trees.clone_of(project["repo"], a.mirror), fix, project["repo"], python), python=python)
            except VimeError as e:
                print(f"{project['repo']} {fix[:8]}: {e}", file=sys.stderr)
                failed += 1
                continue
            with a.out.open("a") as f:
                f.write(json.dumps(dataclasses.asdict(i)) + "\n")
            print(f"{i.instance_id}: {len(i.FAIL_TO_PASS)} to be made to pass, {len(i.PASS_TO_PASS)} to stay passing", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
