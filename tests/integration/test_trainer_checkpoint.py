"""Checkpoints: exact continuation, other numbers of ranks, export, and a disk that fills up while saving."""

import json
import resource
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.integration.trainer_kit import apart, make_batch, make_cfg, make_model, one_rank, train_once, weights
from vime.errors import VimeError
from vime.trainer import checkpoint
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


def save_after(trainer, cfg, steps, folder):
    trainer.setup()
    train(trainer, cfg, steps)
    trainer.save(str(folder))


def resume(trainer, cfg, folder, steps):
    trainer.setup(str(folder))
    return train(trainer, cfg, steps), weights(trainer)


def test_resume_continues_bit_for_bit(tmp_path):
    """Weights, optimizer, random state and metrics of the run that was never interrupted."""
    cfg = make_cfg(
        make_model(tmp_path / "m"), tmp_path, train={"lr": 1e-3, "steps": 10, "global_batch_size": 8, "lr_decay_style": "cosine"}
    )
    with one_rank(cfg) as t:
        train(t, cfg, [1, 2])
        torch.rand(3)  # something moved the generator: the resumed run must not start from the seed again
        path = checkpoint.write(tmp_path / "c", 2, {"step": 2}, lambda p: t.save(str(p)), keep=2)
        drawn = torch.rand(4)
        rest, final = train(t, cfg, [3, 4]), weights(t)
    assert path == checkpoint.latest(tmp_path / "c") and json.loads((path / "state.json").read_text()) == {"step": 2}
    with one_rank(cfg, path) as t:
        assert torch.equal(torch.rand(4), drawn)
        again, end = train(t, cfg, [3, 4]), weights(t)
    assert timeless(again) == timeless(rest)
    assert all(torch.equal(final[k], end[k]) for k in final)


@pytest.mark.parametrize("tied", [True, False])
def test_the_number_of_ranks_may_change(tmp_path, two_ranks, tied):
    """Saved on 1 rank and continued on 2, and the reverse: each like the uninterrupted run."""
    cfg = make_cfg(make_model(tmp_path / "m", tied=tied), tmp_path, train={"lr": 1e-4})
    one, two = tmp_path / "one", tmp_path / "two"
    one.mkdir(), two.mkdir()
    with one_rank(cfg) as t:
        train(t, cfg, [1, 2])
        t.save(str(one))
        rest, final = train(t, cfg, [3, 4]), weights(t)
    pair = cfg.model_copy(deep=True)
    pair.parallel.fsdp = 2
    two_ranks(save_after, pair, [1, 2], two)
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
