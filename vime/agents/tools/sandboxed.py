"""Tools that act on the episode's sandbox: a shell that stays, an editor, Python."""

import posixpath
from typing import Any, Literal

from pydantic import BaseModel, Field

from vime.agents.tools import Context, Observation, Tool, clipped
from vime.errors import VimeError

VIEWED = 2  # levels of a folder that `view` lists


class Shell(Tool):
    name = "shell"
    description = "Run a command in a bash that stays: folder, variables and background jobs are kept from call to call."

    def __init__(self, timeout_s: float = 60, max_chars: int = 16_000):
        self.timeout_s, self.max_chars = timeout_s, max_chars

    class Args(BaseModel):
        command: str

    async def run(self, args: Args, ctx: Context) -> Observation:
        if "shell" not in ctx.state:
            ctx.state["shell"] = await ctx.box.shell()
        return shown(await ctx.state["shell"].run(args.command, self.timeout_s), self.max_chars)


class Python(Shell):
    name, description = "python", "Run Python code as a program of its own and return what it prints."

    class Args(BaseModel):
        code: str

    async def run(self, args: Args, ctx: Context) -> Observation:  # type: ignore[override]
        return shown(await ctx.box.exec(["python3", "-"], stdin=args.code.encode(), timeout=self.timeout_s), self.max_chars)


def shown(result: Any, max_chars: int) -> Observation:
    """A sandbox's Result: its output, then its exit code unless that is 0."""
    text, cut = clipped(result.output, max_chars)
    end = "[stopped: it took too long]" if result.timed_out else f"[exit code {result.code}]" if result.code else ""
    text = "\n".join(filter(None, [text.rstrip("\n"), end])) or "[no output]"
    about = {"exit_code": result.code, "command_seconds": result.seconds}
    return Observation(text, status="timeout" if result.timed_out else "ok", truncated=cut or result.truncated, metadata=about)


class Editor(Tool):
    name = "editor"
    description = (
        "View, create and change text files. view: a file with line numbers, or what a folder holds. create: write file_text. str_replace: "
        "old_str, which must occur exactly once, becomes new_str. insert: new_str after line insert_line (0: at the top). undo: take back "
        "the last change to the file."
    )

    def __init__(self, max_chars: int = 16_000):
        self.max_chars = max_chars

    class Args(BaseModel):
        command: Literal["view", "create", "str_replace", "insert", "undo"]
        path: str = Field(description="absolute, or from the working folder")
        file_text: str | None = None
        old_str: str | None = None
        new_str: str | None = None
        insert_line: int | None = None
        view_range: tuple[int, int] | None = Field(None, description="first and last line, from 1; last -1: to the end")

    async def run(self, args: Args, ctx: Context) -> Observation:
        """ValueError (an observed error) for what the model can mend."""
        box, path = ctx.box, posixpath.normpath(posixpath.join(ctx.box.workdir, args.path))
        past: list[str | None] = ctx.state.setdefault("edits", {}).setdefault(path, [])
        if args.command == "view":
            listed = await box.exec(["find", path, "-maxdepth", str(VIEWED), "-not", "-path", "*/.*", "-type", "f,d"])
            if len(listed.output.splitlines()) > 1 or not (text := await _text(box, path)):
                return shown(listed, self.max_chars)
            return self._numbered(text, args.view_range or (1, -1))
        if args.command == "undo":
            if not past:
                raise ValueError(f"{path} was not changed here")
            text = past.pop()
            await (box.exec(["rm", "-f", path]) if text is None else _write(box, path, text))
            return Observation(f"{path} is as it was before the last change")
        old = await _text(box, path)
        new, line = _changed(args, path, old)
        await _write(box, path, new)
        past.append(old)
        return Observation(f"{path} written") if args.command == "create" else self._numbered(new, (max(1, line - 4), line + 4))

    def _numbered(self, text: str, span: tuple[int, int]) -> Observation:
        lines = text.splitlines()
        first, last = max(1, span[0]), len(lines) if span[1] < 0 else span[1]
        text, cut = clipped("\n".join(f"{n:6}\t{lines[n - 1]}" for n in range(first, min(last, len(lines)) + 1)), self.max_chars)
        return Observation(text, truncated=cut)


async def _text(box: Any, path: str) -> str | None:
    """A file's text; None where there is none."""
    got = await box.exec(["cat", "--", path])
    if got.truncated or got.timed_out:
        raise ValueError(f"{path} is more than this tool can read: use a command")
    return None if got.code else str(got.stdout.decode())


async def _write(box: Any, path: str, text: str) -> None:
    """Raises: ValueError for a file that may not be written."""
    try:
        await box.write(path, text.encode(), mode=None)
    except VimeError as e:
        raise ValueError(e.what) from e


def _changed(args: Any, path: str, old: str | None) -> tuple[str, int]:
    """The file's new text, and the line to show."""
    if args.command == "create":
        if args.file_text is None or old is not None:
            raise ValueError("create needs file_text" if old is None else f"{path} exists: change it with str_replace")
        return args.file_text, 1
    if old is None:
        raise ValueError(f"there is no file {path}")
    new = args.new_str or ""
    if args.command == "insert":
        lines = old.splitlines(keepends=True)
        if args.insert_line is None or not 0 <= args.insert_line <= len(lines):
            raise ValueError(f"insert_line must be 0 to {len(lines)}, the file's number of lines")
        before = "".join(lines[: args.insert_line])
        before += "" if not before or before.endswith("\n") else "\n"
        return before + new + ("" if new.endswith("\n") else "\n") + "".join(lines[args.insert_line :]), args.insert_line + 1
    if not args.old_str or (times := old.count(args.old_str)) != 1:
        raise ValueError(f"old_str must occur exactly once in {path}; it occurs {times} times" if args.old_str else "str_replace needs old_str")
    return old.replace(args.old_str, new), old[: old.index(args.old_str)].count("\n") + 1
