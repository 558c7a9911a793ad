"""A critic on ranks of its own, as the controller runs them: real ranks in Ray, next to those of one rank that has both."""

import os
import signal
from contextlib import contextmanager

import pytest
import ray
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from tests.integration.test_critic import GAE, as_of, judged
from tests.integration.trainer_kit import make_batch, make_cfg, make_model, one_rank, train_once
from vime.cluster import Cluster
from vime.data.plane import Plane, open_store
from vime.errors import VimeError
from vime.trainer.batch import plan

STEPS = {1: 3, 2: 4}  # step -> seed of its batch


@contextmanager
def started(cfg, tmp_path, checkpoint=None):
    (cfg.folder / "logs").mkdir(parents=True, exist_ok=True)
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    cluster = Cluster(cfg, cfg.folder)
    try:
        cluster.plane = Plane(cfg.data_plane, tmp_path.name, 1, tmp_path)
        cluster.store = open_store(cluster.plane.spec, "driver")
        cluster.gather(cluster.start_trainers(checkpoint), "trainer rank")
        yield cluster
    finally:
        cluster.plane.close()
        ray.shutdown()


def stepped(cluster, step):
    batch = as_of(step - 1, make_batch(STEPS[step]))
    plans, *critic = (plan(*judged(w, batch), w, w.parallel.fsdp) for w in cluster.cfg.worlds)
    return cluster.train(step, plans, {g[0].group_index: cluster.put(g) for g in batch}, *critic)


def saved(cluster, tmp_path, name):
    (tmp_path / name).mkdir()
    cluster.save(tmp_path / name)
    return tmp_path / name


def held(folder):
    """All tensors of a checkpoint by name; each world's random state is not of them."""
    out = {}
    for part in (p for p in ("trainer", "critic") if (folder / p).exists()):
        dcp_to_torch_save(folder / part, folder / f"{part}.pt")
        tree = torch.load(folder / f"{part}.pt", weights_only=False)
        out |= {f"{kind}.{name}": t for kind, tensors in tree.items() for name, t in tensors.items()}
    return out


def test_a_critic_on_ranks_of_its_own(tmp_path):
    """Weights and moments of two steps as of one rank that has both; they go on from a checkpoint bit for bit; the first step trains the
    critic alone; whoever dies is named; other numbers of ranks than the checkpoint's are refused where it lacks a critic."""
    algo = GAE | {"critic_lr": 1e-4, "num_critic_only_steps": 1}
    folder, train = make_model(tmp_path / "m"), {"lr": 1e-4, "global_batch_size": 8, "max_tokens_per_gpu": 64}
    both = make_cfg(folder, tmp_path, algo=algo, train=train)
    (tmp_path / "both").mkdir()
    with one_rank(both) as t:
        metrics = [train_once(t, both, step, make_batch(seed)) for step, seed in STEPS.items()]
        t.save(str(tmp_path / "both"))
    want = held(tmp_path / "both")

    cfg = make_cfg(folder, tmp_path, algo=algo | {"critic_ranks": 2}, train=train)
    with started(cfg, tmp_path) as cluster:
        first = stepped(cluster, 1)
        assert first["train/optimizer_steps"] == 0 and first["train/value_loss"] > 0
        one = saved(cluster, tmp_path, "one")
        second = stepped(cluster, 2)
        two = held(saved(cluster, tmp_path, "two"))
        for got, whole in zip((first, second), metrics):
            assert got.keys() == whole.keys()
            assert {k: v for k, v in got.items() if k.startswith("train/")} == pytest.approx(
                {k: whole[k] for k in got if k.startswith("train/")}, rel=1e-3, abs=1e-5
            )
    assert two.keys() == want.keys()
    for name, tensor in want.items():
        torch.testing.assert_close(two[name], tensor, rtol=0, atol=1e-5, msg=lambda m, name=name: f"{name}: {m}")

    with pytest.raises(VimeError, match=r"critic_ranks and \[lora\]"), one_rank(both, one):
        pass
    with started(cfg, tmp_path, one) as cluster:
        again = stepped(cluster, 2)
        assert {k: v for k, v in again.items() if k.startswith("train/")} == {k: v for k, v in second.items() if k.startswith("train/")}
        resumed = held(saved(cluster, tmp_path, "again"))
        assert resumed.keys() == two.keys() and all(torch.equal(resumed[k], two[k]) for k in two)
        os.kill(ray.get(cluster.trainers[2].__ray_call__.remote(lambda _: os.getpid())), signal.SIGKILL)
        with pytest.raises(VimeError, match=r"^critic rank 1 died"):
            stepped(cluster, 2)
