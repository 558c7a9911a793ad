"""Interrupting generation anywhere and going on: against a real server, token-exact."""

from __future__ import annotations

import asyncio

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.integration.rollout_kit import PROMPT, Policy, Stack, group, score
from vime.sample import Sample, Status

POINTS, GROUPS, SIZE, HOT = 1000, 8, 8, 2.0  # at temperature 2 the tiny model seldom ends by itself
WHOLE = {"max_response_len": 100, "max_context_len": 128, "temperature": HOT, "mask_offpolicy_prefix": True}


async def once(stack: Stack, groups: list[list[Sample]], version: int, pause: float | None):
    """Submit the groups and interrupt them after `pause` seconds: their samples, and how many of them were cut midway."""
    worker = stack.worker(rollout=WHOLE)
    try:
        tasks = [asyncio.create_task(worker.run_group(g, version)) for g in groups]
        if pause is not None:
            await asyncio.sleep(pause)
            await worker.interrupt(0)
        while not all(t.done() for t in tasks):
            if pause is not None:
                await asyncio.to_thread(stack.fleet.abort)
            await asyncio.wait(tasks, timeout=None if pause is None else 0.1)
        results = [t.result() for t in tasks]
    finally:
        await worker.close()
    return results, sum(s.status is Status.ABORTED and s.response_length > 0 for _, g in results for s in g)


async def interrupted(stack: Stack, pauses: list[float], version: int):
    """Groups interrupted after each of `pauses` seconds and submitted again until they are done."""
    total, left, done = 0, {g: group(SIZE, at=g) for g in range(GROUPS)}, {}
    for pause in [*pauses, None]:
        results, cuts = await once(stack, list(left.values()), version, pause)
        total += cuts
        for g, (report, samples) in zip(list(left), results):
            if report.interrupted:
                left[g] = samples
            else:
                done[g] = report, left.pop(g) and samples
    return done, total


def check(s: Sample, policy: Policy) -> None:
    s.check()
    assert s.tokens[: len(PROMPT)] == PROMPT and s.loss_mask == [1] * s.response_length
    assert s.token_versions == [policy.version] * s.response_length
    assert s.status is (Status.COMPLETED if s.tokens[-1] == 2 else Status.TRUNCATED)
    assert s.response_length == WHOLE["max_response_len"] or s.status is Status.COMPLETED
    want = score(policy.model, s.tokens, HOT)[len(PROMPT) - 1 :]
    assert max(abs(a - b) for a, b in zip(s.rollout_log_probs, want, strict=True)) < 1e-4


def test_a_thousand_interrupts_leave_every_token_in_place(stack: Stack) -> None:
    """Final tokens, masks, logprobs and versions stay aligned, and the logprobs of continued samples are those of the whole sequence."""
    policy = stack.policy().publish(stack.fleet)
    total = 0

    @settings(max_examples=40, deadline=None, database=None, derandomize=True, suppress_health_check=list(HealthCheck))
    @given(st.lists(st.floats(0.01, 0.3), min_size=4, max_size=8))
    def anywhere(pauses):
        nonlocal total
        if total >= POINTS:
            return
        done, cuts = asyncio.run(interrupted(stack, pauses, policy.version))
        total += cuts
        assert sorted(done) == list(range(GROUPS))
        for report, samples in done.values():
            assert [m.index for m in report.metas] == [s.index for s in samples] and len(samples) == SIZE
            assert report.oldest == policy.version
            for s in samples:
                check(s, policy)

    anywhere()
    assert total >= POINTS, f"only {total} samples were cut midway"


def test_a_masked_prefix_is_not_trained_and_new_weights_carry_on(stack: Stack) -> None:
    """Interrupt under weights v, publish v + 1, go on: old tokens keep their version and logprobs and lose their mask."""
    old = stack.policy().publish(stack.fleet)
    [(cut, held)], cuts = asyncio.run(once(stack, [group(SIZE)], old.version, 0.15))
    assert cut.interrupted and cuts and cut.oldest == old.version
    new = stack.policy().publish(stack.fleet)
    [(report, done)], _ = asyncio.run(once(stack, [held], new.version, None))
    assert report.oldest == new.version
    for before, s in zip(held, done):
        n = before.response_length
        assert s.tokens[: len(before.tokens)] == before.tokens and s.rollout_log_probs[:n] == before.rollout_log_probs
        assert s.token_versions == [old.version] * n + [new.version] * (s.response_length - n)
        assert s.loss_mask == [0] * n + [1] * (s.response_length - n)
        want = score(new.model, s.tokens, HOT)[len(PROMPT) - 1 :]
        assert max((abs(a - b) for a, b in zip(s.rollout_log_probs[n:], want[n:], strict=True)), default=0) < 1e-4
