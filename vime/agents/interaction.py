"""The agent loop: messages -> a turn of the model -> its tool calls -> their observations -> again, until a rule ends it.

Everything that shapes an agent is the caller's: the messages it begins with, the tools and their order, what of the history each turn sees
(`view`), how an observation becomes a message (`observe`), and what is said to a model that called no tool (`reply`).
"""

import asyncio
import base64
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from pydantic import ValidationError

from vime.agents.tools import Context, Observation, Tool
from vime.errors import VimeError, nearest, said

GRACE = 5.0  # seconds beyond its timeout_s in which a tool may end a call itself
Message = dict[str, Any]
Model = Callable[[list[Message], list[dict[str, Any]]], Awaitable[Any]]  # messages and tool schemas -> a Turn (vime/agents/gateway)
End = Literal["running", "submitted", "answered", "max_turns", "context", "wall", "blocked", "failed"]


@dataclass
class Call:
    """One tool call: what was asked and what became of it. "cancelled": the episode's time was up."""

    id: str
    tool: str
    arguments: Any
    status: Literal["ok", "error", "timeout", "blocked", "cancelled"] = "cancelled"
    seconds: float = 0.0
    exception: str | None = None
    truncated: bool = False
    metadata: dict[str, Any] = field(default_factory=dict)


@dataclass
class Step:
    """One turn of the model (tokens sampled, seconds it took) and its calls, in order."""

    turn: str
    tokens: int
    seconds: float
    finish_reason: str
    ill_formed: bool
    calls: list[Call] = field(default_factory=list)


@dataclass
class Episode:
    """What happened. `status` says which rule ended it: "submitted" (a final tool), "answered" (no tool call), "max_turns", "context"
    (no room for another token), "wall", "blocked" (the guard), "failed" (`error`: what
    broke below the tools)."""

    messages: list[Message]
    steps: list[Step] = field(default_factory=list)
    status: End = "running"
    error: str = ""
    answer: str = ""  # given to a final tool, or the last text
    notes: dict[str, Any] = field(default_factory=dict)  # what the task's grading found, for a report

    def record(self) -> dict[str, Any]:
        """Plain JSON, without the messages."""
        return {"status": self.status, "error": self.error, "answer": self.answer, "notes": self.notes, "steps": [asdict(s) for s in self.steps]}

    @property
    def calls(self) -> list[Call]:
        return [c for s in self.steps for c in s.calls]

    @property
    def hacked(self) -> bool:
        """Whether the guard objected."""
        return any(c.status == "blocked" for c in self.calls)


def as_message(call: Call, seen: Observation) -> Message:
    """An observation in OpenAI's form; images become image_url parts."""
    images = [{"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(png).decode()}"}} for png in seen.images]
    content = [{"type": "text", "text": seen.text}, *images] if images else seen.text
    return {"role": "tool", "tool_call_id": call.id, "name": call.tool, "content": content}


def repair(turn: Any) -> str | None:
    """A turn without a tool call ends the episode, but where the call was there and malformed."""
    return "That tool call could not be read: its arguments must be one JSON object." if turn.ill_formed else None


async def interact(
    model: Model, messages: list[Message], tools: list[Tool], ctx: Context, *,
    max_turns: int = 30, wall_s: float = 600, view: Callable[[list[Message]], list[Message]] = list,
    observe: Callable[[Call, Observation], Message] = as_message, reply: Callable[[Any], str | None] = repair,
) -> Episode:  # fmt: skip
    """Run one episode. What tools raise becomes an observation and a status. Raises: what `model`, `view`, `observe` and `reply` raise; VimeError
    for two tools of one name."""
    episode, by_name, schemas = Episode(list(messages)), {t.name: t for t in tools}, [t.schema() for t in tools]
    if len(by_name) < len(tools):
        raise VimeError(f"two tools have the same name, of {', '.join(t.name for t in tools)}", "rename or leave out one of them")
    try:
        async with asyncio.timeout(wall_s) as wall:
            while episode.status == "running":
                if len(episode.steps) == max_turns:
                    episode.status = "max_turns"
                    break
                turn = await model(view(episode.messages), schemas)
                episode.steps.append(Step(turn.id, len(turn.output_ids), turn.seconds, turn.finish_reason, turn.ill_formed))
                episode.messages.append(turn.message)
                episode.answer = turn.message.get("content") or ""
                if turn.finish_reason == "length":
                    episode.status = "context"
                elif calls := turn.message.get("tool_calls"):
                    for asked in calls:  # in the model's order; one that ends the episode is the last
                        if episode.status == "running":
                            await _act(episode, asked, by_name, ctx, observe)
                elif (more := reply(turn)) is not None:
                    episode.messages.append({"role": "user", "content": more})
                else:
                    episode.status = "answered"
    except TimeoutError:
        if not wall.expired():
            raise
        episode.status = "wall"
    return episode


async def _act(episode: Episode, asked: Message, tools: dict[str, Tool], ctx: Context, observe: Callable[[Call, Observation], Message]) -> None:
    call = Call(asked["id"], asked["function"]["name"], asked["function"]["arguments"])
    episode.steps[-1].calls.append(call)
    try:
        episode.messages.append(observe(call, await perform(call, tools, ctx)))
    except VimeError as e:
        episode.status, episode.error = "failed", str(e)
    if call.metadata.get("violation"):
        episode.status = "blocked"
    elif call.status == "ok" and tools[call.tool].final:
        episode.status, episode.answer = "submitted", ctx.state.get("answer", episode.answer)


async def perform(call: Call, tools: dict[str, Tool], ctx: Context) -> Observation:
    """Run one call and record in it what became of it; whatever the tool raises is observed. Raises: VimeError alone, for what is broken
    below the tool (the sandbox is gone)."""
    began = time.monotonic()
    try:
        seen = await _run(call, tools, ctx)
    except VimeError as e:
        call.status, call.exception = "error", str(e)
        raise
    except TimeoutError:
        seen = Observation(f"{call.tool} was stopped: it took more than {tools[call.tool].timeout_s:g} s", status="timeout")
    except ValidationError as e:
        faults = "; ".join(f"{'.'.join(map(str, f['loc'])) or 'arguments'}: {f['msg']}" for f in e.errors())
        seen, call.exception = Observation(f"{call.tool} was not run: {faults}", status="error"), said(e)
    except Exception as e:  # a tool may fail in any way
        seen, call.exception = Observation(f"{call.tool} failed: {said(e)}", status="error"), said(e)
    finally:
        call.seconds = time.monotonic() - began
    call.status, call.truncated, call.metadata = seen.status, seen.truncated, seen.metadata
    return seen


async def _run(call: Call, tools: dict[str, Tool], ctx: Context) -> Observation:
    tool = tools.get(call.tool)
    if tool is None:
        return Observation(f"there is no tool {call.tool!r}; {nearest(call.tool, list(tools))}", status="error")
    args = tool.Args.model_validate_json(call.arguments) if isinstance(call.arguments, str) else tool.Args.model_validate(call.arguments)
    given, warned = args.model_dump(), {}
    if ctx.guard:
        verdict = await ctx.guard.before(call.tool, given)
        if verdict.decision == "block":
            return Observation(f"not run: {verdict.reason}", status="blocked", metadata={"rule": verdict.rule})
        warned = {"warned": verdict.rule} if verdict.decision == "warn" else {}
    async with asyncio.timeout(tool.timeout_s + GRACE):
        seen = await tool.run(args, ctx)
    if ctx.guard and ctx.sandbox:
        verdict = await ctx.guard.after(call.tool, given)
        if verdict.decision == "block":
            about = {"rule": verdict.rule, "violation": True}
            return Observation(f"this was not allowed: {verdict.reason}", status="blocked", metadata=about | warned)
    seen.metadata |= warned
    return seen
