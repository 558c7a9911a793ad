"""The search example on the session's server, its own data and index."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

from examples.search.make_data import main
from tests.conftest import Server, merged
from vime.config import validate
from vime.data import tokenizer
from vime.data.prompts import Prompts
from vime.rollout.http import EngineClient
from vime.rollout.worker import RolloutWorker


def test_search(server: Server, tmp_path: Path) -> None:
    main(tmp_path)
    index = json.loads((tmp_path / "index.json").read_text())
    plugins = {"rollout": {"custom_generate": "examples.search.agent:generate"}, "reward": {"function": "examples.search.agent:reward"}}
    cfg = validate(merged(server.cfg.model_dump(), plugins | {"args": {"index": str(tmp_path / "index.json"), "turn_len": 7}}), "test")
    groups = Prompts(cfg.data, f"{tmp_path}/train.jsonl", tokenizer.load(cfg.model), 8, 0, 64).next(8)

    async def go() -> list:
        version = await EngineClient(server.url).weight_version()
        worker = RolloutWorker(cfg, server.url, 0)
        try:
            return await asyncio.gather(*(worker.run_group(g, version) for g in groups))
        finally:
            await worker.close()

    samples = [s for _, group in asyncio.run(go()) for s in group]
    found = [s for s in samples if "answer" in s.metadata]
    assert found and len(found) < len(samples)
    for s in samples:
        assert s.reward == 0.5 * s.metadata["found"] + 0.5 * (s.metadata.get("answer") == s.label)
    for s in found:
        said = [t for t, trained in zip(s.tokens[s.prompt_length :], s.loss_mask) if not trained]
        document = tokenizer.load(cfg.model).decode(said)
        assert document[0] == " " and document[-1] == ">" and document[1:-1] in index.values()
        assert s.response.endswith(s.metadata["answer"]) and document in s.response
