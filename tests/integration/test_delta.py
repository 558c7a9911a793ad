"""Deltas against a real vLLM server: bit-equal to whole weights, refused and mended where they are wrong, complete for a new server."""

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM

from tests.integration.rollout_kit import LONG, PROMPT, Stack, ask, score
from vime.config import Config
from vime.errors import VimeError
from vime.rollout.http import EngineClient
from vime.weights import Canary
from vime.weights.publish import Publisher


class Trainer:
    """Stands in for rank 0: a policy of which a step moves one element in a hundred, published in the server's float32."""

    def __init__(self, stack: Stack, cfg: Config):
        self.stack, self.publisher = stack, Publisher(cfg, 0)
        self.model = AutoModelForCausalLM.from_pretrained(cfg.model, dtype=torch.float32).eval()
        self.tensors = {k: t for k, t in self.model.state_dict().items() if k != "lm_head.weight"}

    def step(self) -> None:
        with torch.no_grad():
            for p in self.model.parameters():
                p.mul_(torch.where(torch.rand_like(p) < 0.01, 1.5, 1.0))

    def publish(self, harm: Callable[[str], None] | None = None) -> tuple[int, tuple[str, ...], dict[str, float]]:
        """Version, deltas and metrics; `harm` gets the newest file before a server reads it."""
        stack, version = self.stack, self.stack.version + 1
        new = self.publisher.write(self.tensors, version)
        if harm:
            harm([new.path, *new.deltas][-1])
        canary = Canary(PROMPT, score(self.model, PROMPT))
        stack.fleet.publish(version, new.path, canary, 1e-4, new.deltas, lambda: self.publisher.whole(version))
        stack.version = version
        return version, new.deltas, new.metrics

    def served(self) -> list[float]:
        """The server's logprobs of a fixed prompt, after comparing them with transformers'."""
        version, theirs = ask(self.stack.server.url, lambda c: c.weight_version(), lambda c: c.prompt_logprobs(LONG))
        assert version == self.stack.version
        assert max(abs(a - b) for a, b in zip(theirs, score(self.model, LONG), strict=True)) < 1e-4
        return theirs


@pytest.fixture
def trainer(stack: Stack, make_config: Callable[..., Config], tmp_path: Path) -> Iterator[Trainer]:
    torch.manual_seed(0)
    yield Trainer(stack, make_config(run_dir=str(tmp_path), weights={"transport": "file", "delta": True, "delta_full_every": 4}))


async def loaded(client: EngineClient) -> dict[str, str]:
    """vLLM's own checksums of what it computes with, where it isn't packed."""
    return (await client._json("POST", "/weight_checker", {"action": "checksum"}))["checksums"]


def test_a_server_under_deltas_equals_one_that_got_whole_weights(trainer: Trainer, tmp_path: Path) -> None:
    stack, url = trainer.stack, trainer.stack.server.url
    kinds, seen, refused = [], [], stack.fleet.delta_refused
    for _ in range(6):
        _, deltas, metrics = trainer.publish()
        kinds.append(len(deltas))
        seen.append((trainer.served(), ask(url, loaded)))
        if deltas:
            assert 0.005 < metrics["weights/changed_fraction"] < 0.015 and metrics["weights/bytes"] < 0.05 * metrics["weights/full_bytes"]
        else:
            assert metrics["weights/delta_fraction"] >= 1
        trainer.step()
    assert kinds == [0, 1, 2, 3, 0, 1] and stack.fleet.delta_refused == refused
    assert len({tuple(lps) for lps, _ in seen}) == 6
    path = str(tmp_path / "plain.safetensors")  # without a checksum: the server keeps nothing and loads all of it
    save_file(trainer.publisher.last, path)
    stack.version += 1
    stack.fleet.publish(stack.version, path, None)
    assert ask(url, lambda c: c.prompt_logprobs(LONG), loaded) == [seen[-1][0], *seen[-1][1]]
    trainer.publish()
    trainer.served()


def test_a_wrong_delta_is_refused_and_whole_weights_take_its_place(trainer: Trainer) -> None:
    stack, restarts, refused = trainer.stack, trainer.stack.restarts, trainer.stack.fleet.delta_refused

    def flip(path: str) -> None:
        data = bytearray(Path(path).read_bytes())
        data[-2] ^= 1
        Path(path).write_bytes(data)

    trainer.publish()
    trainer.step()
    trainer.publish(harm=flip)
    assert stack.fleet.delta_refused == refused + 1
    trainer.served()
    trainer.step()
    version, deltas, _ = trainer.publish(harm=os.unlink)  # the next one builds on those; this one is gone before it is read
    assert len(deltas) == 1 and stack.fleet.delta_refused == refused + 2
    trainer.served()
    assert stack.restarts == restarts
    assert {p.name for p in trainer.publisher.folder.iterdir()} == {f"v{version - 1}.safetensors", f"v{version}.safetensors"}
    with pytest.raises(VimeError, match=f"weights v{version + 1} are wanted whole, but the trainer holds v{version}"):
        trainer.publisher.whole(version + 1)


def test_a_new_server_gets_whole_weights_and_every_delta_since(trainer: Trainer) -> None:
    stack = trainer.stack
    for _ in range(2):
        trainer.publish()
        trainer.step()
    restarts, refused = stack.restarts, stack.fleet.delta_refused
    os.kill(stack.server.engine.pid(), signal.SIGKILL)
    _, deltas, _ = trainer.publish()
    assert len(deltas) == 2 and stack.restarts == restarts + 1 and stack.fleet.delta_refused == refused
    trainer.served()
    trainer.step()
    trainer.publish()
    trainer.served()
