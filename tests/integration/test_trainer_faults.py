"""Numbers and ranks that go wrong: NaN steps skipped, a rank that fails or hangs ends the step, damaged checkpoints named."""

import json
import time

import pytest
import ray
import torch
import torch.distributed as dist

from tests.integration.trainer_kit import make_batch, make_cfg, make_model, one_rank, train_once, weights
from vime.cluster import Cluster
from vime.data.plane import Plane, open_store
from vime.errors import VimeError
from vime.sample import meta_of
from vime.trainer import checkpoint
from vime.trainer.batch import plan

MANY = {"max_tokens_per_gpu": 30}  # several micro-batches


def spoil(trainer, at, value=float("nan")):
    """From now on the `at`-th forward, counted from 1, gives `value` in place of hidden states."""
    calls = iter(range(1, 10**6))
    norm = trainer.model.model.norm
    return norm.register_forward_hook(lambda _m, _a, out: out * value if next(calls) == at else out)


def moments(trainer):
    return {k: {n: v.clone() for n, v in trainer.optimizer.state[p].items()} for k, p in trainer.model.named_parameters()}


def same(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) if torch.is_tensor(a[k]) else same(a[k], b[k]) for k in a)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_bad_optimizer_step_is_skipped_and_leaves_no_trace(tmp_path, value):
    """As if its samples had not been there: weights, moments, and the metrics of the other optimizer step."""
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path, train=MANY | {"lr": 1e-3})
    with one_rank(cfg) as t:
        train_once(t, cfg, 1, make_batch(30))
        before = weights(t), moments(t)
        hook = spoil(t, 2, value)
        metrics = train_once(t, cfg, 2, make_batch(31))
        hook.remove()
        assert metrics["train/skipped_steps"] == 1 and metrics["train/optimizer_steps"] == 0
        assert "train/loss" not in metrics and "train/grad_norm" not in metrics and metrics["train/logprob_abs_diff_max"] == 0
        assert same(weights(t), before[0]) and same(moments(t), before[1])
        metrics = train_once(t, cfg, 3, make_batch(32))
        assert metrics["train/skipped_steps"] == 0 and t.bad_steps == 0
        end = weights(t)
    with one_rank(cfg) as t:
        train_once(t, cfg, 1, make_batch(30))
        assert {k: v for k, v in train_once(t, cfg, 3, make_batch(32)).items() if "perf/" not in k} == {
            k: v for k, v in metrics.items() if "perf/" not in k
        }
        assert same(weights(t), end)


def test_bad_steps_in_a_row_stop_the_run(tmp_path):
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path, train=MANY | {"max_bad_steps": 2})
    with one_rank(cfg) as t:
        hook = spoil(t, 2)
        assert train_once(t, cfg, 1, make_batch(30))["train/skipped_steps"] == 1
        hook.remove()
        spoil(t, 3)
        said = r"step 2: 2 optimizer step\(s\) in a row.*rank 0, micro-batch 3 of \d+ \(samples [\d, .]+\): its loss is nan; "
        with pytest.raises(VimeError, match=said + "the first bad gradient is that of model.embed_tokens.weight") as e:
            train_once(t, cfg, 2, make_batch(31))
        assert len(str(e.value).splitlines()) == 1


def spoil_rank_one(trainer, cfg):
    trainer.setup()
    if trainer.rank == 1:
        spoil(trainer, 1)
    first = train_once(trainer, cfg, 1, make_batch(30))["train/skipped_steps"]
    if trainer.rank == 1:
        spoil(trainer, 1)
    try:
        return first, train_once(trainer, cfg, 2, make_batch(31))
    except VimeError as e:
        return first, str(e)


@pytest.mark.parametrize("axis", ["fsdp", "tp", "pp"])
def test_ranks_agree_on_a_bad_step(tmp_path, two_ranks, axis):
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path, parallel={axis: 2}, train={"max_bad_steps": 2})
    a, b = two_ranks(spoil_rank_one, cfg, timeout=60)
    assert a == b and a[0] == 1 and "rank 1, micro-batch 1 of " in a[1]
    assert "the first bad gradient is that of model.embed_tokens.weight" in a[1]


def stray_on_rank_one(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **kw):
    """Rank 1 raises, or hangs; rank 0 goes on into the collectives of its backward."""
    if dist.get_rank() == 1:
        if args.how == "raise":
            raise ZeroDivisionError("of rank 1")
        while True:
            time.sleep(0.1)
    return pg_loss, [m.float() for m in loss_masks], {}


@pytest.mark.parametrize("how", ["raise", "hang"])
def test_peers_of_a_rank_that_goes_astray_do_not_wait_for_it(tmp_path, how):
    """A step of real ranks in Ray: the error is there at once, or after train.step_timeout, and says which rank it was, and where."""
    changes = {"parallel": {"fsdp": 2}, "train": {"step_timeout": 10}, "args": {"how": how}}
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path, algo={"custom_tis": f"{__name__}.stray_on_rank_one"}, **changes)
    (cfg.folder / "logs").mkdir(parents=True)
    batch = make_batch(30)
    metas = [meta_of(s) for g in batch for s in g]
    ray.init(address="local", num_cpus=8, include_dashboard=False, log_to_driver=False)
    try:
        cluster = Cluster(cfg, cfg.folder)
        cluster.plane = Plane(cfg.data_plane, tmp_path.name, 1, tmp_path)
        cluster.store = open_store(cluster.plane.spec, "driver")
        cluster.gather(cluster.start_trainers(None), "trainer rank")
        start = time.monotonic()
        with pytest.raises(VimeError) as e:
            cluster.train(1, plan(metas, [1.0] * len(metas), cfg, 2), {g[0].group_index: cluster.put(g) for g in batch})
        took = time.monotonic() - start
        if how == "raise":
            assert took < 15 and e.value.what.startswith("step 1, rank 1, micro-batch 1 of 1 (samples"), e.value
            assert "algo.custom_tis: stray_on_rank_one failed: ZeroDivisionError: of rank 1" in e.value.what
        else:
            assert 10 <= took < 30 and "step 1, training: not finished after 10 s (train.step_timeout); trainer rank 1: File" in e.value.what
            assert "in stray_on_rank_one" in e.value.what and "rank 0" not in e.value.what
            assert "vime/trainer/engine.py" in e.value.log and "in backward" in e.value.log
    finally:
        cluster.plane.close()
        ray.shutdown()


def test_damaged_and_foreign_checkpoints_are_refused_by_name(tmp_path):
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path)
    with one_rank(cfg) as t:
        train_once(t, cfg, 1, make_batch(30))
        path = checkpoint.write(tmp_path / "c", 1, {}, lambda p: t.save(str(p)), keep=1)
    checkpoint.refuse_other_model(path, cfg.model)
    other = make_model(tmp_path / "other", tied=False)
    with pytest.raises(VimeError, match=r"checkpoint of another model than .*other: tie_word_embeddings is True there, False here"):
        checkpoint.refuse_other_model(path, str(other))
    shard = next((path / "trainer").glob("*.distcp"))
    whole = shard.read_bytes()

    def refused(said):
        with pytest.raises(VimeError, match=said), one_rank(cfg, path):
            pass

    shard.write_bytes(whole[: len(whole) // 2])
    refused(f"its shard {shard.name} is cut short: {len(whole) // 2} bytes of")
    shard.unlink()
    refused(f"its shard {shard.name} is missing")
    shard.write_bytes(whole)
    hf = path / "hf" / "config.json"
    hf.write_text(json.dumps(json.loads(hf.read_text()) | {"num_hidden_layers": 1}))
    refused(r"the model has no model.model.layers.1.*weight and \d+ more")
    hf.write_text(json.dumps(json.loads(hf.read_text()) | {"num_hidden_layers": 3}))
    refused("its files lack 9 of the model's weights, model.layers.2.")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offloaded_moments_give_the_same_numbers(tmp_path):
    ends = []
    for where in ("none", "optimizer"):
        cfg = make_cfg(make_model(tmp_path / where), tmp_path, train={"offload": where})
        with one_rank(cfg) as t:
            for step in (1, 2, 3):
                train_once(t, cfg, step, make_batch(30 + step))
            ends.append(weights(t))
            places = {s["exp_avg"].device.type for s in t.optimizer.state.values()}
        assert places == {"cpu" if where == "optimizer" else "cuda"}
    assert same(*ends)


def test_offload_is_refused_where_there_is_nothing_to_offload_from(tmp_path):
    if torch.cuda.is_available():
        pytest.skip("the trainer runs on a GPU here")
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path, train={"offload": "optimizer"})
    with pytest.raises(VimeError, match=r'train.offload = "optimizer": this trainer runs on the CPU'), one_rank(cfg):
        pass


def test_a_model_folder_without_all_weights_is_refused(tmp_path):
    folder = make_model(tmp_path / "m")
    cfg = folder / "config.json"
    cfg.write_text(json.dumps(json.loads(cfg.read_text()) | {"num_hidden_layers": 3}))
    with pytest.raises(VimeError, match=r"m: its files lack 9 of the model's weights, model.layers.2."), one_rank(make_cfg(folder, tmp_path)):
        pass
