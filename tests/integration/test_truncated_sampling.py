"""Top-p and top-k with a real server: each token comes with the ids it was drawn from, and the trainer's logprobs over them are the server's."""

import asyncio
from collections.abc import Iterator

import pytest

from tests.conftest import Server
from tests.integration.plugins import twice
from tests.integration.trainer_kit import one_rank, train_once
from vime.config import validate
from vime.errors import VimeError
from vime.rollout.engine import Engine
from vime.rollout.generate import Link, Slots, generate_group, link, sampling_params
from vime.rollout.http import EngineClient
from vime.rollout.router import Router
from vime.sample import Sample
from vime.trainer.batch import Item
from vime.trainer.packing import pack

PROMPT = [1, *range(3, 12)]
SETTINGS = {"top_p": {"top_p": 0.8}, "top_k": {"top_k": 20}, "both": {"top_p": 0.9, "top_k": 3}}


@pytest.fixture(scope="module")
def truncating(make_config, tmp_path_factory) -> Iterator[Server]:
    """A server of its own flags behind a router: --return-sampling-mask follows from rollout.top_p."""
    cfg = make_config(rollout={"top_p": 0.8, "temperature": 1.3})
    folder = str(tmp_path_factory.mktemp("truncating"))
    engine = Engine(cfg, 0, folder)
    router = None
    try:
        router = Router(cfg, [engine.start()], folder)
        yield Server(engine, router.start(), cfg)
    finally:
        if router:
            router.stop()
        engine.stop()


def config(server: Server, **rollout):
    tree = server.cfg.model_dump()
    return validate(tree | {"rollout": tree["rollout"] | {"top_p": 1.0, "top_k": -1} | rollout}, "test")


def group(n: int, at: int) -> list[Sample]:
    prompt = [1, *range(3 + at, 9 + at)]
    return [Sample(group_index=at, index=at * 10 + i, tokens=list(prompt), session_id=f"s{at}") for i in range(n)]


def sample_groups(url: str, cfg, groups: list[list[Sample]], evaluation: str = "") -> list[Sample]:
    async def go():
        client = EngineClient(url)
        link.set(Link(client, Slots(64), asyncio.Event()))
        params = sampling_params(cfg, evaluation)
        try:
            await asyncio.gather(*(generate_group(g, cfg, params) for g in groups))
            return [*(s for g in groups for s in g), await twice(cfg, group(1, 9)[0], params)]
        finally:
            await client.close()

    return asyncio.run(go())


@pytest.mark.parametrize("name", SETTINGS)
def test_trainer_logprobs_over_the_support_are_the_sampled_ones(truncating: Server, name: str):
    """n > 1 and n = 1 in one batch, and a sample of two turns with tool tokens between them; fp32 to 1e-4."""
    cfg = config(truncating, **SETTINGS[name])
    samples = sample_groups(truncating.url, cfg, [group(6, 0), group(4, 1), group(1, 2)])
    sizes = [b - a for s in samples for a, b, m in zip(s.rollout_top_p_token_offsets, s.rollout_top_p_token_offsets[1:], s.loss_mask) if m]
    assert all(s.response_length and len(s.rollout_top_p_token_offsets) == s.response_length + 1 for s in samples)
    assert min(sizes) >= 1 and max(sizes) > 1 and (name == "top_p" or max(sizes) <= cfg.rollout.top_k)
    p = pack([Item(s.index, s.group_index, 1.0, 1.0) for s in samples], {s.index: s for s in samples})
    with one_rank(cfg) as t:
        diff = (t.log_probs(t.model, p) - p.rollout_log_probs).abs()
        assert diff.max() < 1e-4, f"over the support: {diff.max()}"
        p.support = None
        assert (t.log_probs(t.model, p) - p.rollout_log_probs).abs().max() > 1e-2, "over the vocabulary they must differ"


def test_greedy_evaluation_and_canary_of_such_a_server(truncating: Server):
    """Both would be refused as they are sent to other servers: vLLM wants a temperature and a top_k of every request."""
    tree = config(truncating, top_p=0.8).model_dump(exclude_none=True)
    cfg = validate(tree | {"eval": {"datasets": [{"name": "held", "prompts": "p", "temperature": 0.0}]}}, "test")
    a, b, *_ = sample_groups(truncating.url, cfg, [group(2, 0)], evaluation="held")
    assert a.tokens == b.tokens and max(a.rollout_log_probs) == min(a.rollout_log_probs) == 0.0

    async def canary():
        client = EngineClient(truncating.url)
        try:
            return await client.prompt_logprobs(PROMPT)
        finally:
            await client.close()

    assert len(asyncio.run(canary())) == len(PROMPT) - 1


def test_a_server_without_masks_is_named(server: Server):
    cfg = config(server, top_k=5)
    with pytest.raises(VimeError, match="no sampling_mask came back") as e:
        sample_groups(server.url, cfg, [group(2, 0)])
    assert "--return-sampling-mask" in str(e.value)


def test_a_step_on_truncated_samples(truncating: Server):
    """The difference to the servers' logprobs is rounding, and there is a gradient."""
    cfg = config(truncating, top_p=0.8)
    samples = sample_groups(truncating.url, cfg, [group(6, 0)])[:6]
    for s in samples:
        s.reward, s.token_versions = float(s.index % 2), [0] * s.response_length
    with one_rank(cfg) as t:
        m = train_once(t, cfg, 1, [samples])
    assert m["train/logprob_abs_diff_max"] < 1e-4 and m["train/grad_norm"] > 0
