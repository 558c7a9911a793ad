"""Several real servers: speculation gives true logprobs, servers are drained and brought back under load, their metrics say what happened."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.integration.rollout_kit import PROMPT, Policy, Stack, ask, group, score
from vime.config import Config
from vime.errors import VimeError
from vime.rollout import control, gauges
from vime.rollout.engine import Engine
from vime.rollout.health import Fleet
from vime.rollout.http import EngineDown
from vime.rollout.router import Router

SPEC = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
REPEATS = [1, *[3, 4, 5] * 4]


@pytest.fixture(scope="module")
def drafting(make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A second server, which speculates."""
    engine = Engine(make_config(engine=[{"vllm": {"speculative_config": SPEC}}]), 0, str(tmp_path_factory.mktemp("drafting")))
    try:
        engine.start()
        yield engine
    finally:
        engine.stop()


def counters(url: str) -> dict[str, float]:
    return gauges.read(ask(url, lambda c: c.metrics())[0])


@pytest.mark.parametrize("params", [{"temperature": 1.0}, {"temperature": 1.7}, {"temperature": 0.6, "top_k": 3}], ids=str)
def test_logprobs_under_speculation_are_those_of_the_policy(drafting: Engine, params: dict[str, float]) -> None:
    """Drafts of all lengths, accepted and not, in one batch with requests that have none."""
    model = AutoModelForCausalLM.from_pretrained(drafting.cfg.model, dtype=torch.float32).eval()
    before = counters(drafting.url)
    prompts = [[*REPEATS, 6 + i] for i in range(6)] + [PROMPT]
    calls = [lambda c, p=p: c.generate(p, {"n": 4, "max_tokens": 50, "ignore_eos": True, **params}) for p in prompts]
    for prompt, choices in zip(prompts, ask(drafting.url, *calls)):
        for c in choices:
            ids = prompt + c.token_ids
            with torch.no_grad():
                rows = model(torch.tensor([ids])).logits[0, len(prompt) - 1 : -1].float() / params["temperature"]
            if "top_k" in params:
                rows = rows.masked_fill(rows < rows.topk(3).values[:, -1:], -torch.inf)
            want = torch.log_softmax(rows, -1).gather(1, torch.tensor(c.token_ids)[:, None])[:, 0].tolist()
            assert max(abs(a - b) for a, b in zip(c.log_probs, want, strict=True)) < 1e-4
    now = counters(drafting.url)
    drafted, accepted = (now[k] - before[k] for k in ("drafted", "accepted"))
    assert 0 < accepted < drafted, "nothing was accepted or nothing refused, so nothing was tested"


@pytest.fixture
def fleet(stack: Stack, tmp_path: Path) -> Iterator[Fleet]:
    """The session's server alone behind a router of the test's own; it counts as started elsewhere, which saves its restart."""
    router = Router(stack.server.cfg, [stack.server.url], str(tmp_path))
    router.start()
    fleet = Fleet([stack.server.url], None, router, external=[0])
    try:
        yield fleet
    finally:
        fleet.close()
        router.stop()


def test_servers_are_added_drained_and_brought_back_under_load(stack: Stack, drafting: Engine, fleet: Fleet, tmp_path: Path) -> None:
    first = stack.policy().publish(fleet)
    served, said = control.Control(fleet, tmp_path, None, None), []  # type: ignore[arg-type]
    looks = gauges.Gauges(lambda: {i: fleet.urls[i] for i in fleet.serving()})
    worker = stack.worker(
        rollout={"max_response_len": 100, "concurrency": 16}, train={"mode": "async", "max_staleness": 1}, algo={"correction": "tis"}
    )
    worker.client.url = fleet.router.url  # type: ignore[union-attr]
    stop = threading.Event()

    def vime(action: str, *words: str) -> str:
        said.append(control.command(str(tmp_path), action, list(words)))
        return said[-1]

    async def load() -> list:
        done, at = [], 0
        while not stop.is_set():
            done += await asyncio.gather(*(worker.run_group(group(4, at=at + i), first.version) for i in range(12)))
            at += 12
        await worker.close()
        return done

    results: list = []
    thread = threading.Thread(target=lambda: results.extend(asyncio.run(load())))
    thread.start()
    try:
        assert f"engine 1 ({drafting.url}) serves weights v{first.version}" in vime("add", drafting.url)
        used = counters(drafting.url)["tokens"]
        time.sleep(2)
        assert counters(drafting.url)["tokens"] > used, "the router does not use the added server"
        assert "engine 0" in vime("drain", "0") and fleet.serving() == [1] and fleet.busy(0) == 0
        idle = counters(stack.server.url)["tokens"]
        second = stack.policy().publish(fleet)
        assert [row["version"] for row in served.listed()] == [first.version, second.version]
        time.sleep(1)
        assert counters(stack.server.url)["tokens"] == idle, "a drained server still gets requests"
        assert f"serves weights v{second.version}" in vime("replace", "0") and fleet.serving() == [0, 1]
        time.sleep(2)
    finally:
        stop.set()
        thread.join()
        metrics = gauges.summary(looks.take().values())
        looks.close()
        served.close()
    assert counters(stack.server.url)["tokens"] > idle
    assert sum(r.retries + r.fenced for r, _ in results) == 0, "a request was lost on the way"
    for report, samples in results:
        assert len(report.metas) == 4 and {v for s in samples for v in s.weight_versions} <= {first.version, second.version}
    assert 0 < metrics["rollout/engine_busy_min"] <= metrics["rollout/engine_busy"] <= 1 and 1 <= metrics["rollout/engine_balance"] < 2
    assert 0 < metrics["rollout/spec_acceptance"] < 1 and metrics["rollout/engine_running"] > 1
    assert {0, 1} == set(fleet.serving()) and "2 requests" not in said


def test_a_router_without_servers_says_which_are_gone(stack: Stack, fleet: Fleet) -> None:
    fleet.take_out(0)
    with pytest.raises(EngineDown, match=r"503.*No available workers.*: all are taken out"):
        ask(fleet.router.url, lambda c: c.generate(PROMPT, {"max_tokens": 1}))  # type: ignore[union-attr]
    fleet.bring_in(0)
    ask(fleet.router.url, lambda c: c.generate(PROMPT, {"max_tokens": 1}))  # type: ignore[union-attr]


def test_sleeping_servers_wake_before_they_get_weights(stack: Stack, fleet: Fleet) -> None:
    """The order of colocated mode. On a CPU the server frees nothing, but it takes no requests while it sleeps."""
    stack.policy().publish(fleet)
    fleet.sleep(1)
    with pytest.raises(VimeError):
        ask(stack.server.url, lambda c: c.generate(PROMPT, {"max_tokens": 1}, timeout=2))
    fleet.wake()
    policy: Policy = stack.policy().publish(fleet)
    ((c,),) = ask(stack.server.url, lambda c: c.generate(PROMPT, {"max_tokens": 4}))
    want = score(policy.model, PROMPT + c.token_ids)[len(PROMPT) - 1 :]
    assert max(abs(a - b) for a, b in zip(c.log_probs, want, strict=True)) < 1e-4
