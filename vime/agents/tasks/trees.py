"""Trees of files, and what differs between them, taken without trust in anything that an agent could have written."""

import os
import shutil
import stat
import subprocess
import tempfile
from pathlib import Path

from vime.errors import VimeError

Files = dict[str, bytes | None]  # path in the tree -> new content, None where it was deleted
CACHES = {".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox", ".venv", "venv", "node_modules"}
MOST = 5 << 20  # bytes of one file of an agent's work


def git(*args: str, env: dict[str, str] | None = None, data: bytes | None = None, ok: tuple[int, ...] = (0,)) -> bytes:
    """git's standard output, with no configuration, hook or attribute of this machine or user. Raises VimeError with git's words."""
    clean = {
        "PATH": os.environ["PATH"],
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": os.devnull,
        "GIT_TERMINAL_PROMPT": "0",
        "HOME": "/nonexistent",
    }
    quiet = [
        "-c",
        "safe.directory=*",
        "-c",
        "core.hooksPath=/dev/null",
        "-c",
        "core.fsmonitor=false",
        "-c",
        "core.logAllRefUpdates=false",
        "-c",
        "gc.auto=0",
    ]
    r = subprocess.run(["git", *quiet, *args], env=clean | (env or {}), input=data, capture_output=True)
    if r.returncode not in ok:
        raise VimeError(f"git {' '.join(args)[:200]} failed", "see what git said", r.stderr.decode(errors="replace")[-2000:])
    return r.stdout


def clone_of(repo: str, mirror: Path) -> Path:
    """The clone of `owner/name` below `mirror`, with a work tree or bare, in any of the usual places. Raises VimeError naming them."""
    places = [
        mirror / p / end for p in (repo, repo.replace("/", "+"), repo.replace("/", "__"), f"{repo}.git", repo.split("/")[-1]) for end in ("", "repo")
    ]
    for p in places:
        if (p / "HEAD").is_file() or (p / ".git").exists():
            return p
    raise VimeError(f"there is no clone of {repo} in {mirror}", f"git clone --bare https://github.com/{repo} {mirror / repo}.git")


def checkout(repo: str | Path, commit: str, to: Path) -> Path:
    """The files of a commit, without a .git, in the new folder `to`. `repo`: a clone or a bare git folder."""
    to.mkdir(parents=True)
    with tempfile.TemporaryDirectory() as tmp:
        env = {"GIT_INDEX_FILE": f"{tmp}/index", "GIT_WORK_TREE": str(to.resolve())}
        git("-C", str(repo), "read-tree", commit, env=env)
        git("-C", str(repo), "checkout-index", "-a", f"--prefix={to.resolve()}/", env=env)
    return to


def listing(root: Path) -> dict[str, Path]:
    """Files and links below root, relative path -> path, without caches and git's own folder; links are not followed."""
    found = {}
    for folder, names, files in os.walk(root):
        links = [n for n in names if os.path.islink(os.path.join(folder, n))]
        names[:] = [n for n in names if n not in CACHES and n not in links]
        for n in files + links:
            p = Path(folder, n)
            found[str(p.relative_to(root))] = p
    return found


def changed(base: Path, work: Path) -> tuple[Files, dict[str, str]]:
    """What differs in `work`, found by reading files, so that no ignore file, attribute, index flag or hook in there can hide a thing.
    Returns (files, {path: reason} of what can't be part of a change)."""
    before, after = listing(base), listing(work)
    files: Files = {p: None for p in before if p not in after}
    odd = {}
    for path, p in after.items():
        was, size = before.get(path), p.lstat().st_size
        if not stat.S_ISREG(p.lstat().st_mode):
            if not (was and was.is_symlink() and p.is_symlink() and os.readlink(was) == os.readlink(p)):
                odd[path] = "no regular file"
        elif size > MOST:
            odd[path] = f"larger than {MOST >> 20} MiB"
        elif not was or was.is_symlink() or was.stat().st_size != size or was.read_bytes() != p.read_bytes():
            files[path] = p.read_bytes()
    return files, odd


def apply(tree: Path, patch: str, what: str) -> None:
    """git apply, outside of any repository. Raises VimeError with its words."""
    if patch.strip():
        try:
            git(
                "-C",
                str(tree),
                "apply",
                "--whitespace=nowarn",
                "-",
                env={"GIT_CEILING_DIRECTORIES": str(tree.parent)},
                data=patch.encode("utf-8", "surrogateescape"),
            )
        except VimeError as e:
            raise VimeError(f"the {what} does not apply", "it is against another base, or no diff of git", e.log) from None


def from_patch(base: Path, patch: str) -> Files:
    """A prediction (a unified diff) as files. Raises VimeError where it does not apply."""
    with tempfile.TemporaryDirectory() as tmp:
        work = shutil.copytree(base, Path(tmp, "t"), symlinks=True)
        apply(work, patch, "patch")
        return changed(base, work)[0]


def to_patch(base: Path, files: Files) -> str:
    """Files as a diff in git's form, which is what SWE-bench's predictions hold."""
    with tempfile.TemporaryDirectory() as tmp:
        for side in "ab":
            shutil.copytree(base, Path(tmp, side), symlinks=True)
        write(Path(tmp, "b"), files)
        return git("-C", tmp, "diff", "--no-index", "--binary", "--no-prefix", "a", "b", ok=(0, 1)).decode("utf-8", "surrogateescape")


def write(tree: Path, files: Files) -> None:
    """Lay files over a tree. A path that leaves it, or goes through a link, is refused."""
    for path, content in files.items():
        p = tree / path
        if ".." in Path(path).parts or not p.parent.resolve().is_relative_to(tree.resolve()):
            raise VimeError(f"{path!r} is outside of the tree", "an agent's change may only name files in its work folder")
        if p.is_symlink() or content is None:
            p.unlink(missing_ok=True)
        if content is not None:
            p.parent.mkdir(parents=True, exist_ok=True)
            p.write_bytes(content)
