"""`[agent]`: one episode per sample, in a sandbox, through the gateway that keeps its exact tokens; graded by the task."""

import asyncio
import copy
import dataclasses
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from vime import hooks
from vime.agents.gateway import Gateway, Refused, Turn
from vime.agents.interaction import Episode, Model, interact
from vime.agents.tools import Context, Tool, make, mcp
from vime.config import Config
from vime.hooks import Args
from vime.rollout.generate import for_server, link
from vime.sample import Sample, Status
from vime.sections import AgentConfig

FULL = ("context_length_exceeded", "budget_exceeded")  # what a gateway's refusal says where there is no room for another turn
ENDS = {"submitted": Status.COMPLETED, "answered": Status.COMPLETED, "failed": Status.FAILED}  # the others: TRUNCATED


@dataclass
class Room:
    """What all episodes of this process share."""

    task: Any
    tools: list[Tool]
    gateway: Gateway


async def run_episode(model: Model, task: Any, tools: list[Tool], sample: Sample, a: AgentConfig) -> tuple[Episode, float | dict[str, Any]]:
    """One episode and its grade. `model` takes messages and tool schemas and gives a Turn: a gateway's session, or an Endpoint."""
    spec, messages, own = await task.setup(sample)
    async with AsyncExitStack() as stack:
        sandbox = None
        if spec is not None:
            from vime.agents.sandbox import open_sandbox

            sandbox = await open_sandbox(dataclasses.replace(spec, **a.sandbox))
            stack.push_async_callback(sandbox.stop)
        ctx = await stack.enter_async_context(Context(sandbox))
        if policy := getattr(task, "policy", None):
            from vime.agents.guard import Guard

            ctx.guard = Guard(policy, sandbox)
        every = [*tools, *own, *await mcp.connect(a.mcp, ctx)]
        episode = await interact(model, messages, every, ctx, max_turns=a.max_turns, wall_s=a.wall_s)
        reward = await task.grade(sample, sandbox, episode)
    if episode.hacked:
        value = -a.hack_penalty if a.on_hack == "penalty" else 0.0
        reward = dict.fromkeys(reward, value) if isinstance(reward, dict) else value
    return episode, reward


async def generate(args: Args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> list[Sample]:
    """The rollout.custom_generate of a run with an [agent]: the samples that one episode yields. One that is interrupted begins again."""
    a, at, room = args.agent, link.get(), await _room(args)
    session = room.gateway.session()
    params = for_server(sampling_params) | ({"max_tokens": a.max_turn_len} if a.max_turn_len else {})

    async def turn(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Turn:
        async with at.slots.take(1):
            try:
                return await session.turn(messages, tools, params)
            except Refused as e:
                if e.code not in FULL:
                    raise
                return Turn("", {"role": "assistant", "content": ""}, finish_reason="length")

    work = asyncio.ensure_future(run_episode(turn, room.task, room.tools, sample, a))
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


_rooms: dict[int, asyncio.Task[Room]] = {}  # by event loop: a worker has one


async def _room(args: Args) -> Room:
    loop = asyncio.get_running_loop()
    if id(loop) not in _rooms:
        _rooms[id(loop)] = loop.create_task(_open(args, link.get().client.url))
    return await asyncio.shield(_rooms[id(loop)])


async def _open(args: Args, url: str) -> Room:
    a, limits = args.agent, {"template": args.data.chat_template, "context": args.rollout.max_context_len, "timeout": args.rollout.request_timeout}
    gateway = await Gateway.open(url, args.model, args.gateway, **limits)
    return Room(hooks.load(a.task, "agent.task")(args), make(a.tools, a.tool_args), gateway)


def check(cfg: Config) -> None:
    """Raises: VimeError for a task, a tool or a harness that is not there, before anything starts."""
    if cfg.agent.task:
        hooks.load(cfg.agent.task, "agent.task")
        make(cfg.agent.tools, cfg.agent.tool_args)
