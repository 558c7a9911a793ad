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


def resolve(reward: RewardConfig, function: str | None = None) -> Reward:
    """The reward of that name or path, `reward.function` by default. Raises: VimeError for an unknown name, a bad path, signature or pattern."""
    function = function or reward.function
    if function == "exact":
        return exact
    if function == "regex":
        return regex(reward.pattern or "")
    if function == "math":
        from vime.rewards.math import math_reward

        return math_reward
    if not {":", "."} & set(function):
        raise VimeError(f"reward.function = {function!r}: no such built-in", nearest(function, ["math", "exact", "regex"]))
    return hooks.load(function, "reward.function")


async def score(fn: Reward, args: Any, sample: Sample, timeout: float) -> float | dict[str, Any]:
    """One sample's reward: a finite float, or the function's dict unchanged.

    A sync function runs in a thread (which nobody can end: after `timeout` seconds it goes on, unheeded).
    Raises: VimeError after the timeout, or for a value that is neither; whatever the function raises.
    """
    return _checked(await _call(fn, args, sample, timeout))


async def score_group(fn: Reward, args: Any, samples: list[Sample], timeout: float) -> list[float | dict[str, Any]]:
    """As `score`, for a function of a whole group (reward.group): one value per sample."""
    values = list(await _call(fn, args, samples, timeout))
    if len(values) != len(samples):
        raise VimeError(f"{len(values)} rewards came back for {len(samples)} samples")
    return [_checked(v) for v in values]


async def _call(fn: Reward, args: Any, sample: Any, timeout: float) -> Any:
    try:
        async with asyncio.timeout(timeout) as limit:
            value = fn(args, sample) if inspect.iscoroutinefunction(fn) else await asyncio.to_thread(fn, args, sample)
            if inspect.isawaitable(value):
                value = await value
            return value
    except TimeoutError as e:
        if not limit.expired():
            raise  # the function's own
        raise VimeError(f"no reward within {timeout:g} s", "raise reward.timeout") from e


def _checked(value: Any) -> float | dict[str, Any]:
    if isinstance(value, dict):
        return value
    try:
        number = float(value)
    except (TypeError, ValueError) as e:
        raise VimeError(f"the reward is {value!r}, neither a number nor a dict") from e
    if not isfinite(number):
        raise VimeError(f"the reward is {number}")
    return number
