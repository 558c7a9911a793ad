"""git by its plumbing: objects and trees in and out, without a work tree. Paths are str with undecodable bytes as surrogates."""

from __future__ import annotations

import os
import subprocess
import tempfile
import weakref
from pathlib import Path

UNSIGNED, USAGE, OPEN, GATE, STUCK, SAFETY, ENVIRONMENT = 1, 2, 3, 4, 5, 6, 7  # exit codes; 0 is fine
# What would let a user's own settings change a result, or run a user's programs
FIXED = "core.quotePath=false core.hooksPath=/dev/null core.attributesFile=/dev/null core.autocrlf=false commit.gpgSign=false gc.auto=0"
GIT = ["git", *(x for key in FIXED.split() for x in ("-c", key))]
LOCKED = " of lock.toml"
Entry = tuple[str, str]  # mode, object id
Tree = dict[str, Entry]


class ForksyncError(Exception):
    """What happened and where, what to do about it, and the exit code (2 usage, 6 safety, 7 environment, ...)."""

    def __init__(self, what: str, fix: str = "", code: int = USAGE):
        super().__init__(what, fix, code)
        self.code, self.text = code, what + (f" ({fix})" if fix else "")

    def __str__(self) -> str:
        return self.text


def environment(**extra: str) -> dict[str, str]:
    """The environment without GIT_DIR and such, which hooks set and which would point our git elsewhere."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("GIT_") or k.startswith(("GIT_AUTHOR", "GIT_COMMITTER", "GIT_SSH", "GIT_CONFIG"))}
    return kept | {"LC_ALL": "C", "GIT_NO_REPLACE_OBJECTS": "1", "GIT_TERMINAL_PROMPT": "0"} | extra


class Git:
    """One repository, bare or with a work tree. Raises ForksyncError (7) for a git that fails where that is not expected."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        self._cat: subprocess.Popen[bytes] | None = None

    def run(self, *args: str, data: bytes | None = None, ok: tuple[int, ...] = (0,), env: dict[str, str] | None = None) -> tuple[int, bytes]:
        """Exit code and stdout."""
        try:
            done = subprocess.run([*GIT, "-C", str(self.path), *args], input=data, capture_output=True, env=environment(**(env or {})))
        except FileNotFoundError as e:
            raise ForksyncError("git is not on PATH", "install git >= 2.38", ENVIRONMENT) from e
        if done.returncode not in ok:
            said = (done.stderr or done.stdout).decode(errors="replace").strip().splitlines()
            raise ForksyncError(f"{self.path}: git {args[0]} failed: {said[-1] if said else f'exit code {done.returncode}'}", "", ENVIRONMENT)
        return done.returncode, done.stdout

    def out(self, *args: str, data: bytes | None = None, env: dict[str, str] | None = None) -> str:
        return os.fsdecode(self.run(*args, data=data, env=env)[1]).strip()

    def ref(self, name: str) -> str:
        """Object id of a ref, "" where it does not exist."""
        return self.run("rev-parse", "--verify", "-q", name, ok=(0, 1, 128))[1].decode().strip()

    def commit(self, name: str, what: str = "") -> str:
        """Full id of a commit. Raises: ForksyncError (7) where there is none of that name."""
        if not (found := self.ref(f"{name}^{{commit}}")):
            fix = "fetch it, or give another name"
            fix += "; if upstream was replaced or rewritten, bring the old commit from another clone" * (what == LOCKED)
            raise ForksyncError(f"{self.path} has no commit {name!r}{what}", fix, ENVIRONMENT)
        return found

    def read(self, oid: str) -> bytes | None:
        """Content of a blob, None where this clone lacks it. One process serves all reads."""
        if self._cat is None:
            command = [*GIT, "-C", str(self.path), "cat-file", "--batch"]
            self._cat = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment())
            weakref.finalize(self, self._cat.communicate)  # ends its input, and reaps it
        assert self._cat.stdin and self._cat.stdout
        self._cat.stdin.write(oid.encode() + b"\n")
        self._cat.stdin.flush()
        head = self._cat.stdout.readline().split()
        return self._cat.stdout.read(int(head[2]) + 1)[:-1] if len(head) == 3 else None

    def text(self, entry: Entry | None) -> str | None:
        """A file's text; "" for no file, None for a submodule, or binary or missing content."""
        data = b"" if entry is None else None if entry[0] == "160000" else self.read(entry[1])
        return None if data is None or b"\0" in data else data.decode("utf-8", "surrogateescape")

    def tree(self, treeish: str) -> Tree:
        """{path: (mode, object id)} of all files, links and submodules."""
        rows = [line.split(b"\t", 1) for line in self.run("ls-tree", "-r", "-z", "--full-tree", treeish)[1].split(b"\0")[:-1]]
        return {os.fsdecode(path): (meta.decode().split()[0], meta.decode().split()[2]) for meta, path in rows}

    def write(self, text: str | bytes) -> str:
        data = text.encode("utf-8", "surrogateescape") if isinstance(text, str) else text
        return self.out("hash-object", "-w", "--stdin", data=data)

    def undisturbed(self) -> None:
        """Raises: ForksyncError (7) where a work tree has changes that a reset would lose."""
        if self.run("status", "--porcelain")[1]:
            raise ForksyncError(f"{self.path} has changes that are not committed", "commit them, then again", ENVIRONMENT)

    def tree_of(self, treeish: str) -> str:
        return self.out("rev-parse", f"{treeish}^{{tree}}")

    def tree_with(self, treeish: str, changes: dict[str, Entry | None]) -> str:
        """The tree with some paths set, or removed (None). Checks that it came out so: a lost removal would bring deleted files back."""
        with tempfile.TemporaryDirectory() as folder:
            env = {"GIT_INDEX_FILE": f"{folder}/index"}
            self.run("read-tree", treeish, env=env)
            gone = "".join(f"0 {'0' * 40}\t{p}\0" for p in changes)  # first all away: a file may become a folder
            lines = gone + "".join(f"{e[0]} {e[1]}\t{p}\0" for p, e in changes.items() if e)
            self.run("update-index", "-z", "--index-info", data=os.fsencode(lines), env=env)
            made = self.out("write-tree", env=env)
        got = self.tree(made)
        if wrong := [p for p, e in changes.items() if got.get(p) != e]:
            raise ForksyncError(f"{self.path}: git did not write {wrong[0]} as asked", "a file and a folder of one name?", SAFETY)
        return made

    def worktree_tree(self) -> str:
        """Tree of the work tree as it is, with new files that git does not ignore (those over 5 MB wait until they are added, since looking at them
        means to store them); the index stays as it is."""
        with tempfile.TemporaryDirectory() as folder:
            copy, index = Path(folder, "index"), Path(self.path, self.out("rev-parse", "--git-path", "index"))
            if index.exists():
                copy.write_bytes(index.read_bytes())
            env = {"GIT_INDEX_FILE": str(copy), "GIT_LITERAL_PATHSPECS": "1"}
            self.run("add", "-u", env=env)
            new = [p for p in self.run("ls-files", "-o", "-z", "--exclude-standard")[1].split(b"\0")[:-1] if (self.path / os.fsdecode(p)).lstat().st_size < 5e6]
            self.run("add", "--pathspec-from-file=-", "--pathspec-file-nul", data=b"\0".join(new), env=env)
            return self.out("write-tree", env=env)


def opened(path: str | Path, what: str) -> Git:
    """The repository at a path. Raises: ForksyncError (7) where there is none, or git is too old."""
    git = Git(path)
    if not Path(path).is_dir() or git.run("rev-parse", "--git-dir", ok=(0, 128))[0]:
        raise ForksyncError(f"{path} is no git repository ({what})", "give the path of a clone", ENVIRONMENT)
    version = git.out("version").split()[2]
    if tuple(int(x) for x in version.split(".")[:2]) < (2, 38):
        raise ForksyncError(f"git {version} is too old", "forksync needs git >= 2.38 for merges without a work tree", ENVIRONMENT)
    return git
