"""Routing replay with a real server of a mixture of experts whose routers are full of near ties: a little noise flips many choices."""

import asyncio
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel, Qwen3MoeConfig

from tests.conftest import Server
from tests.integration.rollout_kit import LONG, PROMPT, Stack, ask, group, run
from tests.integration.test_truncated_sampling import sample_groups
from tests.integration.trainer_kit import Ranks, make_batch, make_cfg, one_rank, train_once, weights
from vime.config import Config, validate
from vime.errors import VimeError
from vime.model import CHARS, _char_tokenizer
from vime.rollout.engine import Engine
from vime.rollout.http import Choice, EngineClient
from vime.sample import Sample, Status
from vime.trainer.batch import Item
from vime.trainer.packing import Pack, pack

LAYERS, EXPERTS, TOP_K, VOCAB = 3, 8, 2, 3 + len(CHARS)
TIE, NOISE = 1e-4, 3e-5  # router rows of a quad of experts differ by the one; the other is what the trainer's router is changed by


def moe_model(folder: Path) -> Path:
    """A random Qwen3-MoE, its first layer dense; routers choose two of four almost equal experts, which are very unlike."""
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCAB, hidden_size=64, intermediate_size=64, moe_intermediate_size=32, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, head_dim=32, num_experts=EXPERTS, num_experts_per_tok=TOP_K, norm_topk_prob=True, mlp_only_layers=[0],
        tie_word_embeddings=True, max_position_embeddings=256, initializer_range=0.2, bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for router in routers(model).values():
            quads = router.weight[::4].repeat_interleave(4, 0)
            router.weight.copy_(quads + TIE * torch.randn_like(quads))
    model.save_pretrained(folder)
    _char_tokenizer().save_pretrained(folder)
    return folder


def routers(model: PreTrainedModel) -> dict[int, Any]:
    return {i: layer.mlp.gate for i, layer in enumerate(model.model.layers) if hasattr(layer.mlp, "gate")}


def disturb(model: PreTrainedModel) -> None:
    torch.manual_seed(7)
    with torch.no_grad():
        for router in routers(model).values():
            router.weight.add_(NOISE * torch.randn_like(router.weight))


def own_routing(model: PreTrainedModel, tokens: list[int]) -> np.ndarray:
    """Transformers' experts: (tokens, LAYERS, TOP_K), zeros in the dense layer, as vLLM has it."""
    seen = {i: torch.zeros(len(tokens), TOP_K, dtype=torch.long) for i in range(LAYERS)}
    hooks = [r.register_forward_hook(lambda _, __, out, i=i: seen.update({i: out[2]})) for i, r in routers(model).items()]
    with torch.no_grad():
        model(torch.tensor([tokens]))
    for h in hooks:
        h.remove()
    return torch.stack([seen[i] for i in range(LAYERS)], 1).numpy()


def agreement(a: np.ndarray, b: np.ndarray) -> float:
    """Share of choices of experts that are the same set."""
    return float((np.sort(a[:, 1:]) == np.sort(b[:, 1:])).all(-1).mean())


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return moe_model(tmp_path_factory.mktemp("moe") / "model")


@pytest.fixture(scope="module")
def moe(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A server of that model whose prompts are longer than its cache blocks and than what it forwards at once, behind a router."""
    out = tmp_path_factory.mktemp("moe-server")
    rollout = {"max_context_len": 128, "max_response_len": 24, "concurrency": 32, "routing_replay": True, "request_timeout": 120}
    tree = {"model": str(folder), "run_dir": str(out), "data": {"prompts": "unused"}, "rollout": rollout, "reward": {"function": "exact"},
            "train": {"lr": 1e-3}, "weights": {"transport": "file"}, "vllm": {"block_size": 32, "max_num_batched_tokens": 48}}  # fmt: skip
    cfg = validate(tree, "test")
    engine, stack = Engine(cfg, 0, str(out)), None
    try:
        stack = Stack(Server(engine, engine.start(), cfg), out)
        yield stack
    finally:
        if stack:
            stack.fleet.close()
            stack.router.stop()
        engine.stop()


def packed(samples: list[Sample]) -> Pack:
    return pack([Item(s.index, s.group_index, 1.0, 1.0) for s in samples], {s.index: s for s in samples})


def test_every_choice_comes_with_the_experts_of_its_prompt_too(moe: Stack, folder: Path) -> None:
    """n > 1, a prompt forwarded in parts, and again when it comes from the cache; from a start on where one is given."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = [*LONG, *LONG[1:20]]
    first, second = (ask(moe.url, lambda c: c.generate(prompt, {"n": 4, "max_tokens": 12}))[0] for _ in range(2))
    (part,), short = ask(
        moe.url,
        lambda c: c.generate(prompt, {"max_tokens": 5, "routed_experts_prompt_start": 70}),
        lambda c: c.generate(PROMPT, {"n": 3, "max_tokens": 12}),
    )
    for start, given, choices in ((0, prompt, first), (0, prompt, second), (70, prompt, [part]), (0, PROMPT, short)):
        for c in choices:
            tokens = given + c.token_ids
            rows = c.routed_experts
            assert rows is not None and rows.dtype == np.uint8 and rows.shape == (len(tokens) - 1 - start, LAYERS, TOP_K)
            assert not rows[:, 0].any() and agreement(rows, own_routing(model, tokens)[start:-1]) > 0.98
    assert np.array_equal(first[0].routed_experts[:64], second[-1].routed_experts[:64]), "two whole blocks come from the cache"


async def during(moe: Stack, work: Callable[[], None]) -> list[Choice]:
    """Sixteen long responses that are sampled while `work` runs."""
    client = EngineClient(moe.url)
    running = asyncio.create_task(client.generate(PROMPT, {"n": 16, "max_tokens": 110, "temperature": 2.0, "ignore_eos": True}))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(work)
    choices = await running
    await client.close()
    return choices


def test_replayed_logprobs_are_the_sampled_ones_and_others_are_not(moe: Stack) -> None:
    """In the state the weights were published in, with noise on the trainer's routers, and after a step that the server took over."""
    cfg = moe.server.cfg
    with one_rank(cfg) as t:
        new, canary = t.publish(0)
        moe.fleet.publish(0, new.path, canary, tol=1.0)  # the canary isn't replayed: a tie that flips is no fault
        results = run(moe.worker(), group(6), group(6, LONG, at=1), version=0)
        samples = [s for _, done in results for s in done]
        assert all(s.routed == len(s.tokens) - 1 for s in samples)
        p = packed(samples)

        def off(replayed: bool) -> float:
            batch = p if replayed else replace(p, routing=None)
            return float((t.log_probs(t.model, batch) - p.rollout_log_probs).abs().mean())

        as_published = off(True)
        disturb(t.model)
        replayed, free = off(True), off(False)
        print(f"mean |logprob difference|: {as_published:.2e}; with noise on the routers {replayed:.2e}, and without replay {free:.2e}")
        assert as_published < 1e-5 and replayed < 1e-4 and free > 1e-3

        batch = [[s for s in samples if s.group_index == g] for g in (0, 1)]
        for s in samples:
            s.reward = float(s.index % 2)
        m = train_once(t, cfg, 1, batch)
        assert 0.05 < m["train/routing_flips"] < 0.95 and m["train/logprob_abs_diff"] < 1e-4 and m["train/grad_norm"] > 0
        new, canary = t.publish(1)
        through = asyncio.run(during(moe, lambda: moe.fleet.publish(1, new.path, canary, tol=1.0)))
        assert any(set(c.versions) == {0, 1} for c in through), "no request ran through the update"
        assert all(c.routed_experts is not None and len(c.routed_experts) == len(PROMPT) + len(c.token_ids) - 1 for c in through)
        [(_, after)] = run(moe.worker(), group(6, at=2), version=1)
        p = packed(after)
        assert off(True) < 1e-5 and {v for s in after for v in s.token_versions} == {1}


def test_an_interrupted_sample_has_the_experts_of_one_that_was_not(moe: Stack) -> None:
    """Cut at several points and continued: what joined up is what one request for the whole would have said."""
    (version,) = ask(moe.server.url, lambda c: c.weight_version())
    long = {"rollout": {"max_response_len": 100, "temperature": 2.0}}

    async def cut_and_continue() -> list[Sample]:
        samples, cuts, pause = group(4), 0, 0.1
        while True:  # however fast this machine is
            worker = moe.worker(**long)
            task = asyncio.create_task(worker.run_group(samples, version))
            if cuts < 2:
                await asyncio.sleep(pause)
                await worker.interrupt(0)
            while not task.done():
                if cuts < 2:
                    await asyncio.to_thread(moe.fleet.abort)
                await asyncio.wait([task], timeout=0.1 if cuts < 2 else None)
            report, samples = task.result()
            await worker.close()
            if report.interrupted:
                cut = sum(s.status is Status.ABORTED and s.response_length > 0 for s in samples)
                cuts, pause = cuts + cut, pause if cut else 1.5 * pause
            elif cuts >= 2:
                return samples
            else:
                samples, cuts, pause = group(4), 0, pause / 2

    samples = asyncio.run(cut_and_continue())
    for s in samples:
        s.check()
        assert s.routed == len(s.tokens) - 1
        if len(s.tokens) < 128:
            [(whole,)] = ask(moe.server.url, lambda c, s=s: c.generate(s.tokens, {"max_tokens": 1}))
            assert agreement(s.rollout_routed_experts, whole.routed_experts[:-1]) > 0.98


def test_a_server_that_records_nothing_is_named(server: Server) -> None:
    cfg = validate(server.cfg.model_dump() | {"rollout": server.cfg.rollout.model_dump() | {"routing_replay": True}}, "test")
    with pytest.raises(VimeError, match="no routed_experts came back") as e:
        sample_groups(server.url, cfg, [group(2)])
    assert "--enable-return-routed-experts" in str(e.value)


def routed_batch(seed: int) -> list[list[Sample]]:
    """make_batch with experts at random; those of a prompt are the same in most of its samples."""
    rng = np.random.default_rng(seed)

    def choose(n: int) -> np.ndarray:
        return rng.random((n, LAYERS, EXPERTS)).argsort(-1)[..., :TOP_K].astype(np.uint8)

    batch = make_batch(seed)
    for members in batch:
        prompt = choose(members[0].prompt_length)
        for s in members:
            s.tokens = [t % VOCAB for t in s.tokens]
            last = s.prompt_length + max(i for i, m in enumerate(s.loss_mask) if m)
            head = choose(len(prompt)) if s.index % 4 == 3 else prompt
            s.rollout_routed_experts = np.concatenate([head, choose(last - len(head))])
            s.check()
    return batch


def plain_log_probs(model: PreTrainedModel, s: Sample, temperature: float) -> torch.Tensor:
    """Of one sample's trained tokens, by an unpacked forward of transformers with other routers."""
    assert s.rollout_routed_experts is not None
    kept = {i: r.forward for i, r in routers(model).items()}
    for i, router in routers(model).items():

        def forced(hidden: torch.Tensor, router: Any = router, rows: Any = s.rollout_routed_experts[:, i]) -> Any:
            p = torch.softmax(hidden @ router.weight.T, -1)
            ids = torch.cat([torch.tensor(rows.astype(int)), p.topk(TOP_K).indices[len(rows) :]])
            w = torch.stack([p[t, ids[t]] / p[t, ids[t]].sum() for t in range(len(ids))])
            return p, w, ids

        router.forward = forced
    z = model(torch.tensor([s.tokens])).logits[0, s.prompt_length - 1 : -1] / temperature
    for i, router in routers(model).items():
        router.forward = kept[i]
    return torch.log_softmax(z, -1)[range(s.response_length), s.tokens[s.prompt_length :]][torch.tensor(s.loss_mask) > 0]


def replaying(folder: Path, out: Path, **train: Any) -> Config:
    algo = {"kl_loss_coef": 0.1}
    return make_cfg(folder, out, rollout={"routing_replay": True}, train={"lr": 1e-4, "skip_zero_advantage": False} | train, algo=algo)


def test_packed_replay_equals_a_plain_forward_with_forced_experts(folder: Path, tmp_path: Path) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    samples = [s for g in routed_batch(3) for s in g]
    with one_rank(replaying(folder, tmp_path)) as t, torch.no_grad():
        p = packed(samples)
        want = torch.cat([plain_log_probs(plain, s, 0.8) for s in p.samples])
        torch.testing.assert_close(t.log_probs(t.model, p), want, rtol=0, atol=2e-5)
        p.routing = None
        assert (t.log_probs(t.model, p) - want).abs().mean() > 0.1


def stepped(trainer: Any, cfg: Config, batch: list[list[Sample]]) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    trainer.setup()
    before = weights(trainer)
    metrics = train_once(trainer, cfg, 1, batch)
    return metrics, {k: v - before[k] for k, v in weights(trainer).items()}


def test_ranks_and_recomputation_change_nothing(folder: Path, tmp_path: Path, two_ranks: Ranks) -> None:
    """One step under FSDP, under gradient checkpointing, in many micro-batches; the reference, the same model, is replayed like the policy."""
    with one_rank(replaying(folder, tmp_path)) as t:
        before, m = weights(t), train_once(t, t.cfg, 1, routed_batch(4))
        moved = {k: v - before[k] for k, v in weights(t).items()}
    assert m["train/kl_loss"] < 1e-9 and m["train/routing_flips"] > 0.5
    assert all(moved[f"model.layers.{i}.mlp.gate.weight"].abs().sum() > 0 for i in (1, 2)), "the router learns"
    for changes in ({"gradient_checkpointing": True}, {"max_tokens_per_gpu": 24, "gradient_checkpointing": True}):
        cfg = replaying(folder, tmp_path, **changes)
        cfg.parallel.fsdp = 2
        for got, steps in two_ranks(stepped, cfg, routed_batch(4)):
            for k in ("train/loss", "train/grad_norm", "train/logprob_abs_diff", "train/kl_loss"):
                assert math.isclose(got[k], m[k], rel_tol=1e-4, abs_tol=1e-6), (k, got[k], m[k])
            assert abs(got["train/routing_flips"] - m["train/routing_flips"]) < 0.1, "a prompt may count once or more often"
            other = torch.cat([(steps[k] - moved[k]).abs().flatten() for k in moved]) > 1e-5
            assert other.float().mean() < 1e-3, "Adam's step is of size lr, 1e-4, whatever the gradient: where that is rounding it differs"
