"""Checkpoints: exact continuation, other numbers of ranks, export, and a disk that fills up while saving."""

import json
import resource
import threading
from concurrent.futures import wait
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.integration.trainer_kit import apart, make_batch, make_cfg, make_model, one_rank, train_once, weights
from vime.cli import main
from vime.errors import VimeError
from vime.trainer import checkpoint, state
from vime.weights import location


@contextmanager
def file_size_limit(size: int):
    """Writes beyond `size` bytes in one file fail for real, with the operating system's error."""
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, old[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def train(trainer, cfg, steps):
    return [train_once(trainer, cfg, k, make_batch(20 + k)) for k in steps]


def timeless(metrics):
    return [{k: v for k, v in m.items() if not k.startswith("perf/")} for m in metrics]


def optimizer(trainer):
    return state.tree(trainer.parts)["optimizer"]


def save(trainer, cfg, folder, step):
    """As the loop does; returns the checkpoint, which with async_save is written from then on."""
    if not cfg.checkpoint.async_save:
        return checkpoint.write(folder, step, {"step": step}, lambda p: trainer.save(str(p)), keep=2)
    tmp = checkpoint.begin(folder, step, {"step": step})
    trainer.save(str(tmp), 2)
    return tmp.with_suffix("")


def save_after(trainer, cfg, steps, tmp):
    trainer.setup()
    train(trainer, cfg, steps)
    trainer.save(str(tmp), 1)
    train(trainer, cfg, [9])  # what the background writes must not change with it
    trainer.flush()


def resume(trainer, cfg, folder, steps):
    trainer.setup(str(folder))
    return train(trainer, cfg, steps), weights(trainer)


@pytest.mark.parametrize("async_save", [False, True])
def test_resume_continues_bit_for_bit(tmp_path, async_save):
    """Weights, optimizer, random state and metrics of the run that was never interrupted."""
    changes = {"lr": 1e-3, "steps": 10, "global_batch_size": 8, "lr_decay_style": "cosine"}
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path, train=changes, checkpoint={"async_save": async_save})
    with one_rank(cfg) as t:
        train(t, cfg, [1, 2])
        torch.rand(3)  # something moved the generator: the resumed run must not start from the seed again
        path = save(t, cfg, tmp_path / "c", 2)
        drawn = torch.rand(4)
        rest, final, moved = train(t, cfg, [3, 4]), weights(t), optimizer(t)
        t.flush()
    assert path == checkpoint.latest(tmp_path / "c") and json.loads((path / "state.json").read_text()) == {"step": 2}
    with one_rank(cfg, path) as t:
        assert torch.equal(torch.rand(4), drawn)
        again, end, ended = train(t, cfg, [3, 4]), weights(t), optimizer(t)
    assert timeless(again) == timeless(rest)
    assert all(torch.equal(final[k], end[k]) for k in final)
    assert moved.keys() == ended.keys() and all(torch.equal(moved[k], ended[k]) for k in moved)


@pytest.mark.parametrize("tied", [True, False])
def test_the_number_of_ranks_may_change(tmp_path, two_ranks, tied):
    """Saved on 1 rank and continued on 2, and the reverse: each like the uninterrupted run."""
    cfg = make_cfg(make_model(tmp_path / "m", tied=tied), tmp_path, train={"lr": 1e-4})
    one, two = tmp_path / "one", tmp_path / "step_000002"
    one.mkdir()
    with one_rank(cfg) as t:
        train(t, cfg, [1, 2])
        t.save(str(one))
        rest, final = train(t, cfg, [3, 4]), weights(t)
    pair = cfg.model_copy(deep=True)
    pair.parallel.fsdp, pair.checkpoint.async_save = 2, True
    two_ranks(save_after, pair, [1, 2], checkpoint.begin(tmp_path, 2, {}))
    with one_rank(cfg, two) as t:
        results = [(train(t, cfg, [3, 4]), weights(t))]
    results.append(two_ranks(resume, pair, one, [3, 4])[0])
    for metrics, end in results:
        assert [m["train/grad_norm"] for m in metrics] == pytest.approx([m["train/grad_norm"] for m in rest], abs=1e-5)
        assert apart(end, final) < 1e-3
    a, b = (load_file(p / "hf" / "model.safetensors") for p in (one, two))
    assert apart(a, b) < 1e-3 and apart(a, final) > 0.9



@pytest.mark.parametrize(("tied", "dtype"), [(True, "float32"), (False, "float32"), (True, "bfloat16")])
def test_export_is_the_model(tmp_path, tied, dtype):
    cfg = make_cfg(make_model(tmp_path / "m", tied=tied), tmp_path, train={"lr": 1e-3, "dtype": dtype})
    (tmp_path / "m" / "tokenizer.json").write_text('{"kept": "as it is"}')
    with one_rank(cfg) as t:
        train(t, cfg, [1])
        path = checkpoint.write(tmp_path / "c", 1, {}, lambda p: t.save(str(p)), keep=1)
        trained = weights(t)
    model = AutoModelForCausalLM.from_pretrained(path / "hf")
    assert model.dtype == getattr(torch, dtype) and model.config.architectures == ["LlamaForCausalLM"]
    for k, v in trained.items():
        assert torch.equal(model.get_parameter(k), v.to(model.dtype)), k
    assert ("lm_head.weight" in load_file(path / "hf" / "model.safetensors")) is not tied
    assert (path / "hf" / "tokenizer.json").read_text() == '{"kept": "as it is"}'
    original = AutoModelForCausalLM.from_pretrained(tmp_path / "m")
    assert any(not torch.equal(model.get_parameter(k).float(), original.get_parameter(k)) for k in trained), "training must have changed it"


def contents(folder: Path):
    return {p.relative_to(folder): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.mark.parametrize("where", ["hf", "trainer"])
def test_disk_full_while_saving_leaves_the_old_checkpoint(tmp_path, where):
    """The limit lies below the exported model's file, or between it and the optimizer's."""
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path)
    folder = tmp_path / "c"
    with one_rank(cfg) as t:
        train(t, cfg, [1])
        old = checkpoint.write(folder, 1, {"step": 1}, lambda p: t.save(str(p)), keep=1)
        before = contents(old)
        train(t, cfg, [2])
        size = (old / "hf" / "model.safetensors").stat().st_size
        assert max(p.stat().st_size for p in (old / "trainer").iterdir()) > 2 * size
        with (
            file_size_limit(size // 2 if where == "hf" else int(size * 1.5)),
            pytest.raises(VimeError, match="earlier checkpoints are intact"),
        ):
            checkpoint.write(folder, 2, {"step": 2}, lambda p: t.save(str(p)), keep=1)
        assert checkpoint.latest(folder) == old and [p.name for p in folder.iterdir()] == [old.name]
        assert contents(old) == before
        new = checkpoint.write(folder, 2, {"step": 2}, lambda p: t.save(str(p)), keep=1)  # room again: the same run goes on
        assert checkpoint.latest(folder) == new and [p.name for p in folder.iterdir()] == [new.name]


def test_async_save_writes_behind_the_next_step(tmp_path, monkeypatch):
    """Until it is whole the earlier checkpoint is the newest; the next save waits; what fails in the background fails the next step."""
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path, checkpoint={"async_save": True})
    folder, gate, commit = tmp_path / "c", threading.Event(), checkpoint.commit
    with one_rank(cfg) as t:
        train(t, cfg, [1])
        old = save(t, cfg, folder, 1)
        t.flush()
        monkeypatch.setattr(checkpoint, "commit", lambda *args: gate.wait(60) and commit(*args))
        train(t, cfg, [2])
        new = save(t, cfg, folder, 2)
        train(t, cfg, [3])
        assert checkpoint.latest(folder) == old and not new.exists() and Path(f"{new}.tmp").exists()
        threading.Timer(0.5, gate.set).start()
        t.flush()
        assert checkpoint.latest(folder) == new
        before = contents(new)
        with file_size_limit((new / "hf" / "model.safetensors").stat().st_size // 2):
            save(t, cfg, folder, 3)
            wait([t.writing])
        with pytest.raises(VimeError, match=r"step_000003\.tmp could not be written.*earlier checkpoints are intact"):
            train(t, cfg, [4])
        assert checkpoint.latest(folder) == new and contents(new) == before and not list(folder.glob("*.tmp"))


def test_export_of_any_checkpoint(tmp_path):
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path)
    with one_rank(cfg) as t:
        for step in (1, 2):
            train(t, cfg, [step])
            save(t, cfg, tmp_path / "checkpoints", step)
    assert main(["export", str(tmp_path), "--out", str(tmp_path / "new")]) == 0
    assert main(["export", str(tmp_path), "--step", "1", "--out", str(tmp_path / "old")]) == 0
    for name, step in (("new", 2), ("old", 1)):
        assert contents(tmp_path / name) == contents(tmp_path / "checkpoints" / f"step_00000{step}" / "hf")
    with pytest.raises(VimeError, match=r"no complete checkpoint of step 3 \(there are those of steps 1, 2\)"):
        checkpoint.export(tmp_path, 3, tmp_path / "none")
    with pytest.raises(VimeError, match="old exists already"):
        checkpoint.export(tmp_path, 1, tmp_path / "old")
    with pytest.raises(VimeError, match="is it a run's folder"):
        checkpoint.export(tmp_path / "m", None, tmp_path / "none")


def test_no_room_for_published_weights(tmp_path):
    cfg = make_cfg(make_model(tmp_path / "m"), tmp_path)
    with one_rank(cfg) as t:
        path = t.publish(0)[0].path
        before = Path(path).read_bytes()
        with file_size_limit(len(before) // 2), pytest.raises(VimeError, match="weights v1 could not be written"):
            t.publish(1)
        assert [p.name for p in location(cfg).iterdir()] == ["v0.safetensors"] and Path(path).read_bytes() == before
        assert Path(t.publish(1)[0].path).exists()


def test_partial_checkpoints_are_never_the_latest(tmp_path):
    """A killed run leaves a .tmp folder, whatever is in it: it is not resumed from, and the next save clears it."""
    assert checkpoint.latest(tmp_path / "none") is None
    for name in ("step_000002", "step_000010", "step_000020.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "state.json").write_text("{}")
    (tmp_path / "step_000030").mkdir()  # no state.json
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000010"
    checkpoint.write(tmp_path, 11, {}, lambda p: None, keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step_000010", "step_000011", "step_000030"]
    with pytest.raises(RuntimeError):
        checkpoint.write(tmp_path, 12, {}, lambda p: (_ for _ in ()).throw(RuntimeError("rank died")), keep=2)
    assert checkpoint.latest(tmp_path) == tmp_path / "step_000011" and not list(tmp_path.glob("*.tmp"))


def test_a_checkpoint_of_another_model_is_refused(tmp_path):
    with one_rank(make_cfg(make_model(tmp_path / "m"), tmp_path)) as t:
        path = checkpoint.write(tmp_path / "c", 1, {}, lambda p: t.save(str(p)), keep=1)
    other = make_model(tmp_path / "other", tied=False)
    (path / "hf" / "model.safetensors").write_bytes((other / "model.safetensors").read_bytes())
    (path / "hf" / "config.json").write_text((other / "config.json").read_text())
    with pytest.raises(VimeError, match="does not load"), one_rank(make_cfg(other, tmp_path), path):
        pass
