"""A repository that does not hold its own future: `clean` makes one at a commit, `verify` looks for every way a fix could still be read.

Deleting refs and collecting garbage is not enough (gc never prunes a promisor pack, and a plain clone keeps the branches), so `clean`
starts from nothing and fetches one commit with its past.
"""

import contextlib
import importlib.util
import io
import os
import re
import shutil
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from vime.agents.tasks.trees import TABLE, apply, checkout, git
from vime.errors import VimeError

OFFLINE = {"GIT_NO_LAZY_FETCH": "1", "GIT_NO_REPLACE_OBJECTS": "1"}  # what is not here is not here, and a replaced object is the one it was
STATE, CONFIG, PLAIN = TABLE["history"]["state"], TABLE["history"]["config"], tuple(TABLE["history"]["plain"])
MOST = 64 << 20  # bytes of a member of an archive that are looked at
Wanted = dict[str, tuple[bytes, bytes]]  # path -> content before and after the fix


def clean(repo: str | Path, base: str, out: Path) -> str:
    """A new repository `out` with commit `base` and its past on branch main, and nothing else. Returns the commit's full id."""
    if out.exists() and any(out.iterdir()):
        raise VimeError(f"{out} is not empty", "give a new folder")
    sha = git("-C", str(repo), "rev-parse", "--verify", f"{base}^{{commit}}").decode().strip()
    git("init", "-q", "-b", "main", "--template=", str(out))
    serve = "git -c safe.directory=* -c uploadpack.allowAnySHA1InWant=true upload-pack"
    source = Path(git("-C", str(repo), "rev-parse", "--absolute-git-dir").decode().strip())
    at, wanted = ("-C", str(out)), f"{sha}:refs/vime/base"
    git(*at, "fetch", "-q", "--no-tags", "--no-write-fetch-head", "--upload-pack", serve, source.as_uri(), wanted, env=OFFLINE)
    git(*at, "reset", "-q", "--hard", "refs/vime/base")
    git(*at, "update-ref", "-d", "refs/vime/base")
    for left in ("ORIG_HEAD", "FETCH_HEAD", "logs", "hooks", "description"):
        p = out / ".git" / left
        shutil.rmtree(p) if p.is_dir() else p.unlink(missing_ok=True)
    return sha


def after(tree: Path, patches: list[str]) -> Wanted:
    """{path: (content at HEAD, content with the patches applied)} of what the patches write."""
    with tempfile.TemporaryDirectory() as tmp:
        base = checkout(tree, "HEAD", Path(tmp, "base"))
        fixed = shutil.copytree(base, Path(tmp, "fixed"), symlinks=True)
        for patch in patches:
            apply(fixed, patch, "patch")
        names = [str(f.relative_to(fixed)) for f in fixed.rglob("*") if f.is_file()]
        both = {p: ((base / p).read_bytes() if (base / p).is_file() else b"", (fixed / p).read_bytes()) for p in names}
        return {p: (old, new) for p, (old, new) in both.items() if old != new}


def verify(tree: Path, patches: list[str], fix: str = "", look: list[Path] | None = None) -> list[str]:
    """Ways in which the fix can be read in the repository `tree`, in its untracked files or below the folders of `look` (site-packages, caches
    of pip and uv, wheelhouses): one line each, empty if none. `patches`: the gold patch and the test patch, `fix` the commit of both."""
    home = Path(git("-C", str(tree), "rev-parse", "--absolute-git-dir").decode().strip())
    wanted, leaks = after(tree, patches), []
    branch = git("-C", str(tree), "symbolic-ref", "-q", "HEAD", ok=(0, 1)).decode().strip()
    for ref in git("-C", str(tree), "for-each-ref", "--format=%(refname)").decode().split():
        leaks += [f"ref: {ref}"] if ref != branch else []
    for p in sorted(home.rglob("*")):
        if (p.is_file() or p.is_symlink()) and re.fullmatch(STATE, str(p.relative_to(home))):
            leaks.append(f"git state: {p.relative_to(home)}")
    for line in git("-C", str(tree), "config", "--list", "--name-only", "--local", "--includes").decode().split():
        leaks += [f"git config: {line}"] if re.fullmatch(CONFIG, line) else []
    have = set(git("-C", str(tree), "cat-file", "--batch-all-objects", "--unordered", "--batch-check=%(objectname)", env=OFFLINE).decode().split())
    past = {line.split()[0] for line in git("-C", str(tree), "rev-list", "--objects", "HEAD", env=OFFLINE).decode().splitlines()}
    if more := sorted(have - past):
        leaks.append(f"objects: {len(more)} that are no part of HEAD's past, {more[0]} for one")
    if fix and git("-C", str(tree), "cat-file", "-t", fix, env=OFFLINE, ok=(0, 1, 128)).strip():
        leaks.append(f"object: the fix, {fix}, can be read")
    for path, (_, fixed) in wanted.items():
        blob = git("-C", str(tree), "hash-object", "--stdin", data=fixed).decode().strip()
        leaks += [f"object: {path} as fixed, {blob}, can be read"] if blob in have else []
    for root in (tree, *(look or [])):
        leaks += [f"copy: {where}" for where in copies(root, wanted)]
    return leaks


def alike(where: str, wanted: Wanted) -> list[tuple[bytes, bytes]]:
    """The wanted files of that name; of a .pyc, of its source's."""
    name = re.sub(r"(\.cpython-\w+|\.pypy\w+)?(\.opt-\d)?\.pyc$", ".py", where.rsplit("/", 1)[-1])
    return [v for path, v in wanted.items() if path.rsplit("/", 1)[-1] == name]


def copies(root: Path, wanted: Wanted) -> Iterator[str]:
    """Files below root, and members of archives, that hold a fixed file or most of its new lines: sources, .pyc, wheels, eggs, sdists."""
    for folder, names, files in os.walk(root):
        names[:] = [n for n in names if n != ".git"]
        for p in (Path(folder, n) for n in files if not n.endswith(PLAIN) or alike(n, wanted)):
            if p.is_file() and not p.is_symlink():
                with open(p, "rb") as f:
                    yield from holds(str(p), f, wanted)


def holds(where: str, f: IO[bytes], wanted: Wanted) -> Iterator[str]:
    """`where`, or what is inside it, if it gives a fixed file away. pip's cache puts a header before an archive, which zip allows."""
    inside: Iterator[tuple[str, IO[bytes]]] = iter(())
    if near := alike(where, wanted):
        data = f.read()
        if any((compiled if where.endswith(".pyc") else written)(data, *v) for v in near):
            yield where
        return
    with contextlib.suppress(tarfile.TarError, zipfile.BadZipFile, EOFError, OSError):  # compressed, but no archive: a log, a man page
        if zipfile.is_zipfile(f):
            z = zipfile.ZipFile(f)
            inside = ((i.filename, z.open(i)) for i in z.infolist() if not i.is_dir())
        else:
            f.seek(0)
            head = f.read(512)
            f.seek(0)
            if head.startswith((b"\x1f\x8b", b"BZh", b"\xfd7zXZ")) or head[257:262] == b"ustar":
                t = tarfile.open(fileobj=f)  # noqa: SIM115
                inside = ((m.name, g) for m in t if (g := t.extractfile(m)))
        for member, g in inside:
            if not member.endswith(PLAIN) or alike(member, wanted):
                yield from holds(f"{where}!/{member}", io.BytesIO(g.read(MOST)), wanted)


def written(data: bytes, base: bytes, fixed: bytes) -> bool:
    """Whether a source is the fixed one, or has more than half of the lines that the fix added."""
    old = {line.strip() for line in base.splitlines()}
    new = {line.strip() for line in fixed.splitlines()} - old
    telling = {line for line in new if len(line) >= 12}
    there = {line.strip() for line in data.splitlines()}
    return data == fixed or (len(telling & there) * 2 > len(telling))


def compiled(data: bytes, base: bytes, fixed: bytes) -> bool:
    """Whether bytecode was made from the fixed source: its header has the source's hash, or its size (where the sizes don't differ, it may be)."""
    if data[4:8] != b"\0\0\0\0":
        return data[8:16] == importlib.util.source_hash(fixed)
    return int.from_bytes(data[12:16], "little") == len(fixed) & 0xFFFFFFFF
