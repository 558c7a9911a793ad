"""The tutorials, done as they say: their code is run as it stands, and the site that they are part of is built."""

import asyncio
import json
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest

from vime import rewards, testing
from vime.config import load
from vime.sample import Sample, Status
from vime.sections import RewardConfig

ROOT = Path(__file__).parents[2]
TUTORIALS = ROOT / "docs/tutorials"


def code(page: str) -> str:
    return "\n\n".join(re.findall(r"^```python\n(.*?)^```", (TUTORIALS / f"{page}.md").read_text(), re.M | re.S))


def module(monkeypatch: pytest.MonkeyPatch, name: str, page: str) -> types.ModuleType:
    """What a reader has who put all of a page's code into one file."""
    made = types.ModuleType(name)
    monkeypatch.setitem(sys.modules, name, made)
    exec(compile(code(page), f"{page}.md", "exec"), made.__dict__)
    return made


def test_your_reward(monkeypatch: pytest.MonkeyPatch) -> None:
    mine = module(monkeypatch, "my_reward", "your-reward")
    testing.check("reward.function", "my_reward:near", reward={"key": "near"})
    testing.check("reward.function", "my_reward:judged")
    fn = rewards.resolve(RewardConfig(function="my_reward:near", key="near"))
    sample = Sample(prompt="abcd", response="dcxa", label="dcba", status=Status.COMPLETED)
    assert fn(None, sample) == {"near": 0.75, "exact": 0.0}
    assert asyncio.run(mine.judged(None, sample)) == 0.0


def test_rewards_as_verl_has_them(monkeypatch: pytest.MonkeyPatch) -> None:
    module(monkeypatch, "of_verl", "from-verl")
    testing.check("reward.function", "of_verl:reward")


def test_your_agent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Tool and task of the page in the loop, with a model whose turns are written down; and its run file is accepted."""
    from vime.agents.interaction import interact
    from vime.agents.tools import Context

    mine = module(monkeypatch, "my_agent", "your-agent")  # its own assertion on the tool runs here
    turns = [
        {"role": "assistant", "content": "", "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "calculator", "arguments": json.dumps({"expression": e})}}]}
        for e in ("12 * 7", "12 ** 7")
    ] + [{"role": "assistant", "content": "84"}]  # fmt: skip

    async def model(messages: list, tools: list) -> types.SimpleNamespace:
        assert tools == [mine.Calculator.schema()]
        return types.SimpleNamespace(id="t", message=turns.pop(0), output_ids=[1], seconds=0.0, finish_reason="stop", ill_formed=False)

    async def episode() -> dict:
        task, sample = mine.Arithmetic(None), Sample(prompt="12 times 7", label="84")
        _, messages, tools = await task.setup(sample)
        async with Context() as ctx:
            done = await interact(model, messages, tools, ctx, max_turns=4)
        assert [m["content"] for m in done.messages if m["role"] == "tool"] == ["84", "only whole numbers and + - *"]
        return await task.grade(sample, None, done)

    assert asyncio.run(episode()) == {"score": 1.0, "turns": 3}
    (run,) = re.findall(r"^```toml\n(.*?)^```", (TUTORIALS / "your-agent.md").read_text(), re.M | re.S)
    path = tmp_path / "run.toml"
    path.write_text(run)
    assert load(path).agent.task == "my_agent:Arithmetic"


def test_the_site_is_built_without_a_warning(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")]
    done = subprocess.run(build, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]
    page = (tmp_path / "site/tutorials/your-reward/index.html").read_text()
    assert "vime.testing" in page and "fonts.googleapis" not in page
