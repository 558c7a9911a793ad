"""Knowledge base 1, the translation table: upstream's names in, the fork's names out. Paths by path rules, text by ordered rules."""

from __future__ import annotations

import hashlib
import re
import tomllib
from collections.abc import Callable, Iterable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from forksync.git import ForksyncError

PASSES = 4  # until the text no longer changes
Model = TypeVar("Model", bound=BaseModel)


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", populate_by_name=True)


class PathRule(Strict):
    source: str = Field(alias="from")
    to: str


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
    path: list[PathRule] = []
    protect: list[Protect] = []
    rule: list[Rule] = []
    example: list[Example] = []


def parsed(kind: type[Model], data: dict[str, Any], where: Path | str) -> Model:
    """A file's content as its model. Raises: ForksyncError (2) with the key of the first fault."""
    try:
        return kind.model_validate(data)
    except ValidationError as e:
        first = e.errors()[0]
        raise ForksyncError(f"{where}: {'.'.join(map(str, first['loc']))}: {first['msg'].lower()}", "see docs/forksync.md") from e


def load_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text("utf-8"))
    except FileNotFoundError as e:
        raise ForksyncError(f"{path} does not exist", "run `forksync init` first, or give -C the fork's folder") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as e:
        raise ForksyncError(f"{path}: {e}", "a merge that left its markers?") from e


def matches(path: str, globs: list[str] | str) -> bool:
    """Whether a path fits one of the globs; `*` crosses `/`, so `docs/*` is all below docs."""
    return any(fnmatchcase(path, g) or ("**/" in g and fnmatchcase(path, g.replace("**/", ""))) for g in ([globs] if isinstance(globs, str) else globs))


def needles(pattern: str) -> list[str] | None:
    """Literal pieces of which a matching text holds at least one, found in the pattern itself; None where nothing can be said.
    Looking for them first makes translation an order of magnitude faster than running every rule over every file."""
    if "(?i" in pattern or "(?x" in pattern:
        pattern = re.sub(r"\(\?i:[^()]*\)", "[^a]", pattern)  # what ignores case says nothing; the rest may
        if "(?i" in pattern or "(?x" in pattern:
            return None
    runs = []
    for branch in _split(pattern):
        bare = re.sub(r"\[(?:\\.|[^\]])*\]", "\n", branch)  # character sets, then escapes and repeated or optional pieces
        bare = re.sub(r"\\[A-Za-z0-9]", "\n", bare)
        while re.search(r"\((?:[^()\\]|\\.)*\)[*+?]?(?:\{[^}]*\})?", bare):
            bare = re.sub(r"\((?:[^()\\]|\\.)*\)[*+?]?(?:\{[^}]*\})?", "\n", bare)
        bare = re.sub(r"(?:\\.|.)(?:[*?]|\{[^}]*\})", "\n", bare)
        pieces = re.split(r"[\n^$.+]", re.sub(r"\\(.)", lambda m: "\n" if m[1] in "^$.+" else m[1], bare))
        best = max(pieces, key=len)
        if len(best) < 3:
            return None
        runs.append(best)
    return runs


def _split(pattern: str) -> list[str]:
    """Top-level alternatives of a regex."""
    out, depth, start, i = [], 0, 0, 0
    in_set = False
    while i < len(pattern):
        c = pattern[i]
        if c == "\\":
            i += 1
        elif in_set:
            in_set = c != "]"
        elif c == "[":
            in_set = True
        elif c in "()":
            depth += 1 if c == "(" else -1
        elif c == "|" and depth == 0:
            out.append(pattern[start:i])
            start = i + 1
        i += 1
    return [*out, pattern[start:]]


class Table:
    """A compiled table. Applied until nothing changes, so that translating twice is translating once."""

    def __init__(self, data: TableFile, where: Path | str = "translation.toml"):
        self.data, self.where = data, where
        self.sha = hashlib.sha256(data.model_dump_json(exclude={"example"}).encode()).hexdigest()[:16]
        self.paths = [(self._compiled(r.source, f"path.{i}"), r.to) for i, r in enumerate(data.path)]
        self.protects = [(needles(p.pattern), self._compiled(p.pattern, f"protect.{i}")) for i, p in enumerate(data.protect)]
        self.rules = [(f"rule.{i} ({r.source})", *step) for i, r in enumerate(data.rule) for step in self._steps(i, r)]
        self._in_scope: dict[str, list[tuple[str, Any, list[str] | None, Any]]] = {}

    def _compiled(self, pattern: str, key: str) -> re.Pattern[str]:
        try:
            return re.compile(pattern, re.M)
        except re.error as e:
            raise ForksyncError(f"{self.where}: {key}: {e} in {pattern!r}", "a Python regular expression is wanted") from e

    def _steps(self, i: int, r: Rule) -> Iterable[tuple[Any, list[str] | None, Callable[[str], str]]]:
        """(scope, needles, text -> text) of a rule."""
        if r.kind == "literal":
            yield r.scope, [r.source], lambda text: text.replace(r.source, r.to)
            return
        if r.kind == "regex":
            whole = self._compiled(r.source, f"rule.{i}")
            yield r.scope, needles(r.source), lambda text: whole.sub(r.to, text)
            return
        word = self._compiled(r"(?<![\w-])" + re.escape(r.source) + r"(?![\w-])" if r.kind == "flag" else r"(?<!\w)" + re.escape(r.source) + r"(?!\w)", f"rule.{i}")
        yield r.scope, [r.source], lambda text: word.sub(lambda _: r.to, text)
        if r.kind == "flag" and r.twin:
            old, new = (s.lstrip("-").replace("-", "_") for s in (r.source, r.to))
            twin = self._compiled(r"(?<!\w)" + re.escape(old) + r"(?!\w)", f"rule.{i}")
            yield r.scope, [old], lambda text: twin.sub(lambda _: new, text)

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
            before = text
            spans: list[tuple[int, int]] = []
            for heads, pattern in self.protects:
                if heads is None or any(h in text for h in heads):
                    spans += [m.span() for m in pattern.finditer(text) if m.end() > m.start()]
            kept, at, pieces = [], 0, []
            for start, end in sorted(spans):
                if start >= at:
                    kept.append(text[start:end])
                    pieces.append(text[at:start])
                    at = end
            text = "\0".join([*pieces, text[at:]])  # a text file holds no NUL, so it can stand for a protected span
            for name, _, heads, step in self._in_scope[path]:
                if heads is None or any(h in text for h in heads):
                    new = step(text)
                    last = name if new != text else last
                    text = new
            parts = text.split("\0")
            if len(parts) != len(kept) + 1:
                raise ForksyncError(f"{self.where}: {last} swallows a protected span in {path}", "make its pattern narrower")
            text = "".join(a + b for a, b in zip(parts, [*kept, ""]))
            if text == before:
                return text
        raise ForksyncError(f"{self.where}: {path} does not settle: the output of {last} is translated again", "let it not produce what a rule looks for")

    def blob(self, data: bytes, path: str, mode: str) -> bytes:
        """Content of a file (text is translated, binary is not) or the target of a link (translated as a path)."""
        if mode == "120000":
            return self.path(data.decode("utf-8", "surrogateescape")).encode("utf-8", "surrogateescape")
        if b"\0" in data:
            return data
        return self.text(data.decode("utf-8", "surrogateescape"), path).encode("utf-8", "surrogateescape")

    def failing_examples(self) -> list[str]:
        """One line for each golden example that the table does not reproduce."""
        out = []
        for i, e in enumerate(self.data.example):
            got = self.text(e.source, e.path)
            if got != e.out:
                out.append(f"example.{i} ({e.path}): {e.source!r} became {got!r}, not {e.out!r}")
        return out


def load(path: Path) -> Table:
    return Table(parsed(TableFile, load_toml(path), path), path)


RENAMES = """# Upstream's names -> the fork's. Rules run in order, on what the earlier ones made; docs/forksync.md has the other kinds.
[[path]]
from = 'UP'
to = 'FORK'

[[protect]]
pattern = 'https?://github\\.com/[\\w.-]+/UP/(?:pull|issues|commit)/[\\w./#-]+'
why = "links to upstream's discussions stay valid"
"""


def renames(upstream: str, fork: str) -> str:
    """A first translation.toml for a plain renaming: both names in paths, and in text as lower, Capital and UPPER case."""
    forms = dict.fromkeys((a, b) for a, b in zip((upstream, upstream.capitalize(), upstream.upper()), (fork, fork.capitalize(), fork.upper())))
    rules = "".join(f"\n[[rule]]\nfrom = '{a}'\nto = '{b}'\n" for a, b in forms)
    example = f'\n[[example]]\nin = "import {upstream}\\n"\nout = "import {fork}\\n"\n'
    return RENAMES.replace("UP", re.escape(upstream)).replace("FORK", fork) + rules + example


def read(text: str, where: Path | str = "translation.toml") -> Table:
    return Table(parsed(TableFile, tomllib.loads(text), where), where)
