"""Prompt files: JSONL or parquet rows become groups of fresh Samples, in an order that a seed and one counter determine."""

from __future__ import annotations

import copy
import hashlib
import json
import random
import re
from array import array
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from vime.config import DataConfig
from vime.data import images
from vime.data.tokenizer import Tokenizer
from vime.errors import VimeError, blamed, nearest, said
from vime.sample import Sample, plain

MARK, PART = "<image>", ("image", "image_url")
Parsed = tuple[str, list[dict[str, str]], Any]  # text to tokenize, references to the images in it, label
SLICE = re.compile(r"(?P<path>.+)@\[(?P<start>(-?\d{1,18})?):(?P<stop>(-?\d{1,18})?)\]")


class Row(NamedTuple):
    text: str  # what was tokenized: the rendered chat template, if one applies
    tokens: array[int]
    label: Any
    metadata: dict[str, Any]
    images: list[dict[str, str]]  # references, see images.py, in the order of their placeholders


class Prompts:
    """An endless stream of groups of n samples over a file, and its position. Epoch e visits the rows in the permutation drawn
    from (seed, e). The path may end in a slice of rows: `path@[a:b]`, Python's meaning.

    Raises: VimeError for a missing, unreadable or empty file, and one that lists all bad rows, the first 10 with their place.
    """

    def __init__(self, data: DataConfig, path: str, tokenizer: Tokenizer, n: int, seed: int, max_prompt_len: int):
        self.path, self.n, self.seed, self.shuffle, self.tokenizer = path, n, seed, data.shuffle, tokenizer
        self.given = 0  # prompts given out since the run began
        self.rows = _rows(data, path, tokenizer, max_prompt_len, self.parse)
        self._order: tuple[int, list[int]] = (-1, [])
        digest = hashlib.sha256()
        for r in self.rows:
            shown = [i["sha256"] for i in r.images]
            digest.update(json.dumps([r.tokens.tolist(), r.label, *shown], sort_keys=True, default=str).encode())
        self._digest = digest.hexdigest()[:16]

    def parse(self, data: DataConfig, record: Any, tokenizer: Tokenizer, folder: Path) -> Parsed:
        """A record's text to tokenize, the images in it, and label. Raises: ValueError that says what is wrong with the record."""
        return *render(data, record, tokenizer, folder), plain(record.get(data.label_key), data.label_key)

    def __len__(self) -> int:
        return len(self.rows)

    def next(self, k: int) -> list[list[Sample]]:
        """The next k groups of n samples; `group_index` counts prompts over the whole run, so a second epoch's groups are new ones."""
        return [self.again(g) for g in self.numbers(k)]

    def numbers(self, k: int) -> range:
        """The `group_index` of the next k groups, in place of the groups themselves."""
        self.given += k
        return range(self.given - k, self.given)

    def again(self, g: int) -> list[Sample]:
        """Group g as `next` gave it, or will."""
        return self._group(g, self.rows[self._row(g)], self.n, "group")

    def peek(self) -> Sample:
        """The first sample that `next` would give; nothing moves."""
        return self._group(self.given, self.rows[self._row(self.given)], 1, "group")[0]

    def row(self, g: int, n: int) -> list[Sample]:
        """Row g of the file as a group of n samples, of an evaluation."""
        return self._group(g, self.rows[g], n, "eval")

    def text(self, sample: Sample) -> str:
        """The prompt as the model sees it, special tokens included."""
        return self.tokenizer.decode(sample.tokens[: sample.prompt_length], skip_special_tokens=False)

    def state(self) -> dict[str, Any]:
        """Position and identity of the stream, JSON-able."""
        fixed = {"rows": len(self.rows), "content": self._digest, "n": self.n, "seed": self.seed, "shuffle": self.shuffle}
        return {"given": self.given} | fixed

    def load_state(self, d: dict[str, Any]) -> None:
        """Continue where `state` was taken. Raises: VimeError where the order of samples would not be the same."""
        now = self.state()
        if changed := [f"{k} was {d.get(k)!r}, is {now[k]!r}" for k in now if k != "given" and d.get(k) != now[k]]:
            fix = "resume with the data, tokenizer, chat template, seed and group size it began with, or start a new run"
            raise VimeError(f"{self.path}: not the prompts this run began with: {'; '.join(changed)}", fix)
        self.given = int(d["given"])

    def _row(self, given: int) -> int:
        epoch, at = divmod(given, len(self.rows))
        if not self.shuffle:
            return at
        if self._order[0] != epoch:
            order = list(range(len(self.rows)))
            random.Random(f"{self.seed}/{epoch}").shuffle(order)
            self._order = (epoch, order)
        return self._order[1][at]

    def _group(self, g: int, row: Row, n: int, kind: str) -> list[Sample]:
        return [
            Sample(
                group_index=g, index=g * n + i, rollout_id=g * n + i, prompt=row.text, tokens=row.tokens.tolist(), label=row.label,
                metadata=copy.deepcopy(row.metadata), session_id=f"{kind}-{g}",
                multimodal_inputs={"images": [dict(i) for i in row.images], "token_ids": row.tokens.tolist()} if row.images else None,
            )
            for i in range(n)
        ]  # fmt: skip


def _rows(data: DataConfig, path: str, tokenizer: Tokenizer, max_prompt_len: int, parse: Callable[..., Parsed]) -> list[Row]:
    """Read, check, render and tokenize every row of the slice."""
    m = SLICE.fullmatch(path)
    file = Path(m["path"] if m else path)
    bounds = slice(*(int(x) if x else None for x in (m["start"], m["stop"]))) if m else slice(None)
    with blamed(f"{file}: it cannot be read", OSError, ValueError):
        records = list(_records(file, data))[bounds]
    bad: list[tuple[str, str]] = []  # place, fault
    found: list[tuple[str, str, Any, Any, list[dict[str, str]]]] = []  # place, rendered prompt, label, metadata, images
    for place, record in records:
        try:
            text, shown, label = parse(data, record, tokenizer, file.parent)
            metadata = plain(record.get(data.metadata_key) or {}, data.metadata_key)
            found.append((place, text, label, metadata, shown))
        except ValueError as e:
            bad.append((place, str(e)))
    rows = []
    for start in range(0, len(found), 1024):
        part = found[start : start + 1024]
        # a rendered chat template holds its special tokens already
        ids = tokenizer.encode([text for _, text, *_ in part], special_tokens=not data.apply_chat_template)
        for (place, text, label, metadata, shown), tokens in zip(part, ids):
            if not tokens:
                bad.append((place, "the prompt is rendered to nothing" if data.apply_chat_template else "the prompt has no tokens"))
            if shown and (n := sum(t == tokenizer.image_token for t in tokens)) != len(shown):
                bad.append((place, f"the chat template renders {n} image tokens (id {tokenizer.image_token}) for {len(shown)} images"))
            if len(tokens) > max_prompt_len:
                bad.append((place, f"prompt of {len(tokens)} tokens, longer than the {max_prompt_len} that the context leaves"))
            rows.append(Row(text, array("i", tokens), label, metadata, shown))
    faults = [f"{place}: {text}" for place, text in bad]
    if len(bad) == len(records) > 1 and len({text for _, text in bad}) == 1:  # such as a broken template: nothing of the rows' own
        faults = [f"every row: {bad[0][1]}"]
    if faults:
        long = any(" tokens, longer than " in f for f in faults)
        listed = "\n  ".join(faults[:10] + ([f"... and {len(faults) - 10} more"] if len(faults) > 10 else []))
        fix = "correct or remove these rows" + (", raise rollout.max_context_len or lower rollout.max_response_len" if long else "")
        raise VimeError(f"{file}: {len(bad)} bad row{'s' if len(bad) > 1 else ''}; {fix}\n  {listed}")
    if not rows:
        raise VimeError(f"{path} holds no prompts", "check the file and the @[a:b] slice")
    return rows


def _records(file: Path, data: DataConfig) -> Iterator[tuple[str, Any]]:
    """(place, record) for each row, of parquet the columns that are used; a line that isn't JSON comes as a ValueError object, so that bad
    lines outside the slice pass. Raises: VimeError; OSError or ValueError of reading."""
    if not file.is_file():
        raise VimeError(f"no such prompt file: {file}", "a slice is written path@[a:b]" if "@" in file.name else "")
    if file.suffix == ".parquet":
        import pyarrow.parquet

        with blamed(f"{file}: not a readable parquet file", pyarrow.ArrowException, OSError):
            table = pyarrow.parquet.read_table(file)
        if data.input_key not in table.column_names:
            raise VimeError(f"{file}: no column {data.input_key!r} (data.input_key)", nearest(data.input_key, table.column_names))
        wanted = {data.input_key, data.label_key, data.metadata_key, data.response_key, data.chosen_key, data.rejected_key, data.image_key}
        table = table.select([key for key in table.column_names if key in wanted])
        types = ", ".join(f"{f.name!r} {f.type}" for f in table.schema)
        with blamed(f"{file}: a column of {types} has no counterpart in Python", pyarrow.ArrowException, ValueError, KeyError):
            rows = table.to_pylist()
        yield from ((f"{file}: row {i}", row) for i, row in enumerate(rows))
        return
    if file.suffix not in (".jsonl", ".json"):
        raise VimeError(f"{file}: prompts must be .jsonl or .parquet")
    with file.open("rb") as f:
        for number, line in enumerate(f, 1):
            if line.strip():
                try:
                    yield f"{file}:{number}", json.loads(line)
                except (ValueError, RecursionError) as e:  # JSONDecodeError, UnicodeDecodeError, or nested too deep
                    yield f"{file}:{number}", ValueError(f"not JSON: {e}")


def render(data: DataConfig, record: Any, tokenizer: Tokenizer, folder: Path) -> tuple[str, list[dict[str, str]]]:
    """The text to tokenize, and the images in it. Raises: ValueError that says what is wrong with the record."""
    if isinstance(record, ValueError):
        raise record
    if not isinstance(record, dict):
        raise ValueError(f"a row must be an object, this is {type(record).__name__}")
    prompt = record.get(data.input_key)
    chat = isinstance(prompt, list) and bool(prompt) and all(isinstance(m, dict) and "role" in m for m in prompt)
    if not prompt or not (isinstance(prompt, str) or chat):
        had = f"it is {prompt!r:.60}" if data.input_key in record else f"the keys are {sorted(record)}"
        raise ValueError(f"no prompt under {data.input_key!r} (data.input_key), a string or a list of chat messages; {had}")
    if not isinstance(record.get(data.metadata_key) or {}, dict):
        raise ValueError(f"{data.metadata_key!r} (data.metadata_key) must be an object")
    if not data.apply_chat_template:
        if chat:
            raise ValueError("a list of chat messages needs data.apply_chat_template = true")
        if data.image_key and record.get(data.image_key):
            raise ValueError("images need data.apply_chat_template = true")
        return _text(str(prompt)), []
    messages = prompt if chat else [{"role": "user", "content": prompt}]
    for i, m in enumerate(messages):
        if not isinstance(m.get("content"), str | list) and not (m.get("tool_calls") and m.get("content") is None):
            raise ValueError(f"message {i} of {data.input_key!r}, of role {m['role']!r}: its content is {m.get('content')!r:.40}, not a text")
    messages, shown = _images(data, messages, record, folder)
    if shown and tokenizer.image_token is None:
        raise ValueError(f"it has {len(shown)} images, and the model takes none: no image_token_id in its config.json")
    try:
        return _text(tokenizer.render(messages, data.chat_template)), shown
    except ValueError:
        raise
    except Exception as e:  # templates raise what they like
        raise ValueError(f"the chat template fails: {said(e)}") from e


def _text(text: str) -> str:
    """Raises: ValueError for half of a surrogate pair, which JSON can spell and no tokenizer takes."""
    if half := re.search("[\ud800-\udfff]", text):
        raise ValueError(f"the prompt holds {half[0]!r}, half of a surrogate pair, at position {half.start()}: not a Unicode character")
    return text


def _images(data: DataConfig, messages: list[dict[str, Any]], record: dict[str, Any], folder: Path) -> tuple[list[dict[str, Any]], list[dict[str, str]]]:
    """The messages with every image as {"type": "image"}, which is what chat templates know, and references to the images in order: those
    of image parts, or those under data.image_key, each in place of an <image> of the text, or all before it where it has none."""
    given = record.get(data.image_key) if data.image_key else None
    waiting = list(given) if isinstance(given, list | tuple) else [given] if given else []
    out, shown = [], []
    at_front = waiting and not any(MARK in str(m.get("content")) for m in messages)
    for m in messages:
        content = m.get("content")
        if isinstance(content, str) and waiting and m["role"] != "system":
            pieces = [p for text in content.split(MARK) for p in ({"type": "image"}, {"type": "text", "text": text})][1:]
            content = [{"type": "image"}] * len(waiting) * bool(at_front) + [p for p in pieces if p.get("text") != ""]
            at_front = False
        if not isinstance(content, list) or not any(isinstance(p, dict) and str(p.get("type")) in PART for p in content):
            out.append(m)
            continue
        parts = []
        for p in content:
            kind = p.get("type") if isinstance(p, dict) else None
            if kind == "text":
                parts.append({"type": "text", "text": str(p.get("text", ""))})
            elif kind in PART:
                own = next((p[k] for k in ("image", "image_url", "url", "path") if p.get(k)), None)
                if own is None and not waiting:
                    raise ValueError("an image part without an image, and none is left under data.image_key")
                shown.append(images.reference(waiting.pop(0) if own is None else own, folder))
                parts.append({"type": "image"})
            else:
                raise ValueError(f"a content part must be of type text, image or image_url, this is {p!r:.60}")
        out.append({**m, "content": parts})
    if waiting:
        raise ValueError(f"{len(waiting)} images under {data.image_key!r} (data.image_key) have no place: as many {MARK} as images, or none")
    return out, shown
