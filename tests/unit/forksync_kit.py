"""A pair of small repositories, made here: `acorn` (upstream) and its fork `birch`, over 40 files and every case that a sync meets."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

from forksync import cli

PNG = b"\x89PNG\r\n\x1a\n\0\0acorn"
TABLE = """
schema = 1
[[path]]
from = "acorn"
to = "birch"
[[protect]]
pattern = 'https://github\\.com/oak/acorn/(?:pull|issues)/\\d+'
[[rule]]
kind = "flag"
from = "--acorn-mem"
to = "--birch-memory"
[[rule]]
kind = "literal"
from = "acorn"
to = "birch"
[[rule]]
kind = "literal"
from = "Acorn"
to = "Birch"
[[rule]]
kind = "literal"
from = "ACORN"
to = "BIRCH"
[[example]]
in = "import acorn  # ACORN, see https://github.com/oak/acorn/pull/7\\n"
out = "import birch  # BIRCH, see https://github.com/oak/acorn/pull/7\\n"
"""


def git(where: Path, *args: str, data: bytes | None = None) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
    who = {f"GIT_{w}_{k}": v for w in ("AUTHOR", "COMMITTER") for k, v in (("NAME", "t"), ("EMAIL", "t@t"), ("DATE", "1700000000 +0000"))}
    done = subprocess.run(["git", "-c", "gc.auto=0", "-C", str(where), *args], input=data, capture_output=True, env=env | who)
    assert done.returncode == 0, (args, done.stderr)
    return done.stdout.decode(errors="replace").strip()


def write(where: Path, files: dict[str, str | bytes | None]) -> None:
    for name, content in files.items():
        path = where / name
        if content is None:
            path.unlink()
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())


def commit(where: Path, message: str) -> str:
    git(where, "add", "-A")
    git(where, "commit", "-q", "--no-verify", "-m", message)
    return git(where, "rev-parse", "HEAD")


def repository(where: Path, files: dict[str, str | bytes | None]) -> Path:
    where.mkdir(parents=True)
    git(where, "init", "-q", "-b", "main")
    write(where, files)
    commit(where, "begin")
    return where


def module(n: int) -> str:
    body = "".join(f"def step_{k}(x):\n    # acorn step {k} of part {n}\n    return x + {k * n}\n\n\n" for k in range(8))
    return f'"""Part {n} of acorn."""\n\nimport acorn.core\n\nMEM = "--acorn-mem"\n\n\n{body}'


def upstream_files() -> dict[str, str | bytes | None]:
    files: dict[str, str | bytes | None] = {f"acorn/part_{n}.py": module(n) for n in range(30)}
    files |= {
        "acorn/__init__.py": "", "acorn/core.py": module(40), "acorn/engine.py": module(41), "acorn/pair_a.py": module(42), "acorn/pair_b.py": module(43),
        "README.md": "# Acorn\n\nSee https://github.com/oak/acorn/pull/7.\n", "docs/dos.txt": "one\r\nacorn\r\nthree\r\n", "docs/latin.txt": b"caf\xe9 acorn\nlast\n",
        "docs/empty.txt": "", "img/logo.png": PNG, "run.sh": "#!/bin/sh\npython -m acorn --acorn-mem 1\n", "acorn/tests_data.json": '{"name": "acorn"}\n',
        "docs/old_name.md": "".join(f"line {n} of acorn\n" for n in range(20)), "docs/gone_up.md": "acorn\n" * 5, "docs/gone_fork.md": "acorn\nwords\n",
        "tests/test_core.py": "import birch_free\n\n\ndef test_steps():\n    assert True\n", "docs/mode.sh": "echo acorn\n",
        "with space.txt": "acorn\n", "acorn/\u00e9t\u00e9.txt": "acorn\n",
    }  # fmt: skip
    return files


def make_upstream(where: Path) -> Path:
    repository(where, upstream_files())
    os.symlink("acorn/core.py", where / "link")
    commit(where, "a link")
    return where


ENGINE_OLD, ENGINE_NEW = "    # birch step 2 of part 41\n    return x + 82\n", "    # ours: drained first\n    drain()\n    return x + 82\n"


def make_fork(where: Path, upstream: Path) -> Path:
    """The fork's tree: translated by hand (sed), then edited in its own way."""
    where.mkdir(parents=True)
    git(where, "init", "-q", "-b", "main")
    for name in sorted(os.fsdecode(p.relative_to(upstream)) for p in upstream.rglob("*")):
        source = upstream / name
        if name.startswith(".git") or (source.is_dir() and not source.is_symlink()):
            continue
        target = where / name.replace("acorn", "birch")
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_symlink():
            os.symlink(os.readlink(source).replace("acorn", "birch"), target)
            continue
        data = source.read_bytes()
        if b"\0" not in data:
            keep = data.replace(b"oak/acorn", b"oak/@@").replace(b"--acorn-mem", b"--birch-memory")
            data = keep.replace(b"acorn", b"birch").replace(b"Acorn", b"Birch").replace(b"ACORN", b"BIRCH").replace(b"oak/@@", b"oak/acorn")
        target.write_bytes(data)
    commit(where, "translated")
    return where


def edit(where: Path, name: str, old: str, new: str) -> None:
    data = (where / name).read_bytes()
    assert data.count(old.encode()) == 1, (name, old, data.count(old.encode()))
    (where / name).write_bytes(data.replace(old.encode(), new.encode()))


def fork_edits(fork: Path) -> None:
    """What this fork does differently: nine kinds of difference."""
    edit(fork, "birch/engine.py", ENGINE_OLD, ENGINE_NEW)
    edit(fork, "birch/part_3.py", "    # birch step 5 of part 3\n", "")
    edit(fork, "birch/part_4.py", "    return x + 12\n", "    y = x + 12\n    return y\n")
    edit(fork, "birch/pair_a.py", "    return x + 126\n", "    return x + 126.0\n")
    edit(fork, "docs/latin.txt", "last", "end")
    edit(fork, "docs/dos.txt", "three", "drei")
    write(fork, {"docs/gone_fork.md": None, "birch/only_here.py": "HERE = 1\n", "img/logo.png": PNG.replace(b"acorn", b"birch")})
    (fork / "docs/mode.sh").chmod(0o755)
    commit(fork, "our own ways")


def upstream_moves(upstream: Path) -> list[str]:
    """Four commits: clean ones, conflicts, deletions on both sides, a rename, a link, a mode, new files, coupled hunks."""
    out = []
    edit(upstream, "acorn/part_0.py", "    return x + 0\n\n\ndef step_1", "    return x - 0\n\n\ndef step_1")
    edit(upstream, "acorn/engine.py", "    return x + 287\n", "    return acorn.core.late(x) + 287\n")
    write(upstream, {"acorn/fresh.py": "FRESH = 'acorn'\n", "docs/gone_up.md": None})
    out.append(commit(upstream, "add fresh, drop a page"))
    edit(upstream, "acorn/pair_a.py", "    return x + 126\n", "    return (x + 126) * 2\n")
    edit(upstream, "acorn/pair_b.py", "    return x + 129\n", "    return (x + 129) / 2\n")
    edit(upstream, "docs/gone_fork.md", "words", "new words")
    out.append(commit(upstream, "scale both halves"))
    git(upstream, "mv", "docs/old_name.md", "docs/new_name.md")
    edit(upstream, "docs/new_name.md", "line 3 of", "line three of")
    os.remove(upstream / "link")
    os.symlink("acorn/engine.py", upstream / "link")
    (upstream / "run.sh").chmod(0o755)
    out.append(commit(upstream, "rename a page, run.sh runs"))
    edit(upstream, "acorn/part_4.py", "    # acorn step 3 of part 4\n    return x + 12\n", "    # acorn step 3 of part 4, faster\n    return x + 12\n")
    out.append(commit(upstream, "a word next to the fork's edit"))
    return out


def made(folder: Path, edits: bool = True) -> tuple[Path, Path]:
    """(upstream, fork) with .forksync committed; the fork's own differences are its baseline."""
    upstream = make_upstream(folder / "acorn")
    fork = make_fork(folder / "birch", upstream)
    if edits:
        fork_edits(fork)
    (folder / "table.toml").write_text(TABLE)
    assert cli.main(["-C", str(fork), "init", "--upstream", "../acorn", "--table", str(folder / "table.toml")]) == 0
    commit(fork, "forksync")
    return upstream, fork


def copied(template: Path, folder: Path) -> tuple[Path, Path]:
    """A copy of a pair that `made` has made."""
    shutil.copytree(template, folder, symlinks=True, dirs_exist_ok=True)
    return folder / "acorn", folder / "birch"


def run(fork: Path, *args: str) -> int:
    return cli.main(["-C", str(fork), *args])


def sign_all(fork: Path) -> None:
    assert run(fork, "sign", "*", "--by", "ann", "--yes", "--reason", "our way", "--class", "engine") == 0
    commit(fork, "signed")


def configure(fork: Path, text: str) -> None:
    """Add to config.toml, the fixers of which give way."""
    file = fork / ".forksync/config.toml"
    file.write_text(file.read_text().split("# kit\n")[0].split("[[fixer]]")[0] + "# kit\n" + text)
    commit(fork, "configure")


GREEN = f'[[gate]]\nname = "unit"\nkind = "functional"\nrun = "{sys.executable} -c pass"\n'
