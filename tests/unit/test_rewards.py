import asyncio
import threading
import time
from typing import Any

import numpy as np
import pytest

from vime.errors import VimeError
from vime.rewards import Threads, resolve, score
from vime.sample import Sample, Status
from vime.sections import RewardConfig


def one(fn: Any, response: str, label: Any, status: Status = Status.COMPLETED, timeout: float = 60) -> Any:
    return asyncio.run(score(fn, None, Sample(response=response, label=label, status=status), timeout))


@pytest.mark.parametrize(
    ("response", "label", "status", "reward"),
    [
        (" dcba\n", "dcba", Status.COMPLETED, 1.0),
        ("dcba", "dcba", Status.TRUNCATED, 0.0),
        ("dcb", "dcba", Status.COMPLETED, 0.0),
        ("12", 12, Status.COMPLETED, 1.0),
    ],
)
def test_exact(response: str, label: Any, status: Status, reward: float) -> None:
    assert one(resolve(RewardConfig(function="exact")), response, label, status) == reward


@pytest.mark.parametrize(
    ("pattern", "response", "label", "reward"),
    [
        (r"\d+", "2 + 3 = 5", "5", 1.0),
        (r"\d+", "5, no: 6", "5", 0.0),
        (r"\d+", "15", 5, 0.0),
        (r"\d+", "none", "", 0.0),
        (r"answer: (\w+)", "answer: a answer: b", "b", 1.0),
        (r"(x)|y", "x y", "x", 0.0),
    ],
)
def test_regex_takes_the_last_match(pattern: str, response: str, label: Any, reward: float) -> None:
    assert one(resolve(RewardConfig(function="regex", pattern=pattern)), response, label) == reward


def test_math_from_worker_threads() -> None:
    fn = resolve(RewardConfig())
    cases = [
        ("so \\boxed{\\frac{1}{2}}", "0.5", 1.0), ("The answer is 12.", 12, 1.0), ("The answer is 13.", 12, 0.0), ("no idea", "12", 0.0),
        ("", 3, 0.0), ("$x^2+2x+1$", "(x+1)^2", 1.0), ("it is $1{,}234$", "1234", 1.0), ("first 7, then 8", 8, 1.0),
        ("$\\frac{\\sqrt{4}}{3}$", "\\frac{2}{3}", 1.0),
    ]  # fmt: skip

    async def all_at_once() -> list[Any]:
        return await asyncio.gather(*(score(fn, None, Sample(response=r, label=x), 60) for r, x, _ in cases))

    assert asyncio.run(all_at_once()) == [reward for *_, reward in cases]


def test_math_survives_an_expression_that_never_ends() -> None:
    fn = resolve(RewardConfig())
    assert one(fn, "$9^{9^{9^{9}}}$", "5") == 0.0
    assert [one(fn, "\\boxed{7}", 7) for _ in range(4)] == [1.0] * 4  # no helper of the pool is left broken


def test_math_says_that_a_label_is_unusable() -> None:
    with pytest.raises(VimeError, match="no expression in the label"):
        one(resolve(RewardConfig()), "5", " ")


def thread_name(args: Any, sample: Sample) -> dict[str, Any]:
    return {"thread": threading.current_thread().name}


async def later(args: Any, sample: Sample) -> float:
    await asyncio.sleep(0)
    return 0.5


def test_own_functions_sync_async_and_both() -> None:
    assert resolve(RewardConfig(function=f"{__name__}:thread_name")) is thread_name
    assert one(thread_name, "", "")["thread"] != threading.main_thread().name
    assert one(later, "", "") == one(lambda args, sample: later(args, sample), "", "") == 0.5
    for value in (True, np.float32(1.0), np.int64(1), 1):
        got = one(lambda args, sample, v=value: v, "", "")
        assert got == 1.0 and type(got) is float


@pytest.mark.parametrize("value", [None, "high", [1.0], float("nan"), float("inf")])
def test_a_reward_must_be_a_finite_number_or_a_dict(value: Any) -> None:
    with pytest.raises(VimeError, match="the reward is"):
        one(lambda args, sample: value, "", "")


def test_a_reward_that_raises_or_hangs() -> None:
    def broken(args: Any, sample: Sample) -> float:
        raise KeyError("gold")

    async def own_timeout(args: Any, sample: Sample) -> float:
        raise TimeoutError("my own")

    async def hangs(args: Any, sample: Sample) -> float:
        await asyncio.sleep(60)
        return 0.0

    with pytest.raises(KeyError, match="gold"):
        one(broken, "", "")
    with pytest.raises(TimeoutError, match="my own"):
        one(own_timeout, "", "")
    with pytest.raises(VimeError, match=r"no reward within 0\.05 s"):
        one(hangs, "", "", timeout=0.05)
    with pytest.raises(VimeError, match=r"no reward within 0\.05 s"):
        one(lambda args, sample: time.sleep(0.5), "", "", timeout=0.05)


def test_sync_rewards_run_at_once_wait_off_the_clock_and_a_hanging_one_takes_no_place_for_good() -> None:
    """24 calls, more than asyncio's executor would run at once, meet; 12 go one by one through a place that another never gave back."""
    meet, forever = threading.Barrier(24), threading.Event()

    def meets(args: Any, sample: Sample) -> float:
        meet.wait(30)
        return 1.0

    def hangs(args: Any, sample: Sample) -> float:
        forever.wait()
        return 1.0

    def slow(args: Any, sample: Sample) -> float:
        time.sleep(0.1)
        return 1.0

    async def many(n: int, fn: Any, threads: Threads, timeout: float) -> list[Any]:
        return await asyncio.gather(*(score(fn, None, Sample(), timeout, threads) for _ in range(n)), return_exceptions=True)

    async def after_hanging() -> list[Any]:
        threads = Threads(1)
        assert all("no reward within 0.05 s" in str(e) for e in await many(2, hangs, threads, 0.05))
        return await many(12, slow, threads, 1.0)  # the last one waits 1.1 s for its place

    assert asyncio.run(many(24, meets, Threads(24), 60)) == [1.0] * 24
    try:
        assert asyncio.run(after_hanging()) == [1.0] * 12
    finally:
        forever.set()


@pytest.mark.parametrize("error", [StopIteration("empty"), SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()])
def test_what_an_event_loop_cannot_carry_is_named(error: BaseException) -> None:
    def sync(args: Any, sample: Sample) -> float:
        raise error

    async def as_coroutine(args: Any, sample: Sample) -> float:
        raise error

    with pytest.raises(RuntimeError, match=f"it raised {type(error).__name__}"):
        one(sync, "", "")
    if isinstance(error, StopIteration | SystemExit):
        with pytest.raises(RuntimeError, match=f"raised {type(error).__name__}"):
            one(as_coroutine, "", "")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("exac", "did you mean 'exact'"),
        ("no.such.module:fn", "cannot import no.such.module"),
        ("vime.rewards:exat", "did you mean 'exact'"),
        ("builtins:len", r"expected \(args, sample\) -> float \| dict.*found len\(obj, /\): too many positional"),
    ],
)
def test_names_that_cannot_be_resolved(function: str, said: str) -> None:
    with pytest.raises(VimeError, match=said):
        resolve(RewardConfig(function=function))


def test_a_broken_pattern() -> None:
    with pytest.raises(VimeError, match="not a regular expression"):
        resolve(RewardConfig(function="regex", pattern="("))
