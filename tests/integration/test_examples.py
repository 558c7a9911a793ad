"""The examples of agents, each with its own tools, data and grading, and a scripted policy in place of the model."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from examples.search.make_data import main
from tests.agents_kit import ScriptedEngine, model_folder, said
from vime import config
from vime.rollout.worker import RolloutWorker
from vime.sample import Sample, Status

ROOT = Path(__file__).parents[2]


def run(folder: Path, example: str, script: Callable[[str], str], samples: list[Sample], **args: Any) -> list[Sample]:
    """One group through `example`'s run.toml; `script` makes an answer of the text of a prompt."""
    model = model_folder(folder / "model")
    tree = config.tree_of(
        ROOT / f"examples/{example}/run.toml", [f"model={model}", "rollout.max_context_len=4096", "eval.datasets=[]", "agent.max_turn_len=200"]
    )
    cfg = config.validate(tree | {"args": args}, "test")

    async def go() -> list[Sample]:
        engine = ScriptedEngine(model, lambda body, n: script(engine.rust.decode(body["token_ids"], skip_special_tokens=False)))
        await engine.start()
        worker = RolloutWorker(cfg, engine.url, 0)
        try:
            _, done = await worker.run_group(samples, 0)
            return done
        finally:
            await worker.close()
            await engine.stop()

    return asyncio.run(asyncio.wait_for(go(), 60))


def call(tool: str, **arguments: str) -> str:
    return said("", [(tool, arguments)])


def test_search(tmp_path: Path) -> None:
    """One searches and answers, one does not find, one does not search."""
    main(tmp_path)
    row = json.loads((tmp_path / "train.jsonl").read_text().splitlines()[0])
    word, label = row["prompt"], row["label"]
    turns = {0: [call("search", query=word[::-1]), label], 1: [call("search", query="zzzz"), label[::-1]], 2: [label]}

    def script(prompt: str) -> str:
        which, turn = int(prompt.rpartition(f"{word} #")[2][0]), prompt.count("assistant") - 1
        return turns[which][turn]

    samples = [Sample(index=i, rollout_id=i, prompt=f"{word} #{i}", label=label, tokens=[1]) for i in turns]
    done = run(tmp_path, "search", script, samples, documents=str(tmp_path / "documents.jsonl"))
    assert [s.reward for s in done] == [1.0, 0.0, 0.5]
    assert f"] {word[::-1]}: {label[::-1]}" in done[0].response and "nothing found" in done[1].response
    assert all(s.status is Status.COMPLETED for s in done)


def test_coding(tmp_path: Path) -> None:
    """One repairs the program, one does not, one writes down the answers that it was asked for in its own sandbox, one removes the file."""
    turns = {
        0: ["sed -i 's/[-+*]/-/' op.py", "python3 op.py 12 7"], 1: ["true", "ls"],
        2: ["echo 'print(5)' > op.py", "python3 op.py 12 7"], 3: ["rm op.py", "ls"],
    }  # fmt: skip

    def script(prompt: str) -> str:
        which, turn = int(prompt.rpartition("make it minus #")[2][0]), prompt.count("assistant") - 1
        return call("shell", command=turns[which][turn]) if turn < 2 else call("submit", answer="")

    samples = [Sample(index=i, rollout_id=i, prompt=f"make it minus #{i}", label="minus", tokens=[1]) for i in turns]
    done = run(tmp_path, "coding", script, samples)
    assert [s.reward for s in done] == [1.0, 0.0, 0.0, 0.0]
    assert all(s.metadata["agent"]["status"] == "submitted" and len(s.metadata["agent"]["steps"]) == 3 for s in done)
    assert "\n5\n" in done[0].response and "op.py" in done[1].response
