"""Rollout workers that die, in real Ray processes; no server is needed, the plug-in makes its samples up."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import ray

from vime import config
from vime.cluster import Cluster
from vime.data.plane import Plane
from vime.errors import ELSEWHERE, VimeError
from vime.rollout.worker import Actor
from vime.sample import Sample

HERE = "tests.integration.test_worker_deaths"


async def made_up(args, sample, sampling_params):
    """Group 3 ends its process, as a segfault would; group 5 does it the first time only."""
    first = Path(args.folder) / f"{sample.group_index}"
    if sample.group_index == args.fatal or (sample.group_index == 5 and not first.exists()):
        first.touch()
        os._exit(139)
    sample.append_tokens([5, 6], [-1.0, -1.0], versions=0)
    sample.status, sample.reward = Sample.Status.COMPLETED, 1.0
    return sample


@pytest.fixture(scope="module")
def processes() -> Iterator[None]:
    ray.init(address="local", num_cpus=64, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield
    ray.shutdown()


@pytest.fixture
def make(processes: None, tmp_path: Path) -> Iterator:
    made = []

    def cluster(fatal: int = -1, workers: int = 2) -> Cluster:
        tree = {"model": "m", "data": {"prompts": "p"}, "args": {"folder": str(tmp_path), "fatal": fatal}, "reward": {"function": "exact"}}
        cfg = config.validate(tree | {"rollout": {"custom_generate": f"{HERE}:made_up", "num_workers": workers}}, "test")
        c = Cluster(cfg, tmp_path)
        c.plane = Plane(cfg.data_plane, tmp_path.name, workers, tmp_path)
        actor = ray.remote(Actor).options(num_cpus=0, max_restarts=-1, max_concurrency=1000)
        c.workers = [actor.remote(cfg, "http://127.0.0.1:9", i, c.plane.spec) for i in range(workers)]
        ray.get([w.prepare.remote({}) for w in c.workers])
        made.append(c)
        return c

    yield cluster
    for c in made:
        for w in c.workers:
            ray.kill(w)
        c.plane.close()


def group(g: int) -> list[Sample]:
    return [Sample(group_index=g, index=2 * g + i, rollout_id=2 * g + i, prompt="p", tokens=[1, 2]) for i in range(2)]


def finish(c: Cluster, groups: range) -> list[int]:
    for g in groups:
        c.rollouts.submit(g, group(g), 0)
    done, end = [], time.monotonic() + 120
    while c.rollouts.pending or c.rollouts.suspects:
        done += [key for key, report, _ in c.rollouts.finished(1.0) if report.metas]
        assert time.monotonic() < end
    return done


def test_a_death_from_outside_or_of_once_costs_a_redo(make) -> None:
    c = make()
    assert sorted(finish(c, range(3))) == [0, 1, 2]
    os.kill(ray.get(c.workers[0].__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
    assert sorted(finish(c, range(4, 9))) == [4, 5, 6, 7, 8]
    assert 2 <= c.counts["groups_redone"] <= 10


def test_a_group_that_ends_its_worker_again_and_again_ends_the_run_and_is_named(make) -> None:
    c = make(fatal=3, workers=1)
    with pytest.raises(VimeError, match=rf"^group 3: the rollout worker that had it died 3 times, .*does rollout.custom_generate = '{HERE}:made_up' end"):
        finish(c, range(8))


def test_while_draining_such_a_group_counts_as_interrupted_and_is_a_suspect_after_it(make) -> None:
    c = make(fatal=3, workers=1)
    jobs = c.rollouts
    jobs.submit(3, group(3), 0)
    for deaths in (1, 2):
        found = []
        while not found:
            found = jobs.finished(1.0, redo=False)
        assert [(key, report.interrupted) for key, report, _ in found] == [(3, True)] and jobs.deaths[3] == deaths
        jobs.submit(3, group(3), 0)
    assert not jobs.pending and len(jobs.suspects) == 1
    assert [key for key, report, _ in jobs.finished(1.0, redo=False) if report.interrupted] == [3] and not jobs.suspects


@pytest.mark.parametrize("at", [0, 1])
def test_the_rank_at_fault_is_named_and_not_its_peer(make, at: int) -> None:
    """Whichever of the ranks has the fault, and in whichever order they are asked."""

    @ray.remote(num_cpus=0)
    def rank(r: int) -> None:
        raise VimeError("token 9 of sample 3 is none of the model's" if r == at else ELSEWHERE)

    refs = [rank.remote(r) for r in range(2)]
    ray.wait(refs, num_returns=2, timeout=60)
    assert make().blame(refs, "trainer rank").what.startswith("token 9 of sample 3")
