"""`[agent]`: one episode per sample, in a sandbox, through the gateway that keeps its exact tokens; graded by the task."""

import asyncio
import copy
import dataclasses
from collections import Counter
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any

from vime import hooks
from vime.agents.interaction import Episode, Model, interact
from vime.agents.tools import Context, Tool, make, mcp
from vime.config import Config
from vime.hooks import Args
from vime.rollout.generate import for_server, link, running
from vime.sample import Sample, Status
from vime.sections import AgentConfig

ENDS = {"submitted": Status.COMPLETED, "answered": Status.COMPLETED, "failed": Status.FAILED}  # the others: TRUNCATED


@dataclass
class Room:
    """What all episodes of this process share."""

    task: Any
    tools: list[Tool]
    gateway: Any


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

            ctx.guard = Guard(policy, sandbox, sandbox.workdir if sandbox else None)
        every = [*tools, *own, *await mcp.connect(a.mcp, ctx)]
        episode = await interact(model, messages, every, ctx, max_turns=a.max_turns, wall_s=a.wall_s)
        reward = 0.0 if episode.status == "aborted" else await task.grade(sample, sandbox, episode)
    if episode.hacked:
        value = -a.hack_penalty if a.on_hack == "penalty" else 0.0
        reward = dict.fromkeys(reward, value) if isinstance(reward, dict) else value
    return episode, reward


async def generate(args: Args, sample: Sample, sampling_params: dict[str, Any], evaluation: bool = False) -> list[Sample]:
    """The rollout.custom_generate of a run with an [agent]: the samples that one episode yields. One that is interrupted begins again."""
    a, at, room = args.agent, link.get(), await _room(args)
    params = for_server(sampling_params)
    params["max_tokens"] = a.max_turn_len or params["max_tokens"]
    session = room.gateway.session(f"{running.get().session}-{sample.index}")

    async def turn(messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> Any:
        async with at.slots.take(1):
            return await session.turn(messages, tools, params)

    episode, reward = await run_episode(turn, room.task, room.tools, sample, a)
    found = [t for t in session.finish() if t.kind in a.train]
    if episode.status == "aborted" or at.stop.is_set():
        sample.status = Status.ABORTED
        return [sample]
    counts = {"turns": len(episode.steps), "calls": len(episode.calls), "hacked": episode.hacked, f"end_{episode.status}": 1}
    counts |= {f"call_{k}": v for k, v in Counter(c.status for c in episode.calls).items() if k != "ok"}
    metrics = {k: float(v) for k, v in (counts | session.metrics()).items()}
    out = [t.to_sample(sample) for t in found] or [sample]
    for s in out:
        s.status, s.reward = ENDS.get(episode.status, Status.TRUNCATED), copy.deepcopy(reward)
        s.remove_sample |= not found or episode.status == "failed" or (episode.hacked and a.on_hack == "mask")
        s.metadata = copy.deepcopy(sample.metadata) | {"agent_metrics": dict(metrics)}
    out[0].metadata["agent"] = episode.record()
    out[0].non_generation_time = sum(c.seconds for c in episode.calls)
    return out


_opening: dict[int, asyncio.Task[Room]] = {}  # by event loop: a process has one


async def _room(args: Args) -> Room:
    loop = asyncio.get_running_loop()
    if id(loop) not in _opening:
        _opening[id(loop)] = loop.create_task(_open(args, link.get().client.url))
    return await asyncio.shield(_opening[id(loop)])


async def _open(args: Args, url: str) -> Room:
    raise NotImplementedError


def check(cfg: Config) -> None:
    """Raises: VimeError for a task, a tool or a harness that is not there, before anything starts."""
    if cfg.agent.task:
        hooks.load(cfg.agent.task, "agent.task")
        make(cfg.agent.tools, cfg.agent.tool_args)
