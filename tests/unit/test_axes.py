"""Which layouts a model allows: every refusal by name, and the nearest layout that does fit."""

import json
from pathlib import Path
from typing import Any

import pytest

from vime import cli
from vime.config import Config, ParallelConfig, validate
from vime.errors import VimeError
from vime.trainer import axes

LLAMA = {
    "model_type": "llama", "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4, "hidden_size": 64,
    "intermediate_size": 96, "vocab_size": 62, "tie_word_embeddings": False,
}  # fmt: skip
SLIDING = {"sliding_window": 128}
MOE = LLAMA | {"model_type": "qwen3_moe", "num_experts": 8, "moe_intermediate_size": 16}


def run(tmp_path: Path, model: dict[str, Any], **parallel: int) -> Config:
    folder = tmp_path / f"m{abs(hash(json.dumps(model)))}"
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(model))
    tree = {"model": str(folder), "data": {"prompts": "p"}, "parallel": parallel, "rollout": {"batch_size": 12}}
    return validate(tree, "test")


@pytest.mark.parametrize(
    ("model", "parallel", "said"),
    [
        (LLAMA, {"tp": 3}, "parallel.tp = 3 does not divide the model's 8 attention heads"),
        (LLAMA, {"tp": 8}, "parallel.tp = 8 does not divide the model's 4 key-value heads"),
        (LLAMA, {"tp": 4}, "parallel.tp = 4 does not divide the model's 62 rows of the head"),
        (LLAMA | {"intermediate_size": 95}, {"tp": 2}, "does not divide the model's 95 columns of an MLP"),
        (LLAMA | SLIDING, {"tp": 2, "cp": 8}, "8 does not divide the 4 attention heads of each of tp = 2, and attention of 'llama' has a sliding window"),
        (LLAMA | {"model_type": "mistral"}, {"cp": 3}, "'mistral' has a sliding window, which the ring does not do"),  # 4096 unless config.json says null
        (LLAMA | {"model_type": "gemma2"}, {"cp": 3}, "'gemma2' has soft-capped scores"),
        (LLAMA | {"model_type": "gpt_oss"}, {"cp": 3}, "'gpt_oss' has sinks"),
        (LLAMA, {"pp": 5}, "parallel.pp x pp_interleave = 5 stages for 4 layers"),
        (LLAMA, {"pp": 2, "pp_interleave": 3}, "parallel.pp x pp_interleave = 6 stages for 4 layers"),
        (LLAMA, {"pp_interleave": 2}, "parallel.pp_interleave needs parallel.pp > 1"),
        (LLAMA, {"fsdp": 2, "ep": 2}, "parallel.ep: the model has no experts"),
        (MOE, {"tp": 2}, "parallel.tp = 2 would cut through experts, whose checkpoints then load wrong"),
        (MOE, {"fsdp": 3, "ep": 3}, "parallel.ep = 3 does not divide the model's 8 experts"),
        (MOE, {"fsdp": 2, "ep": 4}, "parallel.ep = 4 does not divide fsdp x cp x tp = 2"),
        (MOE, {"fsdp": 12, "ep": 4, "tp": 1}, "leaves 3 ranks for each expert, which divide neither 2 experts nor their rows"),
        (LLAMA | {"model_type": "phi3"}, {"tp": 2}, "'phi3' shards layers.+ by 'rowwise_split_input', which is not tested"),
        (LLAMA | {"model_type": "unheard_of"}, {"tp": 2}, "transformers has no plan for model_type 'unheard_of'"),
        (LLAMA | {"model_type": "gemma"}, {"pp": 2}, "'gemma' scales its embeddings"),
    ],
)
def test_every_refusal_has_a_reason(tmp_path: Path, model: dict[str, Any], parallel: dict[str, int], said: str) -> None:
    with pytest.raises(VimeError, match=said):
        axes.check(run(tmp_path, model, **parallel))


@pytest.mark.parametrize(
    ("model", "parallel", "said"),
    [
        (LLAMA, {"cp": 4}, "8 of 8 on a rank, 2 in attention, of whole rows"),
        (LLAMA, {"cp": 3}, "8 in attention, of 1/3 of each row, in a ring of 3 ranks"),
        (LLAMA, {"tp": 2, "cp": 8}, "4 of 8 on a rank, 1 in attention, of 1/2 of each row, in a ring of 2 ranks"),
        (LLAMA | SLIDING, {"cp": 8}, "1 in attention, of whole rows"),
        (LLAMA | SLIDING | {"model_type": "qwen2", "use_sliding_window": False}, {"cp": 3}, "a ring of 3 ranks"),
    ],
)
def test_heads_are_dealt_out_as_far_as_they_go_and_a_ring_does_the_rest(tmp_path: Path, model: dict[str, Any], parallel: dict[str, int], said: str) -> None:
    assert said in axes.describe(run(tmp_path, model, **parallel))


def test_fused_columns_are_refused(tmp_path: Path) -> None:
    m = axes.read(run(tmp_path, LLAMA).model)._replace(tp_plan={"layers.*.mlp.gate_up_proj": "packed_colwise"})
    assert "gate_up_proj by 'packed_colwise': fused columns save overlapping checkpoints" in axes.faults(ParallelConfig(tp=2), m)[0]


def test_all_faults_come_at_once_with_the_nearest_layout(tmp_path: Path) -> None:
    with pytest.raises(VimeError) as e:
        axes.check(run(tmp_path, MOE, tp=4, pp=1, cp=3))
    assert "62 rows of the head" in str(e.value) and "cut through experts" in str(e.value)
    assert "the nearest layout on 12 ranks: " in e.value.fix


@pytest.mark.parametrize(
    ("model", "wrong", "near"),
    [
        (LLAMA, {"tp": 4, "fsdp": 2}, {"tp": 2, "fsdp": 4}),
        (MOE, {"tp": 2, "fsdp": 2}, {"tp": 2, "fsdp": 2, "ep": 2}),
        (LLAMA, {"fsdp": 2, "ep": 2}, {"fsdp": 2}),
        (LLAMA, {"pp": 8}, {"pp": 4, "fsdp": 2}),
    ],
)
def test_nearest(tmp_path: Path, model: dict[str, Any], wrong: dict[str, int], near: dict[str, int]) -> None:
    m = axes.read(run(tmp_path, model).model)
    found = axes.nearest(ParallelConfig(**wrong), m)
    assert found == ParallelConfig(**near) and not axes.faults(found, m)


def test_every_layout_that_is_called_valid_has_the_ranks(tmp_path: Path) -> None:
    m = axes.read(run(tmp_path, MOE).model)
    found = list(axes.valid(8, m))
    assert len(found) > 20 and {p.ranks for p in found} == {8} and ParallelConfig(fsdp=8) in found


def test_shares_of_the_samples() -> None:
    p = ParallelConfig(fsdp=2, tp=2, pp=2, cp=2)
    assert [p.shard(r) for r in range(p.ranks)] == [0, 0, 0, 0, 1, 1, 1, 1] * 2


def test_plan_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = run(tmp_path, MOE).model
    (tmp_path / "run.toml").write_text(f'model = "{model}"\n[data]\nprompts = "p"\n[rollout]\nbatch_size = 12\n')
    file = str(tmp_path / "run.toml")
    assert cli.main(["plan", file, "parallel.fsdp=2", "parallel.tp=2", "parallel.pp=2", "parallel.ep=2"]) == 0
    out = capsys.readouterr().out
    assert "8 = fsdp 2 x tp 2 x ep 2 x pp 2" in out and "2 of 2 layers, 1 on a rank, 1F1B" in out and "4 of 8 on a rank, in 2 FSDP" in out
    assert cli.main(["plan", file, "parallel.tp=2"]) == 1
    assert "the nearest layout on 2 ranks: tp 2 x ep 2" in capsys.readouterr().err
