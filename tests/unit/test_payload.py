"""Groups of samples become typed arrays, those become bytes, and both come back as they were."""

import base64
import hashlib
import json
import os
from array import array
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load

from vime.data import plane
from vime.data.payload import fields_of, samples_of
from vime.errors import VimeError
from vime.sample import Sample, Status
from vime.sections import DataPlaneConfig

text = st.text(st.characters(), max_size=8)  # lone surrogates included
leaves = st.none() | st.booleans() | st.integers() | st.floats() | text
tree = st.recursive(leaves, lambda t: st.lists(t, max_size=3) | st.dictionaries(text, t, max_size=3), max_leaves=8)
uris = st.binary(min_size=1, max_size=40).map(lambda b: "data:image/png;base64," + base64.b64encode(b).decode())
images = st.sampled_from(["/a/b.png", "data:image/png;base64,AA%3D%3D", "data:,", "data:image/png;base64,QQ=\n="]) | uris
numbers = st.integers(-(2**70), 2**70) | st.integers(0, 300) | st.booleans() | st.floats()


def lists(values: st.SearchStrategy) -> st.SearchStrategy:
    return st.none() | st.lists(values, max_size=6)


@st.composite
def groups(draw: st.DrawFn) -> list[Sample]:
    """Samples with anything that a Sample may hold, and some of what only a plug-in would put there; layers and top_k are of the group."""
    layers, top_k, kind = draw(st.tuples(st.integers(1, 4), st.sampled_from([1, 2, 3, 8]), st.sampled_from(["u1", "u2"])))
    ints, floats = draw(st.sampled_from([st.integers(0, 300), st.integers(-1, 2**40), numbers])), st.floats(width=draw(st.sampled_from([32, 64])))
    shared = draw(st.lists(images, max_size=3))
    out = []
    for _ in range(draw(st.integers(1, 4))):
        s = Sample(**{n: draw(tree) for n in ("label", "metadata", "train_metadata", "reward", "prompt", "non_generation_time")})
        s.index, s.status, s.response = draw(st.integers(0, 9)), draw(st.sampled_from(Status)), draw(text)
        s.tokens, s.loss_mask, s.token_versions = draw(lists(ints)), draw(lists(ints)), draw(lists(ints))
        s.rollout_log_probs = draw(lists(floats | numbers if draw(st.integers(0, 5)) == 0 else floats))
        if draw(st.booleans()):
            s.rollout_top_p_token_ids = array("i", draw(st.lists(st.integers(0, 2**31 - 1), max_size=6)))
            s.rollout_top_p_token_offsets = array("q", draw(st.lists(st.integers(0, 2**63 - 1), max_size=6)))
        elif draw(st.booleans()):
            s.rollout_top_p_token_ids = s.rollout_top_p_token_offsets = None  # as slime's plug-ins start over
        if draw(st.booleans()):
            s.rollout_routed_experts = draw(hnp.arrays(kind, (draw(st.integers(0, 5)), layers, top_k)))
        if draw(st.booleans()):
            own = draw(st.lists(st.sampled_from(shared), max_size=3)) if shared else []
            s.multimodal_inputs = {"images": [{"image": i, "sha256": draw(text)} for i in own], "token_ids": draw(lists(st.integers(0, 9)))}
        out.append(s)
    return out


def same(a: Sample, b: Sample) -> None:
    one, two = (dict(vars(s)) for s in (a, b))
    rows, back = (d.pop("rollout_routed_experts") for d in (one, two))
    assert repr(one) == repr(two)  # which tells 1, 1.0 and True apart, and NaN is NaN
    assert (rows is None) == (back is None)
    assert rows is None or (rows.dtype == back.dtype and rows.shape == back.shape and (rows == back).all())


@given(groups())
def test_samples_come_back_as_they_were_through_the_bytes(group: list[Sample]):
    fields = fields_of(group)
    head, n = plane.layout(fields)
    packed = np.full(n, 255, np.uint8)
    plane.pack(head, fields, packed)
    assert len(head) % plane.ALIGN == 0
    for read in (plane.unpack("g", packed), load(packed.tobytes())):
        assert read.keys() == fields.keys()
        for name, a in fields.items():
            assert read[name].dtype == a.dtype and read[name].shape == a.shape and read[name].tobytes() == a.tobytes()
        back = samples_of(read)
        assert len(back) == len(group)
        for a, b in zip(group, back):
            same(a, b)


@given(groups(), st.data())
def test_rows_of_a_field_are_one_range_of_its_bytes(group: list[Sample], data: st.DataObject):
    fields = fields_of(group)
    head, n = plane.layout(fields)
    packed = np.zeros(n, np.uint8)
    plane.pack(head, fields, packed)
    name = data.draw(st.sampled_from(sorted(fields)))
    first, end = sorted(data.draw(st.tuples(*[st.integers(0, len(fields[name]))] * 2)))
    dtype, shape, a, b = plane.windows("g", packed[: len(head)], [name], {name: (first, end)})[name]
    rows = packed[a:b].view(dtype).reshape(shape)
    assert rows.tobytes() == np.ascontiguousarray(fields[name][first:end]).tobytes() and rows.shape == fields[name][first:end].shape


def sample(**known: object) -> Sample:
    s = Sample(tokens=[1, 2, 3], **known)
    s.append_tokens([4, 5], [-0.5, -0.25], versions=3, routed_experts=np.arange(4 * 6 * 8, dtype=np.uint8).reshape(4, 6, 8))
    return s


def test_types_are_the_smallest_exact_ones_and_routing_is_layer_major():
    fields = fields_of([sample(), sample()])
    kinds = {k: a.dtype.str for k, a in fields.items()}
    assert kinds | {"tokens": "<i4", "loss_mask": "|u1", "rollout_log_probs": "<f4", "token_versions": "<i4"} == kinds
    assert fields["rollout_routed_experts"].shape == (6, 8, 8) and fields["rollout_routed_experts"].dtype == np.uint8
    part = fields | {"rollout_routed_experts": fields["rollout_routed_experts"][2:4]}  # what a pipeline stage reads
    assert (samples_of(part)[1].rollout_routed_experts == sample().rollout_routed_experts[:, 2:4]).all()
    uneven = sample()
    uneven.rollout_log_probs[1] = -0.1  # no float32
    fields = fields_of([sample(), uneven])
    assert fields["rollout_log_probs"].dtype == np.float64 and samples_of(fields)[1].rollout_log_probs == [-0.5, -0.1]


def test_an_image_is_stored_once_and_nothing_else_of_the_samples_is_shared():
    raw = bytes(range(256)) * 40
    ref = {"image": "data:image/png;base64," + base64.b64encode(raw).decode(), "sha256": hashlib.sha256(raw).hexdigest()}
    group = [sample(index=i, multimodal_inputs={"images": [dict(ref)], "token_ids": [1]}, metadata={"a": [1]}) for i in range(8)]
    fields = fields_of(group)
    assert fields[f"image.{ref['sha256']}"].tobytes() == raw and len(plane.layout(fields)[0]) + sum(a.nbytes for a in fields.values()) < 2 * len(raw)
    back = samples_of(fields)
    back[0].metadata["a"].append(2)
    back[0].multimodal_inputs["images"].clear()
    assert back[1].metadata == {"a": [1]} and back[1].images == [ref]


def test_what_is_missing_or_cannot_be_stored_is_named():
    fields = fields_of([sample()])
    for name in set(fields) - {"rest"}:
        with pytest.raises(VimeError, match=f"field '{name}' was stored with these samples and not read"):
            samples_of({k: v for k, v in fields.items() if k != name})
    with pytest.raises(VimeError, match=r"sample 3 cannot be stored: .*set"):
        fields_of([sample(index=3, metadata={"a": {1}})])
    other = sample()
    other.rollout_routed_experts = other.rollout_routed_experts.astype(np.uint16)
    with pytest.raises(VimeError, match=r"experts of uint16\[4, 6, 8\], uint8\[4, 6, 8\]"):
        fields_of([sample(), other])
    with pytest.raises(VimeError, match="field 'x' has the type complex64"):
        plane.layout({"x": np.zeros(1, np.complex64)})
    head, _ = plane.layout(fields)
    whole = np.frombuffer(head, np.uint8)
    for fields, ranges, said in ((["y"], None, "no field 'y'"), (None, {"y": (0, 1)}, "rows of 'y' are wanted"), (None, {"tokens": (2, 9)}, "rows 2 to 9")):
        with pytest.raises(VimeError, match=f"group g.*{said}"):
            plane.windows("g", whole, fields, ranges)


@given(st.binary(max_size=80) | st.binary(max_size=60).map(lambda b: len(b).to_bytes(8, "little") + b) | tree.map(
    lambda t: (len(b := json.dumps(t).encode())).to_bytes(8, "little") + b))  # fmt: skip
def test_a_damaged_header_is_a_value_error(head: bytes):
    try:
        plane.table_of(np.frombuffer(head, np.uint8))
    except ValueError:
        return
    assert json.loads(head[8 : 8 + int.from_bytes(head[:8], "little")]) == {}


def test_arenas_are_used_again_only_when_nothing_refers_to_them():
    arenas = plane.Arenas()
    a = arenas.take(100)
    at, part = a.ctypes.data, a[10:20].view("u2")[1:].reshape(-1)
    del a
    assert arenas.take(100).ctypes.data != at  # `part` still reads it; the new one is idle again now
    del part
    held = [arenas.take(1 << 20), arenas.take(5)]
    assert at in [h.ctypes.data for h in held]
    dropped = []
    arenas.drop = lambda arena: dropped.append(arena.nbytes)
    del held
    assert arenas.take(3 << 20).nbytes == 3 << 20 and dropped == [1 << 20] * 2


def test_what_a_killed_run_left_in_shared_memory_goes_when_it_starts_again(tmp_path: Path):
    """Without a close: the next start on the same folder has the whole budget, and may use the same keys."""
    settings, group = DataPlaneConfig(budget_bytes=1 << 20), {"left/g0/driver-0": {"tokens": np.zeros(200_000, np.int32)}}
    run = f"left-{os.getpid()}"
    plane.open_store(plane.Plane(settings, run, 1, tmp_path).spec, "driver").put(group)
    again = plane.Plane(settings, run, 1, tmp_path)
    try:
        store = plane.open_store(again.spec, "driver")
        assert store.get(store.put(group))[0]["tokens"].size == 200_000
    finally:
        again.close()
