"""The rollout worker: takes a group of samples, generates, scores, and gives back the finished samples with their metadata."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from vime import hooks, rewards
from vime.config import Config
from vime.errors import VimeError
from vime.rollout.generate import all_of, current_client, generate_group, sampling_params
from vime.rollout.http import EngineClient, EngineDown
from vime.sample import Sample, SampleMeta, Status, meta_of

BACKOFF = (0.1, 2.0)  # seconds before the first redo, and at most; doubled each time


@dataclass
class GroupReport:
    """What the controller learns of a finished group. `dropped` says why the group is not to be trained on (then `metas` is empty)."""

    group_index: int
    metas: list[SampleMeta] = field(default_factory=list)
    dropped: str | None = None
    retries: int = 0  # generations redone because a server failed
    fenced: int = 0  # generations redone because other weights than asked for sampled them


class Slots:
    """A semaphore whose holders take several permits at once, first come first served; more than there are means all of them."""

    def __init__(self, size: int):
        self.size = size
        self._free = asyncio.Semaphore(size)
        self._turn = asyncio.Lock()  # two half-filled holders would wait for each other

    @asynccontextmanager
    async def take(self, n: int) -> AsyncIterator[None]:
        taken = 0
        try:
            async with self._turn:
                while taken < min(n, self.size):
                    await self._free.acquire()
                    taken += 1
            yield
        finally:
            for _ in range(taken):
                self._free.release()


class RolloutWorker:
    """One of the rollout processes; all its groups run concurrently in one event loop, within the engines' concurrency limit."""

    def __init__(self, cfg: Config, router_url: str, index: int):
        r = cfg.rollout
        self.cfg = cfg
        self.client = EngineClient(router_url)
        self.reward = rewards.resolve(cfg.reward)
        self.custom = hooks.load(r.custom_generate, "rollout.custom_generate", 3) if r.custom_generate else None
        self.slots = Slots(max(1, r.concurrency * (len(r.engines) or r.num_engines) // r.num_workers))

    async def run_group(self, samples: list[Sample], version: int, evaluation: bool = False) -> tuple[GroupReport, list[Sample]]:
        """Generate and score one group with weights `version`; the given samples stay as they are.

        A server that fails, and tokens that other weights sampled, cost a redo of the whole group from what it held before.
        Raises: VimeError after rollout.request_timeout, at once for a 4xx, and for a failing reward (reward.on_error).
        """
        report = GroupReport(samples[0].group_index)
        async with self.slots.take(len(samples)):
            done = await self._generate_until(samples, version, evaluation, report)
        try:
            await all_of(*(self._score(s) for s in done))
            report.metas = [meta_of(s, self.cfg.reward.key) for s in done]
        except RewardError as e:
            if self.cfg.reward.on_error == "raise":
                raise VimeError(*e.args) from e
            report.dropped = "reward_error"
        return report, done

    async def _generate_until(self, samples: list[Sample], version: int, evaluation: bool, report: GroupReport) -> list[Sample]:
        params = sampling_params(self.cfg, evaluation)
        limit = self.cfg.rollout.request_timeout
        give_up, wait, last = time.monotonic() + limit, BACKOFF[0], "no answer"
        while True:
            try:
                async with asyncio.timeout(give_up - time.monotonic()):
                    done = await self._generate(copy.deepcopy(samples), params)
                seen = {v for s in done for v, trained in zip(s.token_versions, s.loss_mask) if trained} - {version}
                if seen:
                    report.fenced += 1
                    last = f"weights {version} were asked for, the servers sampled with {sorted(seen)} (-1: those they started with)"
                elif any(s.status == Status.ABORTED for s in done):
                    report.retries += 1
                    last = "the server aborted the request"
                else:
                    return done
            except EngineDown as e:
                report.retries += 1
                last = e.what
            except TimeoutError:
                pass
            if time.monotonic() + wait >= give_up:
                what = f"{self.client.url}: the group of sample {samples[0].index} was not generated within {limit:.0f} s"
                why = f" ({report.retries} failures, {report.fenced} fenced): {last}"
                raise VimeError(what + why, "see the engines' logs, or raise rollout.request_timeout")
            await asyncio.sleep(wait)
            wait = min(2 * wait, BACKOFF[1])

    async def _generate(self, samples: list[Sample], params: dict[str, Any]) -> list[Sample]:
        if self.custom is None:
            await generate_group(self.client, samples, self.cfg, params)
            return samples
        current_client.set(self.client)
        return await all_of(*(self._custom(s, params) for s in samples))

    async def _custom(self, sample: Sample, params: dict[str, Any]) -> Sample:
        assert self.custom
        try:
            got = await self.custom(self.cfg, sample, dict(params))
            if not isinstance(got, Sample):
                raise TypeError(f"it returned {type(got).__name__}, not a Sample")
            got.check()
            return got
        except VimeError:
            raise
        except Exception as e:  # a plug-in may fail in any way
            path = self.cfg.rollout.custom_generate
            raise VimeError(f"custom_generate {path!r} failed on {_name(sample)}: {type(e).__name__}: {e}") from e

    async def _score(self, sample: Sample) -> None:
        """Set the sample's reward, unless custom_generate did. Raises RewardError naming the sample."""
        try:
            if sample.reward is None:
                sample.reward = await rewards.score(self.reward, self.cfg, sample, self.cfg.reward.timeout)
            sample.reward_value(self.cfg.reward.key)
        except Exception as e:  # a reward may fail in any way
            said = e.what if isinstance(e, VimeError) else f"{type(e).__name__}: {e}"
            fix = 'reward.on_error = "skip" drops such groups'
            raise RewardError(f"reward {self.cfg.reward.function!r} failed on {_name(sample)}: {said}", fix) from e

    async def close(self) -> None:
        await self.client.close()


class RewardError(VimeError):
    """A reward function raised, took too long, or gave no number."""


def _name(sample: Sample) -> str:
    prompt = sample.prompt if isinstance(sample.prompt, str) else str(sample.prompt[-1].get("content", "") if sample.prompt else "")
    return f"sample {sample.index} (prompt {prompt[:80]!r})"
