"""The walk through docs/forksync.md, run as it stands on the toy pair; the example configuration."""

import os
import re
import subprocess
import sys
from pathlib import Path

from forksync import cli
from forksync.base import Config
from forksync.table import parsed
from tests.unit import forksync_kit as kit

ROOT = Path(__file__).parents[2]


def test_the_walk_through_works(tmp_path):
    text = (ROOT / "docs/forksync.md").read_text().split("## Ten minutes")[1].split("## Every day")[0]
    commands = [c for block in re.findall(r"```bash\n(.*?)```", text, re.S) for c in block.splitlines()]
    assert sum(c.startswith("forksync") for c in commands) >= 15
    upstream = kit.make_upstream(tmp_path / "acorn")
    fork = kit.make_fork(tmp_path / "birch", upstream)
    kit.fork_edits(fork)
    tool = tmp_path / "bin/forksync"
    kit.write(tmp_path, {"bin/forksync": f'#!/bin/sh\nPYTHONPATH={ROOT} exec {sys.executable} -m forksync.cli "$@"\n'})
    tool.chmod(0o755)
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")} | {"PATH": f"{tool.parent}:{os.environ['PATH']}", "PYTHONDONTWRITEBYTECODE": "1"}
    env |= {f"GIT_{w}_{k}": "ann@example.org" for w in ("AUTHOR", "COMMITTER") for k in ("NAME", "EMAIL")}
    lines = [f"cd {fork}"]
    for command in commands:
        if command.startswith("forksync status"):
            lines.append("true: upstream moves")
        wanted = re.search(r"# exit (\d)", command)
        lines.append(f"{command}\ncode=$?; test $code = {wanted[1] if wanted else 0} || {{ echo 'FAILED with' $code: {command.split('#')[0].split(chr(39))[0]!r}; exit 99; }}")
    first, second = "\n".join(lines).split("true: upstream moves")
    for script in (first, second):
        done = subprocess.run(["bash", "-c", script if script is first else f"cd {fork}\n{script}"], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout[-3000:] + done.stderr
        if script is first:
            assert 'from = "--birch-mem"\nto = "--birch-memory"' in done.stdout
            assert "signed by ann" in done.stdout
            kit.upstream_moves(upstream)
    assert "return x + 126.0" in (fork / "birch/pair_a.py").read_text() and "FRESH" in (fork / "birch/fresh.py").read_text()


def test_the_example_of_a_fork_of_vime():
    config = parsed(Config, (ROOT / "examples/forksync/config.toml").read_text(), "config.toml")
    assert [g.kind for g in config.gate] == ["functional", "precision", "convergence"]
    assert config.gate[1].run == config.gate[2].run, "one set of runs for both"
    assert all("vime.cli parity" in g.judge for g in config.gate[1:])


def test_what_cannot_be_read_is_one_line_and_no_verdict(tmp_path, capsys):
    """Exit code 1 says that there are unsigned differences; a missing file is none."""
    upstream = kit.repository(tmp_path / "up", {"a.py": "x = 1\n"})
    fork = kit.repository(tmp_path / "fork", {"a.py": "x = 1\n"})
    assert cli.main(["-C", str(fork), "init", "--upstream", str(upstream), "--table", "nope.toml"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("forksync: FileNotFoundError: ") and "nope.toml" in said and said.count("\n") == 1
