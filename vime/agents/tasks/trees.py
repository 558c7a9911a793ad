"""Trees of files, and what differs between them, taken without trust in anything that an agent could have written."""

import os
import shutil
import subprocess
import tempfile
import tomllib
from pathlib import Path

from vime.errors import VimeError, said

TABLE = tomllib.loads(Path(__file__).with_name("tables.toml").read_text())
ALONE = {"HOME": "/nonexistent", "GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": os.devnull, "GIT_TERMINAL_PROMPT": "0"}
Files = dict[str, bytes | None]  # path in the tree -> new content, None where it was deleted
CACHES = {".git", "__pycache__", ".pytest_cache", ".mypy_cache", ".ruff_cache", ".hypothesis", ".tox", ".nox", ".venv", "venv", "node_modules"}


def git(*args: str, env: dict[str, str] | None = None, data: bytes | None = None, ok: tuple[int, ...] = (0,)) -> bytes:
    """git's standard output, with no configuration, hook or attribute of this machine or user. Raises VimeError with git's words."""
    settings = ("safe.directory=*", "core.hooksPath=/dev/null", "core.fsmonitor=false", "core.logAllRefUpdates=false", "gc.auto=0")
    quiet = [w for s in settings for w in ("-c", s)]
    r = subprocess.run(["git", *quiet, *args], env={"PATH": os.environ["PATH"]} | ALONE | (env or {}), input=data, capture_output=True)
    if r.returncode not in ok:
        raise VimeError(f"git {' '.join(args)[:200]} failed", "see what git said", r.stderr.decode(errors="replace")[-2000:])
    return r.stdout


def clone_of(repo: str, mirror: Path) -> Path:
    """The clone of `owner/name` below `mirror`, with a work tree or bare, in any of the usual places. Raises VimeError naming them."""
    names = (repo, repo.replace("/", "+"), repo.replace("/", "__"), f"{repo}.git", repo.split("/")[-1])
    for p in (mirror / name / end for name in names for end in ("", "repo")):
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


def apply(tree: Path, patch: str, what: str) -> None:
    """git apply, outside of any repository. Raises VimeError with its words."""
    if patch.strip():
        try:
            text = patch.encode("utf-8", "surrogateescape")
            git("-C", str(tree), "apply", "--whitespace=nowarn", "-", env={"GIT_CEILING_DIRECTORIES": str(tree.parent)}, data=text)
        except VimeError as e:
            raise VimeError(f"the {what} does not apply", "it is against another base, or no diff of git", e.log) from None


def whole(files: Files, base: Path) -> Files:
    """A folder that was deleted, or gave way to a file, as the deletion of its files; a file that gave way to a folder, as deleted."""
    gone = {str(f.relative_to(base)) for p in files if (base / p).is_dir() for f in (base / p).rglob("*") if not f.is_dir() or f.is_symlink()}
    gone |= {str(a) for p in files for a in Path(p).parents if (base / a).is_file()}
    return dict.fromkeys(gone, None) | {p: c for p, c in files.items() if c is not None or not (base / p).is_dir()}


def to_patch(base: Path, files: Files) -> str:
    """Files as a diff in git's form, which is what SWE-bench's predictions hold."""
    with tempfile.TemporaryDirectory() as tmp:
        for side in "ab":
            shutil.copytree(base, Path(tmp, side), symlinks=True)
        write(Path(tmp, "b"), files)
        return git("-C", tmp, "diff", "--no-index", "--binary", "--no-prefix", "a", "b", ok=(0, 1)).decode("utf-8", "surrogateescape")


def write(tree: Path, files: Files) -> None:
    """Lay files over a tree. Raises VimeError for a path that leaves it, goes through a link, or is a folder there."""
    for path, content in sorted(files.items(), key=lambda f: f[1] is not None):  # what was deleted first
        p = tree / path
        if ".." in Path(path).parts or not p.parent.resolve().is_relative_to(tree.resolve()):
            raise VimeError(f"{path!r} is outside of the tree", "an agent's change may only name files in its work folder")
        try:
            if p.is_symlink() or content is None:
                p.unlink(missing_ok=True)
            if content is not None:
                p.parent.mkdir(parents=True, exist_ok=True)
                if p.is_dir() and not any(f.is_file() or f.is_symlink() for f in p.rglob("*")):
                    shutil.rmtree(p)  # a folder whose files were all deleted
                p.write_bytes(content)
        except OSError as e:
            raise VimeError(f"{path!r} cannot be put over the base: {said(e)}") from e
