"""Adapters alone on their way to a real vLLM server: what it then computes, also for requests that are held over an update."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from tests.integration.rollout_kit import LONG, PROMPT, ask, score
from tests.integration.trainer_kit import one_rank
from vime.config import Config
from vime.errors import VimeError
from vime.rollout.engine import Engine
from vime.rollout.health import Fleet
from vime.rollout.http import EngineClient
from vime.trainer.engine import Trainer

NAMES = ["q_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]  # a part of what vLLM packs, and all of it


@pytest.fixture(scope="module")
def cfg(make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Config:
    lora = {"rank": 3, "alpha": 8, "target_modules": NAMES, "publish": "adapter"}
    return make_config(run_dir=str(tmp_path_factory.mktemp("run")), lora=lora, weights={"transport": "file"})


@pytest.fixture(scope="module")
def engine(cfg: Config, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    engine = Engine(cfg, 0, str(tmp_path_factory.mktemp("server")))
    try:
        engine.start()
        yield engine
    finally:
        engine.stop()


@pytest.fixture(scope="module")
def trainer(cfg: Config) -> Iterator[Trainer]:
    with one_rank(cfg) as t:
        yield t


@pytest.fixture
def fleet(engine: Engine) -> Iterator[Fleet]:
    fleet = Fleet([engine.url], lambda _: engine.restart() and None, None)
    yield fleet
    fleet.close()


def change(model: Any, seed: int) -> None:
    """Adapters that do much."""
    torch.manual_seed(seed)
    with torch.no_grad():
        for p in (p for n, p in model.named_parameters() if ".lora_" in n):
            p.copy_(torch.randn_like(p) * 0.2)


def plain(cfg: Config, trainer: Trainer) -> Any:
    """The same policy by peft, adapters added into the weights."""
    lora = peft.LoraConfig(r=3, lora_alpha=8, target_modules=NAMES)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32), lora)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for n, p in trainer.model.named_parameters():
            own[f"base_model.model.{n}"].copy_(p)
    return model.merge_and_unload().eval()


def apart(a: list[float], b: list[float]) -> float:
    return max(abs(x - y) for x, y in zip(a, b, strict=True))


def test_a_server_has_what_was_trained(cfg: Config, trainer: Trainer, fleet: Fleet, engine: Engine) -> None:
    """Each version and, after a restart, a new process; the file holds adapters only."""
    for version in (1, 2):
        change(trainer.model, version)
        published, canary = trainer.publish(version)
        names = load_file(published.path)
        assert names and all(n.startswith("base_model.model.model.layers.") and ".lora_" in n and ".default" not in n for n in names)
        fleet.publish(version, published.path, canary, tol=1e-4)
        want = score(plain(cfg, trainer), LONG)
        got, served = ask(engine.url, lambda c: c.prompt_logprobs(LONG), lambda c: c.weight_version())
        assert served == version and apart(got, want) < 1e-4
    assert apart(want, score(AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32), LONG)) > 0.1
    wrong = [x + 0.01 for x in canary.log_probs]
    with pytest.raises(VimeError, match=r"weights v3 did not take: its logprobs of the canary are off"):
        fleet.publish(3, published.path, type(canary)(canary.token_ids, wrong), tol=1e-4)


def test_held_requests_go_on_with_the_new_adapter(cfg: Config, trainer: Trainer, fleet: Fleet, engine: Engine) -> None:
    """Each token's logprob is that of the version that it is marked with, and of no other."""
    models = {}
    for version in (4, 5):
        change(trainer.model, version)
        published, canary = trainer.publish(version)
        models[version] = plain(cfg, trainer), published, canary
    fleet.publish(4, models[4][1].path, models[4][2], tol=1e-4)

    async def both() -> Any:
        client = EngineClient(engine.url)
        request = asyncio.create_task(client.generate(PROMPT, {"n": 32, "max_tokens": 100, "ignore_eos": True}))
        await asyncio.sleep(0.4)
        await asyncio.to_thread(fleet.publish, 5, models[5][1].path, models[5][2], 1e-4)
        done = await request
        await client.close()
        return done

    cut = 0
    for choice in asyncio.run(both()):
        assert set(choice.versions) <= {4, 5} and choice.versions == sorted(choice.versions)
        cut += len(set(choice.versions)) == 2
        for version, (model, *_) in models.items():
            want = score(model, PROMPT + choice.token_ids)[len(PROMPT) - 1 :]
            off = [(abs(a - b), v == version) for a, b, v in zip(choice.log_probs, want, choice.versions, strict=True)]
            assert max((d for d, own in off if own), default=0) < 5e-4  # float32 over 3,200 tokens: two products there, one of merged weights here
            assert max((d for d, own in off if not own), default=1) > 1e-2
    assert cut > 0


def test_a_server_without_the_flag_refuses_an_adapter(trainer: Trainer, tiny_server: str) -> None:
    published, canary = trainer.publish(6)
    other = Fleet([tiny_server], None, None)
    try:
        with pytest.raises(VimeError, match=r"weights v6 did not take: .*started without --enable-lora"):
            other.publish(6, published.path, canary)
    finally:
        other.close()


def test_a_layer_that_vllm_does_not_adapt_is_named(cfg: Config, trainer: Trainer, fleet: Fleet, tmp_path: Path) -> None:
    from safetensors import safe_open
    from safetensors.torch import save_file

    published, canary = trainer.publish(7)
    with safe_open(published.path, framework="pt") as f:
        head, tensors = f.metadata(), {n.replace("mlp.up_proj", "mlp.odd_proj"): f.get_tensor(n) for n in f.keys()}  # noqa: SIM118
    save_file(tensors, tmp_path / "odd.safetensors", metadata=head)
    with pytest.raises(VimeError, match=r"weights v7 did not take: .*no adapters for 4 of these layers, model\.layers\.0\.mlp\.odd_proj first"):
        fleet.publish(7, str(tmp_path / "odd.safetensors"), canary)
