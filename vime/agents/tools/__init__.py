"""What a tool is: pydantic arguments, an async `run`, and a schema that is made from them. The tools of this folder by their names: NAMED."""

from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from importlib.util import find_spec
from shutil import which
from typing import Any, Literal

from pydantic import BaseModel

from vime import hooks
from vime.errors import VimeError, nearest

NAMED = {
    "shell": "vime.agents.tools.sandboxed:Shell", "editor": "vime.agents.tools.sandboxed:Editor", "python": "vime.agents.tools.sandboxed:Python",
    "search": "vime.agents.tools.search:Search", "open": "vime.agents.tools.search:Open", "submit": "vime.agents.tools:Submit",
    "browser": "vime.agents.tools.browser:Browser", "desktop": "vime.agents.tools.desktop:Desktop",
}  # fmt: skip


@dataclass
class Observation:
    """What the model is shown after a call; `images` are PNG files. `status` and `metadata` go to the record of the step, not to the model."""

    text: str
    images: list[bytes] = field(default_factory=list)
    status: Literal["ok", "error", "timeout", "blocked"] = "ok"
    truncated: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


class Context(AsyncExitStack):
    """What the calls of one episode share; `state`: what tools keep between calls. What they enter into it is closed when it is left, which
    must be in the task that entered it."""

    def __init__(self, sandbox: Any = None, guard: Any = None):
        super().__init__()
        self.sandbox, self.guard, self.state = sandbox, guard, dict[str, Any]()

    @property
    def box(self) -> Any:
        """The sandbox. Raises: VimeError where the episode has none."""
        if self.sandbox is None:
            raise VimeError("this tool works in a sandbox, and the task opened none", "return a SandboxSpec from its setup")
        return self.sandbox


class Tool:
    """One tool; a class of its own sets `name`, `description`, `Args` and `run`. One object serves many episodes at once: state is the context's."""

    name: str
    description: str
    timeout_s: float = 60  # of one call; a tool that ends its own calls in time gets GRACE seconds more to do so
    final = False  # the episode is over when this was called
    needs: tuple[str, ...] = ()  # packages of vime[agents], and programs

    class Args(BaseModel):
        pass

    async def run(self, args: Any, ctx: Context) -> Observation:
        raise NotImplementedError

    @classmethod
    def schema(cls) -> dict[str, Any]:
        """The function in OpenAI's form."""
        parameters = cls.Args.model_json_schema()
        for part in (parameters, *parameters.get("properties", {}).values()):
            part.pop("title", None)
        return {"type": "function", "function": {"name": cls.name, "description": cls.description, "parameters": parameters}}


class Submit(Tool):
    name, description, final = "submit", "End the task with this answer.", True

    class Args(BaseModel):
        answer: str = ""

    async def run(self, args: Args, ctx: Context) -> Observation:
        ctx.state["answer"] = args.answer
        return Observation("submitted")


def make(names: list[str], options: dict[str, dict[str, Any]]) -> list[Tool]:
    """Tools by name, or by dotted path to a class; `options` are what to make each with. Raises: VimeError that names the nearest tool."""
    out = []
    for name in names:
        if ":" not in name and name not in NAMED:
            raise VimeError(f"agent.tools: no tool {name!r}", nearest(name, list(NAMED)) + "; or package.module:Class for your own")
        kind: Any = hooks.load(NAMED.get(name, name), "agent.tools")
        if not (isinstance(kind, type) and issubclass(kind, Tool)):
            raise VimeError(f"agent.tools: {name!r} is no class of tools", "derive it from vime.agents.tools.Tool")
        if lacks := [n for n in kind.needs if not (which(n) or find_spec(n))]:
            raise VimeError(f"agent.tools: {name!r} needs {', '.join(lacks)}", 'pip install "vime[agents]"; apt-get install chromium xvfb xdotool')
        try:
            out.append(kind(**options.get(name, {})))
        except TypeError as e:
            raise VimeError(f"agent.tools: {name!r} cannot be made with {options.get(name, {})}: {e}") from e
    if unused := sorted(set(options) - set(names)):
        raise VimeError(f"agent.tool_args: {unused[0]!r} is none of agent.tools", nearest(unused[0], names) if names else "there are none")
    return out


def clipped(text: str, limit: int) -> tuple[str, bool]:
    """The text, its middle left out where it has more than `limit` characters; whether it was."""
    if len(text) <= limit:
        return text, False
    return f"{text[: limit // 2]}\n[... {len(text) - limit} characters left out ...]\n{text[len(text) - limit // 2 :]}", True
