"""What the documents say exists: commands, flags, keys, files, metrics, and every TOML block is a valid run."""

import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest
from pydantic import BaseModel

from vime import config

ROOT = Path(__file__).parents[2]
PAGES = [
    *("quickstart", "rollout", "engines", "plugins", "eval", "multimodal", "parity", "algorithms", "moe", "parallel", "trainer", "weights"),
    *("benchmarks", "data-plane", "dependencies", "gateway", "harnesses", "reward-hacking", "sandboxes"),
]
DOCS = [ROOT / "README.md", *(ROOT / f"docs/{n}.md" for n in PAGES)]
BASE = {"model": "m", "data": {"prompts": "p.jsonl"}}  # what a fragment leaves out


def blocks(language: str) -> list[tuple[str, str]]:
    """(file:line, text) of every fenced block in that language."""
    out = []
    for path in DOCS:
        text = path.read_text()
        for m in re.finditer(rf"^```{language}\n(.*?)^```", text, re.M | re.S):
            out.append((f"{path.name}:{text[: m.start()].count(chr(10)) + 1}", m[1]))
    assert out
    return out


@cache
def help_of(*words: str) -> str:
    command, env = [sys.executable, "-m", "vime.cli", *words, "--help"], os.environ | {"COLUMNS": "400"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=env)
    assert done.returncode == 0, f"vime {' '.join(words)} --help: {done.stderr}"
    return done.stdout


def commands() -> list[str]:
    """Every `vime ...` line of a shell block, its comment cut off; also those in the tables and paragraphs."""
    shell = [line.partition(" #")[0].strip() for _, text in blocks("bash") for line in text.splitlines()]
    inline = [m for p in DOCS for m in re.findall(r"`(vime [^`]+)`", p.read_text())]
    found = sorted({c for c in (re.sub(r"^PYTHONPATH=\S+ ", "", s) for s in [*shell, *inline]) if re.match(r"vime [a-z]", c)})
    assert len(found) > 5
    return found


def valid_key(dotted: str) -> bool:
    node: object = config.Config
    for part in dotted.split("."):
        if not (isinstance(node, type) and issubclass(node, BaseModel)):
            return False
        if part not in node.model_fields:
            return False
        node = node.model_fields[part].annotation
    return True


@pytest.mark.parametrize(("place", "text"), blocks("toml"))
def test_toml_blocks_are_valid_runs(place, text):
    tree = tomllib.loads(text)
    config.validate(BASE | tree, place)


@pytest.mark.parametrize("command", commands())
def test_documented_commands_exist(command):
    """Subcommands, flags and overridden keys."""
    words = command.split()[1:]
    path = words[:2] if words[0] in ("model", "bench") else words[:1]
    text = help_of(*path)
    for word in words[len(path) :]:
        if word.startswith("--"):
            assert re.search(rf"(?<![\w-]){re.escape(word)}(?![\w-])", text), f"{command}: `vime {' '.join(path)}` has no {word}"
        elif "=" in word and words[0] != "engines":  # whose arguments are vLLM's
            keys, _ = config.parse_override(word)
            assert valid_key(".".join(keys)), f"{command}: no key {'.'.join(keys)}"


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_documented_keys_exist(path):
    kinds = {n: f.annotation for n, f in config.Config.model_fields.items()}
    sections = "|".join(n for n, kind in kinds.items() if isinstance(kind, type) and issubclass(kind, BaseModel))
    named = re.findall(rf"`((?:{sections})\.[a-z_]+)(?: = [^`]*)?`", path.read_text().replace("`reward.png`", ""))
    assert [k for k in named if not valid_key(k)] == []


def test_documented_make_targets_exist():
    targets = set(re.findall(r"^([a-z0-9 -]+):", (ROOT / "Makefile").read_text(), re.M))
    targets = {t for group in targets for t in group.split()}
    named = {t for p in DOCS for t in re.findall(r"(?:^|`)make ([a-z][a-z-]*)", p.read_text(), re.M)}
    assert {"demo", "test"} <= named <= targets


@pytest.mark.parametrize("path", DOCS, ids=lambda p: p.name)
def test_links_lead_somewhere(path):
    links = re.findall(r"\]\(([^)#]+)\)", path.read_text())
    assert [x for x in links if "://" not in x and not (path.parent / x).exists()] == []


def test_documented_files_of_the_examples_exist():
    named = {m for p in DOCS for m in re.findall(r"examples/[\w/.-]+\.(?:py|toml)", p.read_text())}
    assert named and [x for x in named if not (ROOT / x).exists()] == []


def test_documented_metrics_are_logged():
    """Each metric named in a table occurs in the code, whole or as a name under its prefix."""
    code = "\n".join(p.read_text() for p in (ROOT / "vime").rglob("*.py"))
    named = {m for p in DOCS for m in re.findall(r"`((?:rollout|train|eval|weights|perf|health)/[a-z_]+)`", p.read_text())}
    assert len(named) > 10
    missing = [m for m in named if f'"{m}"' not in code and not (f'f"{m.split("/")[0]}/{{' in code and f'"{m.split("/")[1]}"' in code)]
    assert missing == []
