"""Rollout without servers: parameters, command lines, parsing, the group semaphore, the errors of plug-ins."""

import asyncio
import random
import socket
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.config import validate
from vime.errors import VimeError
from vime.rollout.engine import Engine, cause, flags
from vime.rollout.generate import EVERY_TOKEN, for_plugin, for_server, sampling_params
from vime.rollout.http import EngineClient, EngineDown, _message, version_of
from vime.rollout.router import Router
from vime.rollout.worker import Slots

TWO = [{"name": "a", "prompts": "a.jsonl", "top_k": 3}, {"name": "b", "prompts": "b.jsonl", "max_response_len": 2}]
EVAL = {"temperature": 0.0, "max_response_len": 5, "datasets": TWO}


def config(**sections: object):
    return validate({"model": "m", "data": {"prompts": "p.jsonl"}, **sections}, "test")


def test_sampling_params_of_rollout_and_evaluation() -> None:
    cfg = config(rollout={"temperature": 0.7, "max_response_len": 9, "stop": ["x"]}, eval=EVAL)
    train, evaluation = sampling_params(cfg), sampling_params(cfg, "a")
    assert (train["temperature"], train["max_tokens"], train["stop"]) == (0.7, 9, ["x"]) and "stop_token_ids" not in train
    assert (evaluation["temperature"], evaluation["max_tokens"], evaluation["top_k"]) == (0.0, 5, 3)
    assert sampling_params(cfg, "b")["max_tokens"] == 2
    assert for_server(for_plugin(train)) == train | {"skip_special_tokens": False} and "max_tokens" not in for_plugin(train)
    assert for_server(for_plugin(train) | {"max_tokens": 4, "no_stop_trim": True, "stop": None})["max_tokens"] == 4


def test_servers_that_return_masks_are_asked_in_their_terms(tmp_path: Path) -> None:
    """vLLM wants a temperature and a top_k of every request then, evaluation included, which is truncated as the rollout unless told."""
    cfg = config(rollout={"top_p": 0.9}, eval=EVAL | {"datasets": [*TWO, {"name": "c", "prompts": "c.jsonl", "temperature": 0.5}]})
    assert Engine(cfg, 0, str(tmp_path)).arguments(1)["return_sampling_mask"] is True
    assert "return_sampling_mask" not in Engine(config(), 0, str(tmp_path)).arguments(1)
    seen = {name: [sampling_params(cfg, name)[k] for k in ("temperature", "top_p", "top_k")] for name in ("", "b", "c")}
    assert seen == {"": [1.0, 0.9, EVERY_TOKEN], "b": [1.0, 0.9, 1], "c": [0.5, 0.9, EVERY_TOKEN]}


def test_flags() -> None:
    assert flags({"max_num_seqs": 8, "enforce_eager": True}) == ["--max-num-seqs", "8", "--enforce-eager"]
    assert flags({"enable_prefix_caching": False, "a": {"b": 1}}) == ["--no-enable-prefix-caching", "--a", '{"b": 1}']
    assert flags({"sizes": [1, 2], "lora": [{"n": 1}]}) == ["--sizes", "1", "2", "--lora", '{"n": 1}']


def test_vllm_section_overrides_defaults(tmp_path) -> None:
    cfg = config(vllm={"max-num-seqs": 3, "dtype": "bfloat16"}, rollout={"max_context_len": 77, "max_response_len": 7}, seed=5)
    args = Engine(cfg, 2, str(tmp_path)).arguments(1234)
    assert (args["max_num_seqs"], args["dtype"], args["max_model_len"], args["seed"], args["port"]) == (3, "bfloat16", 77, 7, 1234)
    router = Router(config(router={"policy": "round_robin"}), ["http://a"], str(tmp_path)).arguments(1)
    assert router["policy"] == "round_robin" and router["disable_retries"] is True


@pytest.mark.parametrize("part", ["vllm", "router"])
def test_taken_port(part: str, tmp_path) -> None:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        cfg = config(**{part: {"port": port}})
        what = Engine(cfg, 0, str(tmp_path)) if part == "vllm" else Router(cfg, ["http://127.0.0.1:1"], str(tmp_path))
        with pytest.raises(VimeError, match=rf"{part}\.port: port {port} is taken"):
            what.start()


def test_cause_is_the_root_not_the_report() -> None:
    log = "x\nValueError: head_dim must be even\nTraceback\nRuntimeError: Engine core initialization failed. See root cause above.\n"
    assert cause(log) == "ValueError: head_dim must be even"


def choice(ids: list[int], **changes: object) -> dict:
    content = [{"token_id": t, "logprob": -0.5} for t in ids]
    return {"index": 0, "token_ids": ids, "finish_reason": "stop", "logprobs": {"content": content}} | changes


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 5)), min_size=1, max_size=6))
def test_versions_cover_every_token(spans: list[tuple[int, int]]) -> None:
    want = [v for v, n in spans for _ in range(n)]
    at, sent = 0, []
    for v, n in spans:
        sent.append({"version": str(v), "start": at, "end": at + n})
        at += n
    got = EngineClient("http://x")._choice(choice(list(range(at)), weight_versions=sent))
    assert got.versions == want and len(got.log_probs) == at


def test_unlabelled_tokens_have_version_minus_one() -> None:
    client = EngineClient("http://x")
    assert client._choice(choice([4, 5])).versions == [-1, -1]
    assert client._choice(choice([4, 5], weight_versions=[{"version": "default", "start": 0, "end": 2}])).versions == [-1, -1]
    assert version_of("12") == 12 and version_of("x") == version_of(None) == -1


@pytest.mark.parametrize("logprobs", [None, {"content": None}, {"content": []}, {"content": [{"token_id": 9, "logprob": -1.0}] * 2}])
def test_missing_or_foreign_logprobs_are_an_error(logprobs: object) -> None:
    with pytest.raises(VimeError, match="logprobs came back for 2 sampled tokens") as e:
        EngineClient("http://x")._choice(choice([4, 5], logprobs=logprobs))
    assert not isinstance(e.value, EngineDown)


@pytest.mark.parametrize("changes", [{"finish_reason": None}, {"finish_reason": ""}])
def test_no_finish_reason_is_no_success(changes: dict) -> None:
    with pytest.raises(EngineDown, match="ended early"):
        EngineClient("http://x")._choice(choice([4, 5], **changes))


def test_unknown_sampling_parameter_and_unreachable_server() -> None:
    async def go() -> None:
        client = EngineClient("http://127.0.0.1:9")
        with pytest.raises(VimeError, match="did you mean 'max_tokens'"):
            await client.generate([1], {"max_tokenz": 3})
        with pytest.raises(EngineDown, match=r"http://127\.0\.0\.1:9/health"):
            await client.health()
        await client.close()

    asyncio.run(go())


@pytest.mark.parametrize(
    "raw, want",
    [(b'{"error":{"message":"bad\\nid"}}', "bad id"), (b'{"detail":"no"}', "no"), (b"<html>", "<html>"), (b'{"error":"e"}', "e")],
)
def test_error_messages_of_every_form(raw: bytes, want: str) -> None:
    assert _message(raw) == want


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 8), st.lists(st.integers(1, 12), min_size=1, max_size=20), st.integers(0, 2**16))
def test_slots_never_exceed_their_size_and_never_block_for_good(size: int, wants: list[int], seed: int) -> None:
    rng, held, peak, order = random.Random(seed), 0, 0, []
    slots = Slots(size)

    async def one(i: int, n: int) -> None:
        nonlocal held, peak
        async with slots.take(n):
            order.append(i)
            held += min(n, size)
            peak = max(peak, held)
            try:
                for _ in range(rng.randrange(3)):
                    await asyncio.sleep(0)
            finally:
                held -= min(n, size)

    async def go() -> None:
        tasks = [asyncio.create_task(one(i, n)) for i, n in enumerate(wants)]
        await asyncio.sleep(0)
        tasks[rng.randrange(len(tasks))].cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 5)
        async with slots.take(size):  # every permit came back
            pass

    asyncio.run(asyncio.wait_for(go(), 10))
    assert peak <= size and order == sorted(order)
