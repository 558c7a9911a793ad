"""The rollout worker: takes a group of samples, generates, scores, and gives back the finished samples with their metadata."""

from __future__ import annotations

import asyncio
import copy
import time
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vime import hooks, rewards
from vime.config import Config
from vime.errors import VimeError
from vime.rollout import filters
from vime.rollout.generate import Link, Slots, all_of, generate_group, link, sampling_params
from vime.rollout.http import EngineClient, EngineDown
from vime.sample import Sample, SampleMeta, Status, meta_of

T = TypeVar("T")
BACKOFF = (0.1, 2.0)  # seconds before the first redo, and at most; doubled each time


@dataclass
class GroupReport:
    """What the controller learns of a group. `dropped` says why it is not to be trained on, `interrupted` that it is to be run again from
    the samples that came back with it; `metas` is empty in both cases."""

    group_index: int
    metas: list[SampleMeta] = field(default_factory=list)
    dropped: str | None = None
    interrupted: bool = False
    oldest: int | None = None  # the oldest weight version among tokens that would be trained; None: there is none
    retries: int = 0  # generations redone because a server failed
    fenced: int = 0  # generations redone because older weights than asked for sampled them
    continued: int = 0  # aborted generations that went on from the tokens they had


class RolloutWorker:
    """One of the rollout processes; all its groups run concurrently in one event loop, within the engines' concurrency limit."""

    def __init__(self, cfg: Config, router_url: str, index: int):
        r = cfg.rollout
        self.cfg = cfg
        self.client = EngineClient(router_url)
        self.reward = rewards.resolve(cfg.reward)
        self.custom = hooks.load(r.custom_generate, "rollout.custom_generate", 3) if r.custom_generate else None
        self.filter = filters.resolve(r.dynamic_filter)
        self.slots = Slots(max(1, r.concurrency * (len(r.engines) or r.num_engines) // r.num_workers))
        self._stops: dict[int, asyncio.Event] = {}

    async def interrupt(self, wave: int) -> None:
        """End the groups that were submitted with this `wave` as soon as they can be: those in the servers once these abort their requests,
        those that are being scored within rollout.abort_timeout seconds."""
        self._stop(wave).set()
        self._stops = {w: e for w, e in self._stops.items() if w >= wave}

    def _stop(self, wave: int) -> asyncio.Event:
        return self._stops.setdefault(wave, asyncio.Event())

    async def run_group(self, samples: list[Sample], version: int, wave: int = 0, evaluation: bool = False) -> tuple[GroupReport, list[Sample]]:
        """Generate and score one group with weights `version` or newer; the given samples stay as they are.

        Tokens that the samples hold already are kept (rollout.mask_offpolicy_prefix: but not trained), scored samples are not scored again.
        A server that fails, and tokens that older weights sampled, cost a redo of the whole group from what it held before.
        Raises: VimeError after rollout.request_timeout, at once for a 4xx, and for a failing reward (reward.on_error).
        """
        report, stop = GroupReport(samples[0].group_index), self._stop(wave)
        held = copy.deepcopy(samples)
        if self.cfg.rollout.mask_offpolicy_prefix:
            for s in held:
                s.loss_mask = [m if v >= version else 0 for m, v in zip(s.loss_mask, s.token_versions)]
        generating = self._generate_until(held, version, evaluation, report, stop)
        done = await self._or_stop(generating, stop) or held
        if report.interrupted or not all(map(finished, done)):
            report.interrupted = True
        else:
            await self._finish(done, report, stop, None if evaluation else self.filter)
        versions = [v for s in done for v, trained in zip(s.token_versions, s.loss_mask) if trained]
        report.oldest = min(versions, default=None)
        return report, done

    async def _or_stop(self, work: Coroutine[Any, Any, T], stop: asyncio.Event) -> T | None:
        """The result of `work`; None where it was cancelled because it had not ended rollout.abort_timeout seconds after `stop`."""
        task, stopped = asyncio.ensure_future(work), asyncio.ensure_future(stop.wait())
        try:
            await asyncio.wait({task, stopped}, return_when=asyncio.FIRST_COMPLETED)
            await asyncio.wait({task}, timeout=self.cfg.rollout.abort_timeout)
            return task.result() if task.done() else None
        finally:
            stopped.cancel()
            if not task.done():
                task.cancel()
                await asyncio.wait({task})

    async def _finish(self, done: list[Sample], report: GroupReport, stop: asyncio.Event, keep: Callable[..., Any] | None) -> None:
        """Score a generated group and pass it through the dynamic filter."""
        try:
            if await self._or_stop(all_of(*(self._score(s) for s in done)), stop) is None:
                report.interrupted = True
                return
            report.dropped = filters.verdict(keep, self.cfg, done)
            report.metas = [] if report.dropped else [meta_of(s, self.cfg.reward.key) for s in done]
        except RewardError as e:
            if self.cfg.reward.on_error == "raise":
                raise VimeError(*e.args) from e
            report.dropped = "reward_error"

    async def _generate_until(self, samples: list[Sample], version: int, evaluation: bool, report: GroupReport, stop: asyncio.Event) -> list[Sample]:
        """Generate the group, redoing what fails, until every sample is finished, or `stop` is set."""
        params = sampling_params(self.cfg, evaluation)
        limit = self.cfg.rollout.request_timeout
        give_up, wait, last = time.monotonic() + limit, BACKOFF[0], "no answer"
        link.set(Link(self.client, self.slots, stop))
        while not stop.is_set():
            try:
                async with asyncio.timeout(give_up - time.monotonic()):
                    done = await self._generate(copy.deepcopy(samples), params)
                if stale := older_than(version, samples, done):
                    report.fenced += 1
                    last = f"weights {version} were asked for, the servers sampled with {stale} (-1: those they started with)"
                elif not all(map(finished, done)):  # aborted for a weight update, or because of `stop`: go on from the tokens it has
                    report.continued += 1
                    samples, give_up = done, time.monotonic() + limit
                    continue
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
        return samples

    async def _generate(self, samples: list[Sample], params: dict[str, Any]) -> list[Sample]:
        left = {i: s for i, s in enumerate(samples) if not finished(s)}  # fixed before plug-ins change samples in place
        if self.custom is None:
            await generate_group(list(left.values()), self.cfg, params)
            return samples
        done = dict(zip(left, await all_of(*(self._custom(s, params) for s in left.values()))))
        return [done.get(i, s) for i, s in enumerate(samples)]

    async def _custom(self, sample: Sample, params: dict[str, Any]) -> Sample:
        assert self.custom
        try:
            got = await self.custom(self.cfg, sample, dict(params))
            if not isinstance(got, Sample):
                raise TypeError(f"it returned {type(got).__name__}, not a Sample")
            if got.status is Status.PENDING:
                raise ValueError("it returned a sample that is still pending: set its status, ABORTED where it is to be continued")
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


def finished(sample: Sample) -> bool:
    return sample.status not in (Status.PENDING, Status.ABORTED)


def older_than(version: int, before: list[Sample], after: list[Sample]) -> list[int]:
    """Weight versions below `version` that sampled trained tokens which `after` has and `before` had not."""
    held = {s.index: s.response_length for s in before}
    new = ((v, m) for s in after for v, m in zip(s.token_versions[held.get(s.index, 0) :], s.loss_mask[held.get(s.index, 0) :]))
    return sorted({v for v, trained in new if trained and v < version})


def _name(sample: Sample) -> str:
    prompt = sample.prompt if isinstance(sample.prompt, str) else str(sample.prompt[-1].get("content", "") if sample.prompt else "")
    return f"sample {sample.index} (prompt {prompt[:80]!r})"
