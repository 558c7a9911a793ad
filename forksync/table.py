"""Knowledge base 1, the translation table: upstream's names in, the fork's names out. Paths by path rules, text by ordered rules."""

from __future__ import annotations

import difflib
import hashlib
import json
import re
import tomllib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from re import _parser  # type: ignore[attr-defined]
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forksync.git import ForksyncError

PASSES = 4  # until the text no longer changes
Model = TypeVar("Model", bound=BaseModel)
Step = Callable[[str], str]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class Protect(Strict):
    pattern: str
    why: str = ""


class Rule(Strict):
    kind: Literal["literal", "word", "flag", "regex"] = "literal"
    source: str = Field(alias="from")
    to: str
    scope: list[str] | str = Field("*", alias="in")
    twin: bool = True  # of a flag: also the snake_case name
    n: int = 0
    confidence: str = ""
    why: str = ""


class Example(Strict):
    path: str = "example.txt"
    source: str = Field(alias="in")
    out: str


class TableFile(Strict):
    version: int = Field(1, alias="schema")
    upstream: str = ""
    fork: str = ""
    case_variants: dict[str, list[str]] = {}  # for people: the forms that rules should cover
    path: list[Rule] = []  # regexes, whatever their kind says
    protect: list[Protect] = []
    rule: list[Rule] = []
    example: list[Example] = []


def parsed(kind: type[Model], text: str, where: Path | str) -> Model:
    """A TOML text as its model. Raises: ForksyncError (2) with the key of the first fault."""
    try:
        return kind.model_validate(tomllib.loads(text))
    except tomllib.TOMLDecodeError as e:
        raise ForksyncError(f"{where}: {e}", "a merge that left its markers?") from e
    except ValidationError as e:
        raise ForksyncError(f"{where}: {'; '.join(fault(kind, f) for f in e.errors())}", "see docs/forksync.md") from e


def fault(kind: type[BaseModel], error: Any) -> str:
    """One fault with its key; for a key that does not exist the nearest that does."""
    place, schema = ".".join(map(str, error["loc"])), kind.model_json_schema()
    if error["type"] != "extra_forbidden":
        return f"{place}: {error['msg'].removeprefix('Value error, ')}"
    names = {n for part in (schema, *schema.get("$defs", {}).values()) for n in part.get("properties", {})}
    near = difflib.get_close_matches(str(error["loc"][-1]), sorted(names), 1)
    return f"{place}: no such key" + (f", did you mean {near[0]}?" if near else "")


def load(kind: type[Model], path: Path) -> Model:
    try:
        return parsed(kind, path.read_text("utf-8"), path)
    except FileNotFoundError as e:
        raise ForksyncError(f"{path} does not exist", "run `forksync init` first, or give -C the fork's folder") from e


def matches(path: str, globs: Iterable[str] | str) -> bool:
    """Whether a path fits one of the globs; `*` crosses `/`, so `docs/*` is all below docs."""
    return any(fnmatchcase(path, g) for g in ([globs] if isinstance(globs, str) else globs))


def needles(pattern: str) -> list[str] | None:
    """Literal pieces of which a matching text holds at least one, found in the pattern itself; None where nothing can be said.
    Looking for them first makes translation an order of magnitude faster than running every rule over every file."""
    tree = _parser.parse(pattern)
    branches = tree[0][1][1] if len(tree) == 1 and tree[0][0] is _parser.BRANCH else [tree]
    out = []
    for branch in branches:
        text = "".join(chr(arg) if op is _parser.LITERAL else "\0" for op, arg in branch)
        out.append(max(text.split("\0"), key=len))
    return None if tree.state.flags & re.IGNORECASE or min(map(len, out)) < 3 else out


class Table:
    """A compiled table. Applied until nothing changes, so that translating twice is translating once."""

    def __init__(self, data: TableFile, where: Path | str = "translation.toml"):
        self.data, self.where = data, where
        what = [[(r.source, r.to) for r in data.path], [p.pattern for p in data.protect], [(r.kind, r.source, r.to, r.scope, r.twin) for r in data.rule]]
        self.sha = hashlib.sha256(json.dumps(what).encode()).hexdigest()[:16]  # of what translates, not of notes and examples
        self.paths = [(self._compiled(r.source, f"path.{i}"), r.to) for i, r in enumerate(data.path)]
        self.protects = [(self._compiled(p.pattern, f"protect.{i}"), needles(p.pattern)) for i, p in enumerate(data.protect)]
        self.rules = [(f"rule.{i} ({r.source})", r.scope, *step) for i, r in enumerate(data.rule) for step in self._steps(i, r)]
        self._in_scope: dict[str, list[tuple[str, Any, list[str] | None, Step]]] = {}

    def _compiled(self, pattern: str, key: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern, re.M)
        except re.error as e:
            raise ForksyncError(f"{self.where}: {key}: {e} in {pattern!r}", "a Python regular expression is wanted") from e

    def _steps(self, i: int, r: Rule) -> Iterable[tuple[list[str] | None, Step]]:
        """(needles, text -> text) of a rule."""
        if r.kind == "literal":
            yield [r.source], lambda text: text.replace(r.source, r.to)
        elif r.kind == "regex":
            whole = self._compiled(r.source, f"rule.{i}")
            yield needles(r.source), lambda text: whole.sub(r.to, text)
        else:
            edge = r"[\w-]" if r.kind == "flag" else r"\w"
            word = re.compile(rf"(?<!{edge}){re.escape(r.source)}(?!{edge})")
            yield [r.source], lambda text: word.sub(lambda _: r.to, text)
            if r.kind == "flag" and r.twin:
                old, new = (s.lstrip("-").replace("-", "_") for s in (r.source, r.to))
                twin = re.compile(rf"(?<!\w){re.escape(old)}(?!\w)")
                yield [old], lambda text: twin.sub(lambda _: new, text)

    def path(self, path: str) -> str:
        for _ in range(PASSES):
            before = path
            for pattern, to in self.paths:
                path = pattern.sub(to, path)
            if path == before:
                return path
        raise ForksyncError(f"{self.where}: path {path!r} does not settle", "the output of a path rule is translated again")

    def text(self, text: str, path: str) -> str:
        """The fork's wording of an upstream text; `path` is upstream's, for rules with a scope."""
        if path not in self._in_scope:
            self._in_scope[path] = [r for r in self.rules if r[1] == "*" or matches(path, r[1])]
        last = ""
        for _ in range(PASSES):
            before, kept, at, pieces = text, [], 0, []
            spans = [m.span() for p, heads in self.protects if heads is None or any(h in text for h in heads) for m in p.finditer(text)]
            for start, end in sorted(spans):
                if start >= at and end > start:
                    kept.append(text[start:end])
                    pieces.append(text[at:start])
                    at = end
            text = "\0".join([*pieces, text[at:]])  # a text file holds no NUL, so it can stand for a protected span
            for name, _, heads, step in self._in_scope[path]:
                if heads is None or any(h in text for h in heads):
                    new = step(text)
                    text, last = new, name if new != text else last
            parts = text.split("\0")
            if len(parts) != len(kept) + 1:
                raise ForksyncError(f"{self.where}: {last} swallows a protected span in {path}", "make its pattern narrower")
            text = "".join(a + b for a, b in zip(parts, [*kept, ""]))
            if text == before:
                return text
        raise ForksyncError(f"{self.where}: {path} does not settle: the output of {last} is translated again", "let it not produce what a rule looks for")

    def blob(self, data: bytes, path: str, mode: str) -> bytes:
        """Content of a file (text is translated, binary is not) or the target of a link (translated as a path)."""
        if b"\0" in data:
            return data
        text = data.decode("utf-8", "surrogateescape")
        return (self.path(text) if mode == "120000" else self.text(text, path)).encode("utf-8", "surrogateescape")

    def failing_examples(self) -> list[str]:
        """One line for each golden example that the table does not reproduce."""
        got = [(i, e, self.text(e.source, e.path)) for i, e in enumerate(self.data.example)]
        return [f"example.{i} ({e.path}): {e.source!r} became {text!r}, not {e.out!r}" for i, e, text in got if text != e.out]


def renames(upstream: str, fork: str) -> str:
    """A first translation.toml for a plain renaming: both names in paths, and in text as lower, Capital and UPPER case."""
    forms = dict.fromkeys((a, b) for a, b in zip((upstream, upstream.capitalize(), upstream.upper()), (fork, fork.capitalize(), fork.upper())))
    rules = "".join(f"\n[[rule]]\nfrom = '{a}'\nto = '{b}'\n" for a, b in forms)
    first = (Path(__file__).parent / "renames.toml").read_text("utf-8")
    return first.replace("UP", re.escape(upstream)).replace("FORK", fork) + rules
