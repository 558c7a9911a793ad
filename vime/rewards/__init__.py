"""Rewards: functions (args, sample) -> float | dict, sync or async. Built in: math, exact, regex; anything else is a dotted path."""

import asyncio
import inspect
import re
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from math import isfinite  # `math` becomes this package's submodule
from typing import Any

from vime import hooks
from vime.errors import VimeError, nearest
from vime.rewards.math import HELPERS, math_reward
from vime.sample import Sample, Status, plain
from vime.sections import RewardConfig

Reward = Callable[[Any, Sample], Any]
Value = float | dict[str, Any]


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
    if function == "regex":
        return regex(reward.pattern or "")
    if built_in := {"exact": exact, "math": math_reward}.get(function):
        return built_in
    if not {":", "."} & set(function):
        raise VimeError(f"reward.function = {function!r}: no such built-in", nearest(function, ["math", "exact", "regex"]))
    return hooks.load(function, "reward.function")


class Threads:
    """Where sync rewards run, `size` of them at a time (math: one a helper). asyncio's own executor has four more threads than the machine has
    cores, and loses one for good to each call that hangs."""

    def __init__(self, size: int = 64):
        self._free, self._math = asyncio.Semaphore(size), asyncio.Semaphore(HELPERS)

    async def call(self, timeout: float, fn: Callable[..., Any], *args: Any) -> Any:
        """What `fn` returns or raises. The clock starts with the thread, not while the call waits for its turn.
        Raises: VimeError after `timeout` seconds; nobody can end the thread, it goes on unheeded."""
        done: Future[Any] = Future()
        done.set_running_or_notify_cancel()  # from here on nobody cancels it: the thread can always say what came of it

        def run() -> None:
            try:
                done.set_result(fn(*args))
            except BaseException as e:
                done.set_exception(_carried(e))

        async with self._math if fn is math_reward else self._free:
            threading.Thread(target=run, name="reward", daemon=True).start()
            return await _within(timeout, asyncio.wrap_future(done))


def _carried(e: BaseException) -> Exception:
    """`e`, or an exception that names it where `e` would end the event loop (sys.exit) or cannot pass through it (StopIteration)."""
    if isinstance(e, Exception) and not isinstance(e, StopIteration):
        return e
    return RuntimeError(f"it raised {type(e).__name__}: {e}")


async def _within(timeout: float, value: Awaitable[Any]) -> Any:
    """What it gives. Raises: VimeError after `timeout` seconds."""
    try:
        async with asyncio.timeout(timeout) as limit:
            return await value
    except TimeoutError as e:
        if not limit.expired():
            raise  # the function's own
        raise VimeError(f"no reward within {timeout:g} s", "raise reward.timeout") from e
    except SystemExit as e:
        raise _carried(e) from e


async def score(fn: Reward, args: Any, sample: Sample, timeout: float, threads: Threads | None = None) -> Value:
    """One sample's reward: a finite float, or the function's dict unchanged.

    A sync function runs in one of `threads`. Raises: VimeError after the timeout, or for a value that is neither; whatever the function
    raises, sys.exit() and StopIteration as a RuntimeError.
    """
    return _checked(await _call(fn, args, sample, timeout, threads or Threads()))


async def score_group(fn: Reward, args: Any, samples: list[Sample], timeout: float, threads: Threads | None = None) -> list[Value]:
    """As `score`, for a function of a whole group (reward.group): one value per sample."""
    values = list(await _call(fn, args, samples, timeout, threads or Threads()))
    if len(values) != len(samples):
        raise VimeError(f"{len(values)} rewards came back for {len(samples)} samples")
    return [_checked(v) for v in values]


async def _call(fn: Reward, args: Any, sample: Any, timeout: float, threads: Threads) -> Any:
    value = fn(args, sample) if inspect.iscoroutinefunction(fn) else await threads.call(timeout, fn, args, sample)
    return await _within(timeout, value) if inspect.isawaitable(value) else value


def _checked(value: Any) -> Value:
    if isinstance(value, dict):
        try:
            return dict(plain(value, "the reward"))
        except ValueError as e:
            raise VimeError(str(e)) from e
    try:
        number = float(value)
    except (TypeError, ValueError) as e:
        raise VimeError(f"the reward is {value!r}, neither a number nor a dict") from e
    if not isfinite(number):
        raise VimeError(f"the reward is {number}")
    return number
