"""The rollout worker as a process of its own: prompts come as numbers, samples leave as bytes in the data plane, and only metadata returns."""

from __future__ import annotations

import asyncio
import itertools
import os
import time

from vime.config import Config
from vime.data.payload import fields_of, samples_of
from vime.data.plane import Lost, Ref, Spec, StoreFull, open_store
from vime.data.prompts import Prompts
from vime.data.records import read_groups
from vime.rollout.worker import GroupReport, RolloutWorker
from vime.sample import Sample, SampleMeta

Task = int | Ref | list[Sample]  # a prompt by its number, a group in the data plane, or samples that a plug-in of the controller made
FULL = 0.5  # seconds until a full store is tried again


class Actor(RolloutWorker):
    def __init__(self, cfg: Config, router_url: str, index: int, spec: Spec):
        super().__init__(cfg, router_url, index)
        self.sources: dict[str, Prompts] = {}
        self.prepared = asyncio.Event()
        self.attempt = itertools.count()
        self.label = f"{index}.{os.getpid()}"  # a worker that Ray has restarted counts anew
        self.store = open_store(spec, f"worker-{index}")

    async def prepare(self, sources: dict[str, Prompts]) -> None:
        """The prompts to train on under "", those of each eval dataset under its name. Once after each start: groups wait for it."""
        self.sources = sources
        self.prepared.set()

    async def serve(self, number: int, task: Task, version: int, wave: int = 0, evaluation: str = "") -> GroupReport:
        """`run_group` of a task, group `number` of the run. The report's `ref` says where the samples are, if they are wanted: to be trained,
        continued or shown. A group that the data plane has lost starts again from its prompt."""
        await self.prepared.wait()
        try:
            group = await asyncio.to_thread(self.drawn, task, evaluation)
        except Lost:
            if self.cfg.data.source:
                raise
            group = await asyncio.to_thread(self.drawn, number, evaluation)
        report, done = await self.run_group(group, version, wave, evaluation)
        wanted = bool(self.cfg.log.eval_hook) if evaluation else not report.interrupted or self.kept_when_interrupted(done)
        if wanted and (not report.dropped or report.spare):
            report.ref = await self.put(report.group_index, done)
        return report

    def kept_when_interrupted(self, group: list[Sample]) -> bool:
        r = self.cfg.rollout
        return (r.partial_rollout or r.mask_offpolicy_prefix) and any(s.response_length for s in group)

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
        while True:
            key = f"{self.cfg.name}/g{group_index}/{self.label}-{next(self.attempt)}"
            try:
                return (await asyncio.to_thread(self.store.put, {key: fields_of(group)}))[0]
            except StoreFull:
                if time.monotonic() > end:
                    raise
                await asyncio.sleep(FULL)

    async def load_groups(self, path: str, ready: list[bool]) -> list[tuple[list[SampleMeta], Ref | None]]:
        """What save_groups wrote: (metadata of a finished group's samples, reference to them) of each; no metadata of unfinished ones,
        no reference to those that had been lost."""
        metas, *groups = await asyncio.to_thread(read_groups, path, ready, self.cfg.reward.key)
        return [(m, await self.put(g[0].group_index, g) if g else None) for m, g in zip(metas, groups, strict=True)]

    async def close(self) -> None:
        self.store.close()
        await super().close()
