"""Rewards: functions (args, sample) -> float | dict, sync or async. Built in: math, exact, regex; anything else is a dotted path."""

from __future__ import annotations

import asyncio
import inspect
import re
from collections.abc import Callable
from math import isfinite  # `math` becomes this package's submodule
from typing import Any

from vime import hooks
from vime.config import RewardConfig
from vime.errors import VimeError, nearest
from vime.sample import Sample, Status

Reward = Callable[[Any, Sample], Any]


def exact(args: Any, sample: Sample) -> float:
    """1 iff the response equals the label, outer white space aside, and ended by itself: a truncated response counts 0."""
    return float(sample.status is Status.COMPLETED and sample.response.strip() == str(sample.label).strip())


def regex(pattern: str) -> Reward:
    """1 iff the last match of `pattern` in the response (its first group, if it has one) equals the label as text."""
    try:
        compiled = re.compile(pattern)
    except re.error as e:
        raise VimeError(f"reward.pattern = {pattern!r} is not a regular expression: {e}") from e

    def last_match(args: Any, sample: Sample) -> float:
        answers = [(m.group(1) or "") if compiled.groups else m.group() for m in compiled.finditer(sample.response)]
        return float(bool(answers) and answers[-1].strip() == str(sample.label).strip())

    return last_match


def resolve(reward: RewardConfig) -> Reward:
    """The function that `reward.function` names. Raises: VimeError for an unknown name, a bad path, signature or pattern."""
    if reward.function == "exact":
        return exact
    if reward.function == "regex":
        return regex(reward.pattern or "")
    if reward.function == "math":
        from vime.rewards.math import math_reward

        return math_reward
    if not {":", "."} & set(reward.function):
        raise VimeError(f"reward.function = {reward.function!r}: no such built-in", nearest(reward.function, ["math", "exact", "regex"]))
    return hooks.load(reward.function, "reward.function", 2)


async def score(fn: Reward, args: Any, sample: Sample, timeout: float) -> float | dict[str, Any]:
    """Call a reward; a sync function runs in a thread (which nobody can end: after `timeout` seconds it goes on, unheeded).

    Returns: a finite float, or the function's dict unchanged.
    Raises: VimeError after the timeout, or for a value that is neither; whatever the function raises.
    """
    try:
        async with asyncio.timeout(timeout) as limit:
            value = fn(args, sample) if inspect.iscoroutinefunction(fn) else await asyncio.to_thread(fn, args, sample)
            if inspect.isawaitable(value):
                value = await value
    except TimeoutError as e:
        if not limit.expired():
            raise  # the function's own
        raise VimeError(f"no reward within {timeout:g} s", "raise reward.timeout") from e
    if isinstance(value, dict):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError) as e:
        raise VimeError(f"the reward is {value!r}, neither a number nor a dict") from e
    if not isfinite(number):
        raise VimeError(f"the reward is {number}")
    return number
