"""The math reward: math-verify in helper processes, since one expression like 9^9^9^9 would hang the worker for good.

math-verify's own time limit needs SIGALRM in a main thread, and no Python signal handler interrupts a big-integer power. Each helper
therefore arms a SIGALRM with its default action, which ends it whatever it computes; the next question starts another helper.
"""

import json
import os
import queue
import subprocess
import sys
from typing import Any

from vime.errors import VimeError
from vime.sample import Sample

LIMIT_S = 5  # per answer
LIMIT_BYTES = 4 << 30  # address space of a helper
HELPERS = min(4, os.cpu_count() or 1)
Helper = subprocess.Popen[str]

_idle: queue.LifoQueue[Helper | None] = queue.LifoQueue()  # None: a helper that is yet to be started
for _ in range(HELPERS):
    _idle.put(None)


def math_reward(args: Any, sample: Sample) -> float:
    """1 iff the last expression in the response (in \\boxed{}, LaTeX or plain) equals the label, a number or LaTeX, mathematically.
    An answer that takes longer than 5 s or 4 GiB counts 0; a label without an expression is a VimeError. Safe from any thread."""
    helper = _idle.get()
    try:
        helper = helper or _start()
        assert helper.stdin and helper.stdout
        helper.stdin.write(json.dumps([str(sample.label), sample.response]) + "\n")
        helper.stdin.flush()
        line = helper.stdout.readline()
        if not line:  # it ended itself over this answer
            helper.wait()
            helper = None
            return 0.0
        reply = json.loads(line)
        if isinstance(reply, str):
            raise VimeError(reply)
        return float(reply)
    except OSError:
        helper = None  # killed from outside: this answer's error, not the next one's
        raise
    finally:
        _idle.put(helper)


def _start() -> Helper:
    """A helper that is ready: math-verify is imported, which takes seconds and is not counted against an answer."""
    helper = subprocess.Popen([sys.executable, "-m", "vime.rewards.math"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    if not helper.stdout or helper.stdout.readline() != "ready\n":
        raise VimeError("the math-verify helper does not start", "its error is in the log above; pip install 'math-verify[antlr4_9_3]'")
    return helper


def main() -> None:
    """A helper: JSON lines [label, response] in; 0, 1 or the text of an error out; until its input closes."""
    import logging
    import resource
    import signal

    from math_verify import parse, verify

    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # stray prints of libraries must not look like replies
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the driver's
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT_BYTES, LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    out.write("ready\n")
    for line in sys.stdin:
        label, response = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, LIMIT_S)
        wrapped = label if "$" in label or "\\boxed" in label else f"${label}$"
        reply: bool | str = f"math-verify finds no expression in the label {label!r}"
        try:
            if gold := parse(wrapped, parsing_timeout=None) or parse(label, parsing_timeout=None):
                reply = verify(gold, parse(response, parsing_timeout=None), timeout_seconds=None)
        except (MemoryError, RecursionError):
            reply = False
        signal.setitimer(signal.ITIMER_REAL, 0)
        out.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
