"""`[agent]`: one episode per sample, in a sandbox, through the gateway that keeps its exact tokens; graded by the task."""

import asyncio
import copy
import dataclasses
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

from vime import hooks
from vime.agents import harness
from vime.agents.gateway import Refused, Turn, opened
from vime.agents.interaction import Call, Episode, Model, Step, interact
from vime.agents.sandbox import SandboxSpec, open_sandbox
from vime.agents.tools import Context, Tool, make, mcp
from vime.config import Config
from vime.errors import VimeError, nearest
from vime.hooks import Args
from vime.rollout.generate import for_server, link
from vime.sample import Sample, Status
from vime.sections import AgentConfig

FULL = ("context_length_exceeded", "budget_exceeded")  # what a gateway's refusal says where there is no room for another turn
ENDS = {"submitted": Status.COMPLETED, "answered": Status.COMPLETED, "failed": Status.FAILED}  # the others: TRUNCATED
STATES: dict[str, Any] = {"completed": "answered", "timeout": "wall", "budget": "max_turns"}  # of a harness; the others: failed
CALLS: dict[str, Any] = {"completed": "ok", "budget": "ok", "timeout": "timeout"}

_made: WeakKeyDictionary[asyncio.AbstractEventLoop, tuple[Any, list[Tool]]] = WeakKeyDictionary()  # task and tools of a worker, made once


Act = Callable[[list[dict[str, Any]], list[Tool], Context], Awaitable[Episode]]  # what an agent is: `react`, or a harness


def react(model: Model, a: AgentConfig) -> Act:
    """The loop, with a model: a session of the gateway, or an endpoint."""
    return partial(interact, model, max_turns=a.max_turns, wall_s=a.wall_s)


async def black_box(a: AgentConfig, model: str, token: str, messages: list[dict[str, Any]], tools: list[Tool], ctx: Context) -> Episode:
    """A harness: what it says and does is the gateway's to know; here it is one step, with one call. It has tools of its own."""
    if ctx.guard:
        await ctx.guard.before(a.agent, {})  # learns the tree as it is now, where that lies in the sandbox alone
    got = await harness.run(a.agent, "\n\n".join(m["content"] for m in messages), ctx.box, token, model, timeout=a.wall_s)
    call = Call("", a.agent, None, CALLS.get(got.state, "error"), got.seconds, None if got.state == "completed" else got.log_tail)
    episode = Episode(messages, [Step("", 0, got.seconds, got.state, False, [call])], STATES.get(got.state, "failed"))
    episode.error = got.log_tail if episode.status == "failed" else ""
    return episode


async def run_episode(
    act: Act, task: Any, tools: list[Tool], sample: Sample, a: AgentConfig, fit: Callable[[SandboxSpec], SandboxSpec] = lambda spec: spec
) -> tuple[Episode, float | dict[str, Any]]:
    """One episode and its grade; `fit`: what the agent needs of a sandbox."""
    spec, messages, own = await task.setup(sample)
    async with Context() as ctx:
        if spec is not None:
            ctx.sandbox = await ctx.enter_async_context(await open_sandbox(fit(dataclasses.replace(spec, **a.sandbox))))
        if policy := getattr(task, "policy", None):
            from vime.agents.guard import Guard

            ctx.guard = Guard(policy, ctx.sandbox)
        every = [*tools, *own, *await mcp.connect(a.mcp, ctx)]
        episode = await act(messages, every, ctx)
        # what a harness left, or a call that raised, or a job in the background: nobody has looked since
        if ctx.guard and ctx.sandbox and episode.calls and (verdict := await ctx.guard.after()).decision == "block":
            last, episode.status = episode.calls[-1], "blocked"
            last.status, last.metadata = "blocked", last.metadata | {"rule": verdict.rule, "violation": True}
        reward = await task.grade(sample, ctx.sandbox, episode)
    if episode.hacked:
        value = -a.hack_penalty if a.on_hack == "penalty" else 0.0
        reward = dict.fromkeys(reward, value) if isinstance(reward, dict) else value
    return episode, reward


async def generate(args: Args, sample: Sample, sampling_params: dict[str, Any]) -> list[Sample]:
    """The rollout.custom_generate of a run with an [agent]: the samples that one episode yields. One that is interrupted begins again."""
    a, at, loop = args.agent, link.get(), asyncio.get_running_loop()
    if loop not in _made:
        _made[loop] = hooks.load(a.task, "agent.task")(args), make(a.tools, a.tool_args)
    gateway, own = await opened(args), {"max_tokens": a.max_turn_len} if a.max_turn_len else {}
    session = gateway.session(sampling=for_server(sampling_params) | own, limits={"max_requests": a.max_turns})

    async def turn(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Turn:
        async with at.slots.take(1):
            try:
                return await session.turn(messages, tools)
            except Refused as e:
                if e.code not in FULL:
                    raise
                return Turn("", {"role": "assistant", "content": ""}, finish_reason="length")

    episode_of = partial(run_episode, react(turn, a))
    if a.agent != "react":
        fit = partial(harness.fitted, name=a.agent, port=gateway.port)
        episode_of = partial(run_episode, partial(black_box, a, gateway.model, session.token), fit=fit)
    work = asyncio.ensure_future(episode_of(*_made[loop], sample, a))
    stopped = asyncio.ensure_future(at.stop.wait())
    try:
        await asyncio.wait({work, stopped}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            sample.status = Status.ABORTED
            return [sample]
        episode, reward = work.result()
    finally:
        stopped.cancel()
        work.cancel()
        await asyncio.wait({work})
        found = session.finish()
    ends = {f"end_{episode.status}": 1, **{f"call_{k}": v for k, v in Counter(c.status for c in episode.calls).items()}, "hacked": episode.hacked}
    metrics = session.metrics(found) | {f"agent/{k}": float(v) for k, v in ends.items()}
    out = [t.to_sample(sample) for t in found] or [sample]
    for s in out:
        s.status, s.reward = ENDS.get(episode.status, Status.TRUNCATED), copy.deepcopy(reward)
        s.remove_sample |= not found or episode.status == "failed" or (episode.hacked and a.on_hack == "mask")
        s.metadata = copy.deepcopy(s.metadata) | {"agent_metrics": dict(metrics)}
    out[0].metadata["agent"] = episode.record()
    out[0].non_generation_time = sum(c.seconds for c in episode.calls)
    return out


def check(cfg: Config) -> None:
    """Raises: VimeError for a task, a tool, a setting of the sandbox or a harness that is not there, before anything starts."""
    a, known = cfg.agent, [f.name for f in dataclasses.fields(SandboxSpec)]
    hooks.load(str(a.task), "agent.task")
    make(a.tools, a.tool_args)
    if a.agent != "react":
        harness.program(a.agent)
        if a.tools or a.mcp:
            raise VimeError(f"agent.tools and agent.mcp are of the loop, and agent.agent = {a.agent!r} has its own", "leave them out")
    if wrong := next((k for k in a.sandbox if k not in known), None):
        raise VimeError(f"agent.sandbox.{wrong}: unknown key", nearest(wrong, known))
