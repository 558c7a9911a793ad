"""The guard: what an agent may do to the files and the history that its reward depends on.

Two layers. `check` reads an action before it runs (shell.py, commands.py, code.py) and holds it against a policy's rules: early feedback, in under
2 ms. `after` looks at the state: whatever the command was, a protected file that differs from the pristine tree is a violation. The third layer is
the grader's (vime/agents/tasks/), which takes nothing of the agent's tree but its diff. docs/reward-hacking.md has the figures of each.
"""

import ast
import copy
import os
import re
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from vime.agents.guard import code
from vime.agents.guard.shell import Act, Reader, World, globbed
from vime.errors import VimeError

Decision = Literal["allow", "warn", "block"]
RANK = {"allow": 0, "warn": 1, "block": 2}
LOOPBACK = re.compile(r"localhost|127\.[\d.]+|\[?::1\]?|0\.0\.0\.0")
HOST = re.compile(r"(?:\b[a-z][a-z0-9+]*://(?:[^/@\s'\"]*@)?|\bgit@|\s[\w.-]+@(?=[\w.-]+:))([\w.-]+|\[[0-9a-f:]+\])")


@dataclass(frozen=True)
class Verdict:
    """`rule`: the id of the rule that decided, None where none applied."""

    decision: Decision = "allow"
    rule: str | None = None
    reason: str = ""


class PathSet(BaseModel, extra="forbid"):
    """Files by name. Globs are relative to the task's root, or absolute; `**` is any depth."""

    globs: list[str]
    excluding: list[str] = []
    existing: bool = False  # only files that were there at the start: new ones are the agent's own
    additive: bool = False  # Python: new tests and imports beside what was there are no change
    part: str = ""  # only what this regular expression finds in them counts

    @cached_property
    def patterns(self) -> list[re.Pattern[str]]:
        return [re.compile("|".join(map(globbed, g)) or r"(?!)") for g in (self.globs, self.excluding)]

    def holds(self, path: str) -> bool:
        return bool(self.patterns[0].fullmatch(path)) and not self.patterns[1].fullmatch(path)

    def differs(self, old: bytes | None, new: bytes | None) -> bool:
        """Whether a file that went from `old` to `new` (None: not there) has changed in what counts."""
        if self.part:
            before, after = ("\n".join(re.findall(self.part, text(t), re.M | re.S)).split() for t in (old, new))
            return before != after
        same = old == new or (self.existing and old is None)
        return not same and not (self.additive and old is not None and new is not None and additive(old, new))


class Rule(BaseModel, extra="forbid", frozen=True):
    """When all that it says holds of an Act. docs/reward-hacking.md has its keys."""

    id: str
    reason: str
    decision: Decision = "block"
    match: dict[Literal["program", "words", "text", "pipe"], str] = {}  # regular expressions; program: the whole of it
    unless_earlier: str = ""  # not where an earlier command of the episode was one of these
    paths: dict[Literal["reads", "changes", "adds", "maybe"], list[str]] = {}  # path sets; one of these holds
    outside: bool = False  # it names a host that is not this machine
    unknown: bool = False  # it could not be decided


class Policy(BaseModel, extra="forbid"):
    """A policy file: path sets, rules for actions (the first that applies), rules for the state."""

    paths: dict[str, PathSet]
    rules: list[Rule]
    state: list[Rule] = []

    @staticmethod
    @cache
    def load(name: str | Path, project: str = "(?!)") -> "Policy":
        """`name`: a policy of this folder, or a TOML file. PROJECT in it: the project's own import names. Raises: VimeError for a bad one."""
        path = Path(name) if str(name).endswith(".toml") else Path(__file__).with_name(f"{name}.toml")
        try:
            found = Policy.model_validate(tomllib.loads(path.read_text().replace("PROJECT", project)))
            for r in [*found.rules, *found.state]:
                if missing := {n for names in r.paths.values() for n in names} - set(found.paths):
                    raise ValueError(f"rule {r.id} names what is not in [paths]: {', '.join(missing)}")
                [re.compile(p) for p in (*r.match.values(), r.unless_earlier)]
        except (OSError, ValueError, re.error) as e:
            fault = " ".join(str(e).split())
            raise VimeError(f"the guard's policy {path} cannot be used: {fault}", "docs/reward-hacking.md says how one is written") from e
        return found


class Guard:
    """One episode's guard. `root`: the task's folder as the agent sees it. `base`: the pristine tree on this host (sandbox.spec.base by default;
    without either it is copied out of the sandbox before the first action). `verdicts`: all that it said."""

    def __init__(self, policy: str | Path = "code_repair", sandbox: Any = None, root: str = "", base: str | Path | None = None):
        self.name, self.sandbox, self.verdicts, self._ran, self.base = policy, sandbox, list[Verdict](), list[str](), Path()
        self.policy, self.world = Policy.load(policy), World((root or getattr(sandbox, "workdir", "/testbed")).rstrip("/"))
        self._shell: Reader | None = None
        if base := base or getattr(getattr(sandbox, "spec", None), "base", None):
            self.learn(Path(base))

    def learn(self, base: Path) -> None:
        """Takes the names, links and packages of the pristine tree."""
        known, packages = pristine(str(base), self.world.root)
        self.base, self.world = base, copy.copy(known)
        self.world.links, self.world.texts = dict(known.links), {}
        self.policy = Policy.load(self.name, packages)

    def check(self, tool: str, args: dict[str, Any], cwd: str = "") -> Verdict:
        """What the rules say of an action that has not run. `cwd`: the folder of the agent's shell, where it is known; else the guard follows the
        shell's `cd`, variables and functions from call to call. Other tools act from the task's root."""
        r, worst = Reader(self.world, cwd or self.world.root), Verdict()
        if "command" in args and "path" not in args and not cwd:
            r = self._shell = Reader(self.world, self.world.root, self._shell)
        try:
            if path := args.get("path") or args.get("file_path"):
                edited(r, path, args)
            elif "code" in args:
                code.read(r, str(args["code"]))
            else:
                r.shell(str(args.get("command") or args.get("cmd") or ""))
        except RecursionError:
            r.act("sh", unknown="what a command does that is nested so deep")
        for act in r.acts:
            rule = next((rule for rule in self.policy.rules if self._applies(rule, act)), None)
            if rule and RANK[rule.decision] > RANK[worst.decision]:
                worst = Verdict(rule.decision, rule.id, f"{rule.reason}: {act.unknown}" if rule.unknown else rule.reason)
            self._ran.append(act.words)
        return worst

    def _applies(self, rule: Rule, act: Act) -> bool:
        for key, pattern in rule.match.items():
            if not (re.fullmatch if key == "program" else re.search)(pattern, getattr(act, key), re.S):
                return False
        if (rule.unknown and not act.unknown) or (rule.unless_earlier and any(re.search(rule.unless_earlier, w) for w in self._ran)):
            return False
        if rule.outside and all(LOOPBACK.fullmatch(m[1]) for m in HOST.finditer(f" {act.words}")):
            return False
        kinds = {"reads": act.of("reads"), "changes": act.of("writes", "deletes"), "adds": act.of("adds"), "maybe": act.of("maybe")}
        some = any(self._in(p, names, kind != "reads") for kind, names in rule.paths.items() for p in kinds[kind])
        return some or not rule.paths or (bool(kinds["maybe"]) and all(self._in(p, rule.paths.get("changes", [])) for p in kinds["maybe"]))

    def _in(self, path: str, names: list[str], whole: bool = True) -> bool:
        """Whether an absolute path is in one of the sets, or (`whole`) a folder that holds a file of one."""
        files, folder, within = self.world.files, path.rstrip("/") + "/", [path]
        if whole and files is None:
            within.append(folder + "test_.py")
        elif whole and (path in self.world.folders or path == self.world.root):
            within += self.world.under(folder)
        for kind in map(self.policy.paths.__getitem__, names):
            if any(kind.holds(p.removeprefix(self.world.root + "/")) and (not kind.existing or files is None or p in files) for p in within):
                return True
        return False

    async def before(self, tool: str, args: dict[str, Any], cwd: str = "") -> Verdict:
        """`check`, kept in `verdicts`; before the first action the pristine tree is learnt."""
        if self.world.files is None and self.sandbox is not None:
            self._copy = tempfile.TemporaryDirectory(prefix="vime-guard-")  # goes with the guard
            await self.sandbox.download(self.world.root, self._copy.name)
            self.learn(Path(self._copy.name))
        self.verdicts.append(self.check(tool, args, cwd))
        return self.verdicts[-1]

    async def after(self, *action: Any) -> Verdict:
        """What the state of the sandbox's files says now, whatever the action was."""
        changed, watched = await self.sandbox.changes(), [self.policy.paths[n] for rule in self.policy.state for n in rule.paths["changes"]]
        now: dict[str, bytes | None] = {}
        for path in (p for p in changed if any(w.holds(p) for w in watched)):
            try:
                now[path] = None if changed[path] == "deleted" else bytes(await self.sandbox.read(f"{self.world.root}/{path}"))
            except (OSError, VimeError):  # a link to nowhere, a folder in a file's place, no longer readable
                now[path] = b""
        self.verdicts.append(self.state(now))
        return self.verdicts[-1]

    def state(self, now: dict[str, bytes | None]) -> Verdict:
        """`now`: files that changed, relative to the root, as they are (None: gone). They are held against the pristine tree."""
        for path, new in now.items():
            old = (self.base / path).read_bytes() if (self.base / path).is_file() else None
            was = set(text(old).splitlines())
            added = "\n".join(s for s in text(new).splitlines() if s not in was)
            for rule in self.policy.state:
                kinds = [k for k in (self.policy.paths[n] for n in rule.paths["changes"]) if k.holds(path)]
                if any(k.differs(old, new) for k in kinds) and re.search(rule.match.get("text", ""), added, re.S):
                    return Verdict(rule.decision, rule.id, f"{path}: {rule.reason}")
        return Verdict()


@lru_cache(64)
def pristine(base: str, root: str) -> tuple[World, str]:
    """What a tree holds, git's own folder left out, as seen at `root`; its packages as a regular expression. Episodes of one task share it."""
    world = World(root, set())
    for folder, names, files in os.walk(base):
        names[:], at = [n for n in names if n != ".git"], root + folder[len(base) :]
        world.links |= {f"{at}/{n}": os.readlink(os.path.join(folder, n)) for n in names + files if os.path.islink(os.path.join(folder, n))}
        world.files |= {f"{at}/{n}" for n in files}  # type: ignore[operator]
    tops = [p for p in world.folders if p.rpartition("/")[0] in (root, f"{root}/src") and world.under(f"{p}/__init__.py")]
    return world, "|".join(sorted({re.escape(p.rpartition("/")[2]) for p in tops} - {"tests", "test", "docs"})) or "(?!)"


def edited(r: Reader, path: str, args: dict[str, Any]) -> None:
    """An editor's call: `view` reads, an edit that keeps what it replaces adds, all others write. Argument names of the usual tools are known."""
    old = str(args.get("old_str") or args.get("old_string") or args.get("old") or "")
    given = [str(args[k]) for k in ("new_str", "new_string", "new", "file_text", "content", "text") if args.get(k) is not None]
    new, command = "".join(given), args.get("command") or ("str_replace" if old else "create" if given else "view")
    kind = "reads" if command in ("view", "read") else "adds" if command == "insert" or (old and old in new) else "writes"
    act = r.act("editor", f"{command} {path}", new, paths={kind: [path]})
    if command == "create":
        r.world.texts |= dict.fromkeys(act.of("writes"), new)


def text(data: bytes | None) -> str:
    return (data or b"").decode("utf-8", "replace")


def additive(old: bytes, new: bytes) -> bool:
    """Whether a Python test file still has all that it had, in order, and besides only tests of new names and imports of new names."""
    try:
        had, has = (list(_flat(ast.parse(t).body)) for t in (old, new))
    except (SyntaxError, ValueError):
        return False
    rest, names = iter(has), {name for name, _ in had}
    return all(s in rest for s in had) and all(re.search(r"(^|\.)[tT]est\w*$|^import ", n) and n not in names for n, _ in Counter(has) - Counter(had))


def _flat(body: list[ast.stmt], within: str = "") -> Iterator[tuple[str, str]]:
    """(name, content) of each statement; a class is its head, then its members."""
    for s in body:
        if isinstance(s, ast.Import | ast.ImportFrom):
            yield from ((f"import {a.asname or a.name.partition('.')[0]}", ast.dump(s)) for a in s.names)
        elif isinstance(s, ast.ClassDef):
            yield within + s.name, ast.dump(ast.ClassDef(s.name, s.bases, s.keywords, [], s.decorator_list))
            yield from _flat(s.body, f"{within}{s.name}.")
        else:
            yield within + str(getattr(s, "name", "")), ast.dump(s)
