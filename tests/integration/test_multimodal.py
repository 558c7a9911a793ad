"""Prompts with images: the trainer's forward against the model's own, and against a real server's sampled logprobs, before and after updates."""

from __future__ import annotations

import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.e2e.harness import job
from tests.integration.rollout_kit import run
from tests.integration.trainer_kit import Ranks, apart, make_cfg, one_rank, train_once, weights
from tests.integration.vision_kit import draw, make_vlm
from vime.config import Config
from vime.data.images import reference
from vime.data.prompts import Prompts
from vime.data.tokenizer import load
from vime.errors import VimeError
from vime.rollout.engine import Engine
from vime.rollout.health import Fleet
from vime.rollout.worker import RolloutWorker
from vime.sample import Sample
from vime.trainer.batch import Item
from vime.trainer.engine import Trainer
from vime.trainer.packing import pack

FAMILIES = ["idefics3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl"]
SIZES = [(40, 30), (64, 64), (100, 31)]


@pytest.fixture(scope="module")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("images")
    return [draw(folder / f"{i}.png", size, i) for i, size in enumerate(SIZES)]


def groups_of(trainer: Trainer, pictures: list[Path], shown: list[list[int]], n: int = 3) -> list[list[Sample]]:
    """A group of n samples per list of images: text, and each image as the run of placeholders that a server would make of it."""
    r, (vision,) = random.Random(0), trainer.vision.values()
    refs = [reference(str(p), Path()) for p in pictures]
    sizes = [vision.count(dict(vision.processor(images=[Image.open(p)], return_tensors="pt"))) for p in pictures]
    out = []
    for g, images in enumerate(shown):
        prompt = [1, *(r.randrange(3, 40) for _ in range(3))]
        for i in images:
            prompt += [vision.image_token] * sizes[i] + [r.randrange(3, 40) for _ in range(2)]
        group = []
        for k in range(n):
            mm = {"images": [refs[i] for i in images], "token_ids": prompt} if images else None
            s = Sample(group_index=g, index=g * n + k, tokens=list(prompt), reward=float(k % 2), multimodal_inputs=mm)
            tokens = [r.randrange(3, 40) for _ in range(r.randint(2, 9))]
            s.append_tokens(tokens, [-3.0] * len(tokens), versions=0)
            group.append(s)
        out.append(group)
    return out


@pytest.mark.parametrize("family", FAMILIES)
def test_a_packed_forward_gives_the_models_own_logprobs(tmp_path: Path, pictures: list[Path], family: str) -> None:
    """Shared prompts, two images in one, text beside them, and image tokens that the policy sampled itself."""
    model = make_vlm(tmp_path, family)
    own = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    with one_rank(make_cfg(model, tmp_path, rollout={"temperature": 1.0})) as trainer:
        (vision,) = trainer.vision.values()
        samples = [s for g in groups_of(trainer, pictures, [[0], [2, 1], [], [1]]) for s in g]
        vision.process(samples)
        batch = pack([Item(s.index, s.group_index, 0.0, 1.0) for s in samples], {s.index: s for s in samples})
        got = trainer.log_probs(trainer.model, batch)
        for s in batch.samples:
            features = [vision.cache[i["sha256"]] for i in s.images]
            more = {k: torch.cat([f[k] for f in features], vision.dim) for k in (features[0] if features else ())}
            ids = torch.tensor([s.tokens])
            if "image_grid_thw" in more:
                more["mm_token_type_ids"] = (ids == vision.image_token).int()
            with torch.no_grad():
                rows = torch.log_softmax(own(input_ids=ids, **more).logits[0], -1)
            want = rows[:-1].gather(1, ids[0, 1:, None])[-s.response_length :, 0]
            mine, got = got[: s.response_length], got[s.response_length :]
            torch.testing.assert_close(mine, want, atol=2e-5, rtol=0)
        before = trainer.log_probs(trainer.model, batch)
        samples[0].tokens[-2] = vision.image_token  # sampled by the policy: no placeholder
        again = pack([Item(s.index, s.group_index, 0.0, 1.0) for s in samples], {s.index: s for s in samples})
        after = trainer.log_probs(trainer.model, again)
        n = samples[0].response_length
        torch.testing.assert_close(after[n:], before[n:], atol=2e-5, rtol=0)
        assert after[:n].isfinite().all() and not torch.allclose(after[:n], before[:n])


def test_tokens_that_do_not_fit_the_images_are_refused(tmp_path: Path, pictures: list[Path]) -> None:
    cfg = make_cfg(make_vlm(tmp_path, "idefics3"), tmp_path)
    with one_rank(cfg) as trainer:
        groups = groups_of(trainer, pictures, [[0], [1, 2]])
        for s in groups[1]:
            del s.tokens[5]
        with pytest.raises(VimeError, match=r"sample 3 has 31 image tokens in its prompt, its 2 images make 32: do server and trainer"):
            train_once(trainer, cfg, 1, groups)


@pytest.mark.parametrize("frozen", [False, True])
def test_the_vision_tower_learns_unless_it_is_frozen(tmp_path: Path, pictures: list[Path], frozen: bool) -> None:
    cfg = make_cfg(make_vlm(tmp_path, "idefics3"), tmp_path, train={"freeze_vision": frozen})
    with one_rank(cfg) as trainer:
        before = weights(trainer)
        train_once(trainer, cfg, 1, groups_of(trainer, pictures, [[0], [1, 2]]))
        changed = {k for k, v in weights(trainer).items() if not torch.equal(v, before[k])}
        assert any("connector" in k for k in changed) and any("text_model" in k for k in changed)
        assert any("vision_model" in k for k in changed) != frozen
        (tmp_path / "saved").mkdir()
        trainer.save(str(tmp_path / "saved"))
    assert AutoModelForImageTextToText.from_pretrained(tmp_path / "saved" / "hf").config.model_type == "idefics3"
    with one_rank(cfg, tmp_path / "saved") as trainer:
        train_once(trainer, cfg, 2, groups_of(trainer, pictures, [[0], [1, 2]]))


def _train(trainer: Trainer, cfg: Config, pictures: list[Path], checkpoint: str | None = None) -> Any:
    trainer.setup(checkpoint)
    metrics = train_once(trainer, cfg, 1, groups_of(trainer, pictures, [[0], [], [], [1, 2]]))
    return metrics, weights(trainer)


def test_two_ranks_train_as_one_where_only_one_has_images(tmp_path: Path, pictures: list[Path], two_ranks: Ranks) -> None:
    """Micro-batches without images take part in the reductions of the vision tower's gradients."""
    model = make_vlm(tmp_path, "idefics3")
    changes = {"train": {"max_tokens_per_gpu": 30}, "rollout": {"n_samples_per_prompt": 3}}
    one = make_cfg(model, tmp_path / "one", **changes)
    with one_rank(one) as trainer:
        want = train_once(trainer, one, 1, groups_of(trainer, pictures, [[0], [], [], [1, 2]])), weights(trainer)
    got = two_ranks(_train, make_cfg(model, tmp_path / "two", parallel={"fsdp": 2}, **changes), pictures)
    for metrics, after in got:
        assert metrics["train/grad_norm"] == pytest.approx(want[0]["train/grad_norm"], rel=1e-4)
        assert apart(after, want[1], by=1e-4) < 1e-3


class Live(NamedTuple):
    url: str
    fleet: Fleet
    model: Path


@pytest.fixture(scope="module", params=FAMILIES)
def live(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    """A real server of a tiny model. That of Idefics3 cuts images into more or fewer tiles."""
    if request.param != "idefics3" and not importlib.util.find_spec("torchvision"):
        pytest.skip(f"vLLM's {request.param} needs torchvision, which is not installed")
    folder = tmp_path_factory.mktemp("live")
    model = make_vlm(folder, request.param)
    engine = Engine(live_cfg(model, folder), 0, str(folder))
    try:
        url = engine.start()
        fleet = Fleet([url], None, None)
        fleet.probe()
        yield Live(url, fleet, model)
        fleet.close()
    finally:
        engine.stop()


def live_cfg(model: Path, folder: Path) -> Config:
    rollout = {"max_context_len": 400, "max_response_len": 12, "n_samples_per_prompt": 4, "temperature": 1.3, "concurrency": 64}
    changes: dict[str, Any] = {"reward": {"function": "tests.integration.plugins:length"}, "vllm": {"block_size": 32}, "train": {"lr": 3e-3}}
    return make_cfg(model, folder, rollout=rollout, **changes)


def rows_of(folder: Path, pictures: list[Path]) -> str:
    """A prompt for each image, one with two, one without."""
    shown = [{"type": "image", "image": str(p)} for p in pictures]
    texts = [{"type": "text", "text": t} for t in ("what?", "and")]
    rows: list[Any] = [[{"role": "user", "content": c}] for c in (*([i, texts[0]] for i in shown), [shown[1], texts[1], shown[2]])]
    (folder / "data.jsonl").write_text("\n".join(json.dumps({"prompt": r, "label": "a"}) for r in [*rows, "no image"]))
    return str(folder / "data.jsonl")


def test_logprobs_of_prompts_with_images_are_those_of_the_server(live: Live, tmp_path: Path, pictures: list[Path]) -> None:
    """Fresh weights, and updated ones: cached embeddings of images seen before must go with the old weights."""
    cfg = live_cfg(live.model, tmp_path)
    prompts = Prompts(cfg.data, rows_of(tmp_path, pictures), load(str(live.model)), 4, 0, 100)
    with one_rank(cfg) as trainer:
        for version in range(3):
            new, canary = trainer.publish(version)
            live.fleet.publish(version, new.path, canary, tol=1e-4)
            done = [samples for _, samples in run(RolloutWorker(cfg, live.url, 0), *prompts.next(5), version=version)]
            lengths = {(len(g[0].images), g[0].prompt_length) for g in done}
            assert {n for n, _ in lengths} == {0, 1, 2} and len(lengths) >= 3
            for s in (s for g in done for s in g):
                s.reward = float(s.index % 2)
            metrics = train_once(trainer, cfg, version + 1, done)
            print(version, {k: v for k, v in metrics.items() if "logprob" in k or "norm" in k})
            assert metrics["train/logprob_abs_diff"] < 1e-4


def test_an_interrupted_sample_goes_on_from_its_tokens_and_images(live: Live, tmp_path: Path, pictures: list[Path]) -> None:
    cfg = live_cfg(live.model, tmp_path)
    prompts = Prompts(cfg.data, rows_of(tmp_path, pictures) + "@[2:3]", load(str(live.model)), 4, 0, 100)
    with one_rank(cfg) as trainer:
        new, canary = trainer.publish(50)
        live.fleet.publish(50, new.path, canary, tol=1e-4)
        ((_, half),) = run(RolloutWorker(cfg, live.url, 0), *prompts.next(1), version=50)
        begun = [list(s.tokens) for s in half]
        for s in half:
            s.status, s.reward = Sample.Status.ABORTED, None
        more = cfg.model_copy(update={"rollout": cfg.rollout.model_copy(update={"max_response_len": 20})})
        ((_, done),) = run(RolloutWorker(more, live.url, 0), half, version=50)
        assert any(len(s.tokens) > len(b) for s, b in zip(done, begun)) and all(s.tokens[: len(b)] == b for s, b in zip(done, begun))
        for k, s in enumerate(done):
            s.reward = float(k % 2)
        assert train_once(trainer, cfg, 51, [done])["train/logprob_abs_diff"] < 1e-4


def test_a_whole_run(live: Live, tmp_path: Path, pictures: list[Path]) -> None:
    data = rows_of(tmp_path, pictures)
    rollout = {"engines": [live.url], "max_context_len": 400, "batch_size": 4}
    evals = {"interval": 2, "datasets": [{"name": "seen", "prompts": data}]}
    with job(tmp_path, live.model, Path(data), rollout=rollout, train={"steps": 2, "skip_zero_advantage": False}, eval=evals) as j:
        assert j.run() == 0, j.printed[-3000:]
        rows = [json.loads(x) for f in sorted((j.folder / "samples").glob("step_*.jsonl")) for x in f.read_text().splitlines()]
        assert len(rows) == 64 and any(r.get("images") == [str(pictures[1]), str(pictures[2])] for r in rows)
        assert max(m["train/logprob_abs_diff"] for m in j.metrics if "train/loss" in m) < 1e-4
        assert [m["step"] for m in j.metrics if "eval/seen/reward" in m] == [0, 2]
