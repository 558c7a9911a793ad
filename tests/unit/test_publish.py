"""Which files the trainer writes, and how long they stay."""

import os
import weakref
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from vime import config
from vime.errors import VimeError
from vime.weights import Published, Receiver, delta, routes
from vime.weights.publish import Publisher, write_file


class Run:
    """A publisher and the weights that it gets: a step changes `share` of them."""

    def __init__(self, folder: Path, share: float = 0.01, **weights: object):
        tree = {"model": "-", "run_dir": str(folder), "data": {"prompts": "-"}, "weights": {"transport": "file"} | weights}
        self.publisher, self.share = Publisher(config.validate(tree, "test"), 0), share
        self.weights = {"a": torch.randn(300, 100).bfloat16(), "b": torch.randn(5)}
        self.version = -1

    def publish(self) -> Published:
        self.version += 1
        self.weights["a"][torch.rand(300, 100) < self.share] *= 1.5
        return self.publisher.write(self.weights, self.version)  # the same tensors each time, changed in place, as a trainer's may be

    def files(self) -> list[str]:
        return sorted(os.listdir(self.publisher.folder), key=lambda name: int(name[1:].split(".")[0].split("-")[0]))

    def check(self, new: Published) -> None:
        state = dict(delta.Held().read(new.path, new.deltas))
        assert delta.checksum(state) == delta.checksum(self.weights)


def test_a_streamed_file_is_what_safetensors_writes_and_holds_one_part_at_a_time(tmp_path):
    parts = [
        {"b": torch.randn(3, 5), "a.half": torch.randn(7).bfloat16()},
        {"n": torch.tensor(4), "flags": torch.tensor([True, False, True]), "none": torch.zeros(0, 4)},
        {"turned": torch.randn(4, 6).T, "bytes": torch.arange(5, dtype=torch.uint8)},
    ]
    whole = {k: v.clone() for p in parts for k, v in p.items()}
    held: list[weakref.ref[torch.Tensor]] = []

    def stream():
        while parts:
            assert all(r() is None for r in held), "an earlier part is still in memory"
            part = parts.pop()
            held[:] = [weakref.ref(t) for t in part.values()]
            yield part
            part = None

    write_file(tmp_path / "x", {k: v.to("meta") for k, v in whole.items()}, {"format": "pt"}, stream())
    found = load_file(tmp_path / "x")
    assert found.keys() == whole.keys() and all(torch.equal(found[k], whole[k]) and found[k].dtype == whole[k].dtype for k in whole)
    save_file({k: v.contiguous() for k, v in whole.items()}, tmp_path / "y", metadata={"format": "pt"})
    assert os.path.getsize(tmp_path / "x") == os.path.getsize(tmp_path / "y")
    with safe_open(tmp_path / "x", "pt") as f:
        assert f.metadata() == {"format": "pt"}
    with pytest.raises(VimeError, match="b and 1 more did not come"):
        write_file(tmp_path / "z", {"a": torch.zeros(2), "b": torch.zeros(2), "c": torch.zeros(1)}, {}, [{"a": torch.zeros(2)}])


def test_whole_weights_replace_each_other(tmp_path):
    run = Run(tmp_path)
    for v in range(3):
        new = run.publish()
        run.check(new)
        size = os.path.getsize(new.path)
        assert new.deltas == () and new.metrics == {"weights/full_bytes": 60020, "weights/bytes": size, "weights/delta_fraction": size / 60020}
        assert run.files() == [f"v{i}.safetensors" for i in range(max(0, v - 1), v + 1)]
    assert run.publisher.last == {}


def test_every_kth_version_is_whole_and_no_file_goes_that_may_be_read(tmp_path):
    run, before = Run(tmp_path, delta=True, delta_full_every=3), []
    for v in range(8):
        new = run.publish()
        run.check(new)
        assert len(new.deltas) == v % 3
        now = [new.path, *new.deltas]
        assert set(run.files()) == {os.path.basename(f) for f in [*before, *now]}
        assert os.path.basename(now[-1]) == (f"v{v}-delta.safetensors" if v % 3 else f"v{v}.safetensors")
        assert (new.metrics["weights/delta_fraction"] < 0.1) == bool(v % 3) and new.metrics["weights/bytes"] == os.path.getsize(now[-1])
        assert v == 0 or 0.005 < new.metrics["weights/changed_fraction"] < 0.015
        before = now


def test_deltas_never_add_up_to_whole_weights(tmp_path):
    run = Run(tmp_path, share=0.1, delta=True, delta_full_every=100)
    lengths = []
    for _ in range(8):
        new = run.publish()
        lengths.append(len(new.deltas))
        assert sum(os.path.getsize(d) for d in new.deltas) < 60020
    assert lengths == [0, 1, 2, 3, 4, 5, 6, 0]  # 0.1 x 30,000 x (1 + 2) bytes = 9 kB each, and a header
    run.share = 1.0
    new = run.publish()
    run.check(new)
    assert new.metrics["weights/delta_whole_tensors"] == 1 and new.metrics["weights/changed_fraction"] > 0.99


def test_whole_weights_on_demand_and_after_a_failure(tmp_path, monkeypatch):
    run = Run(tmp_path, delta=True)
    run.publish()
    assert len(run.publish().deltas) == 1
    path = run.publisher.whole(1)
    run.check(Published(path, (), {}))
    assert run.publisher.whole(1) == path
    new = run.publish()
    assert new.path == path and len(new.deltas) == 1  # the next delta is laid over it
    assert run.files() == ["v1.safetensors", "v2-delta.safetensors"]
    for version in (0, 3):
        with pytest.raises(VimeError, match=f"v{version} are wanted whole, but the trainer holds v2"):
            run.publisher.whole(version)

    def full(*args: object) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as m:
        m.setattr(os, "replace", full)
        with pytest.raises(VimeError, match=r"weights v3 could not be written.*No space left"):
            run.publish()
    assert run.files() == ["v1.safetensors", "v2-delta.safetensors"]
    new = run.publish()
    run.check(new)
    assert new.deltas == ()


@given(st.lists(st.integers(1, 16), min_size=1, max_size=20), st.integers(1, 64))
def test_every_server_has_one_sender_and_a_place_in_its_group(workers: list[int], ranks: int) -> None:
    receivers = [Receiver(i, f"http://h:{i}", n, 0) for i, n in enumerate(workers)]
    plan = routes(receivers, ranks)
    senders = [r.sender for r in plan]
    assert len(plan) == min(len(receivers), ranks) and senders[0] == 0 and senders == sorted(set(senders)) and senders[-1] < ranks
    assert sorted(r for route in plan for r, _ in route.receivers) == receivers
    for route in plan:
        taken = [0, *(offset + k for r, offset in route.receivers for k in range(r.workers))]
        assert taken == list(range(route.size)), "ranks of a group that nobody or two would take"
    assert max(len(r.receivers) for r in plan) - min(len(r.receivers) for r in plan) <= 1
