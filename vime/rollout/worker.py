"""The rollout worker: takes a group of samples, generates, scores, and gives back the finished samples with their metadata."""

import asyncio
import copy
import inspect
import itertools
import os
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from vime import hooks, rewards
from vime.config import Config
from vime.data.payload import fields_of, samples_of
from vime.data.plane import Lost, Ref, Spec, StoreFull, open_store
from vime.data.prompts import Prompts
from vime.data.records import read_groups
from vime.errors import ANY, VimeError, blamed, said
from vime.observe import trace
from vime.rollout import filters
from vime.rollout.generate import Link, Running, Slots, all_of, for_plugin, generate_group, link, running, sampling_params
from vime.rollout.http import EngineClient, EngineDown
from vime.sample import Sample, SampleMeta, Status, meta_of

T = TypeVar("T")
Task = int | Ref | list[Sample]  # a prompt by its number, a group in the data plane, or samples that a plug-in of the controller made
BACKOFF = (0.1, 2.0)  # seconds before the first redo, and at most; doubled each time
FULL = 0.5  # seconds until a full store is tried again


@dataclass
class GroupReport:
    """What the controller learns of a group; `metas` is empty where it is dropped, or interrupted: to be run again from the samples."""

    group_index: int
    metas: list[SampleMeta] = field(default_factory=list)
    dropped: str | None = None
    interrupted: bool = False
    oldest: int | None = None  # the oldest weight version among tokens that would be trained; None: there is none
    retries: int = 0  # generations redone because a server failed
    fenced: int = 0  # generations redone because older weights than asked for sampled them
    continued: int = 0  # aborted generations that went on from the tokens they had
    ref: Ref | None = None  # where the samples are in the data plane


class RolloutWorker:
    """One of the rollout processes; all its groups run concurrently in one event loop, within the engines' concurrency limit."""

    def __init__(self, cfg: Config, router_url: str, index: int):
        r = cfg.rollout
        self.cfg = cfg
        self.client = EngineClient(router_url)
        self.reward = rewards.resolve(cfg.reward)
        self.args = hooks.plugin_args(cfg, router_url)
        self.hooks = [hooks.load(path, "rollout.sample_hook") for path in r.sample_hook]
        self.filter = filters.resolve(r.dynamic_filter)
        self.slots = Slots(self._share(len(r.engines) + len(cfg.servers)))
        self.threads = rewards.Threads(self.slots.size)
        self._stops: dict[int, asyncio.Event] = {}

    def _share(self, engines: int) -> int:
        return max(1, self.cfg.rollout.concurrency * engines // self.cfg.rollout.num_workers)

    async def resize(self, engines: int) -> None:
        """So many servers take requests from here on."""
        self.slots.resize(self._share(engines))

    async def interrupt(self, wave: int) -> None:
        """End the groups submitted with this `wave`: those in the servers once these abort, those being scored within rollout.abort_timeout."""
        self._stop(wave).set()
        self._stops = {w: e for w, e in self._stops.items() if w >= wave}

    def _stop(self, wave: int) -> asyncio.Event:
        return self._stops.setdefault(wave, asyncio.Event())

    async def run_group(self, samples: list[Sample], version: int, wave: int = 0, evaluation: str = "") -> tuple[GroupReport, list[Sample]]:
        """Generate and score one group with weights `version` or newer, for an eval dataset if named; the given samples stay as they are. Tokens
        that they hold are kept (rollout.mask_offpolicy_prefix: not trained). A failing server, and tokens of older weights, cost a redo of the
        group. Raises: VimeError after rollout.request_timeout, at once for a 4xx, and for a failing reward (reward.on_error)."""
        report, stop = GroupReport(samples[0].group_index), self._stop(wave)
        held = copy.deepcopy(samples)
        if self.cfg.algo.advantage_estimator == "remax" and not evaluation and not any(s.greedy for s in held):
            held.append(held[0].greedy_twin())
        if self.cfg.rollout.mask_offpolicy_prefix:
            for s in held:
                s.loss_mask = [m if v >= version else 0 for m, v in zip(s.loss_mask, s.token_versions)]
        generating = self._generate_until(held, version, evaluation, report, stop)
        done = await self._or_stop(generating, stop) or held
        if report.interrupted or not all(map(finished, done)):
            report.interrupted = True
        else:
            done = await all_of(*(self._hooked(s, version, evaluation) for s in done))
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
        try:
            if await self._or_stop(self._score_all(done), stop) is None:
                report.interrupted = True
                return
            report.dropped = filters.verdict(keep, self.args, [s for s in done if not s.greedy])
            report.metas = [] if report.dropped else [meta_of(s, self.cfg.reward.key) for s in done]
        except RewardError as e:
            if self.cfg.reward.on_error == "raise":
                raise VimeError(*e.args) from e
            report.dropped = "reward_error"

    async def _generate_until(self, samples: list[Sample], version: int, evaluation: str, report: GroupReport, stop: asyncio.Event) -> list[Sample]:
        """Generate the group, redoing what fails, until every sample is finished, or `stop` is set."""
        params = [sampling_params(self.cfg, evaluation, greedy) for greedy in (False, True)]
        limit = self.cfg.rollout.request_timeout
        give_up, wait, last = time.monotonic() + limit, BACKOFF[0], "no answer"
        link.set(Link(self.client, self.slots, stop))
        while not stop.is_set():
            try:
                async with asyncio.timeout(give_up - time.monotonic()):
                    done = await self._generate(samples, params, evaluation)
                if foreign := others_than(version, self.cfg.train.mode == "async" and not evaluation, samples, done):
                    report.fenced += 1
                    last = f"weights {version} were asked for, the servers sampled with {foreign} (-1: those they started with)"
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

    async def _generate(self, samples: list[Sample], params: list[dict[str, Any]], evaluation: str) -> list[Sample]:
        """The group's continuation, in order, with `params` of ordinary samples and of greedy ones. A plug-in may make several samples of
        one: where one of these is not finished, the rollout starts again from the sample it was given."""
        work = copy.deepcopy(samples)
        custom = {i: s.generate_function_path or self.cfg.rollout.custom_generate for i, s in enumerate(work) if not finished(s)}
        plain = [[work[i] for i, path in custom.items() if not path and work[i].greedy is greedy] for greedy in (False, True)]
        await all_of(*(generate_group(part, self.cfg, p) for part, p in zip(plain, params)))
        calls = {i: self._custom(path, work[i], params[work[i].greedy], evaluation) for i, path in custom.items() if path}
        done = dict(zip(calls, await all_of(*calls.values())))
        done = {i: out if len(out) == 1 or all(map(finished, out)) else [samples[i]] for i, out in done.items()}
        return [s for i, given in enumerate(work) for s in done.get(i, [given])]

    async def _custom(self, path: str, sample: Sample, params: dict[str, Any], evaluation: str) -> list[Sample]:
        index, group, greedy = sample.index, sample.group_index, sample.greedy
        rollout = index if sample.rollout_id is None else sample.rollout_id
        now = Running(self.args, sample.session_id or f"group-{group}")
        running.set(now)  # of this task alone: all_of gives each call one
        with blamed(f"custom_generate {path!r} failed on {_name(sample)}", *ANY, through=VimeError):
            fn = hooks.load(path, "rollout.custom_generate")
            got = await fn(self.args, sample, for_plugin(params), **hooks.accepted(fn, evaluation=bool(evaluation)))
            out = got if isinstance(got, list) else [got]
            if not out or not all(isinstance(s, Sample) for s in out) or len({id(s) for s in out}) < len(out):
                raise TypeError(f"it returned {got!r:.80}, not a Sample or a list of different Samples")
            for part, s in enumerate(out):
                s.make_plain()
                if s.status is Status.PENDING:
                    raise ValueError("it returned a sample that is still pending: set its status, ABORTED where it is to be continued")
                s.index, s.group_index, s.rollout_id, s.part, s.greedy = index, group, rollout, part, greedy
                s.remove_sample |= greedy
                fill_in(s, min(now.versions, default=None))  # of those that can have sampled it, the oldest is on the safe side
                s.check()
            return out

    async def _hooked(self, sample: Sample, version: int, evaluation: str) -> Sample:
        for fn, path in zip(self.hooks, self.cfg.rollout.sample_hook):
            with blamed(f"rollout.sample_hook {path!r} failed on {_name(sample)}", *ANY):
                got = fn(self.args, sample, **hooks.accepted(fn, rollout_id=version, evaluation=bool(evaluation)))
                got = await got if inspect.isawaitable(got) else got
                if not isinstance(got, Sample | None):
                    raise TypeError(f"it returned {type(got).__name__}, neither a Sample nor None")
                sample = got or sample
                sample.make_plain()
        return sample

    async def _score_all(self, samples: list[Sample]) -> bool:
        """Set the rewards that custom_generate didn't. Raises RewardError naming a sample."""
        together = [s for s in samples if self.cfg.reward.group and s.reward is None and not s.custom_rm_path]
        if together:
            with self._blame(together[0]), trace.span("reward", [s.uid for s in together]):
                values = await rewards.score_group(self.reward, self.args, together, self.cfg.reward.timeout, self.threads)
            for s, value in zip(together, values):
                s.reward = value
        await all_of(*(self._score(s) for s in samples))
        of_rollout: dict[int | None, float] = {}
        for s in samples:
            with self._blame(s):
                value = s.reward_value(self.cfg.reward.key)
                if of_rollout.setdefault(s.rollout_id, value) != value:
                    raise VimeError(f"samples of rollout {s.rollout_id} have different rewards: a rollout has one, that of its episode")
        return True

    async def _score(self, sample: Sample) -> None:
        if sample.reward is None:
            with self._blame(sample), trace.span("reward", [sample.uid]):
                fn = rewards.resolve(self.cfg.reward, sample.custom_rm_path) if sample.custom_rm_path else self.reward
                sample.reward = await rewards.score(fn, self.args, sample, self.cfg.reward.timeout, self.threads)

    @contextmanager
    def _blame(self, sample: Sample) -> Iterator[None]:
        try:
            yield
        except (Exception, SystemExit) as e:  # a reward may fail in any way
            what = e.what if isinstance(e, VimeError) else said(e)
            fix = 'reward.on_error = "skip" drops such groups'
            raise RewardError(f"reward {sample.custom_rm_path or self.cfg.reward.function!r} failed on {_name(sample)}: {what}", fix) from e

    async def close(self) -> None:
        await self.client.close()


class Actor(RolloutWorker):
    """The worker as a process of its own: prompts come as numbers, samples leave as bytes in the data plane, and only metadata returns."""

    def __init__(self, cfg: Config, router_url: str, index: int, spec: Spec):
        super().__init__(cfg, router_url, index)
        self.sources: dict[str, Prompts] = {}
        self.prepared = asyncio.Event()
        self.attempt = itertools.count()
        self.label = f"{index}.{os.getpid()}"  # a worker that Ray has restarted counts anew
        self.store = open_store(spec, f"worker-{index}")
        trace.start(cfg, f"worker-{index}")

    async def prepare(self, sources: dict[str, Prompts]) -> None:
        """The prompts to train on under "", those of each eval dataset under its name. Once after each start: groups wait for it."""
        self.sources = sources
        self.prepared.set()

    async def serve(self, number: int, task: Task, version: int, wave: int = 0, evaluation: str = "") -> GroupReport:
        """`run_group` of a task, group `number` of the run. The report's `ref` says where the samples are, if they are wanted. A group that the
        data plane has lost starts again from its prompt."""
        await self.prepared.wait()
        trace.scope.set(evaluation)
        begun = time.time_ns()
        try:
            group = await asyncio.to_thread(self.drawn, task, evaluation)
        except Lost:
            if self.cfg.data.source:
                raise
            group = await asyncio.to_thread(self.drawn, number, evaluation)
        trace.record("prompt", begun, time.time_ns(), [s.uid for s in group])
        report, done = await self.run_group(group, version, wave, evaluation)
        r = self.cfg.rollout
        kept = (r.partial_rollout or r.mask_offpolicy_prefix) and any(s.response_length for s in done)
        wanted = bool(self.cfg.log.eval_hook) if evaluation else not report.interrupted or kept
        if wanted and not report.dropped:
            with trace.span("put", [s.uid for s in done]):
                report.ref = await self.put(report.group_index, done)
        return report

    def drawn(self, task: Task, evaluation: str) -> list[Sample]:
        """The samples of a task. Raises: Lost where the data plane has them no more."""
        if isinstance(task, Ref):
            return samples_of(self.store.get([task])[0])
        if isinstance(task, list):
            return task
        source = self.sources[evaluation]
        if not evaluation:
            return source.again(task)
        (d,) = (d for d in self.cfg.eval.datasets if d.name == evaluation)
        group = source.row(task, d.n_samples_per_prompt or 1)
        for s in group:
            s.custom_rm_path, s.generate_function_path, s.session_id = d.reward, d.custom_generate, f"{d.name}-{s.group_index}"
        return group

    async def put(self, group_index: int, group: list[Sample]) -> Ref:
        """Bytes first, then the reference: what a report names can be read. A full store is waited for."""
        end = time.monotonic() + self.cfg.rollout.request_timeout
        fields = await asyncio.to_thread(fields_of, group)
        while True:
            key = f"{self.cfg.name}/g{group_index}/{self.label}-{next(self.attempt)}"
            try:
                return (await asyncio.to_thread(self.store.put, {key: fields}))[0]
            except StoreFull:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(FULL)

    async def load_groups(self, path: str, ready: list[bool]) -> list[tuple[list[SampleMeta], Ref | None]]:
        """What save_groups wrote: (metadata, reference) of each; no metadata of unfinished groups, no reference to lost ones."""
        metas, *groups = await asyncio.to_thread(read_groups, path, ready, self.cfg.reward.key)
        return [(m, await self.put(g[0].group_index, g) if g else None) for m, g in zip(metas, groups, strict=True)]

    async def close(self) -> None:
        self.store.close()
        await super().close()


class RewardError(VimeError):
    """A reward function raised, took too long, or gave no number."""


def finished(sample: Sample) -> bool:
    return sample.status not in (Status.PENDING, Status.ABORTED)


def fill_in(sample: Sample, version: int | None) -> None:
    """What a plug-in left open: without a loss mask all of the response is the model's, as in slime; trained tokens without a weight version are
    taken to be of `version`, if one is known."""
    n = sample.response_length
    sample.loss_mask = sample.loss_mask or [1] * n
    if version is not None:
        known = sample.token_versions or [-1] * n
        sample.token_versions = [version if trained and v < 0 else v for v, trained in zip(known, sample.loss_mask)]


def others_than(version: int, newer: bool, before: list[Sample], after: list[Sample]) -> list[int]:
    """Weight versions other than `version`, or `newer` ones where these are allowed, of trained tokens that `after` has and `before` had not."""
    held = {s.uid: s.response_length for s in before}
    new = ((v, m) for s in after for v, m in zip(s.token_versions[held.get(s.uid, 0) :], s.loss_mask[held.get(s.uid, 0) :]))
    return sorted({v for v, trained in new if trained and (v < version or (v > version and not newer))})


def _name(sample: Sample) -> str:
    prompt = sample.prompt if isinstance(sample.prompt, str) else str(sample.prompt[-1].get("content", "") if sample.prompt else "")
    return f"sample {sample.index} (prompt {prompt[:80]!r})"
