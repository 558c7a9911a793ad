"""Files that hold groups of samples: those under way in a checkpoint, and the readable ones of a step."""

import contextlib
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson

from vime.data.payload import samples_of
from vime.data.plane import Lost, Ref, Spec, open_store
from vime.errors import VimeError, blamed
from vime.sample import Sample, meta_of


def write_groups(path: str, *groups: list[Sample] | None) -> None:
    """None, a group that the data plane has lost, becomes null."""
    for s in itertools.chain.from_iterable(g for g in groups if g):  # filters and rewards may have put anything there since the sample was checked
        try:
            s.make_plain()
        except ValueError as e:
            raise VimeError(f"a checkpoint cannot hold {e}", "a plug-in put it there") from e
    lines = (json.dumps(group and [s.to_dict() for s in group]) + "\n" for group in groups)
    _whole(Path(path), "".join(lines).encode())


def read_groups(path: str, ready: list[bool], key: str | None) -> list[Any]:
    with blamed(f"{path} is damaged", OSError, ValueError, TypeError, KeyError, fix="remove its checkpoint: a resume then takes the one before it"):
        rows = [json.loads(line) for line in Path(path).read_text().splitlines()]
        groups = [None if row is None else [Sample.from_dict(d) for d in row] for row in rows]
        if [] in groups:
            raise ValueError("a group without samples")
        return [[[meta_of(s, key) for s in g or ()] if done else [] for g, done in zip(groups, ready, strict=True)], *groups]


def dump_samples(path: str, *groups: list[Sample] | None) -> None:
    """Write samples to `path`, one readable JSON object a line: texts first, then numbers, then per-token arrays of the response."""
    rows = (
        {
            "index": s.index, "uid": s.uid, "group_index": s.group_index, "rollout_id": s.rollout_id, "prompt": s.prompt, "response": s.response,
            "label": s.label, "reward": s.reward, "status": str(s.status), "prompt_length": s.prompt_length,
            "response_length": s.response_length, "weight_versions": s.weight_versions, "removed": s.remove_sample,
            "metadata": s.metadata, "tokens": s.tokens[s.prompt_length :], "log_probs": [round(x, 5) for x in s.rollout_log_probs],
            "loss_mask": s.loss_mask, "prompt_tokens": s.tokens[: s.prompt_length],
            "version_runs": [[v, sum(1 for _ in run)] for v, run in itertools.groupby(s.token_versions)],
        } | ({"images": [i["image"][:200] for i in s.images]} if s.images else {})
        for group in groups for s in group or ()
    )  # fmt: skip
    # half a surrogate pair, which a response may hold, has no UTF-8
    text = "".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows)
    _whole(Path(path), text.encode("utf-8", errors="backslashreplace"))


def dump_log_probs(path: Path, seen: dict[int, list[float]]) -> None:
    """Write the trainer's logprobs of a step's trained tokens, by uid; null where no loss looked at a token."""
    _whole(path, orjson.dumps({str(uid): [round(x, 5) for x in values] for uid, values in seen.items()}))


def _whole(target: Path, content: bytes) -> None:
    """Nobody sees a half-written file."""
    tmp = target.with_suffix(".tmp")
    target.parent.mkdir(parents=True, exist_ok=True)
    tmp.write_bytes(content)
    tmp.replace(target)


def reading(write: Callable[..., None], spec: Spec, path: str, groups: list[Any]) -> int:
    """`write(path, *groups)` of groups in the data plane, None for those that are lost. Returns how many these are."""
    found: list[list[Sample] | None] = []
    with contextlib.closing(open_store(spec)) as store:
        for group in groups:
            try:
                found.append(samples_of(store.get([group])[0]) if isinstance(group, Ref) else group)
            except Lost:
                found.append(None)
    write(path, *found)
    return found.count(None)
