"""SWE-bench instances: the official format, grading in a clean room, and instances built from a git history.

What an agent leaves behind is graded in a tree of ours, never in its own (docs/swe.md has the threats and who gets past which defence):
the pristine base, plus the agent's files as far as they are not protected, plus the test patch; the tests run as another user, without
a network, and their results leave through a signed pipe (cleanroom.py). Standard output counts for nothing.
"""

import asyncio
import contextlib
import dataclasses
import fnmatch
import json
import os
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from vime.agents.sandbox import SandboxSpec, open_sandbox
from vime.agents.tasks import cleanroom, history
from vime.agents.tasks.trees import CACHES, TABLE, Files, apply, checkout, clone_of, git, to_patch, whole, write
from vime.errors import VimeError, said
from vime.sample import Sample

TESTS, PROTECTED = TABLE["grade"]["tests"], TABLE["grade"]["tests"] + TABLE["grade"]["protected"]
ROOM = "/testbed"  # where the tree is while its tests run
CLEAN = "/opt/clean.git"  # the cleaned history, in a container, until it takes the place of the image's


@dataclass(frozen=True)
class Instance:
    """A row of a SWE-bench file. Beyond the official columns: `paths`, folders that go on sys.path; `image`, a sandbox kind as docker:NAME that has
    the tree in /testbed, and `python` inside it (none: a virtual environment of this machine)."""

    instance_id: str
    repo: str
    base_commit: str
    patch: str
    test_patch: str
    FAIL_TO_PASS: list[str]
    PASS_TO_PASS: list[str]
    problem_statement: str = ""
    version: str = ""
    paths: list[str] = field(default_factory=lambda: ["src", "."])
    image: str = ""
    python: str = ""


@dataclass
class Grade:
    """resolved: every FAIL_TO_PASS and PASS_TO_PASS id passed in a run that can be trusted. `fault`: why it can't be. `dropped`: the
    agent's files that were left out, each with the reason. `flags`: suspicious words in what was kept (they decide nothing)."""

    resolved: bool
    fault: str | None = None
    failed: dict[str, str] = field(default_factory=dict)  # required id -> how it ended
    dropped: dict[str, str] = field(default_factory=dict)
    flags: list[str] = field(default_factory=list)
    outcomes: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0
    log: str = ""  # tail of what the tests printed, for a person


def load(path: str | Path) -> list[Instance]:
    """Instances of a .jsonl, .json or .parquet file. Raises VimeError naming the row and the columns that it lacks."""
    p = Path(path)
    try:
        if p.suffix == ".parquet":
            import pyarrow.parquet

            rows = pyarrow.parquet.read_table(p).to_pylist()
        else:
            rows = json.loads(p.read_text()) if p.suffix == ".json" else [json.loads(line) for line in p.read_text().splitlines() if line.strip()]
        for r in rows:  # on the hub the lists are text
            r |= {k: json.loads(v) if isinstance(v, str) else list(v) for k, v in r.items() if k.endswith("_TO_PASS")}
    except (OSError, ValueError, TypeError, AttributeError) as e:
        raise VimeError(f"{p} cannot be read as instances: {said(e)}", "each row is an object with the columns of SWE-bench: docs/swe.md") from e
    names = [f.name for f in dataclasses.fields(Instance)]
    for n, row in enumerate(rows):
        if lacks := [k for k in names[:7] if k not in row]:
            raise VimeError(f"row {n} of {p} lacks {', '.join(lacks)}", "the columns are those of SWE-bench: docs/swe.md")
    return [Instance(**{k: v for k, v in row.items() if k in names and v is not None}) for row in rows]


def touched(patch: str) -> set[str]:
    """Paths that a unified diff of git names, old and new."""
    found = re.findall(r"^(?:--- a/|\+\+\+ b/|rename from |rename to )([^\t\n]+)", patch, re.M)
    return set(found) | {m for pair in re.findall(r"^diff --git a/(\S+) b/(\S+)$", patch, re.M) for m in pair}


def matches(path: str, patterns: list[str]) -> bool:
    """Whether the path, its end or its file name matches a glob."""
    return any(fnmatch.fnmatchcase(path, g) or fnmatch.fnmatchcase("/" + path, "*/" + g) for g in patterns)


def screen(files: Files, gold: str, tests: str) -> tuple[Files, dict[str, str]]:
    """(what counts, {path: reason} of what is dropped): no protected file unless the gold patch touches it, nothing that the test patch writes."""
    mine, theirs = touched(gold), touched(tests)
    dropped = {p: "written by the test patch" for p in files if p in theirs}
    dropped |= {p: "protected" for p in files if p not in mine and p not in dropped and matches(p, PROTECTED)}
    return {p: c for p, c in files.items() if p not in dropped}, dropped


async def run_tests(tree: Path, files: list[str], i: Instance, python: str, timeout: float, mine: Files) -> tuple[dict[str, str], str | None, str]:
    """Run pytest on test files of a tree, read-only, in a sandbox. Returns ({id: passed|failed|error|skipped|xfailed|foreign}, fault, log).
    Two canaries with random names lie beside the first file; one must fail and one pass, or the run counts for nothing."""
    good, bad = (f"test_{secrets.token_hex(6)}" for _ in "ab")
    key, script = secrets.token_bytes(32), f"/opt/{secrets.token_hex(8)}.py"
    canary = str(Path(files[0]).with_name(f"test_{secrets.token_hex(6)}.py"))
    (tree / canary).write_text(f"def {bad}():\n    assert {{}} == {{1: 2}}\n\n\ndef {good}():\n    assert {{}} == {{}}\n")
    env = {"PATH": f"{Path(python).parent}:/usr/bin:/bin", "HOME": "/tmp", "LANG": "C.UTF-8", "TZ": "UTC", "CI": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    env["PYTHONPATH"] = ":".join(f"{ROOM}/{p}" for p in i.paths)
    job = {"root": ROOM, "paths": i.paths, "files": [*files, canary], "mine": [f"{ROOM}/{p}" for p in mine], "env": env, "timeout": timeout}
    binds = ({} if i.image else environment(python)) | {str(tree): ROOM, cleanroom.__file__: script}
    drop = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--no-new-privs"] if i.image else []  # a local sandbox has its own user
    async with await open_sandbox(SandboxSpec(i.image or "local", binds=binds, timeout_s=timeout + 30)) as box:
        r = await box.exec([*drop, python, "-I", script], stdin=json.dumps(job | {"key": key.hex()}).encode(), max_output=64 << 20)
    (tree / canary).unlink()
    if r.code in (126, 127):
        raise VimeError(f"{python} does not start in the sandbox", "give a Python that has pytest and what the instance needs", r.output[-2000:])
    sign, _, text = r.stdout.decode(errors="replace").strip().partition(" ")
    if not secrets.compare_digest(sign.encode(), cleanroom.mac(key, text).encode()):
        return {}, f"no signed result came back (exit code {r.code}{', timed out' if r.timed_out else ''})", r.output[-4000:]
    told = json.loads(text)
    outcomes, fault = judge(told["records"], told["fault"])
    canaries = [outcomes.pop(f"{canary}::{name}", "missing") for name in (bad, good)]
    if not fault and canaries != ["failed", "passed"]:
        fault = f"the canaries ended as {' and '.join(canaries)}, not as failed and passed"
    return outcomes, fault, told["log"]


async def pristine(i: Instance, mirror: Path, to: Path) -> Path:
    """The base's files in the new folder `to`: of the instance's image (with what was built there), or of the clone of its repository."""
    if not i.image:
        return checkout(clone_of(i.repo, mirror), i.base_commit, to)
    async with await open_sandbox(SandboxSpec(i.image)) as box:
        await box.download(ROOM, str(to))
    return to


def judge(records: list[list[str]], fault: str | None) -> tuple[dict[str, str], str | None]:
    """{id: status} of signed records, and the fault. A test passed if all its records say so; a second one of a kind is a fault."""
    seen, parts = dict[tuple[str, str], str](), dict[str, str]()
    for kind, status, name in records:
        if kind == "part":  # a subTest that did not pass; there may be more
            parts[name] = status
        elif (kind, name) in seen:
            fault = fault or f"{name} has two results"
        seen[kind, name] = status
    whole = {name: status for (kind, name), status in seen.items() if kind == "test"}
    for name, status in whole.items():
        worse = [s for s in (seen.get(("begin", name), "missing"), seen.get(("call", name), "missing"), parts.get(name, "passed")) if s != "passed"]
        whole[name] = worse[0] if status in ("passed", "failed") and worse else status
    return whole, fault


def environment(python: str) -> dict[str, str]:
    """What a sandbox must show for an interpreter to run: its virtual environment and its home, each where it is."""
    if not shutil.which(python):
        raise VimeError(f"there is no interpreter {python}", "give a Python that has pytest and what the instance needs")
    out = subprocess.run([python, "-I", "-c", "import sys; print(sys.prefix); print(sys.base_prefix)"], capture_output=True, text=True)
    if out.returncode:
        raise VimeError(f"{python} does not run", "give a Python that has pytest and what the instance needs", out.stderr[-2000:])
    folders = {p for prefix in out.stdout.split() for p in (prefix, os.path.realpath(prefix))} | {os.path.dirname(os.path.dirname(python))}
    return {p: p for p in sorted(folders) if not p.startswith("/usr")}


def passed(instance: Instance, outcomes: dict[str, str], official: bool = False) -> dict[str, str]:
    """The required ids that did not pass, {id: how they ended}; none means resolved. SWE-bench's rules (`official`) also take an expected
    failure, and in PASS_TO_PASS a skip; the code under test can cause both, so the strict rule does not. An id that the official log parser
    cut at a space stands for all that begin with it."""
    out = {}
    for ids, more in ((instance.FAIL_TO_PASS, {"xfailed"}), (instance.PASS_TO_PASS, {"xfailed", "skipped"})):
        for i in ids:
            got = {outcomes[i]} if i in outcomes else {s for o, s in outcomes.items() if " " in o and o.split(" ")[0] == i} or {"missing"}
            if wrong := got - {"passed", *(more if official else ())}:
                out[i] = sorted(wrong)[0]
    return out


LOGGED = {"passed": "PASSED", "failed": "FAILED", "error": "ERROR", "skipped": "SKIPPED", "xfailed": "XFAIL"}


def by_swebench(i: Instance, outcomes: dict[str, str]) -> bool:
    """Whether swebench's own code would call it resolved, from a log that lists these outcomes. It cuts ids at a space, in the log only.
    Raises: VimeError where swebench 5 is not installed."""
    try:
        from swebench.harness.constants import END_TEST_OUTPUT, START_TEST_OUTPUT
        from swebench.harness.grading import get_eval_report
        from swebench.types import TestSpec
    except ImportError as e:
        raise VimeError(f"args.cross_check: {said(e)}", "pip install vime[swebench], or leave it out") from e
    ids = [[n.split(" ")[0] for n in wanted] for wanted in (i.FAIL_TO_PASS, i.PASS_TO_PASS)]
    spec = TestSpec(i.instance_id, "", [], i.repo, i.version, *ids, log_parser="parse_log_pytest", eval_type="pass_and_fail")
    with tempfile.NamedTemporaryFile("w", suffix=".log") as log:
        lines = [START_TEST_OUTPUT, *(f"{LOGGED[s]} {n}" for n, s in outcomes.items() if s in LOGGED), END_TEST_OUTPUT]
        print("\n".join(lines), file=log, flush=True)
        report = get_eval_report(spec, {"instance_id": i.instance_id, "model_patch": "-"}, log.name, False)
    return bool(report[i.instance_id]["resolved"])


async def grade(i: Instance, base: Path, files: Files, python: str = sys.executable, timeout: float = 300, official: bool = False) -> Grade:
    """Grade an agent's files against a pristine checkout of the base in the clean room. Raises VimeError where the instance itself is broken."""
    begun, ids = time.monotonic(), [*i.FAIL_TO_PASS, *i.PASS_TO_PASS]
    kept, dropped = screen(files, i.patch, i.test_patch)
    if not i.FAIL_TO_PASS:
        raise VimeError(f"{i.instance_id} has no FAIL_TO_PASS", "an instance without one is solved by doing nothing")
    with tempfile.TemporaryDirectory(prefix="vime-swe-") as tmp:
        os.chmod(tmp, 0o755)  # the tests' user reads it
        tree = shutil.copytree(base, Path(tmp, "t"), symlinks=True)
        flags = suspicious(base, kept)
        apply(tree, i.test_patch, f"test patch of {i.instance_id}")
        outcomes, log = dict[str, str](), ""
        fault: str | None = None
        try:
            write(tree, kept)
        except VimeError as e:
            fault = str(e)
        else:
            outcomes, fault, log = await run_tests(tree, sorted({n.split("::")[0] for n in ids}), i, i.python or python, timeout, kept)
    failed = passed(i, outcomes, official)
    return Grade(not fault and not failed, fault, failed, dropped, flags, outcomes, time.monotonic() - begun, log)


def suspicious(base: Path, files: Files) -> list[str]:
    """`path: word` for words in new lines that a repair seldom needs."""
    out = []
    for path, content in files.items():
        old = set((base / path).read_bytes().splitlines()) if (base / path).is_file() else set()
        new = b"\n".join(line for line in (content or b"").splitlines() if line not in old).decode(errors="replace")
        out += [f"{path}: {w}" for w in sorted(set(re.findall(TABLE["grade"]["suspicious"], new)))]
    return out


def build(repo: str | Path, fix: str, name: str = "", python: str = sys.executable, timeout: float = 300) -> Instance:
    """An instance from the commit that fixed a bug: base is its first parent, patch and test_patch are its halves, FAIL_TO_PASS and
    PASS_TO_PASS come from running the tests twice before and twice after; an id that is not stable is left out.
    Raises VimeError where the commit has no tests, or they don't show the bug."""
    fix, base = git("-C", str(repo), "rev-parse", f"{fix}^{{commit}}", f"{fix}^1").decode().split()
    name = name or re.sub(r"(/repo|/\.git|\.git)?/*$", "", str(repo)).rpartition("/")[2].replace("+", "/")
    paths = git("-C", str(repo), "diff", "--name-only", "--no-renames", "-z", base, fix).decode().split("\0")[:-1]
    halves = []
    for tests in (False, True):
        chosen = [p for p in paths if matches(p, TESTS) == tests]
        if not chosen:
            raise VimeError(f"{fix[:12]} of {name} changes no {'tests' if tests else 'source'}", "choose a commit with a fix and its test")
        diff = git("-C", str(repo), "diff", "--binary", "--no-ext-diff", "--no-textconv", "--no-renames", base, fix, "--", *chosen)
        halves.append(diff.decode("utf-8", "surrogateescape"))
    version = git("-C", str(repo), "describe", "--tags", "--abbrev=0", base, ok=(0, 128)).decode().strip()
    text = git("-C", str(repo), "log", "-1", "--format=%B", fix).decode(errors="replace").strip()
    made = Instance(f"{name.replace('/', '__')}-{fix[:8]}", name, base, halves[0], halves[1], [], [], text, version)
    runs: list[set[str]] = []
    for patched in (False, False, True, True):
        with tempfile.TemporaryDirectory(prefix="vime-swe-") as tmp:
            os.chmod(tmp, 0o755)
            tree = checkout(repo, base, Path(tmp, "t"))
            apply(tree, made.test_patch, "test patch")
            apply(tree, made.patch if patched else "", "patch")
            there = sorted(p for p in touched(made.test_patch) if re.search(r"(^|/)(test_[^/]*|[^/]*_test|tests)\.py$", p) and (tree / p).exists())
            if not there:
                raise VimeError(f"{fix[:12]} of {name} changes no test file that pytest would run")
            outcomes, fault, log = asyncio.run(run_tests(tree, there, made, python, timeout, {}))
        if fault:
            raise VimeError(f"the tests of {name} at {base[:12]} can't be run: {fault}", "give --python an environment that has what they need", log)
        runs.append({i for i, s in outcomes.items() if s == "passed"})
    f2p, p2p = (runs[2] & runs[3]) - (runs[0] | runs[1]), runs[0] & runs[1] & runs[2] & runs[3]
    if not f2p:
        raise VimeError(f"no test of {fix[:12]} of {name} fails before and passes after", "a dependency may be missing in --python", log)
    return dataclasses.replace(made, FAIL_TO_PASS=sorted(f2p), PASS_TO_PASS=sorted(p2p))


class Task:
    """agent.task = "vime.agents.tasks.swe:Task": data.prompts has instances, data.input_key = "problem_statement", data.label_key = "instance_id".
    [args]: mirror (folder of clones), python (for instances that name none), timeout and official (see grade), cross_check (true: note what
    swebench's own code makes of the outcomes, too), read_only (true: the agent can't write where tests lie, nor beside them; local sandboxes).

    The agent gets a repository that ends at the base commit, also in an image (history.clean; VimeError where verify finds a leak), and is
    graded on what it changed there. agent.agent = "gold" and "noop" are no agents: they show that a set of instances can be solved, and is not yet."""

    policy = "code_repair"

    def __init__(self, args: Any):
        self.args, self.instances = vars(args), {i.instance_id: i for i in load(args.data.prompts)}
        self.gold = args.agent.agent == "gold"
        self.python, self.mirror = self.args.get("python", sys.executable), Path(self.args.get("mirror", "."))
        self.folder = tempfile.TemporaryDirectory(prefix="vime-swe-")
        os.chmod(self.folder.name, 0o755)
        self.locks: dict[str, asyncio.Lock] = {}
        self.ready: set[str] = set()
        if self.args.get("cross_check"):
            by_swebench(Instance("", "", "", "", "", [], []), {})  # is it there?

    async def base(self, i: Instance) -> tuple[Path, Path]:
        """The instance's pristine files, and what the agent's work folder starts as; made once."""
        base, work = (Path(self.folder.name, part, i.instance_id) for part in ("base", "work"))
        async with self.locks.setdefault(i.instance_id, asyncio.Lock()):
            if i.instance_id not in self.ready:
                for made in (base, work):  # by an attempt that failed
                    shutil.rmtree(made, ignore_errors=True)
                await pristine(i, self.mirror, base)
                look = [base] if i.image else [Path(p) for p in environment(i.python or self.python) if (Path(p) / "pyvenv.cfg").exists()]
                if not i.image or (base / ".git").exists():
                    await asyncio.to_thread(history.clean, base if i.image else clone_of(i.repo, self.mirror), i.base_commit, work)
                    if leaks := await asyncio.to_thread(history.verify, work, [i.patch, i.test_patch], "", look):
                        raise VimeError(f"{i.instance_id}: the fix can be read by the agent: {'; '.join(leaks[:3])}", "vime guard verify shows all")
                    shutil.rmtree(base / ".git", ignore_errors=True)  # the tests run the agent's code
                self.ready.add(i.instance_id)
        return base, work

    async def setup(self, sample: Sample) -> tuple[SandboxSpec, list[dict[str, Any]], list[Any]]:
        i = self.instances[str(sample.label)]
        _, work = await self.base(i)
        text, python = TABLE["grade"]["prompt"].format(problem=i.problem_statement, root=ROOM), i.python or self.python
        env = {"PYTHONPATH": ":".join(f"{ROOM}/{p}" for p in i.paths), "PATH": f"{Path(python).parent}:/usr/local/bin:/usr/bin:/bin"}
        swap = {"binds": {str(work / ".git"): CLEAN}, "prepare": f"rm -rf {ROOM}/.git && cp -R {CLEAN} {ROOM}/.git"} if work.exists() else {}
        given: dict[str, Any] = swap if i.image else {"base": str(work), "binds": environment(python), "env": env}
        given |= {"protected": TABLE["grade"]["read_only"]} if self.args.get("read_only") else {}
        return SandboxSpec(i.image or "local", workdir=ROOM, **given), [{"role": "user", "content": text}], []

    async def grade(self, sample: Sample, sandbox: Any, episode: Any) -> float:
        i = self.instances[str(sample.label)]
        base, _ = await self.base(i)
        if self.gold:
            await sandbox.exec(["git", "apply", "-"], stdin=i.patch.encode("utf-8", "surrogateescape"))
        await sandbox.killall()  # nothing of the agent's may go on while its work is read
        small = await sandbox.exec(["find", ".", "-type", "f", "-size", "-10240", "-print0"], cwd=ROOM, max_output=64 << 20)  # 5 MiB; no links
        read = {p.removeprefix("./") for p in small.stdout.decode("utf-8", "surrogateescape").split("\0")}
        paths = {p: how for p, how in (await sandbox.changes()).items() if not CACHES & set(Path(p).parts) and (p in read or how == "deleted")}
        files = whole({p: None if how == "deleted" else await sandbox.read(f"{ROOM}/{p}") for p, how in paths.items()}, base)
        g = await grade(i, base, files, self.python, self.args.get("timeout", 300), self.args.get("official", False))
        found = {k: v for k, v in dataclasses.asdict(g).items() if k not in ("outcomes", "log")}
        with contextlib.suppress(VimeError):  # what can't be put over the base is no patch
            found["model_patch"] = to_patch(base, files)
        if self.args.get("cross_check"):
            found["swebench"] = await asyncio.to_thread(by_swebench, i, g.outcomes)
        episode.notes = {"instance_id": i.instance_id, "model_patch": ""} | found
        return float(g.resolved)
