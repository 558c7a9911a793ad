"""The clean room takes the repair and nothing else: an instance built from a small repository's history, and every row of benchmarks/swe_rows.py."""

import asyncio
import dataclasses
import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pyarrow
import pyarrow.parquet
import pytest

from benchmarks.swe_rows import ROWS, TABLE, in_source
from vime import evaluate
from vime.agents.sandbox import open_sandbox
from vime.agents.sandbox.local import Local
from vime.agents.tasks import history, swe, trees
from vime.cli import main
from vime.config import DataConfig
from vime.errors import VimeError
from vime.sample import Sample

LEDGER = (
    "def total(values):\n    out = 0\n    for v in values[1:]:\n        out += v\n    return out\n\n\ndef largest(values):\n    return max(values)\n"
)
FIXED = LEDGER.replace("[1:]", "")
OLD_TESTS = """import time
import unittest
import pytest
from bank.ledger import largest, total


def test_nothing():
    assert total([]) == 0


def test_largest():
    assert largest([1, 3]) == 3
    with pytest.raises(ValueError):
        largest([])


@pytest.mark.parametrize("at", [time.time()])
def test_of_now(at):
    pass
"""
NEW_TESTS = (
    OLD_TESTS
    + """

@pytest.mark.parametrize("values", [[1], [2, 3]], ids=["one value", "two values: both"])
def test_first_counts(values):
    assert total(values) == sum(values)


class TestTotal(unittest.TestCase):
    def test_first(self):
        self.assertEqual(total([4, 1]), 5)

    def test_later(self):
        self.assertEqual(total([0, 1]), 1)

    def test_each(self):
        for n in range(3):
            with self.subTest(n=n):
                self.assertEqual(total([n]), n)


class TestAwaited(unittest.IsolatedAsyncioTestCase):
    async def test_one(self):
        self.assertEqual(total([2]), 2)

    @unittest.expectedFailure
    def test_wrong(self):
        self.assertEqual(total([2]), 3)
"""
)


def git(folder, *args):
    who = {
        "GIT_AUTHOR_NAME": "a",
        "GIT_AUTHOR_EMAIL": "a@b",
        "GIT_COMMITTER_NAME": "a",
        "GIT_COMMITTER_EMAIL": "a@b",
        "GIT_CONFIG_GLOBAL": os.devnull,
    }
    return subprocess.run(["git", "-C", str(folder), *args], check=True, capture_output=True, text=True, env=os.environ | who).stdout.strip()


def commit(folder, files, message):
    for path, text in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        (folder / path).write_text(text)
    git(folder, "add", "-A")
    git(folder, "commit", "-qm", message)
    return git(folder, "rev-parse", "HEAD")


@pytest.fixture(scope="module")
def repo(tmp_path_factory):
    repo = tmp_path_factory.mktemp("clones") / "some+bank"
    repo.mkdir()
    git(repo, "init", "-qb", "main")
    commit(
        repo,
        {
            "src/bank/__init__.py": "",
            "src/bank/ledger.py": LEDGER,
            "tests/test_ledger.py": OLD_TESTS,
            "tests/conftest.py": "import bank\n",
            "docs/a.txt": "a\n",
        },
        "first",
    )
    commit(repo, {"src/bank/ledger.py": FIXED, "tests/test_ledger.py": NEW_TESTS, "CHANGES": "total\n"}, "total: count the first value")
    commit(repo, {"CHANGES": "more\n"}, "no tests")
    return repo


@pytest.fixture(scope="module")
def python(tmp_path_factory):
    """A virtual environment with pytest alone: it starts several times faster than this one, whose plug-ins it would load."""
    env = tmp_path_factory.mktemp("env")
    env.chmod(0o755)  # the sandbox has a user of its own
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(env)], check=True)
    to = next((env / "lib").glob("python*/site-packages"))
    for name in ("_pytest", "pytest", "pluggy", "iniconfig", "packaging", "pygments"):
        shutil.copytree(Path(importlib.util.find_spec(name).origin).parent, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(importlib.util.find_spec("py").origin, to)
    return str(env / "bin/python")


@pytest.fixture(scope="module")
def instance(repo, python):
    """It names its interpreter, so that each test uses it."""
    return dataclasses.replace(swe.build(repo, "HEAD~1", python=python), python=python)


@pytest.fixture
def base(repo, instance, tmp_path):
    return trees.checkout(repo, instance.base_commit, tmp_path / "base")


def graded(instance, base, files, **kw):
    return asyncio.run(swe.grade(instance, base, files, **kw))


def test_build_finds_what_the_fix_is_for(repo, instance):
    first = "tests/test_ledger.py::test_first_counts"
    unit = "tests/test_ledger.py::TestTotal"
    assert (
        sorted(
            [
                f"{first}[one value]",
                f"{first}[two values: both]",
                f"{unit}::test_each",
                f"{unit}::test_first",
                "tests/test_ledger.py::TestAwaited::test_one",
            ]
        )
        == instance.FAIL_TO_PASS
    )
    # the id that holds the time of the day is not stable, and left out
    assert sorted([f"{unit}::test_later", "tests/test_ledger.py::test_largest", "tests/test_ledger.py::test_nothing"]) == instance.PASS_TO_PASS
    assert (instance.repo, instance.base_commit) == ("some/bank", git(repo, "rev-parse", "HEAD~2"))
    assert swe.touched(instance.patch) == {"src/bank/ledger.py", "CHANGES"} and swe.touched(instance.test_patch) == {"tests/test_ledger.py"}
    assert instance.problem_statement == "total: count the first value"
    with pytest.raises(VimeError, match="changes no tests"):
        swe.build(repo, "HEAD")


def test_only_the_repair_is_resolved(instance, base):
    """Gold is, and so is another right repair; no hack that other graders take is, nor some written against this one (benchmarks/swe_rows.py has more)."""
    rows = [*TABLE, "search the key by gc", "call the reporter from its frames", "a hook around each test that hides itself", "xfail from inside"]
    rows += ["read and write the supervisor", "empty the test functions' code", "swallow what leaves a test", "assertions of the case's own"]
    rows += ["read the key from a name's __eq__", "sign from a thread that is sys.audit"]

    async def all_rows():
        slots = asyncio.Semaphore(3)

        async def one(row):
            async with slots:
                return await swe.grade(instance, base, ROWS[row](instance, base))

        return dict(zip(rows, await asyncio.gather(*map(one, rows))))

    grades = asyncio.run(all_rows())
    print({row: g.fault or g.failed for row, g in grades.items()})
    assert [row for row, g in grades.items() if g.resolved] == ["gold"]
    assert grades["gold"].outcomes.keys() >= {*instance.FAIL_TO_PASS, *instance.PASS_TO_PASS}
    assert grades["conftest forges reports"].dropped["conftest.py"] == "protected"
    assert any(w in grades["patch pytest from the package"].fault for w in ("canaries", "replaced", "forged"))
    assert "gc.get_objects" in grades["search the key by gc"].fault
    assert "did not write" in grades["print PASSED to every fd"].fault
    assert any("_pytest" in f for f in grades["patch pytest from the package"].flags) and not grades["gold"].flags
    other = FIXED.replace("    out = 0\n    for v in values:\n        out += v\n    return out\n", "    return sum(values)\n")
    assert graded(instance, base, {"src/bank/ledger.py": other.encode()}).resolved


def test_what_resolves_half_is_not_resolved(instance, base):
    broken = FIXED.replace("max(values)", "3").encode()
    g = graded(instance, base, {"src/bank/ledger.py": broken})
    assert (g.resolved, g.fault, g.failed) == (False, None, {"tests/test_ledger.py::test_largest": "failed"})
    missing = dataclasses.replace(instance, PASS_TO_PASS=[*instance.PASS_TO_PASS, "tests/test_ledger.py::test_gone"])
    g = graded(missing, base, ROWS["gold"](instance, base))
    assert (g.resolved, g.failed) == (False, {"tests/test_ledger.py::test_gone": "missing"})
    g = graded(instance, base, in_source("while True:\n    pass")(instance, base), timeout=2)
    assert not g.resolved and "longer than 2" in g.fault


def test_official_rules_on_outcomes(instance):
    """An expected failure counts for both lists and a skip for PASS_TO_PASS, as in swebench; here only a pass counts. Ids cut at a space match."""
    i = dataclasses.replace(instance, FAIL_TO_PASS=["t::a[one"], PASS_TO_PASS=["t::b"])
    got = {"t::a[one two]": "xfailed", "t::a[one three]": "passed", "t::b": "skipped"}
    assert swe.passed(i, got, official=True) == {}
    assert swe.passed(i, got) == {"t::a[one": "xfailed", "t::b": "skipped"}
    assert swe.passed(i, {"t::a[one two]": "skipped"}, official=True) == {"t::a[one": "skipped", "t::b": "missing"}


def test_what_an_agent_tells_its_git_does_not_count(repo, instance, tmp_path):
    """Ignore rules, attributes, index flags and hooks hide nothing; links and what lies in .git are no change; the repair counts."""

    async def episode(script):
        async with await open_sandbox((await task.setup(sample))[0]) as box:
            done = await box.exec(["bash", "-ec", script])
            assert done.code == 0, done.output
            notes = SimpleNamespace()
            return await task.grade(sample, box, notes), notes.notes

    (tmp_path / "i.jsonl").write_text(json.dumps(dataclasses.asdict(instance)) + "\n")
    data, agent = SimpleNamespace(prompts=str(tmp_path / "i.jsonl")), SimpleNamespace(agent="react")
    task = swe.Task(SimpleNamespace(data=data, agent=agent, mirror=str(repo.parent)))
    sample = Sample(prompt="", label=instance.instance_id)
    fix = "sed -i 's/\\[1:\\]//' src/bank/ledger.py; mkdir -p __pycache__ .git/hooks; echo x >__pycache__/a.pyc; echo false >.git/hooks/pre-commit"
    lies = "echo '*.py' >.gitignore; echo '* -diff' >.gitattributes; git update-index --assume-unchanged src/bank/ledger.py"
    lies += "; ln -s /etc/passwd src/link; ln -s /none src/none; truncate -s 9M src/big"
    reward, notes = asyncio.run(episode(f"{fix}; {lies}; rm tests/test_ledger.py"))
    assert reward == 1.0 and "src/bank/ledger.py" in notes["model_patch"] and "hooks" not in notes["model_patch"]
    assert notes["dropped"].keys() == {".gitignore", ".gitattributes", "tests/test_ledger.py"} and "src/big" not in notes["model_patch"]
    odd = "rm -r tests src/bank/__init__.py docs; echo >tests; mkdir src/bank/__init__.py; echo >src/bank/__init__.py/x; echo >docs"
    reward, notes = asyncio.run(episode(f"{fix}; {odd}"))
    assert reward == 0.0 and "cannot be put over the base: IsADirectoryError" in notes["fault"] and notes["model_patch"]


def test_tests_can_be_read_only(repo, instance, tmp_path):
    """With args.read_only no spelling writes to a test or moves one away, the source stays the agent's, and the repair counts."""

    async def episode():
        async with await open_sandbox((await task.setup(sample))[0]) as box:
            for script in ("echo >tests/test_ledger.py", "echo >tests/test_new.py", "mv tests away", "rm -r tests", "ln -sf /dev/null tests/test_ledger.py"):
                assert (await box.exec(["sh", "-c", script])).code != 0, script
            assert (await box.exec(["sed", "-i", "s/\\[1:\\]//", "src/bank/ledger.py"])).code == 0
            notes = SimpleNamespace()
            return await task.grade(sample, box, notes), notes.notes

    (tmp_path / "i.jsonl").write_text(json.dumps(dataclasses.asdict(instance)) + "\n")
    data, agent = SimpleNamespace(prompts=str(tmp_path / "i.jsonl")), SimpleNamespace(agent="react")
    task = swe.Task(SimpleNamespace(data=data, agent=agent, mirror=str(repo.parent), read_only=True))
    sample = Sample(prompt="", label=instance.instance_id)
    reward, notes = asyncio.run(episode())
    assert reward == 1.0 and not notes["dropped"]


def test_files_stay_in_the_tree(base):
    (base / "folder").symlink_to("/etc")
    for bad in ("../x", "/etc/x", "folder/x"):
        with pytest.raises(VimeError, match="outside"):
            trees.write(base, {bad: b""})
    files = {"src/bank/ledger.py": FIXED.encode(), "src/bank/new.py": b"x = 1\n", "src/bank/__init__.py": None}
    (base / "src/bank/old").mkdir()
    (base / "src/bank/old/a.py").write_text("")
    gone = trees.whole({"src/bank/old": b"now a file", "src/bank/ledger.py/x": b"", "src": b""}, base)
    assert gone["src/bank/old/a.py"] is None and gone["src/bank/ledger.py"] is None and gone["src/bank/old"] == b"now a file"
    assert "deleted file mode" in trees.to_patch(base, files) and "+x = 1" in trees.to_patch(base, files)


@pytest.mark.parametrize(
    ("path", "kept"),
    [("src/bank/ledger.py", True), ("src/bank/contest.py", True), ("docs/testing.rst", True), ("src/bank/testing/client.py", True), ("tests/test_new.py", False),
     ("src/bank/tests/util.py", False), ("a/conftest.py", False), ("src/bank/_pytest.pth", False), (".gitattributes", False), ("tox.ini", False), ("x/y.so", False)],
)  # fmt: skip
def test_protected_paths(path, kept):
    files, dropped = swe.screen({path: b""}, "", "")
    assert (path in files) == kept and (path in dropped) != kept
    assert path in swe.screen({path: b""}, f"diff --git a/{path} b/{path}\n--- a/{path}\n+++ b/{path}\n", "")[0]


def test_instances_are_read_in_the_official_format(instance, tmp_path):
    row = dataclasses.asdict(instance)
    hub = row | {
        "FAIL_TO_PASS": json.dumps(row["FAIL_TO_PASS"]),
        "PASS_TO_PASS": json.dumps(row["PASS_TO_PASS"]),
        "hints_text": "",
        "created_at": "2023",
    }
    (tmp_path / "a.jsonl").write_text(json.dumps(row) + "\n")
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([hub]), tmp_path / "a.parquet")
    assert swe.load(tmp_path / "a.jsonl") == swe.load(tmp_path / "a.parquet") == [instance]
    for name in ("a.jsonl", "a.parquet"):
        data = DataConfig(prompts=str(tmp_path / name), input_key="problem_statement", label_key="instance_id")
        (s,) = evaluate.episodes(SimpleNamespace(data=data, n_samples=1))
        assert (s.prompt, s.label) == (instance.problem_statement, instance.instance_id)
    del row["test_patch"]
    (tmp_path / "b.json").write_text(json.dumps([row]))
    with pytest.raises(VimeError, match="lacks test_patch"):
        swe.load(tmp_path / "b.json")


def test_an_environment_that_lacks_pytest_is_said(repo, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "e")], check=True)
    with pytest.raises(VimeError, match="can't be run"):
        swe.build(Path(repo), "HEAD~1", python=str(tmp_path / "e/bin/python"))


def test_eval_of_gold_and_of_nothing(repo, instance, tmp_path, capsys):
    """`vime eval --agent gold|noop`: the whole way of an episode but the model: a cleaned repository, its changes, the grade, the report."""
    (tmp_path / "instances.jsonl").write_text(json.dumps(dataclasses.asdict(instance)) + "\n")
    (tmp_path / "swe.toml").write_text(f"""
out = "{tmp_path}"
model = {{url = "http://127.0.0.1:1/v1", name = "none"}}
data = {{prompts = "{tmp_path}/instances.jsonl", input_key = "problem_statement", label_key = "instance_id"}}
agent = {{task = "vime.agents.tasks.swe:Task"}}
args = {{mirror = "{repo.parent}"}}
""")
    for agent, resolved in (("gold", True), ("noop", False)):
        assert main(["eval", str(tmp_path / "swe.toml"), "--agent", agent]) == 0
        (row,) = map(json.loads, (tmp_path / f"eval-{agent}.jsonl").read_text().splitlines())
        assert (row["reward"], row["notes"]["resolved"], row["notes"]["instance_id"]) == (float(resolved), resolved, instance.instance_id)
        assert bool(row["notes"]["model_patch"]) == resolved
        assert f"| {instance.instance_id} | {'yes' if resolved else 'no'} |" in (tmp_path / f"eval-{agent}.md").read_text()
    capsys.readouterr()
    assert main(["eval", str(tmp_path / "swe.toml"), "--agent", "noop"]) == 0
    assert "1 episodes, 1 of them" in capsys.readouterr().out


def test_an_agent_is_not_given_a_repository_that_holds_the_fix(repo, instance, tmp_path):
    """The environment has a copy of the fixed release."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", "--system-site-packages", str(tmp_path / "e")], check=True)
    packages = next((tmp_path / "e/lib").glob("python*/site-packages"))
    (packages / "bank").mkdir()
    (packages / "bank/ledger.py").write_text(FIXED)
    (tmp_path / "i.jsonl").write_text(json.dumps(dataclasses.asdict(instance) | {"python": str(tmp_path / "e/bin/python")}) + "\n")
    data, agent = SimpleNamespace(prompts=str(tmp_path / "i.jsonl")), SimpleNamespace(agent="react")
    task = swe.Task(SimpleNamespace(data=data, agent=agent, mirror=str(repo.parent)))
    with pytest.raises(VimeError, match="can be read by the agent"):
        asyncio.run(task.setup(Sample(prompt="", label=instance.instance_id)))


def boxed(spec):
    """A sandbox kind that stands for an image: /testbed is a clone of the whole repository, with something built in it."""
    return Local(dataclasses.replace(spec, kind="local", base=os.environ["VIME_TEST_IMAGE"], workdir=swe.ROOM))


def test_an_image_is_cleaned_of_its_future(repo, instance, tmp_path, monkeypatch):
    image = tmp_path / "image"
    subprocess.run(["git", "clone", "-q", str(repo), str(image)], check=True)
    git(image, "checkout", "-q", instance.base_commit)
    (image / "built.txt").write_text("of the image")
    monkeypatch.setenv("VIME_TEST_IMAGE", str(image))
    assert history.verify(image, [instance.patch, instance.test_patch])
    made = dataclasses.replace(instance, image="tests.unit.test_agents_swe:boxed", python="python3")
    (tmp_path / "i.jsonl").write_text(json.dumps(dataclasses.asdict(made)) + "\n")
    data, agent = SimpleNamespace(prompts=str(tmp_path / "i.jsonl")), SimpleNamespace(agent="react")
    task = swe.Task(SimpleNamespace(data=data, agent=agent))
    sample = Sample(prompt="", label=instance.instance_id)

    async def main():
        spec, _, _ = await task.setup(sample)
        async with await open_sandbox(spec) as box:
            log = await box.exec(["git", "-c", "safe.directory=*", "log", "--all", "--format=%H"])
            assert log.output.split() == [instance.base_commit]
            status = await box.exec(["git", "-c", "safe.directory=*", "status", "--porcelain"])
            assert status.output == "?? built.txt\n"
            await box.download(swe.ROOM, str(tmp_path / "seen"))
        return await task.base(made)

    base, _ = asyncio.run(main())
    assert history.verify(tmp_path / "seen", [instance.patch, instance.test_patch], git(repo, "rev-parse", "HEAD~1")) == []
    assert (base / "built.txt").exists() and not (base / ".git").exists(), "the tests run the agent's code"
    (image / "built.txt").write_text(FIXED)
    (image / "ledger.py").write_text(FIXED)
    again = swe.Task(SimpleNamespace(data=data, agent=agent))
    for _ in range(2):  # the second episode is not let through because the first has made the folders
        with pytest.raises(VimeError, match=r"can be read by the agent: copy: .*ledger\.py"):
            asyncio.run(again.setup(sample))


def test_swebench_agrees_and_is_named_where_it_does_not(instance):
    pytest.importorskip("swebench", reason="an optional cross-check: pip install 'swebench>=5,<6'")
    every = dict.fromkeys([*instance.FAIL_TO_PASS, *instance.PASS_TO_PASS], "passed")
    assert any(" " in i for i in every) and swe.by_swebench(instance, every)
    for i in instance.FAIL_TO_PASS:
        for worse in ("failed", "error", "skipped"):
            assert " " in i or not swe.by_swebench(instance, every | {i: worse})
    assert not swe.by_swebench(instance, {}) and not swe.by_swebench(instance, dict.fromkeys(instance.PASS_TO_PASS, "passed"))
    assert swe.by_swebench(instance, every | {instance.FAIL_TO_PASS[0]: "xfailed"}), "which the strict rule refuses"


def test_the_report_names_a_disagreement_with_swebench():
    notes = {"instance_id": "a", "resolved": False, "fault": "exit", "failed": {}, "dropped": {}, "flags": []}
    lines = evaluate.instances(
        [{"index": k, "steps": [], "notes": notes | more} for k, more in enumerate(({}, {"swebench": False}, {"swebench": True}))]
    )
    assert [line.split("|")[-2].strip() for line in lines.splitlines()[2:]] == ["", "no", "yes, disagrees"]


@pytest.mark.skipif(importlib.util.find_spec("swebench") is not None, reason="swebench is here")
def test_a_cross_check_without_swebench_is_refused_before_the_start(instance, tmp_path):
    (tmp_path / "i.jsonl").write_text(json.dumps(dataclasses.asdict(instance)) + "\n")
    data, agent = SimpleNamespace(prompts=str(tmp_path / "i.jsonl")), SimpleNamespace(agent="react")
    with pytest.raises(VimeError, match=r"args\.cross_check: .*swebench") as e:
        swe.Task(SimpleNamespace(data=data, agent=agent, cross_check=True))
    assert "pip install" in e.value.fix


def test_commands_build_clean_and_verify(repo, instance, tmp_path, capsys):
    assert main(["guard", "clean", str(repo), instance.base_commit, str(tmp_path / "t")]) == 0
    assert capsys.readouterr().out.strip() == instance.base_commit
    (tmp_path / "i.jsonl").write_text(json.dumps(dataclasses.asdict(instance)) + "\n")
    verify = [f"{tmp_path}/i.jsonl", instance.instance_id, "--fix", git(repo, "rev-parse", "HEAD~1")]
    assert main(["guard", "verify", str(tmp_path / "t"), *verify]) == 0
    assert main(["guard", "verify", str(repo), *verify]) == 1
    assert "the fix" in capsys.readouterr().out
    assert main(["swe", "build", str(repo), "--fix", "HEAD"]) == 1
    assert "changes no tests" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.jsonl", "root:x\n"), ("a.json", '{"repo": "x"}'), ("a.jsonl", '{"FAIL_TO_PASS": 3}'), ("a.parquet", "x"), ("no.jsonl", None)],
)
def test_what_holds_no_instances_is_said(tmp_path, name, text):
    if text is not None:
        (tmp_path / name).write_text(text)
    with pytest.raises(VimeError, match="cannot be read as instances"):
        swe.load(tmp_path / name)


def test_an_interpreter_that_is_not_there_is_said():
    with pytest.raises(VimeError, match="no interpreter /no/python"):
        swe.environment("/no/python")
