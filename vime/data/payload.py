"""A group of samples as typed arrays, and back, without loss: what the data plane moves.

Per-token data are flat arrays under their Sample's name, with `<name>.lengths` (int64) of the samples. Routing is one array (layers, tokens of
all samples, top_k), so that the layers of a pipeline stage are one range of bytes. An image given as a data: URI is `image.<sha256>`, its file's
bytes, once for all samples. All else is `rest`, UTF-8 JSON: an object per sample, which leaves out what is as in the first.
"""

import base64
import binascii
import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from copy import deepcopy
from dataclasses import fields as fields_in
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from vime.errors import VimeError
from vime.sample import Sample, Status

ROUTING = "rollout_routed_experts"
TYPES: dict[str, tuple[type, ...]] = {  # the first that holds every value of a group exactly; where none does, the values go to `rest`
    "tokens": (np.int32, np.int64),
    "loss_mask": (np.uint8, np.int64),
    "rollout_log_probs": (np.float32, np.float64),
    "token_versions": (np.int32, np.int64),
}
ARRAYS = {"rollout_top_p_token_ids": "i", "rollout_top_p_token_offsets": "q"}
NAMES = [f.name for f in fields_in(Sample)]


def fields_of(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
    """Raises: VimeError for samples whose experts are of different shapes or types, and for what JSON cannot hold."""
    out: dict[str, np.ndarray] = {}
    for name, types in TYPES.items():
        _add(out, name, _exact([getattr(s, name) for s in samples], types))
    for name, code in ARRAYS.items():
        values = [getattr(s, name) for s in samples]
        fine = all(isinstance(v, array) and v.typecode == code for v in values)
        _add(out, name, [np.frombuffer(v, code) for v in values] if fine else None)
    rows = [s.rollout_routed_experts for s in samples]
    if known := [r for r in rows if r is not None]:
        if len({(r.dtype, r.shape[1:]) for r in known}) > 1 or known[0].ndim != 3:
            shapes = sorted({f"{r.dtype}{list(r.shape)}" for r in known})
            raise VimeError(f"group {samples[0].group_index}: experts of {', '.join(shapes)}, which must be (tokens, layers, top_k) of one kind")
        out[ROUTING] = np.concatenate(known).transpose(1, 0, 2)
        out[f"{ROUTING}.lengths"] = np.array([-1 if r is None else len(r) for r in rows], np.int64)
    names = [n for n in NAMES if n not in out]
    uris: dict[str, list[str]] = {}
    texts = []
    for s in samples:
        plain = {n: getattr(s, n) for n in names} | {"multimodal_inputs": _without_images(s.multimodal_inputs, out, uris)}
        try:
            texts.append({n: json.dumps(list(v) if isinstance(v, array) else v) for n, v in plain.items()})
        except (TypeError, ValueError) as e:
            raise VimeError(f"sample {s.index} cannot be stored: {e}", "a plug-in put there what JSON cannot hold") from e
    first = texts[0] if texts else {}
    short = [{n: t for n, t in row.items() if i == 0 or t != first[n]} for i, row in enumerate(texts)]
    rest = "[" + ",".join("{" + ",".join(f'"{n}":{t}' for n, t in row.items()) + "}" for row in short) + "]"
    return out | {"rest": np.frombuffer(rest.encode(), np.uint8)}


def samples_of(fields: Mapping[str, np.ndarray]) -> list[Sample]:
    """The way back. Of routing, layers that were left out on reading are left out. Raises: VimeError where a field is missing."""
    rest = json.loads(_field(fields, "rest").tobytes())
    columns = {n: _split(fields, n) for n in (*TYPES, *ARRAYS, ROUTING) if rest and n not in rest[0]}
    uris: dict[tuple[str, str], str] = {}
    out = []
    for i, own in enumerate(rest):
        v = own if i == 0 else deepcopy({n: x for n, x in rest[0].items() if n not in own}) | own
        v |= {n: c[i].tolist() for n, c in columns.items() if n in TYPES}
        v |= {n: array(code, columns[n][i].tobytes()) if n in columns else None if v[n] is None else array(code, v[n]) for n, code in ARRAYS.items()}
        if ROUTING in columns:
            v[ROUTING] = columns[ROUTING][i]
        out.append(v)
    for v in out:
        for ref in (v["multimodal_inputs"] or {}).get("images") or ():
            if isinstance(at := ref.get("image"), list):
                key = (at[0], at[1])
                uris[key] = uris.get(key) or at[0] + base64.b64encode(_field(fields, at[1]).tobytes()).decode()
                ref["image"] = uris[key]
    return [Sample(**(v | {"status": Status(v["status"])})) for v in out]


def _field(fields: Mapping[str, np.ndarray], name: str) -> np.ndarray:
    if name not in fields:
        raise VimeError(f"field {name!r} was stored with these samples and not read", f"read were {', '.join(fields)}")
    return fields[name]


def _add(out: dict[str, np.ndarray], name: str, columns: list[np.ndarray] | None) -> None:
    if columns is not None:
        out[name] = np.concatenate(columns) if columns else np.zeros(0, np.uint8)
        out[f"{name}.lengths"] = np.array([len(c) for c in columns], np.int64)


def _exact(values: list[Any], types: tuple[type, ...]) -> list[np.ndarray] | None:
    """One array for each sample, all of the first type that holds them bit for bit; None where no type does."""
    kind = float if types[0] is np.float32 else int
    if any(type(v) is not list or (v and set(map(type, v)) != {kind}) for v in values):
        return None
    try:
        wide: list[np.ndarray] = [np.array(v, types[-1]) for v in values]
    except OverflowError:
        return None
    for dtype in types:
        with np.errstate(all="ignore"):  # out of range: seen below
            narrow: list[np.ndarray] = [w.astype(dtype) for w in wide]
        if all(n.astype(types[-1]).tobytes() == w.tobytes() for n, w in zip(narrow, wide)):
            return narrow
    return None


def _split(fields: Mapping[str, np.ndarray], name: str) -> list[Any]:
    """What each sample has of a column; of routing (tokens, layers, top_k), or None."""
    flat, lengths = _field(fields, name), _field(fields, f"{name}.lengths").tolist()
    if name == ROUTING:
        flat = flat.transpose(1, 0, 2)
    ends = accumulate((max(0, n) for n in lengths), initial=0)
    return [None if n < 0 else flat[a:b] for n, (a, b) in zip(lengths, pairwise(ends))]


def _without_images(inputs: dict[str, Any] | None, out: dict[str, np.ndarray], uris: dict[str, list[str]]) -> dict[str, Any] | None:
    """A prompt's multimodal_inputs; in place of each image's data: URI [what stands before its bytes, the field that has these]."""
    if not inputs or not isinstance(inputs.get("images"), list):
        return inputs
    images = []
    for ref in inputs["images"]:
        uri = ref.get("image")
        if isinstance(uri, str) and uri.startswith("data:") and uri not in uris:
            head, comma, text = uri.partition(",")
            try:
                raw = base64.b64decode(text, validate=True)
            except (binascii.Error, ValueError):
                raw = b""
            if raw and base64.b64encode(raw).decode() == text:  # else (percent signs, line breaks) it stays as it is
                name = f"image.{hashlib.sha256(raw).hexdigest()}"
                out[name], uris[uri] = np.frombuffer(raw, np.uint8), [head + comma, name]
        images.append(ref | {"image": uris[uri]} if uri in uris else ref)
    return inputs | {"images": images}
