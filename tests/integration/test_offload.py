"""train.offload = "all": FSDP's CPU offload. Here the device is the CPU, so that memory saved can't be seen; every number must stay what it is."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule

from tests.integration.test_lora import fill
from tests.integration.test_trainer_checkpoint import timeless
from tests.integration.trainer_kit import Ranks, apart, make_batch, make_cfg, make_model, one_rank, train_once, weights
from vime.config import Config
from vime.trainer import engine
from vime.trainer.layout import Layout


def run(trainer: Any, cfg: Config, offload: bool, out: str) -> dict[str, Any]:
    """Two steps, a checkpoint, one more in a trainer that goes on from it, a publish."""
    with patch.object(engine, "Layout", lambda parallel, device, _: Layout(parallel, device, offload)):
        trainer.setup()
        if cfg.lora.rank:
            fill(trainer.model)
        metrics = [train_once(trainer, cfg, k, make_batch(k)) for k in (1, 2)]
        trainer.save(out)
        with patch.object(engine, "init", lambda *a: trainer.device):
            trainer.setup(out)
    models = [m for m in (trainer.model, trainer.reference, trainer.critic and trainer.critic.model) if m is not None]
    policies = [m._get_fsdp_state()._fsdp_param_group.offload_policy for x in models for m in x.modules() if isinstance(m, FSDPModule)]
    assert all(isinstance(p, CPUOffloadPolicy) == offload for p in policies) and (policies or not offload)
    metrics.append(train_once(trainer, cfg, 3, make_batch(3)))
    published, canary = trainer.publish(3)
    return {
        "metrics": timeless(metrics), "weights": weights(trainer), "canary": canary.log_probs,
        "served": load_file(published.path) if published else {}, "trained": trainer.device.type,
    }  # fmt: skip


CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "one rank": ("llama", {}),
    "reference, bfloat16, recomputation": ("qwen3", {"algo": {"kl_loss_coef": 0.1}, "train": {"dtype": "bfloat16", "gradient_checkpointing": True}, "parallel": {"fsdp": 2}}),
    "critic": ("llama", {"algo": {"advantage_estimator": "gae"}, "parallel": {"fsdp": 2}}),
    "tensor parallel": ("qwen3", {"parallel": {"tp": 2}}),
    "adapters": ("llama", {"lora": {"rank": 4}, "algo": {"kl_loss_coef": 0.1}, "parallel": {"fsdp": 2}}),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_same_bit_for_bit(tmp_path: Path, two_ranks: Ranks, case: str) -> None:
    kind, changes = CASES[case]
    folder, results = make_model(tmp_path / "m", kind), []
    train = {"lr": 1e-3, "max_tokens_per_gpu": 64} | changes.get("train", {})
    for offload in (False, True):
        cfg = make_cfg(folder, tmp_path / f"run{offload}", **(changes | {"train": train}))
        (out := tmp_path / f"checkpoint{offload}").mkdir()
        results.append(two_ranks(run, cfg, offload, str(out)))
    for without, with_ in zip(*results, strict=True):
        assert not isinstance(without, Exception) and not isinstance(with_, Exception), (without, with_)
        assert without["metrics"] == with_["metrics"] and without["canary"] == with_["canary"]
        for key in ("weights", "served"):
            assert without[key].keys() == with_[key].keys() and all(torch.equal(t, with_[key][n]) for n, t in without[key].items())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_weights_leave_the_gpu(tmp_path: Path) -> None:
    folder, ends, held = make_model(tmp_path / "m", hidden_size=512, intermediate_size=2048), [], []
    for where in ("none", "all"):
        cfg = make_cfg(folder, tmp_path / where, train={"offload": where})
        with one_rank(cfg) as t:
            for step in (1, 2):
                train_once(t, cfg, step, make_batch(step))
            places = {p.device.type for p in t.model.parameters()} | {s["exp_avg"].device.type for s in t.optimizer.state.values()}
            assert places == {"cpu" if where == "all" else "cuda"}
            held.append(torch.cuda.memory_allocated())
            ends.append({n: w.cpu() for n, w in weights(t).items()})
    assert held[1] < held[0] / 2 and apart(*ends) < 0.01
