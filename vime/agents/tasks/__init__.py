"""A task: what an agent is asked to do, where it does it, and what that was worth."""

from typing import Any, Protocol

from vime.sample import Sample


class Task(Protocol):
    """The object that agent.task = "module:name" makes when it is called with `args` (the run's sections and [args]), once in a process.

    It may have a `policy`, which the guard (vime/agents/guard/) holds every action against.
    """

    async def setup(self, sample: Sample) -> tuple[Any, list[dict[str, Any]], list[Any]]:
        """(SandboxSpec or None, the first messages in OpenAI's form, tools beyond those of agent.tools) of one episode."""
        ...

    async def grade(self, sample: Sample, sandbox: Any, episode: Any) -> float | dict[str, Any]:
        """The episode's reward. `sandbox` is the agent's own, or None: what decides must be looked at in a clean copy, not in there."""
        ...
