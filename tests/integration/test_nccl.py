"""Weights over NCCL, where there is none: planning, handshake, packing and failures as they are, the bytes over gloo (see nccl_kit)."""

import json
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.multiprocessing as mp
from safetensors.torch import load_file

from tests.integration.nccl_kit import over_gloo, serve
from tests.integration.trainer_kit import Ranks, make_batch, make_cfg, make_model, one_rank, train_once
from vime.config import Config
from vime.errors import VimeError
from vime.procs import free_port
from vime.weights import Receiver, delta

BUFFER = 4096  # bytes; the largest tensors of these models have more
Start = Callable[..., str]


@pytest.fixture(scope="module")
def start() -> Iterator[Start]:
    """Starts a server of `workers` processes' worth; its URL."""
    context, processes = mp.get_context("spawn"), []

    def one(workers: int, fault: str = "") -> str:
        ours, theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(theirs, workers, fault), daemon=True))
        processes[-1].start()
        assert ours.poll(120)
        return str(ours.recv())

    yield one
    for p in processes:
        p.kill()


def config_of(folder: Path, model: Path, **changes: Any) -> Config:
    return make_cfg(model, folder, weights={"transport": "nccl", "buffer_size": BUFFER, "canary": False}, **changes)


def asked(url: str) -> Any:
    with urllib.request.urlopen(url) as r:
        return json.loads(r.read())


def publishes(trainer: Any, cfg: Config, sent: list[list[Receiver]]) -> Any:
    """A publish to each list of servers, with a step before it. Returns: of rank 0 what was sent at last, its metrics, and the file that
    is written for a server that missed it."""
    trainer.setup()
    with pytest.MonkeyPatch.context() as patch:
        over_gloo(patch.setattr)
        for version, receivers in enumerate(sent, 1):
            train_once(trainer, cfg, version, make_batch(version))
            new, _ = trainer.publish(version, receivers)
    if trainer.rank:
        return None
    path = trainer.whole(len(sent))
    return delta.checksum(trainer.publisher.last), new.metrics, delta.checksum(load_file(path)), max(t.nbytes for t in load_file(path).values())


def check(url: str, result: Any, version: int, joined: int) -> list[float]:
    """That every worker of a server has what was sent, in buckets that keep to the bound; when it took the last update."""
    checksum, _, on_file, largest = result
    got = asked(url)
    assert set(got["sums"]) == {checksum} == {on_file} and got["version"] == str(version) and got["joined"] == joined
    assert BUFFER < got["largest"] <= BUFFER + largest, "vLLM packs until a bucket is over its size"
    return got["updates"][-1]


def test_ranks_send_the_same_bits_to_several_servers_at_once(tmp_path: Path, start: Start, two_ranks: Ranks) -> None:
    model = make_model(tmp_path / "m", "qwen3", num_hidden_layers=3)
    urls = [start(2), start(1)]
    servers, healed = ([Receiver(i, u, n, epoch) for i, (u, n) in enumerate(zip(urls, (2, 1)))] for epoch in (0, 1))
    cfg = config_of(tmp_path, model, parallel={"fsdp": 2})
    results = two_ranks(publishes, cfg, [servers, servers, healed])
    assert not any(isinstance(r, Exception) for r in results), results
    assert results[0][1]["weights/senders"] == 2
    (a, b), (c, d) = (check(url, results[0], 3, joined=2) for url in urls)  # groups are formed anew only for another process
    assert max(a, c) < min(b, d), "one server waited for the other"
    results = two_ranks(publishes, config_of(tmp_path, model, parallel={"pp": 2}), [servers])  # the two are one model: one sends to both
    assert results[0][1]["weights/senders"] == 1
    for url in urls:
        check(url, results[0], 1, joined=3)


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("dies", r"NCCL, sending weights v1 to engine 0 .*: (engine 0: POST /update_weights: |.*Connection closed by peer)"),
        ("refuses", r"engine 0: POST /update_weights: HTTP Error 500.*ValueError: no room for these weights"),
        ("deaf", r"NCCL, sending weights v1 to engine 0 .*: not done after 4 s \(train.step_timeout\)"),
        ("gone", r"NCCL, joining engine 0 .*: engine 0: POST /init_weight_transfer_engine: .*refused"),
    ],
)
def test_a_dead_server_is_an_error_and_no_hang(tmp_path: Path, start: Start, monkeypatch: pytest.MonkeyPatch, fault: str, said: str) -> None:
    over_gloo(monkeypatch.setattr)
    url = f"http://127.0.0.1:{free_port()}" if fault == "gone" else start(1, fault)
    cfg = config_of(tmp_path, make_model(tmp_path / "m"), train={"step_timeout": 4 if fault == "deaf" else 60})
    with one_rank(cfg) as t:
        began = time.monotonic()
        with pytest.raises(VimeError, match=said) as e:
            t.publish(1, [Receiver(0, url, 1, 0)])
        assert time.monotonic() - began < 15 and "\n" not in str(e.value)
        with pytest.raises(VimeError, match="wanted whole"):  # what was half sent is no version
            t.whole(1)
