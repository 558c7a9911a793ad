"""Routing replay without a server: experts join up token by token, are packed beside their tokens, and routers obey them."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig
from transformers.models.mixtral.modeling_mixtral import MixtralTopKRouter
from transformers.models.olmoe.modeling_olmoe import OlmoeTopKRouter
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeTopKRouter
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeTopKRouter

from vime import config
from vime.errors import VimeError
from vime.sample import Sample
from vime.train import preflight
from vime.trainer.batch import Item
from vime.trainer.packing import pack
from vime.trainer.routing import Replay, check_model

LAYERS, TOP_K = 3, 2


def experts(tokens: list[int], dtype: Any = np.uint8, salt: int = 0) -> np.ndarray:
    """What a router would say, a function of token and position: (tokens, LAYERS, TOP_K)."""
    at = np.arange(len(tokens))[:, None, None]
    return ((np.array(tokens, dtype=np.int64)[:, None, None] * 7 + at * 3 + np.arange(LAYERS * TOP_K).reshape(LAYERS, TOP_K) + salt) % 251).astype(dtype)


def served(tokens: list[int], start: int, new: list[int], dtype: Any = np.uint8) -> np.ndarray:
    """A server's answer: experts of the tokens from `start` on that it forwarded, which the last sampled one was not."""
    return experts(tokens + new, dtype)[start:-1]


turns = st.lists(st.tuples(st.lists(st.integers(0, 50), max_size=5), st.lists(st.integers(0, 50), max_size=3)), max_size=5)


@given(st.lists(st.integers(0, 50), min_size=1, max_size=5), turns, st.sampled_from([np.uint8, np.uint16]))
def test_parts_of_a_sample_join_token_by_token(prompt: list[int], parts: list[Any], dtype: Any) -> None:
    """Aborted and continued, or with tool tokens between turns: each request brings the experts that were missing; and through JSON."""
    s, last = Sample(tokens=list(prompt)), 0
    for sampled, tool in parts:
        if sampled:
            rows = served(s.tokens, s.routed, sampled, dtype)
            s.append_tokens(sampled, [-1.0] * len(sampled), versions=0, routed_experts=rows)
            last = len(s.tokens) - 1
        s.append_tokens(tool, trainable=False)
        s.check()
        assert s.routed == last
        s = Sample.from_dict(json.loads(json.dumps(s.to_dict())))
    if last:
        assert s.rollout_routed_experts is not None and s.rollout_routed_experts.dtype == dtype
        np.testing.assert_array_equal(s.rollout_routed_experts, experts(s.tokens, dtype)[:last])


def sample(rows: int | None = 2, index: int = 5) -> Sample:
    s = Sample(index=index, tokens=[1, 2])
    s.append_tokens([3], [-1.0], versions=0, routed_experts=None if rows is None else experts([1, 2, 3])[:rows])
    return s


@pytest.mark.parametrize(
    ("rows", "trainable", "said"),
    [
        (None, True, "some of its trainable tokens came with their experts, some without"),
        (experts([3, 4, 5]), True, r"shape \(3, 3, 2\) for 2 tokens, which join \(2, 3, 2\)"),
        (experts([3]), True, r"shape \(1, 3, 2\) for 2 tokens"),
        (experts([3, 4])[:, :2], True, r"shape \(2, 2, 2\) for 2 tokens"),
        (experts([3, 4])[:, 0], True, r"shape \(2, 2\) for 2 tokens"),
        (experts([3, 4]), False, "for 2 tokens"),
    ],
)
def test_experts_that_do_not_fit_change_nothing(rows: np.ndarray | None, trainable: bool, said: str) -> None:
    s = sample()
    before = s.to_dict()
    with pytest.raises(ValueError, match=f"sample 5: .*{said}"):
        s.append_tokens([4, 5], [-1.0] * 2 if trainable else None, versions=0, routed_experts=rows, trainable=trainable)
    assert s.to_dict() == before


def test_a_trained_token_needs_the_experts_of_all_before_it() -> None:
    s = sample()
    s.append_tokens([8, 9], trainable=False)
    s.check()
    s.loss_mask[-1] = 1
    with pytest.raises(ValueError, match="experts of 2 tokens for 5 tokens, the last trained one being number 4"):
        s.check()
    with pytest.raises(ValueError, match="sample 5: experts of shape"):
        sample(1)


def test_packed_beside_their_tokens() -> None:
    """A golden layout: two samples behind one prompt, laid out once; then one whose prompt went elsewhere, and tool tokens at an end."""
    samples = []
    for i, (response, salt) in enumerate([([7], 0), ([8, 9], 0), ([7], 1)]):
        s = Sample(index=i, tokens=[5, 6])
        s.append_tokens(response, [-1.0] * len(response), versions=0, routed_experts=experts([5, 6, *response], salt=salt)[:-1])
        samples.append(s)
    samples[1].append_tokens([4, 4], trainable=False)
    p = pack([Item(s.index, 0, 1.0, 1.0) for s in samples], {s.index: s for s in samples})
    assert p.routing is not None and p.routing.dtype == torch.int16
    assert p.ids.tolist() == [[5, 6, 8, 9, 4, 5, 6]]  # 7 is the last of its samples and never forwarded
    assert p.routing[:, 1, 0].tolist() == [37, 47, 64, -1, -1, 38, 48]
    assert pack([], {}).routing is None
    with pytest.raises(ValueError, match="1 of 2 samples came with the experts"):
        pack([Item(i, 0, 1.0, 1.0) for i in (0, 1)], {0: sample(2, 0), 1: sample(None, 1)})


@given(st.lists(st.tuples(st.lists(st.integers(0, 50), min_size=1, max_size=6), st.integers(0, 1), st.integers(0, 2)), min_size=1, max_size=6))
def test_each_sample_finds_its_own_experts(rows: list[Any]) -> None:
    samples = []
    for i, (response, salt, tool) in enumerate(rows):
        s = Sample(index=i, group_index=i // 3, tokens=[3, 4, 5])
        s.append_tokens(response, [-1.0] * len(response), versions=0, routed_experts=experts([3, 4, 5, *response], salt=salt)[:-1])
        s.append_tokens([1] * tool, trainable=False)
        samples.append(s)
    p = pack([Item(s.index, s.group_index, 1.0, 1.0) for s in samples], {s.index: s for s in samples})
    assert p.routing is not None and p.uses is not None and int(p.uses.sum()) == sum(len(s.tokens) - 1 for s in samples)
    for s, at in zip(p.samples, p.where):
        np.testing.assert_array_equal(p.routing[at][: s.routed], s.rollout_routed_experts)
        assert (p.routing[at][s.routed :] == -1).all()


ROUTERS = {
    "qwen3": (Qwen3MoeTopKRouter, Qwen3MoeConfig(hidden_size=16, num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)),
    "qwen2": (Qwen2MoeTopKRouter, Qwen2MoeConfig(hidden_size=16, num_experts=8, num_experts_per_tok=2, norm_topk_prob=False)),
    "olmoe": (OlmoeTopKRouter, OlmoeConfig(hidden_size=16, num_experts=8, num_experts_per_tok=2)),
    "mixtral": (MixtralTopKRouter, MixtralConfig(hidden_size=16, num_local_experts=8, num_experts_per_tok=2)),
}


@pytest.mark.parametrize("name", ROUTERS)
def test_routers_of_every_family_obey(name: str) -> None:
    """Their own choice replayed gives their own weights; another one gives the weights of its experts, whose router gets the gradient."""
    kind, cfg = ROUTERS[name]
    torch.manual_seed(0)
    router = kind(cfg)
    torch.nn.init.normal_(router.weight)
    model = torch.nn.Module()
    model.layers = torch.nn.ModuleList([torch.nn.Module()])
    model.layers[0].gate = router
    object.__setattr__(model, "base_model", model)  # as it is of transformers' own base models
    model.config = SimpleNamespace(get_text_config=lambda: SimpleNamespace(num_hidden_layers=1, name_or_path="m"))
    hidden = torch.randn(5, 16)
    _, weights, own = router(hidden)
    replay = Replay(model)
    replay.batch = SimpleNamespace(routing=own[:, None].to(torch.int16), uses=torch.tensor([1, 1, 1, 3, 2]))
    _, again, chosen = router(hidden)
    assert torch.equal(chosen, own) and torch.allclose(again, weights, atol=1e-6)
    assert replay.take().tolist() == [0, 8], "a token of several samples counts for each of them"

    rows = torch.tensor([[[3, 1]], [[-1, -1]], [[0, 7]], [[6, 5]], [[4, 2]]], dtype=torch.int16)
    replay.batch = SimpleNamespace(routing=rows, uses=torch.ones(5, dtype=torch.long))
    logits, some, chosen = router(hidden)
    assert chosen.tolist() == [[3, 1], own[1].tolist(), [0, 7], [6, 5], [4, 2]]
    want = logits.softmax(-1)[0, [3, 1]]
    assert torch.allclose(some[0], want if name in ("qwen2", "olmoe") else want / want.sum(), atol=1e-6)
    assert torch.allclose(some[1], weights[1], atol=1e-6)
    flips = sum(set(a) != set(b) for a, b in zip(chosen.tolist(), own.tolist()))
    assert replay.take().tolist() == [flips, 4] and flips
    some[0, 0].backward()
    assert router.weight.grad is not None and router.weight.grad[3].abs().sum() > 0
    with torch.no_grad():
        router(hidden)
    assert replay.take().tolist() == [0, 0], "forwards without a gradient don't count"
    batch = SimpleNamespace(samples=[sample()], routing=torch.full((4, 1, 2), 8, dtype=torch.int16))
    with pytest.raises(ValueError, match=r"experts up to 8 in the shape \(1, 2\) were recorded; m has 8, and \(layers, top_k\) \(1, 2\)"):
        replay.check([batch])
    batch.routing = None
    with pytest.raises(ValueError, match="every sample needs its rollout_routed_experts"):
        replay.check([batch])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"model_type": "qwen3"}, "is a dense model: its config.json has no num_experts, num_local_experts, n_routed_experts"),
        ({"model_type": "deepseek_v3", "n_routed_experts": 4}, "the router of model_type 'deepseek_v3' is not known (known are qwen3_moe"),
        ({"model_type": "qwen3_moe", "num_experts": 8}, None),
    ],
)
def test_models_that_cannot_be_replayed_are_refused_before_the_start(content: dict[str, Any], said: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "model.safetensors").touch()
    if said is None:
        return check_model(str(tmp_path))
    tree = {"model": str(tmp_path), "data": {"prompts": "none.jsonl"}, "rollout": {"routing_replay": True}}
    with pytest.raises(VimeError) as e:
        preflight(config.validate(tree, "test"))
    assert "rollout.routing_replay: " in str(e.value) and said in str(e.value)
