"""Every layout against one process, in float32: metrics, each gradient by name, updated weights, and what the servers would get."""

import time
import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from tests.integration.trainer_kit import VOCAB, Ranks, make_batch, make_cfg, make_model, one_rank, train_once
from vime.config import Config
from vime.sample import Sample
from vime.trainer import ring
from vime.trainer.layout import local
from vime.trainer.parallel import whole_parts

pytestmark = pytest.mark.layouts

DENSE = {"num_hidden_layers": 4}
MOE = DENSE | {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "norm_topk_prob": True, "mlp_only_layers": [0]}
MODELS: dict[str, dict[str, Any]] = {  # the untied head's 62 rows are 31 for each of two TP ranks, which FSDP cannot halve
    "llama": {"kind": "llama", "tied": False, "vocab_size": VOCAB + 1, **DENSE},
    "qwen3": {"kind": "qwen3", "tied": True, **DENSE},
    "moe": {"kind": "qwen3_moe", "tied": False, "vocab_size": VOCAB + 1, **MOE},
    "replay": {"kind": "qwen3_moe", "tied": False, "vocab_size": VOCAB + 1, **MOE},  # of random routing, and with recomputation
    "heads2": {"kind": "llama", "num_attention_heads": 2, "num_key_value_heads": 1, **DENSE},
    "heads3": {"kind": "qwen3", "num_attention_heads": 3, "num_key_value_heads": 1, **DENSE},
    "heads6": {"kind": "llama", "num_attention_heads": 6, "num_key_value_heads": 2, "hidden_size": 48, **DENSE},
}
TABLE = [
    ("llama", "fsdp=2"), ("qwen3", "tp=2"), ("llama", "tp=2"), ("llama", "cp=2"), ("llama", "pp=2"), ("qwen3", "pp=2"),
    ("llama", "pp=2 pp_interleave=2"), ("llama", "fsdp=2 tp=2"), ("qwen3", "fsdp=2 tp=2"), ("qwen3", "fsdp=2 cp=2"), ("qwen3", "tp=2 cp=2"),
    ("llama", "cp=4"), ("qwen3", "fsdp=2 pp=2"), ("qwen3", "tp=2 pp=2"), ("llama", "cp=2 pp=2"), ("qwen3", "pp=4"),
    ("llama", "tp=2 pp=2 pp_interleave=2"),
    ("moe", "fsdp=2"), ("moe", "fsdp=2 ep=2"), ("moe", "tp=2 ep=2"), ("moe", "cp=2 ep=2"), ("moe", "pp=2"), ("moe", "fsdp=4 ep=2"),
    ("moe", "fsdp=4 ep=4"), ("moe", "fsdp=2 tp=2 ep=2"), ("moe", "fsdp=2 tp=2 ep=4"), ("moe", "fsdp=2 cp=2 ep=4"), ("moe", "tp=2 cp=2 ep=4"),
    ("moe", "fsdp=2 pp=2 ep=2"), ("moe", "tp=2 pp=2 ep=2"), ("moe", "cp=2 pp=2 ep=2"),
    # Heads run out: a ring of cp, or of 2 with heads dealt out to 2.
    ("heads3", "cp=2"), ("heads3", "cp=4"), ("heads3", "fsdp=2 cp=2"), ("heads3", "cp=2 pp=2"), ("heads2", "cp=4"), ("heads6", "cp=4"),
    ("heads6", "tp=2 cp=2"),
    ("replay", "fsdp=2"), ("replay", "cp=2"), ("replay", "pp=2"), ("replay", "tp=2 ep=2"), ("replay", "fsdp=2 cp=2 ep=4"),
    ("replay", "cp=2 pp=2 ep=2"), ("replay", "tp=2 pp=2 ep=2"), ("replay", "pp=2 pp_interleave=2"),
]  # fmt: skip
SAME = ("loss", "pg_loss", "grad_norm", "entropy", "kl_loss", "ppo_kl", "pg_clipfrac", "logprob_abs_diff", "trained_tokens", "ppo_kl_first")


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    pool = Ranks(4)
    yield pool
    pool.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("layouts")
    for name, shape in MODELS.items():
        make_model(out / name, **shape)
        make_model(out / f"{name}-ref", seed=1, **shape)
    return out


def config_of(folder: Path, model: str, layout: str = "", **changes: Any) -> Config:
    algo = {"kl_loss_coef": 0.1, "entropy_coef": 0.01, "ref_model": str(folder / f"{model}-ref")} | changes.pop("algo", {})
    train = {"lr": 1e-3, "clip_grad": 1e9, "max_tokens_per_gpu": 64, "global_batch_size": 8, "logprob_chunk": 16} | changes.pop("train", {})
    if model == "replay":
        train["gradient_checkpointing"], changes["rollout"] = bool(layout), {"routing_replay": True}
    parallel = {k: int(v) for k, v in (x.split("=") for x in layout.split())}
    return make_cfg(folder / model, folder / (layout.replace(" ", ".") or "one"), algo=algo, train=train, parallel=parallel, **changes)


def whole(t: Any) -> torch.Tensor:
    return (t.full_tensor() if hasattr(t, "full_tensor") else t).detach().clone()


def observe(trainer: Any) -> list[dict[str, torch.Tensor]]:
    """Makes the trainer note all gradients, whole, before each optimizer step."""
    seen: list[dict[str, torch.Tensor]] = []
    step = trainer.optimizer.step

    def noting() -> None:
        seen.append({n: whole(p.grad) for n, p in trainer.model.named_parameters()})
        step()

    trainer.optimizer.step = noting
    return seen


def routed(batch: list[list[Sample]]) -> list[list[Sample]]:
    """With experts at random of all but the last sampled token, in prompts the same for most samples of a group."""
    rng = np.random.default_rng(0)

    def choose(n: int) -> np.ndarray:
        return rng.random((n, MOE["num_hidden_layers"], MOE["num_experts"])).argsort(-1)[..., : MOE["num_experts_per_tok"]].astype(np.uint8)

    for members in batch:
        prompt = choose(members[0].prompt_length)
        for s in members:
            last = s.prompt_length + max(i for i, m in enumerate(s.loss_mask) if m)
            head = choose(len(prompt)) if s.index % 4 == 3 else prompt
            s.rollout_routed_experts = np.concatenate([head, choose(last - len(head))])
    return batch


def run(trainer: Any, cfg: Config, seeds: list[int]) -> dict[str, Any]:
    """Two optimizer steps of several micro-batches for each seed, then a publish."""
    if not hasattr(trainer, "model"):
        trainer.setup()
    gradients, start = observe(trainer), time.monotonic()
    ring.TILE = 8  # so that a row is several
    metrics = [train_once(trainer, cfg, k + 1, routed(make_batch(s)) if trainer.replays else make_batch(s)) for k, s in enumerate(seeds)]
    seconds = time.monotonic() - start
    published, canary = trainer.publish(7)
    weights = {n: whole(p) for n, p in trainer.model.named_parameters()}
    return {"metrics": metrics, "gradients": gradients, "weights": weights, "seconds": seconds, "canary": canary.log_probs,
            "served": load_file(published.path) if published else {}}  # fmt: skip


def merged(results: list[Any]) -> dict[str, Any]:
    """The whole model's view from the ranks', each of which may hold a part of the layers."""
    for r in results:
        assert not isinstance(r, Exception), r
    out = dict(results[0])
    for r in results[1:]:
        for a, b in zip(r["metrics"], out["metrics"], strict=True):
            assert {k: v for k, v in a.items() if "perf" not in k} == pytest.approx({k: v for k, v in b.items() if "perf" not in k}, rel=1e-6)
        for i, g in enumerate(r["gradients"]):
            out["gradients"][i] = g | out["gradients"][i]
        out["weights"] = r["weights"] | out["weights"]
    return out


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Largest difference of an element, as a share of the largest element of its tensor where that is above 1."""
    assert a.keys() == b.keys(), set(a) ^ set(b)
    return max(float((a[k] - b[k]).abs().max() / b[k].abs().max().clamp(min=1)) for k in a)


def compare(got: dict[str, Any], want: dict[str, Any]) -> tuple[float, float, float]:
    """Largest difference of the metrics, the gradients, and the weights wherever Adam's step isn't made of rounding."""
    same = (*SAME, "routing_flips") if "train/routing_flips" in want["metrics"][0] else SAME
    pairs = [(x[f"train/{k}"], y[f"train/{k}"]) for x, y in zip(got["metrics"], want["metrics"], strict=True) for k in same]
    metric = max(abs(x - y) / max(1, abs(y)) for x, y in pairs)
    gradient = max(apart(a, b) for a, b in zip(got["gradients"], want["gradients"], strict=True))
    sure = {n: torch.stack([g[n].abs() for g in want["gradients"]]).amin(0) > 1e-4 for n in want["weights"]}
    assert sum(int(s.sum()) for s in sure.values()) > 0.2 * sum(s.numel() for s in sure.values())
    mask = lambda w: {n: torch.where(sure[n], t, 0) for n, t in w.items()}  # noqa: E731
    return metric, gradient, apart(mask(got["weights"]), mask(want["weights"]))


@pytest.fixture(scope="module")
def single(folder: Path) -> dict[str, dict[str, Any]]:
    out = {}
    torch.set_num_threads(1)
    for name in MODELS:
        cfg = config_of(folder, name)
        with one_rank(cfg) as t:
            out[name] = run(t, cfg, [3])
            assert len(out[name]["gradients"]) == 2
    return out


LINES: list[str] = []


@pytest.fixture(scope="module", autouse=True)
def table(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    if reporter and LINES:
        reporter.write_line("\n| model | layout | ranks | metrics | gradients | weights | s |\n|---|---|---|---|---|---|---|")
        for line in LINES:
            reporter.write_line(line)


@pytest.mark.parametrize(("model", "layout"), TABLE)
def test_layout_equals_one_process(folder: Path, ranks: Ranks, single: dict[str, Any], model: str, layout: str) -> None:
    cfg, want = config_of(folder, model, layout), single[model]
    got = merged(ranks(run, cfg, [3], timeout=90))
    metric, gradient, weight = compare(got, want)
    LINES.append(f"| {model} | `{layout}` | {cfg.parallel.ranks} | {metric:.1e} | {gradient:.1e} | {weight:.1e} | {got['seconds']:.1f} |")
    assert max(metric, gradient, weight) < 1e-5
    served = got["served"]
    assert served.keys() == want["served"].keys() and apart(served, want["served"]) < 5e-3
    assert all(torch.equal(served[n], w) for n, w in got["weights"].items() if "experts" not in n)
    assert torch.tensor(got["canary"]).sub(torch.tensor(want["canary"])).abs().max() < 1e-2


@contextmanager
def doubled() -> Iterator[None]:
    """In the block everything that is float32 elsewhere is float64: what still differs is no rounding."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with patch.object(torch, "float32", torch.float64), patch.object(torch.Tensor, "float", torch.Tensor.double):
            yield
    finally:
        torch.set_default_dtype(before)


def run_doubled(trainer: Any, cfg: Config, seeds: list[int]) -> dict[str, Any]:
    with doubled():
        out = run(trainer, cfg, seeds)
    assert {t.dtype for t in [*out["weights"].values(), *out["gradients"][0].values()]} == {torch.float64}
    return out


@pytest.mark.parametrize(
    ("kind", "layout", "seed"), [("llama", "tp=2 cp=2", 5), ("qwen3", "tp=2 cp=2", 5), ("qwen3", "fsdp=2 tp=2", 3), ("llama", "cp=2 pp=2", 3)]
)  # fmt: skip
def test_what_a_layout_is_apart_is_rounding(tmp_path: Path, ranks: Ranks, kind: str, layout: str, seed: int) -> None:
    """In float32 the second step of the first of these has gradients 7e-5 off: Adam's first step divides gradients that are rounding only by
    their own size, so their weights part by up to lr. In float64 nothing of it is left, so no sum over ranks or in the ring lacks a part."""
    for name in (kind, f"{kind}-ref"):
        file = make_model(tmp_path / name, **(MODELS["heads6"] | {"kind": kind, "seed": int(name == kind)})) / "model.safetensors"
        save_file({n: t.double() for n, t in load_file(file).items()}, file, metadata={"format": "pt"})
    one = config_of(tmp_path, kind)
    with doubled(), one_rank(one) as t:
        want = run(t, one, [seed])
    got = merged(ranks(run_doubled, config_of(tmp_path, kind, layout), [seed], timeout=90))
    metric, gradient, weight = compare(got, want)
    assert metric < 1e-6 and max(gradient, weight) < 1e-12  # a micro-batch's arrays are float32 there, too


def gather(trainer: Any, cfg: Config, limit: int, takers: list[int]) -> tuple[Any, ...]:
    """The weights as they are published, in bfloat16, and: the parts' sizes and numbers of tensors, gathered tensors by how often, whether
    an earlier part was still there."""
    trainer.setup()
    gathered, original = Counter[int](), DTensor.full_tensor

    def counting(self: DTensor, *args: Any, **kw: Any) -> torch.Tensor:
        gathered[self.numel()] += 1
        assert self.dtype == torch.bfloat16
        return original(self, *args, **kw)

    forms, parts = whole_parts(trainer.model, torch.bfloat16, limit, "cpu", takers)
    got: dict[str, torch.Tensor] = {}
    sizes, held, kept = [], list[weakref.ref[torch.Tensor]](), False
    with patch.object(DTensor, "full_tensor", counting):
        for part in parts:
            kept |= any(r() is not None for r in held)
            held = [weakref.ref(t) for t in part.values()]
            sizes.append((sum(t.nbytes for t in part.values()), len(part)))
            for name in list(part):
                got[name] = part.pop(name).clone()
    assert not got or [(n, t.shape, t.dtype) for n, t in forms.items()] == [(n, t.shape, t.dtype) for n, t in got.items()]
    return got, sizes, sum(gathered.values()), kept, len(forms)


@pytest.mark.parametrize(
    ("model", "layout", "takers"),
    [("llama", "fsdp=2", [0, 1]), ("qwen3", "tp=2 pp=2", [0, 1]), ("qwen3", "fsdp=2 pp=2", [1]), ("moe", "fsdp=2 pp=2 ep=2", [0]), ("moe", "tp=2 ep=2", [0, 1])],
)  # fmt: skip
def test_each_weight_is_gathered_once_in_parts_of_bounded_size(folder: Path, ranks: Ranks, model: str, layout: str, takers: list[int]) -> None:
    cfg, limit = config_of(folder, model, layout), 5000
    results = ranks(gather, cfg, limit, takers)
    assert not any(isinstance(r, Exception) for r in results), results
    file = {k: v.bfloat16() for k, v in load_file(folder / model / "model.safetensors").items()}
    for rank, (got, sizes, _, kept, _) in enumerate(results):
        assert got.keys() == (file.keys() if rank in takers else set()) and all(torch.equal(t, file[n]) for n, t in got.items())
        assert not kept, "an earlier part is still in memory"
        # one tensor here is the layer's experts there
        assert all(size <= limit or n == 1 or model == "moe" for size, n in sizes) and len(sizes) > 8
    per_stage = cfg.parallel.ranks // cfg.parallel.pp
    with one_rank(config_of(folder, model)) as t:
        own = len([n for n in t.model.state_dict() if n not in (t.model.all_tied_weights_keys or {})])
    assert sum(r[2] for r in results[::per_stage]) == own


def step_and_save(trainer: Any, cfg: Config, out: str) -> None:
    trainer.setup()
    train_once(trainer, cfg, 1, make_batch(3))
    trainer.save(out)


def resume(trainer: Any, cfg: Config, checkpoint: str) -> dict[str, Any]:
    trainer.setup(checkpoint)
    return run(trainer, cfg, [4])


@pytest.mark.parametrize(
    ("model", "saved", "loaded"),
    [("llama", "fsdp=2 tp=2", "cp=2 pp=2"), ("qwen3", "tp=2 pp=2", "fsdp=2 tp=2"), ("moe", "fsdp=2 tp=2 ep=4", "pp=2 fsdp=2 ep=2"), ("moe", "", "fsdp=4 ep=2")],
)  # fmt: skip
def test_a_checkpoint_of_one_layout_continues_in_another(folder: Path, ranks: Ranks, tmp_path: Path, model: str, saved: str, loaded: str) -> None:
    """And in one process, which must give the same; the moments of the optimizer are what a wrong shard would spoil."""
    one, out = config_of(folder, model), tmp_path / "c"
    out.mkdir()
    assert ranks(step_and_save, config_of(folder, model, saved), str(out))[0] is None
    with one_rank(one, out) as t:
        want = run(t, one, [4])
    got = merged(ranks(resume, config_of(folder, model, loaded), str(out)))
    assert max(compare(got, want)) < 1e-5
    with one_rank(one) as t:
        train_once(t, one, 1, make_batch(3))
        unbroken = run(t, one, [4])
    assert abs(unbroken["metrics"][0]["train/grad_norm"] - want["metrics"][0]["train/grad_norm"]) < 1e-2
    assert apart(load_file(out / "hf" / "model.safetensors"), want["served"]) > 1e-4


def every_logit(args: Any, batch: dict[str, Any], logits: torch.Tensor, sum_of_sample_mean: Any) -> tuple[torch.Tensor, dict[str, Any]]:
    """A loss of the user's own, of all positions: half the mean of squared logits of each sample's response."""
    parts, at = [], 0
    for total, response in zip(batch["total_lengths"], batch["response_lengths"]):
        parts.append(logits[0, at + total - response - 1 : at + total - 1].square().mean(-1))
        at += total
    loss = sum_of_sample_mean(torch.cat(parts)) / 2
    return loss, {"square": loss.detach()}


@pytest.mark.parametrize("changes", [{"loss": {"custom": f"{__name__}:every_logit"}}, {"algo": {"use_opsm": True, "opsm_delta": 1e-4}}], ids=["custom", "opsm"])
@pytest.mark.parametrize("layout", ["tp=2 cp=2", "pp=2 cp=2"])
def test_losses_that_see_whole_samples(folder: Path, ranks: Ranks, changes: dict[str, Any], layout: str) -> None:
    one = config_of(folder, "llama", **changes)
    with one_rank(one) as t:
        want = run(t, one, [5])
    got = merged(ranks(run, config_of(folder, "llama", layout, **changes), [5]))
    names = ("grad_norm", "loss", *(["square"] if "loss" in changes else ["opsm_clipfrac"]))
    assert [got["metrics"][0][f"train/{k}"] for k in names] == pytest.approx([want["metrics"][0][f"train/{k}"] for k in names], abs=1e-5)
    assert max(apart(a, b) for a, b in zip(got["gradients"], want["gradients"], strict=True)) < 1e-5


def test_bf16_runs_in_a_product_of_axes(folder: Path, ranks: Ranks, single: dict[str, Any]) -> None:
    got = merged(ranks(run, config_of(folder, "moe", "tp=2 pp=2 ep=2", train={"dtype": "bfloat16"}), [3]))
    assert got["metrics"][0]["train/loss"] == pytest.approx(single["moe"]["metrics"][0]["train/loss"], abs=0.05)


def kept(trainer: Any, cfg: Config) -> list[str]:
    trainer.setup()
    own = {name: local(p.detach()) for name, p in trainer.model.named_parameters()}
    return [name for name, t in own.items() if t.untyped_storage().nbytes() > t.nbytes]


@pytest.mark.parametrize(("model", "layout"), [("llama", "fsdp=2 tp=2"), ("moe", "fsdp=2 ep=2")])
def test_a_shard_does_not_keep_the_whole_tensor_that_it_was_cut_from(folder: Path, ranks: Ranks, model: str, layout: str) -> None:
    assert ranks(kept, config_of(folder, model, layout)) == [[]] * (4 if "tp" in layout else 2)


def test_a_layout_that_does_not_fit_is_refused_before_the_model_is_read(folder: Path, ranks: Ranks) -> None:
    for said in ranks(run, config_of(folder, "llama", "tp=4"), [3]):
        assert isinstance(said, RuntimeError) and "parallel.tp = 4 does not divide the model's 2 key-value heads" in str(said)
        assert "the nearest layout on 4 ranks: fsdp 2 x tp 2" in str(said)
