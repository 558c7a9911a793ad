"""Deltas of weights: bit-exact whatever the tensors hold, and refused where anything about them is wrong."""

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from vime.weights import delta

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.int64, torch.bool, torch.float8_e4m3fn]
SHAPES = [(), (0,), (1,), (7,), (3, 0, 2), (4, 5), (2, 3, 4), (70_000,)]  # the last one: gaps beyond 16 bits


def same(a: delta.State, b: delta.State) -> bool:
    return delta.same_form(a, b) and all(torch.equal(delta.bits(a[k]), delta.bits(b[k])) for k in a)


def raw(rng: np.random.Generator, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
    """Any bits at all: infinities, subnormals, NaNs with every payload."""
    n = int(np.prod(shape)) * dtype.itemsize
    data = rng.integers(0, 2 if dtype is torch.bool else 256, n, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape) if n else torch.empty(shape, dtype=dtype)


@st.composite
def pairs(draw: st.DrawFn) -> tuple[delta.State, delta.State]:
    """Weights before and after: in each tensor none, one, few or all of the elements get new bits."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    old, new = {}, {}
    for i, (dtype, shape) in enumerate(draw(st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from(SHAPES)), max_size=5))):
        name = f"layers.{i}.{draw(st.sampled_from(['weight', 'gap:bias', '']))}"
        old[name] = raw(rng, dtype, shape)
        share = draw(st.sampled_from([0.0, 1e-5, 0.01, 0.3, 1.0]))
        moved = torch.from_numpy(np.asarray(rng.random(shape) < share))
        if draw(st.booleans()) and moved.numel():
            moved.view(-1)[-1] = True
        new[name] = torch.where(moved, raw(rng, dtype, shape).view(delta.BITS[dtype.itemsize]), old[name].view(delta.BITS[dtype.itemsize])).view(dtype)
    return old, new


@given(pairs())
def test_a_delta_leads_exactly_from_old_to_new(states):
    old, new = states
    kept, wanted = {k: t.clone() for k, t in old.items()}, {k: t.clone() for k, t in new.items()}
    d = delta.make(old, new)
    assert same(old, kept) and same(new, wanted)
    assert d.changed == sum(int((delta.bits(old[k]) != delta.bits(new[k])).sum()) for k in old)
    assert d.size <= delta.size(new) and d.whole == [k.removeprefix("whole:") for k in d.tensors if k.startswith("whole:")]
    assert bool(d.tensors) == (not same(old, new)) == (delta.checksum(old) != delta.checksum(new))
    delta.apply(old, d.tensors)
    assert same(old, new) and delta.checksum(old) == delta.checksum(new)


def test_signed_zeros_and_nan_payloads_are_changes():
    old = {"a": torch.tensor([0.0, float("nan"), 1.0] + [0.0] * 99)}
    new = {"a": old["a"].clone()}
    assert not delta.make(old, new).tensors  # a NaN equals itself
    new["a"][0], delta.bits(new["a"])[1] = -0.0, 0x7FC00001
    d = delta.make(old, new)
    assert d.changed == 2 and d.tensors["gap:a"].tolist() == [0, 1] and d.tensors["gap:a"].dtype == torch.uint8
    delta.apply(old, d.tensors)
    assert same(old, new)


def test_what_changed_throughout_comes_whole_and_is_named():
    old = {"a": torch.zeros(1000, dtype=torch.bfloat16), "b": torch.zeros(1000, dtype=torch.bfloat16)}
    new = {"a": torch.ones(1000, dtype=torch.bfloat16), "b": old["b"].clone()}
    new["b"][500] = 1
    d = delta.make(old, new)
    assert d.whole == ["a"] and set(d.tensors) == {"whole:a", "gap:b", "bits:b"} and d.size == 2000 + 2 + 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"gap:x": torch.tensor([1]), "bits:x": torch.zeros(1, dtype=torch.int32)},
        {"other:a": torch.zeros(4)},
        {"whole:a": torch.zeros(5)},
        {"whole:a": torch.zeros(4, dtype=torch.int32)},
        {"gap:a": torch.tensor([1])},
        {"gap:a": torch.tensor([1.0]).bfloat16(), "bits:a": torch.zeros(1, dtype=torch.int32)},
        {"bits:a": torch.zeros(1, dtype=torch.int32)},
        {"gap:a": torch.tensor([1]), "bits:a": torch.zeros(1, dtype=torch.int16)},
        {"gap:a": torch.tensor([1, 2]), "bits:a": torch.zeros(1, dtype=torch.int32)},
        {"gap:a": torch.tensor([4]), "bits:a": torch.zeros(1, dtype=torch.int32)},
        {"gap:a": torch.tensor([3, -1]), "bits:a": torch.zeros(2, dtype=torch.int32)},
        {"gap:a": torch.tensor([-1]), "bits:a": torch.zeros(1, dtype=torch.int32)},
    ],
)
def test_a_delta_that_does_not_fit_is_refused(wrong):
    with pytest.raises(ValueError, match=":"):
        delta.apply({"a": torch.zeros(4)}, wrong)


# ------------------------------------------------------------------ the receiver


class Sender:
    """Versions of some weights as files: v0 whole, then deltas."""

    def __init__(self, folder: Path, versions: int = 4):
        torch.manual_seed(0)
        self.states = [{"w": torch.randn(300, 7).bfloat16(), "b": torch.zeros(5)}]
        self.whole, self.deltas = str(folder / "v0"), [str(folder / f"d{v}") for v in range(1, versions)]
        save_file(self.states[0], self.whole, {"checksum": delta.checksum(self.states[0])})
        for path in self.deltas:
            old = self.states[-1]
            new = {k: t.clone() for k, t in old.items()}
            new["w"][torch.rand(300, 7) < 0.01] *= 1.5
            save_file(delta.make(old, new).tensors, path, {"base": delta.checksum(old), "checksum": delta.checksum(new)})
            self.states.append(new)


def test_a_receiver_reads_only_what_it_has_not(tmp_path, monkeypatch):
    s, held, applied = Sender(tmp_path), delta.Held(), []
    apply = delta.apply
    monkeypatch.setattr(delta, "apply", lambda state, d: (applied.append(d), apply(state, d)))
    before = Path(s.whole).read_bytes()
    for n, reads in ((0, 0), (1, 1), (1, 1), (3, 3), (2, 5)):  # the last one goes back, so from the whole file
        assert same(dict(held.read(s.whole, s.deltas[:n])), s.states[n]) and len(applied) == reads
    assert same(dict(delta.Held().read(s.whole, s.deltas)), s.states[3]) and len(applied) == 8  # a new receiver reads all
    assert Path(s.whole).read_bytes() == before
    Path(s.whole).write_bytes(b"gone")  # what is kept does not hang on the file
    assert same(held.state, s.states[2])


def test_a_wrong_delta_is_refused_and_what_is_kept_is_dropped(tmp_path):
    s = Sender(tmp_path)
    held = delta.Held()
    held.read(s.whole, s.deltas[:1])
    with pytest.raises(ValueError, match="delta 2 of 2 is not of the weights before it"):
        held.read(s.whole, [s.deltas[0], s.deltas[2]])
    assert held.state == {} and held.checksum == ""
    held.read(s.whole, s.deltas[:1])
    data = bytearray(Path(s.deltas[1]).read_bytes())
    data[-1] ^= 1  # one bit of one new value
    Path(s.deltas[1]).write_bytes(data)
    with pytest.raises(ValueError, match="checksum"):
        held.read(s.whole, s.deltas[:2])
    assert held.state == {}
    Path(s.deltas[1]).write_bytes(data[:-1])
    with pytest.raises(SafetensorError):
        held.read(s.whole, s.deltas[:2])
    with pytest.raises(FileNotFoundError):
        held.read(s.whole, [str(tmp_path / "none")])
    assert same(dict(held.read(s.whole, s.deltas[:1])), s.states[1])


def test_nothing_is_kept_of_weights_without_a_checksum(tmp_path):
    s = Sender(tmp_path)
    plain = str(tmp_path / "plain")
    save_file(load_file(s.whole), plain)
    held = delta.Held()
    held.read(s.whole, s.deltas[:1])
    assert same(dict(held.read(plain)), s.states[0]) and held.state == {}
    with pytest.raises(ValueError, match="need checksums"):
        held.read(plain, s.deltas[:1])
