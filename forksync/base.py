"""The folder .forksync of a fork: configuration, ledger (knowledge base 2, why the fork differs), lock and audit."""

from __future__ import annotations

import datetime
import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field, model_validator

from forksync.git import ForksyncError
from forksync.hunks import DIFF, Hunk, fingerprint
from forksync.table import Strict, Table, TableFile, load, matches

FOLDER = ".forksync"
TOOL = "1"  # format of lock, ledger and fingerprints


class Pair(Strict):
    upstream: str
    ref: str = "main"
    branch: str = "main"
    first_parent: bool = True


class Policy(Strict):
    glob: list[str] | str
    mode: Literal["own", "review", "drop", "mirror"]
    reason: str = ""
    expires: datetime.date | None = None


class Lint(Strict):
    forbidden: list[re.Pattern[str]] = []
    vocabulary: Literal["auto", "off"] = "auto"
    known: str = ""  # a file of names that are fine


class Metric(Strict):
    max: float | None = None
    tost: float | None = Field(None, gt=0)
    window: int = Field(20, ge=1)

    @model_validator(mode="after")
    def _bounded(self) -> Metric:
        if (self.max is None) == (self.tost is None):
            raise ValueError("give max (an absolute bound) or tost (a margin of equivalence), one of the two")
        return self


class Gate(Strict):
    name: str
    kind: Literal["functional", "precision", "convergence"]
    run: str = Field(min_length=1)
    timeout_s: float = Field(900, gt=0)
    run_upstream: bool = False
    seeds: int = Field(1, ge=1)
    judge: str = ""
    judge_key: str = ""
    metrics: dict[str, Metric] = {}


class Fixer(Strict):
    kind: Literal["rules", "command", "openai"]
    argv: list[str] = []
    base_url: str = ""
    model: str = ""
    max_tokens: int = Field(4096, ge=1)
    api_key_env: str = ""
    timeout_s: float = Field(300, gt=0)

    @model_validator(mode="after")
    def _complete(self) -> Fixer:
        needs = {"command": ["argv"], "openai": ["base_url", "model"]}.get(self.kind, [])
        if lacking := [k for k in needs if not getattr(self, k)]:
            raise ValueError(f'a fixer of kind "{self.kind}" needs {" and ".join(lacking)}')
        if self.kind == "openai" and not self.base_url.startswith(("http://", "https://")):
            raise ValueError(f"base_url {self.base_url!r} is no http:// or https:// address")
        return self


class Guard(Strict):
    """What fixers may not write, over and above what does not belong to their item."""

    tests: list[str] = ["tests/*", "*/tests/*", "test_*", "*/test_*", "conftest.py", "*/conftest.py"]
    protected: list[str] = [f"{FOLDER}*", ".git*", ".buildkite/*", ".circleci/*", ".pre-commit-config.yaml", "Jenkinsfile", "Makefile", "pytest.ini", "tox.ini"]
    max_lines: int = Field(400, ge=1)


class Loop(Strict):
    max_iterations: int = Field(8, ge=1)
    stall: int = Field(2, ge=1)
    per_item_attempts: int = Field(3, ge=1)
    budget_s: float = Field(3600, ge=0)
    budget_tokens: int = Field(400_000, ge=0)


class Config(Strict):
    pair: Pair
    policy: list[Policy] = []
    lint: Lint = Lint()
    gate: list[Gate] = []
    fixer: list[Fixer] = [Fixer(kind="rules")]
    guard: Guard = Guard()
    loop: Loop = Loop()

    def mode(self, path: str) -> str:
        """Policy of a fork's path: the first whose glob fits."""
        return next((p.mode for p in self.policy if matches(path, p.glob)), "mirror")


class Entry(Strict):
    """One explained difference, or one not explained yet (proposed)."""

    id: str
    fp: str
    count: int = 1
    kind: str
    klass: str = Field("", alias="class")
    reason: str
    status: Literal["proposed", "signed", "retired"] = "proposed"
    refs: list[str] = []
    signed_by: str = ""
    signed_at: datetime.date | None = None
    expires: datetime.date | None = None
    upstream: str = ""
    watch: list[str] = []
    pin: str = ""
    replaces: str = ""  # of a proposal: the id of the entry that it would replace
    old: list[str] = []
    new: list[str] = []

    @property
    def baseline(self) -> bool:
        return self.status == "proposed" and self.klass == "baseline"

    @property
    def sides(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Lines of mirror and fork. TOML holds no lone surrogates: bytes that are no UTF-8 are kept there as private characters."""
        return tuple(x.translate(BACK) for x in self.old), tuple(x.translate(BACK) for x in self.new)


BACK = {0xF700 + i: 0xDC00 + i for i in range(128, 256)}
AWAY = {v: k for k, v in BACK.items()}


class Ledgered(Strict):
    """A path's entries in order of the file, and what both sides were when they were last right (hashes of lines)."""

    mirror: str = ""
    fork: str = ""
    d: list[Entry] = []


class Lock(Strict):
    upstream_commit: str
    mirror_tree: str = ""
    table_sha: str
    ledger_sha: str = ""
    diff: str = DIFF
    tool: str = TOOL
    baseline: int = 0
    lints: dict[str, int] = {}
    audit: str = ""


def entry(h: Hunk, count: int, **fields: Any) -> Entry:
    old, new = ([x.translate(AWAY) for x in side] for side in (h.old, h.new))
    return Entry(id=h.id, fp=h.fp, count=count, kind=h.kind, old=old, new=new, **fields)


def digest(data: Any) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:32]


def put(file: Path, text: str) -> None:
    """Write a file whole or not at all: half a ledger would read like somebody's edit."""
    file.parent.mkdir(parents=True, exist_ok=True)
    part = file.with_name(f"{file.name}.new")
    part.write_text(text, encoding="utf-8")
    part.replace(file)


@dataclass
class Base:
    """.forksync as read. `save` writes ledger and lock; audit lines are added by `log`."""

    root: Path
    config: Config
    table: Table
    lock: Lock
    ledger: dict[str, Ledgered]
    audit: list[dict[str, Any]]
    name: str = FOLDER

    @property
    def folder(self) -> Path:
        return self.root / self.name

    def active(self, path: str) -> list[Entry]:
        return [e for e in self.ledger.get(path, Ledgered()).d if e.status != "retired"]

    def ledger_sha(self) -> str:
        """Digest of what the gate rests on; wording may be edited by hand."""
        return digest(sorted((p, e.fp, e.count, e.status, e.klass == "baseline") for p, f in self.ledger.items() for e in f.d))

    def baseline(self) -> int:
        return sum(e.count for f in self.ledger.values() for e in f.d if e.baseline)

    def log(self, action: str, actor: str, **fields: Any) -> None:
        """Add a line to the audit; it holds the hash of the one before."""
        line = {"time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "actor": actor, "action": action, **fields}
        line["prev"] = self.audit[-1]["hash"] if self.audit else ""
        self.audit.append(line | {"hash": digest(line)})
        with (self.folder / "audit.jsonl").open("a", encoding="utf-8") as f:
            f.write(json.dumps(self.audit[-1], sort_keys=True) + "\n")

    def save(self, paths: Iterable[str] | None = None) -> None:
        """Write the ledger files of these paths (default: all) and the lock. The bound of the baseline only falls."""
        for path in self.ledger if paths is None else paths:
            file = self.folder / "ledger" / f"{path}.toml"
            if self.ledger[path].d:
                put(file, tomli_w.dumps(self.ledger[path].model_dump(by_alias=True, exclude_defaults=True)))
            else:
                file.unlink(missing_ok=True)
        self.lock.baseline = min(self.lock.baseline, self.baseline())
        self.lock.ledger_sha, self.lock.audit = self.ledger_sha(), self.audit[-1]["hash"]
        put(self.folder / "lock.toml", tomli_w.dumps(self.lock.model_dump()))

    def faults(self) -> list[str]:
        """What is wrong with the folder itself: table or ledger changed without a person's command, audit broken, sign-offs that nobody gave."""
        out = []
        if (self.lock.table_sha, self.lock.diff, self.lock.tool) != (self.table.sha, DIFF, TOOL):
            out.append("translation.toml (or forksync's format) is not that of lock.toml: run `forksync rebaseline`, in a commit of its own")
        if self.lock.ledger_sha != self.ledger_sha():
            what = "the ledger is not the one of lock.toml (edited by hand, branches merged, or a command was killed)"
            out.append(f"{what}: look at `git diff {FOLDER}`, then `forksync rebaseline`, or `git checkout {FOLDER}` to go back")
        known, signs = {""}, set()
        for i, line in enumerate(self.audit):
            if line.get("prev") not in known or digest({k: v for k, v in line.items() if k != "hash"}) != line.get("hash"):
                out.append(f"audit.jsonl line {i + 1} does not follow from the lines before it: it was edited")
                break
            known.add(line["hash"])
            signs |= {(p, fp) for p, fp in line.get("signs", [])}
        if self.lock.audit not in known:
            out.append("audit.jsonl lacks its last line of lock.toml: it was shortened; restore it from git")
        for path, e in ((p, e) for p, f in self.ledger.items() for e in f.d):
            if e.fp != fingerprint(path, e.kind, *e.sides):
                out.append(f"ledger/{path}.toml: {e.id}: old and new don't have its fingerprint")
            elif e.status == "signed" and (path, e.fp) not in signs:
                out.append(f"ledger/{path}.toml: {e.id} is marked signed, but nobody signed it: no such line in audit.jsonl")
        return out + [f"translation.toml: {x}" for x in self.table.failing_examples()]


def read(root: Path) -> Base:
    """Raises: ForksyncError (2) with file and key."""
    folder, audit = root / FOLDER, []
    config, lock = load(Config, folder / "config.toml"), load(Lock, folder / "lock.toml")
    files = sorted((folder / "ledger").rglob("*.toml")) if (folder / "ledger").is_dir() else []
    ledger = {str(f.relative_to(folder / "ledger")).removesuffix(".toml"): load(Ledgered, f) for f in files}
    for i, line in enumerate((folder / "audit.jsonl").read_text("utf-8").splitlines() if (folder / "audit.jsonl").exists() else []):
        try:
            audit.append(json.loads(line))
        except json.JSONDecodeError as e:
            raise ForksyncError(f"{folder}/audit.jsonl line {i + 1} is no JSON: {e}", "restore it from git") from e
    if config.lint.known and not (root / config.lint.known).is_file():
        raise ForksyncError(f"{folder}/config.toml: lint.known = {config.lint.known!r}: no such file in {root}", "a file of names, one or more a line")
    return Base(root, config, Table(load(TableFile, folder / "translation.toml"), folder / "translation.toml"), lock, ledger, audit)
