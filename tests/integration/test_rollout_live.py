"""Rollout against one real vLLM server and a real router: generation, weights, faults, healing. Tests that kill come last."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.integration.rollout_kit import LONG, PROMPT, Stack, ask, group, run, score
from vime.config import Config
from vime.errors import VimeError
from vime.procs import descendants
from vime.rollout.health import Fleet
from vime.rollout.http import EngineClient, EngineDown
from vime.rollout.router import Router
from vime.sample import Sample, Status

# ------------------------------------------------------------------ generation


def test_groups_come_back_aligned_with_true_logprobs(stack: Stack) -> None:
    policy = stack.policy().publish(stack.fleet)
    groups = [group(at=i) for i in range(6)]
    results = run(stack.worker(rollout={"temperature": 1.7}), *groups, version=policy.version)
    for before, (report, samples) in zip(groups, results):
        assert [s.index for s in samples] == [s.index for s in before] and before[0].response_length == 0
        assert (report.retries, report.fenced, report.dropped) == (0, 0, None)
        assert [m.reward for m in report.metas] == [s.response_length for s in samples]
        assert sum(m.response_length for m in report.metas) == sum(s.response_length for s in samples)
        for s in samples:
            s.check()
            assert s.weight_versions == [policy.version] and s.tokens[: len(PROMPT)] == PROMPT
            assert s.status == (Status.COMPLETED if s.tokens[-1] == 2 else Status.TRUNCATED)
            want = score(policy.model, s.tokens, 1.7)[len(PROMPT) - 1 :]
            assert max(abs(a - b) for a, b in zip(s.rollout_log_probs, want, strict=True)) < 1e-4
    assert len({tuple(s.tokens) for _, ss in results for s in ss}) >= 4  # samples differ, although this policy may be sure of much


def test_response_is_cut_at_the_context(stack: Stack) -> None:
    cfg = stack.server.cfg
    long = [1] + [5] * (cfg.rollout.max_context_len - 4)
    ((_, samples),) = run(stack.worker(), group(2, long), version=stack.version)
    assert all(1 <= s.response_length <= 3 and len(s.tokens) <= cfg.rollout.max_context_len for s in samples)


def test_greedy_evaluation_of_a_group(stack: Stack) -> None:
    worker = stack.worker(eval={"temperature": 0.0, "max_response_len": 5, "datasets": [{"name": "a", "prompts": "-"}]})
    ((_, samples),) = run(worker, group(3), version=stack.version, evaluation="a")
    assert len({tuple(s.tokens) for s in samples}) == 1 and samples[0].response_length <= 5


def test_remax_samples_one_more_greedily(stack: Stack) -> None:
    """It is the response of greedy evaluation, is scored, and not trained; also where a plug-in generates."""
    algo = {"advantage_estimator": "remax"}
    greedy_eval = {"temperature": 0.0, "datasets": [{"name": "a", "prompts": "-"}]}
    ((_, (best,)),) = run(stack.worker(eval=greedy_eval), group(1), version=stack.version, evaluation="a")
    for custom in (None, "tests.integration.plugins:plain"):
        given = group(3)
        ((report, samples),) = run(stack.worker(algo=algo, rollout={"temperature": 2.0, "custom_generate": custom}), given, version=stack.version)
        assert [s.greedy for s in samples] == [False, False, False, True] == [m.greedy for m in report.metas]
        assert samples[3].tokens == best.tokens and len(given) == 3
        assert report.metas[3].reward == samples[3].response_length and report.metas[3].trained_tokens == 0 < report.metas[0].trained_tokens
        assert len({m.index for m in report.metas}) == 4
    ((_, samples),) = run(stack.worker(algo=algo, eval=greedy_eval), group(2), version=stack.version, evaluation="a")
    assert len(samples) == 2, "an evaluation has no use for a baseline"


def test_custom_generate_with_tool_tokens(stack: Stack) -> None:
    worker = stack.worker(rollout={"custom_generate": "tests.integration.plugins:twice"})
    ((report, samples),) = run(worker, group(3), version=stack.version)
    assert report.fenced == 0 and all(s.metadata["turns"] == 2 for s in samples)
    for s in samples:
        first = s.loss_mask.index(0)
        assert s.loss_mask[first : first + 2] == [0, 0] and s.token_versions[first : first + 2] == [-1, -1]


def test_a_rollout_may_yield_several_samples(stack: Stack) -> None:
    """Two of them, made by hand as slime's users do; one reward for the whole group; hooks of both kinds run before it."""
    changes = {"custom_generate": "tests.integration.plugins:two_segments"}
    changes |= {"sample_hook": ["tests.integration.plugins:mark", "tests.integration.plugins:mark_async"]}
    worker = stack.worker(rollout=changes, reward={"function": "tests.integration.plugins:ranks", "group": True})
    ((report, samples),) = run(worker, group(3, at=5), version=stack.version)
    assert [(s.group_index, s.index, s.rollout_id, s.part) for s in samples] == [(5, i, i, p) for i in (15, 16, 17) for p in (0, 1)]
    assert len({m.index for m in report.metas}) == 6 and [m.reward for m in report.metas] == [0.0, 0.0, 1.0, 1.0, 2.0, 2.0]
    assert all(s.weight_versions == [stack.version] and s.metadata["seen"] == [stack.version, False] for s in samples)


def test_a_rollout_of_several_samples_starts_again_where_one_is_aborted(stack: Stack) -> None:
    worker = stack.worker(rollout={"custom_generate": "tests.integration.plugins:aborted_once"})
    ((report, samples),) = run(worker, group(2), version=stack.version)
    assert report.continued == 1 and [(s.index, s.part, s.response_length > 0) for s in samples] == [(0, 0, True), (0, 1, True), (1, 0, True), (1, 1, True)]


def test_a_sample_may_bring_its_own_plugins(stack: Stack) -> None:
    samples = group(2)
    for s in samples:
        s.generate_function_path, s.custom_rm_path = "tests.integration.plugins:twice", "exact"
    ((report, done),) = run(stack.worker(), samples, version=stack.version)
    assert all(s.metadata["turns"] == 2 for s in done) and {m.reward for m in report.metas} <= {0.0, 1.0}


def test_samples_of_one_rollout_cannot_differ_in_reward(stack: Stack) -> None:
    changes = {"custom_generate": "tests.integration.plugins:two_segments"}
    with pytest.raises(VimeError, match=r"samples of rollout \d have different rewards"):
        run(stack.worker(rollout=changes, reward={"function": "tests.integration.plugins:by_part"}), group(2), version=stack.version)


def test_failing_plugins_name_the_sample(stack: Stack) -> None:
    with pytest.raises(VimeError, match=r"crash.*sample 0 \(prompt 'abc'\).*RuntimeError: sandbox lost"):
        run(stack.worker(rollout={"custom_generate": "tests.integration.plugins:crash"}), group(1), version=stack.version)
    broken = {"function": "tests.integration.plugins:broken"}
    with pytest.raises(VimeError, match=r"sample \d \(prompt 'abc'\).*no such answer") as e:
        run(stack.worker(reward=broken), group(2), version=stack.version)
    assert "on_error" in e.value.fix
    ((report, _),) = run(stack.worker(reward=broken | {"on_error": "skip"}), group(2), version=stack.version)
    assert report.dropped == "reward_error" and report.metas == []


def test_wrong_requests_are_not_tried_again(stack: Stack) -> None:
    worker, asked = stack.worker(), list[object]()
    sent = worker.client.generate

    def counted(*given, **more):
        asked.append(given)
        return sent(*given, **more)

    worker.client.generate = counted  # type: ignore[method-assign]
    with pytest.raises(VimeError, match=r"http://127.*HTTP 400.*out of vocabulary") as e:
        run(worker, group(2, [1, 99999]), version=stack.version)
    assert not isinstance(e.value, EngineDown) and 1 <= len(asked) <= 2
    with pytest.raises(VimeError, match="lacks /nonsense"):
        ask(stack.server.url, lambda c: c.probe({"/nonsense", "/health"}))


def test_the_fence_refuses_other_weights(stack: Stack) -> None:
    with pytest.raises(VimeError, match=rf"fenced.*weights 999 were asked for, the servers sampled with \[{stack.version}\]"):
        run(stack.worker(rollout={"request_timeout": 2.0}), group(2), version=999)


# ------------------------------------------------------------------ weights


def test_updates_reach_every_tensor_the_tied_head_included(stack: Stack) -> None:
    for _ in range(2):  # the second must not see anything of the first
        policy = stack.policy().publish(stack.fleet)
        (theirs,) = ask(stack.server.url, lambda c: c.prompt_logprobs(LONG))
        assert max(abs(a - b) for a, b in zip(theirs, score(policy.model, LONG), strict=True)) < 1e-4
        assert ask(stack.server.url, lambda c: c.weight_version()) == [policy.version]
    assert max(abs(a - b) for a, b in zip(theirs, stack_base(stack))) > 0.1  # the comparison can fail


def stack_base(stack: Stack) -> list[float]:
    return score(AutoModelForCausalLM.from_pretrained(stack.server.cfg.model, dtype=torch.float32), LONG)


def test_cached_prefixes_of_old_weights_are_never_used(stack: Stack) -> None:
    def hits() -> float:
        text = urllib.request.build_opener(urllib.request.ProxyHandler({})).open(f"{stack.server.url}/metrics").read().decode()
        return sum(float(x) for x in re.findall(r"^vllm:prefix_cache_hits_total.* (\S+)$", text, re.M))

    def sample() -> Sample:
        ((_, (s,)),) = run(stack.worker(), group(1, LONG), version=stack.version)
        return s

    stack.policy().publish(stack.fleet)
    sample()
    before = hits()
    sample()
    assert hits() > before  # this prompt is cached now
    policy, before = stack.policy().publish(stack.fleet), hits()
    s = sample()
    assert hits() == before
    want = score(policy.model, s.tokens)[len(LONG) - 1 :]
    assert max(abs(a - b) for a, b in zip(s.rollout_log_probs, want, strict=True)) < 1e-4


def test_requests_in_flight_go_on_with_the_new_weights_and_no_old_cache(stack: Stack) -> None:
    policy = stack.policy()
    params = {"n": 32, "max_tokens": 100, "ignore_eos": True}

    async def go():
        client = EngineClient(stack.server.url)
        request = asyncio.create_task(client.generate(PROMPT, params))
        await asyncio.sleep(0.3)
        await asyncio.to_thread(policy.publish, stack.fleet)
        done = await request
        await client.close()
        return done

    cut = 0
    for c in asyncio.run(go()):
        old, new = policy.version - 1, policy.version
        assert set(c.versions) <= {old, new} and c.versions == sorted(c.versions) and len(c.token_ids) == 100
        if set(c.versions) == {old, new}:
            cut += 1
            want = score(policy.model, PROMPT + c.token_ids)[len(PROMPT) - 1 :]
            assert max(abs(a - b) for a, b, v in zip(c.log_probs, want, c.versions) if v == new) < 1e-4
    assert cut > 0


def test_bad_weight_files_are_refused_in_one_line_and_harm_nothing(stack: Stack) -> None:
    good = stack.policy().publish(stack.fleet)
    cut = stack.folder / "cut.safetensors"
    cut.write_bytes(Path(good.path).read_bytes()[:-1000])
    for path, why in ((stack.folder / "none.safetensors", "No such file"), (cut, "not fully covered")):
        with pytest.raises(VimeError) as e:
            stack.fleet.publish(good.version + 1, str(path), None)
        line = str(e.value)
        assert (
            "\n" not in line and f"engine 0 ({stack.server.url}): weights v{good.version + 1} did not take: {path}" in line and why in line
        )
    assert stack.restarts == 0
    ((report, _),) = run(stack.worker(), group(2), version=good.version)
    assert report.fenced == 0


def test_the_canary_finds_weights_that_are_not_the_trainers(stack: Stack) -> None:
    other, wrong = stack.policy(), stack.policy()
    with pytest.raises(VimeError, match=rf"engine 0 \(http.*\): weights v{other.version} did not take: its logprobs .* are off by"):
        stack.fleet.publish(other.version, other.path, wrong.canary)
    wrong.publish(stack.fleet)


# ------------------------------------------------------------------ faults


def test_a_half_loaded_server_is_healed_with_the_last_good_weights(stack: Stack) -> None:
    good = stack.policy().publish(stack.fleet)
    part = str(stack.folder / "part.safetensors")
    save_file({k: t for k, t in good.tensors.items() if "layers.1" not in k}, part)
    with pytest.raises(VimeError, match=rf"weights v{good.version + 1} did not take: .*no weights for") as e:
        stack.fleet.publish(good.version + 1, part, None)
    assert "\n" not in str(e.value) and stack.restarts == 1
    ((report, (s, _)),) = run(stack.worker(), group(2), version=good.version)
    assert report.fenced == 0
    want = score(good.model, s.tokens)[len(PROMPT) - 1 :]
    assert max(abs(a - b) for a, b in zip(s.rollout_log_probs, want, strict=True)) < 1e-4


def victims(stack: Stack) -> dict[str, int]:
    api = stack.server.engine.pid()
    core = next(p for p in descendants(api) if "EngineCore" in Path(f"/proc/{p}/comm").read_text() + Path(f"/proc/{p}/cmdline").read_text())
    return {"api server": api, "engine core": core, "router": stack.router.pid()}


def test_killed_processes_are_brought_back_and_their_requests_redone(stack: Stack) -> None:
    """kill -9 of the API server, of EngineCore and of the router, each mid-generation."""
    fleet = Fleet([stack.server.url], stack.restart, stack.router)  # its own: a watch that outlives the test would go on healing
    try:
        killed_and_brought_back(stack, fleet)
    finally:
        fleet.close()


def killed_and_brought_back(stack: Stack, fleet: Fleet) -> None:
    policy = stack.policy().publish(fleet)
    fleet.watch()
    for who in ("router", "api server", "engine core"):
        pid, counts = victims(stack)[who], dict(fleet.counts)
        old = descendants(stack.server.engine.pid())
        long = {"max_response_len": 110, "custom_generate": "benchmarks.engine_busy:long_answers"}  # still under way when the process dies
        worker = stack.worker(rollout=long)
        groups = [group(8, at=i) for i in range(8)]

        async def go(worker=worker, groups=groups, pid=pid):
            tasks = [asyncio.create_task(worker.run_group(g, policy.version)) for g in groups]
            await asyncio.sleep(0.2)
            os.kill(pid, signal.SIGKILL)
            done = await asyncio.gather(*tasks)
            await worker.close()
            return done

        results = asyncio.run(go())
        assert sum(r.retries for r, _ in results) > 0, who
        for report, samples in results:
            assert len(report.metas) == 8 and all(s.weight_versions == [policy.version] for s in samples)
        what = "router_restarts" if who == "router" else "engine_restarts"
        assert fleet.counts[what] > counts[what]
        if who != "router":
            assert not any(Path(f"/proc/{p}").exists() for p in old), "orphans of the killed server"
        fleet.check()


# ------------------------------------------------------------------ servers that do not start


def test_router_that_cannot_start_says_why(make_config: Callable[..., Config], tmp_path: Path) -> None:
    router = Router(make_config(router={"policy": "no-such-policy"}), ["http://127.0.0.1:9"], str(tmp_path))
    with pytest.raises(VimeError, match=r"vllm-router failed to start.*no-such-policy"):
        router.start()


class Raced(Router):
    """A router whose port another process takes between the choice and the start."""

    thief: socket.socket | None = None

    def arguments(self, port: int) -> dict[str, object]:
        self.thief = self.thief or socket.create_server(("127.0.0.1", port))
        return super().arguments(port)


def test_router_starts_on_another_port_where_its_own_is_taken_meanwhile(stack: Stack, tmp_path: Path) -> None:
    router = Raced(stack.server.cfg, [stack.server.url], str(tmp_path))
    try:
        assert router.start() == router.url and router.alive()
        assert router.thief and router.port != router.thief.getsockname()[1]
    finally:
        router.stop()
        router.thief.close()  # type: ignore[union-attr]
