"""`vime eval --agent HARNESS` on a SWE-bench instance: a real harness repairs it, and the clean room says so."""

import asyncio
import dataclasses
import json
import sys

import pytest

from tests.agents_kit import ScriptedEngine
from tests.e2e.test_harness import RIGHT, TEST, WRONG, folder, installed, pytestmark, scripted  # noqa: F401 (fixtures)
from tests.unit.test_agents_swe import commit, git
from vime.agents.tasks import swe
from vime.cli import main


@pytest.fixture
def repo(tmp_path):
    repo = tmp_path / "clones" / "some+calc"
    repo.mkdir(parents=True)
    git(repo, "init", "-qb", "main")
    commit(repo, {"calc.py": f"def add(a, b):\n    {WRONG}\n", "test_calc.py": TEST}, "first")
    test = "from calc import add\n\n\ndef test_add():\n    assert add(20, 3) == 23\n"
    commit(repo, {"calc.py": f"def add(a, b):\n    {RIGHT}\n", "tests/test_add.py": test}, "add() subtracts")
    return repo


@pytest.mark.parametrize("name", ["claude_code", "codex", "mini_swe_agent"])
def test_a_harness_repairs_an_instance(name, installed, folder, repo, tmp_path):  # noqa: F811
    installed(name)
    (tmp_path / "i.jsonl").write_text(json.dumps(dataclasses.asdict(swe.build(repo, "HEAD"))) + "\n")

    async def go():
        engine = ScriptedEngine(folder)
        says = scripted(name, lambda: engine.rust)
        engine.script = lambda body, n: says(body, n).replace("/work", "/testbed")
        await engine.start()
        (tmp_path / "swe.toml").write_text(f"""
out = "{tmp_path}"
model = {{url = "{engine.url}/v1", name = "scripted", folder = "{folder}"}}
gateway = {{parser = "hermes"}}
data = {{prompts = "{tmp_path}/i.jsonl", input_key = "problem_statement", label_key = "instance_id"}}
agent = {{task = "vime.agents.tasks.swe:Task", wall_s = 120}}
args = {{mirror = "{repo.parent}", python = "{sys.executable}"}}
""")
        try:
            return await asyncio.to_thread(main, ["eval", str(tmp_path / "swe.toml"), "--agent", name])
        finally:
            await engine.stop()

    assert asyncio.run(go()) == 0
    (row,) = map(json.loads, (tmp_path / f"eval-{name}.jsonl").read_text().splitlines())
    assert (row["status"], row["reward"], row["hacked"]) == ("answered", 1.0, False), row["steps"]
    assert f"+    {RIGHT}" in row["notes"]["model_patch"] and row["notes"]["fault"] is None
