"""A real server behind a real router, with a fleet that publishes made-up policies to it, and transformers to compare with."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.conftest import Server, merged
from vime.config import validate
from vime.rollout.health import Fleet
from vime.rollout.http import EngineClient
from vime.rollout.router import Router
from vime.rollout.worker import RolloutWorker
from vime.sample import Sample
from vime.weights import Canary

PROMPT = [1, *range(3, 12)]
LONG = [1, *(3 + i % 26 for i in range(60))]  # more than one cache block of 32 tokens


def score(model: PreTrainedModel, ids: list[int], temperature: float = 1.0) -> list[float]:
    """Transformers' logprobs of tokens 1..n-1."""
    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([ids])).logits[0].float() / temperature, -1)
    return rows[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()


class Policy:
    """Weights v, made by noise on the tiny model: the file, the model to compare with, and its canary."""

    def __init__(self, base: Path, folder: Path, version: int):
        self.version, self.path = version, str(folder / f"v{version}.safetensors")
        self.model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
        torch.manual_seed(version)
        with torch.no_grad():
            for p in self.model.parameters():
                p.add_(torch.randn_like(p) * 0.05)
        self.tensors = {k: t.contiguous() for k, t in self.model.state_dict().items() if k != "lm_head.weight"}
        save_file(self.tensors, self.path)
        self.canary = Canary(PROMPT, score(self.model, PROMPT))

    def publish(self, fleet: Fleet) -> Policy:
        fleet.publish(self.version, self.path, self.canary, tol=1e-4)
        return self


class Stack:
    """The session's server behind a router of this module, with the fleet that publishes to it."""

    def __init__(self, server: Server, folder: Path):
        self.server, self.folder, self.version = server, folder, 0
        self.router = Router(server.cfg, [server.url], str(folder))
        self.url = self.router.start()
        self.restarts = 0
        self.fleet = Fleet([server.url], self.restart, self.router)

    def restart(self, i: int) -> str:
        assert i == 0
        self.restarts += 1
        return str(self.server.engine.restart())

    def policy(self) -> Policy:
        self.version += 1
        return Policy(Path(self.server.cfg.model), self.folder, self.version)

    def worker(self, **changes: object) -> RolloutWorker:
        tree = merged(self.server.cfg.model_dump(), {"reward": {"function": "tests.integration.plugins:length"}})
        return RolloutWorker(validate(merged(tree, changes), "test"), self.url, 0)


def group(n: int = 4, tokens: list[int] = PROMPT, at: int = 0) -> list[Sample]:
    return [Sample(group_index=at, index=at * n + i, rollout_id=at * n + i, prompt="abc", tokens=list(tokens)) for i in range(n)]


def ask(url: str, *calls: Callable):
    """Run each call(client) in one event loop; their results."""

    async def go():
        client = EngineClient(url)
        try:
            return [await c(client) for c in calls]
        finally:
            await client.close()

    return asyncio.run(go())


def run(worker: RolloutWorker, *groups: list[Sample], version: int, evaluation: str = ""):
    async def go():
        try:
            return await asyncio.gather(*(worker.run_group(g, version, evaluation=evaluation) for g in groups))
        finally:
            await worker.close()

    return asyncio.run(go())
