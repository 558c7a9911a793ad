"""Groups of samples on their way through the rollout workers."""

from __future__ import annotations

import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import ray
import ray.exceptions as rex

from vime import hooks
from vime.config import Config
from vime.errors import VimeError, said
from vime.rollout.worker import GroupReport

if TYPE_CHECKING:
    from vime.cluster import Cluster

SUSPECT = 2  # deaths of workers that make the groups they had suspects; one more with such a group ends the run
# The Ray errors that mean "the process behind it is gone", not "the code in it raised".
DEAD = (rex.RayActorError, rex.ObjectLostError, rex.WorkerCrashedError, rex.NodeDiedError)


class Rollouts:
    """Groups under way on the workers, by key. A group may itself be what ends its worker (a plug-in that crashes): those that were there at
    SUSPECT deaths go on one at a time, so that the next death has one of them as its cause."""

    def __init__(self, cluster: Cluster):
        self.cluster = cluster
        # reference to the report -> arguments of submit, the worker's index
        self.pending: dict[Any, tuple[tuple[Any, ...], int]] = {}
        self.moved = 0  # bytes that went to and came from the workers, pickled
        self.deaths: Counter[int] = Counter()  # of workers, while they had the group
        self.suspects: list[tuple[Any, ...]] = []  # arguments of submit; not with a worker yet

    def submit(self, key: int, task: Any, version: int, wave: int = 0, evaluation: str = "") -> None:
        """Start a group on the next worker. See Actor.serve."""
        args = (key, task, version, wave, evaluation)
        if self.deaths[key] >= SUSPECT:
            self.suspects.append(args)
        else:
            self._send(args)

    def _send(self, args: tuple[Any, ...]) -> None:
        i = next(self.cluster.turn) % len(self.cluster.workers)
        self.moved += len(ray.cloudpickle.dumps(args))
        self.pending[self.cluster.workers[i].serve.remote(*args)] = args, i

    def finished(self, timeout: float, redo: bool = True) -> list[tuple[int, GroupReport, Any]]:
        """(key, report, reference to the samples) of the groups that have come back; waits up to `timeout` seconds for the first. A group
        whose worker died is submitted again, or without `redo` counts as interrupted. Raises: VimeError of a failing reward, request or
        engine, and of a group that one worker after the other died with."""
        out: list[tuple[int, GroupReport, Any]] = []
        if not redo:
            out += [(args[0], GroupReport(args[0], interrupted=True), None) for args in self.suspects]
            self.suspects = []
        elif self.suspects and not any(self.deaths[args[0]] >= SUSPECT for args, *_ in self.pending.values()):
            self._send(self.suspects.pop(0))
        if not self.pending:
            time.sleep(min(timeout, 0.05))
            return out
        ray.wait(list(self.pending), num_returns=1, timeout=timeout)
        done, _ = ray.wait(list(self.pending), num_returns=len(self.pending), timeout=0)
        self.cluster.check()
        lost: list[tuple[Any, ...]] = []
        dead: dict[int, BaseException] = {}
        for ref in done:  # grows: what else a dead worker had is lost with it
            args, i = self.pending.pop(ref)
            try:
                report = ray.get(ref)
                self.moved += len(ray.cloudpickle.dumps(report))
                out.append((args[0], report, report.ref))
                if not report.interrupted:
                    del self.deaths[args[0]]
            except DEAD as e:
                lost.append(args)
                others = [r for r, (*_, j) in self.pending.items() if j == i and r not in done] if i not in dead else []
                dead[i] = dead.get(i, e)
                done += ray.wait(others, num_returns=len(others), timeout=5)[0] if others else []
            except rex.RayTaskError:
                raise self.cluster.blame([ref], f"group {args[0]}, part") from None
        for i in dead:
            self.cluster.await_worker(i)
            self.cluster.lost_owner(f"worker-{i}")
            self.cluster.changed()
        for args in lost:
            self.cluster.counts["groups_redone"] += 1
            self.deaths[args[0]] += 1
            if self.deaths[args[0]] > SUSPECT:
                what = f"group {args[0]}: the rollout worker that had it died {SUSPECT + 1} times"
                raise VimeError(f"{what}, the last time with: {said(next(iter(dead.values())))}", _runs_there(self.cluster.cfg, args[4]))
            if redo:
                self.submit(*args)
            else:
                out.append((args[0], GroupReport(args[0], interrupted=True), None))
        return out


def _runs_there(cfg: Config, evaluation: str) -> str:
    """The plug-ins in a rollout worker, for the error of its death."""
    d = {d.name: d for d in cfg.eval.datasets}.get(evaluation)
    paths = {key: hooks.paths(cfg, key) for key in ("rollout.custom_generate", "rollout.sample_hook", "rollout.dynamic_filter", "reward.function")}
    paths |= {key: [path] for key, path in (("rollout.custom_generate", d and d.custom_generate), ("reward.function", d and d.reward)) if path}
    own = [f"{key} = {path!r}" for key, found in paths.items() for path in found if {":", "."} & set(path)]
    return f"does {' or '.join(own)} end its process?" if own else "no plug-in of yours runs there; is memory short? see `vime doctor`"
