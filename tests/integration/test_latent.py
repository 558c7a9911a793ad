"""Latent attention (DeepSeek-V3), whose values have another size than its keys, and what chooses its tokens by an indexer."""

from pathlib import Path

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.integration.trainer_kit import VOCAB, make_batch, make_cfg, one_rank, train_once
from vime.errors import VimeError
from vime.trainer.parallel import load_model

SHAPE = {
    "vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 48, "moe_intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12, "head_dim": 8,
    "n_routed_experts": 8, "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
    "initializer_range": 0.2,
}  # fmt: skip


def made(tmp_path: Path, kind: str, **more: object) -> Path:
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[kind](**SHAPE | more))
    model.save_pretrained(tmp_path / "m")
    return tmp_path / "m"


def test_log_probs_are_those_of_the_plain_model(tmp_path: Path) -> None:
    cfg, batch = make_cfg(made(tmp_path, "deepseek_v3"), tmp_path, rollout={"temperature": 1.0}), make_batch(0)
    plain = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32)
    for s in (s for g in batch for s in g):
        logp = torch.log_softmax(plain(torch.tensor([s.tokens])).logits[0], -1)
        own = logp[range(s.prompt_length - 1, len(s.tokens) - 1), s.tokens[s.prompt_length :]].tolist()
        s.rollout_log_probs = [lp if m else old for lp, m, old in zip(own, s.loss_mask, s.rollout_log_probs)]
    with one_rank(cfg) as trainer:
        metrics = train_once(trainer, cfg, 1, batch)
    assert metrics["train/logprob_abs_diff_max"] < 1e-5
    assert metrics["train/grad_norm"] > 0


def test_attention_by_an_indexer_is_refused_by_name(tmp_path: Path) -> None:
    model = made(tmp_path, "glm_moe_dsa", index_topk=8, index_head_dim=16, index_n_heads=2, mlp_layer_types=["dense", "sparse"])
    with pytest.raises(VimeError, match="index_topk = 8 is not supported yet"):
        load_model(model, "float32", None)  # type: ignore[arg-type]
