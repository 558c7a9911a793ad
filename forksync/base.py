"""The folder .forksync of a fork: configuration, ledger (knowledge base 2, why the fork differs), lock and audit."""

from __future__ import annotations

import datetime
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field

from forksync.git import DIFF, ForksyncError
from forksync.hunks import Hunk, fingerprint
from forksync.table import Strict, Table, load, load_toml, matches, parsed

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
    forbidden: list[str] = []
    vocabulary: Literal["auto", "off"] = "auto"
    known: str = ""  # a file of names that are fine, one a line


class Metric(Strict):
    max: float | None = None
    tost: float | None = None
    window: int = 20


class Gate(Strict):
    name: str
    kind: Literal["functional", "precision", "convergence"]
    run: str
    timeout_s: float = 900
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
    max_tokens: int = 4096
    api_key_env: str = ""
    timeout_s: float = 300


class Guard(Strict):
    tests: list[str] = ["tests/*", "*/tests/*", "test_*", "*/test_*", "conftest.py", "*/conftest.py"]
    protected: list[str] = [
        ".forksync/*", ".git*", ".github/*", ".gitlab-ci.yml", ".buildkite/*", ".circleci/*", ".pre-commit-config.yaml", "Jenkinsfile", "Makefile", "pytest.ini", "tox.ini",
    ]  # fmt: skip
    max_lines: int = 400


class Loop(Strict):
    max_iterations: int = 8
    stall: int = 2
    per_item_attempts: int = 3
    budget_s: float = 3600
    budget_tokens: int = 400_000


class Config(Strict):
    pair: Pair
    policy: list[Policy] = []
    lint: Lint = Lint()
    gate: list[Gate] = []
    fixer: list[Fixer] = [Fixer(kind="rules")]
    guard: Guard = Guard()
    loop: Loop = Loop()

    def policy_of(self, path: str) -> Policy:
        """The first policy whose glob fits the fork's path."""
        return next((p for p in self.policy if matches(path, p.glob)), Policy(glob="*", mode="mirror"))


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


def storable(lines: Iterable[str]) -> list[str]:
    """TOML holds no lone surrogates: bytes that are no UTF-8 are kept as private characters, and come back."""
    return [x.translate({0xDC00 + i: 0xF700 + i for i in range(128, 256)}) if not x.isascii() else x for x in lines]


def restored(lines: Iterable[str]) -> tuple[str, ...]:
    return tuple(x.translate({0xF700 + i: 0xDC00 + i for i in range(128, 256)}) if not x.isascii() else x for x in lines)


def entry(h: Hunk, count: int, **fields: Any) -> Entry:
    return Entry(id=f"S-{h.fp[:8]}", fp=h.fp, count=count, kind=h.kind, old=storable(h.old), new=storable(h.new), **fields)


@dataclass
class Base:
    """.forksync as read. `save` writes ledger and lock; audit lines are added by `log`."""

    root: Path
    config: Config
    table: Table
    lock: Lock
    ledger: dict[str, Ledgered]
    audit: list[dict[str, Any]]

    @property
    def folder(self) -> Path:
        return self.root / FOLDER

    def active(self, path: str) -> list[Entry]:
        return [e for e in self.ledger.get(path, Ledgered()).d if e.status != "retired"]

    def ledger_sha(self) -> str:
        """Digest of what the gate rests on; wording may be edited by hand."""
        rows = sorted((p, e.fp, e.count, e.status, e.klass == "baseline") for p, f in self.ledger.items() for e in f.d)
        return hashlib.sha256(json.dumps(rows).encode()).hexdigest()[:16]

    def baseline(self) -> int:
        return sum(e.count for f in self.ledger.values() for e in f.d if e.baseline)

    def log(self, action: str, actor: str, **fields: Any) -> None:
        """Add a line to the audit; it holds the hash of the one before."""
        line = {"time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"), "actor": actor, "action": action, **fields}
        line["prev"] = self.audit[-1]["hash"] if self.audit else ""
        line["hash"] = hashlib.sha256(json.dumps(line, sort_keys=True).encode()).hexdigest()[:32]
        self.audit.append(line)
        with (self.folder / "audit.jsonl").open("a", encoding="utf-8") as f:
            f.write(json.dumps(line, sort_keys=True) + "\n")

    def save(self, paths: Iterable[str] = (), everything: bool = False) -> None:
        """Write the ledger files of these paths and the lock. The baseline's bound only falls, but for `rebaseline` and `init`."""
        for path in self.ledger if everything else paths:
            file = self.folder / "ledger" / f"{path}.toml"
            if not self.ledger[path].d:
                file.unlink(missing_ok=True)
                continue
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(tomli_w.dumps(_filled(self.ledger[path])), encoding="utf-8")
        self.lock.ledger_sha = self.ledger_sha()
        self.lock.audit = self.audit[-1]["hash"] if self.audit else ""
        (self.folder / "lock.toml").write_text(tomli_w.dumps(_filled(self.lock)), encoding="utf-8")

    def faults(self) -> list[str]:
        """What is wrong with the folder itself: table or ledger changed without a person's command, audit broken, sign-offs that nobody gave."""
        out = []
        if self.lock.table_sha != self.table.sha:
            out.append("translation.toml is not the table of lock.toml: run `forksync rebaseline`, in a commit of its own")
        if self.lock.ledger_sha != self.ledger_sha():
            out.append("the ledger is not the one of lock.toml (edited by hand, or branches merged): look at it, then `forksync rebaseline`")
        if (self.lock.diff, self.lock.tool) != (DIFF, TOOL):
            out.append(f"lock.toml was written for diff {self.lock.diff}, format {self.lock.tool}; this is {DIFF}, {TOOL}: run `forksync rebaseline`")
        known, signs = {""}, set()
        for i, line in enumerate(self.audit):
            body = {k: v for k, v in line.items() if k != "hash"}
            if line.get("prev") not in known or hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:32] != line.get("hash"):
                out.append(f"audit.jsonl line {i + 1} does not follow from the lines before it: it was edited")
                break
            known.add(line["hash"])
            signs |= {(p, fp) for p, fp in line.get("signs", [])}
        if self.lock.audit not in known:
            out.append("audit.jsonl lacks its last line of lock.toml: it was shortened")
        for path, f in self.ledger.items():
            for e in f.d:
                if e.fp != fingerprint(path, e.kind, restored(e.old), restored(e.new)):
                    out.append(f"ledger/{path}.toml: {e.id}: old and new don't have its fingerprint")
                elif e.status == "signed" and (path, e.fp) not in signs:
                    out.append(f"ledger/{path}.toml: {e.id} is marked signed, but nobody signed it: no such line in audit.jsonl")
        return out + [f"translation.toml: {x}" for x in self.table.failing_examples()]


def _filled(model: Strict) -> dict[str, Any]:
    return model.model_dump(by_alias=True, exclude_defaults=True) if not isinstance(model, Lock) else model.model_dump()


def read(root: Path) -> Base:
    """Raises: ForksyncError (2) with file and key."""
    folder = root / FOLDER
    config = parsed(Config, load_toml(folder / "config.toml"), folder / "config.toml")
    lock = parsed(Lock, load_toml(folder / "lock.toml"), folder / "lock.toml")
    ledger = {}
    for file in sorted((folder / "ledger").rglob("*.toml")) if (folder / "ledger").is_dir() else []:
        ledger[str(file.relative_to(folder / "ledger"))[: -len(".toml")]] = parsed(Ledgered, load_toml(file), file)
    audit = []
    if (folder / "audit.jsonl").exists():
        for i, line in enumerate((folder / "audit.jsonl").read_text("utf-8").splitlines()):
            try:
                audit.append(json.loads(line))
            except json.JSONDecodeError as e:
                raise ForksyncError(f"{folder}/audit.jsonl line {i + 1} is no JSON: {e}", "restore it from git") from e
    return Base(root, config, load(folder / "translation.toml"), lock, ledger, audit)
