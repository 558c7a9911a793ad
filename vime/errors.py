"""One kind of error for a person: what happened, where, what to do. The CLI prints it and exits 1, without a traceback."""

import difflib
from collections.abc import Iterator
from contextlib import contextmanager

MANY = 12  # names in a list
ELSEWHERE = "another trainer rank failed"  # what a rank says that has no fault of its own
ANY = (Exception, SystemExit)  # what a plug-in may fail with


class VimeError(Exception):
    """A failure a user can act on: `what` happened and where (file:line, key, engine id, URL), how to `fix` it, one line each; under them
    the tail of a `log` that shows the cause."""

    def __init__(self, what: str, fix: str = "", log: str = ""):
        super().__init__(what, fix, log)  # all three in args, so that the error survives pickling between processes
        self.what, self.fix, self.log = what, fix, log

    def __str__(self) -> str:
        line = self.what + (f" ({self.fix})" if self.fix else "")
        return line + (f"\n--- log tail ---\n{self.log.rstrip()}" if self.log else "")


def nearest(name: str, valid: list[str]) -> str:
    """'did you mean ...?' for the closest valid name, or the list of them where none is close, of a long one the beginning."""
    close = difflib.get_close_matches(name, valid, n=1, cutoff=0.6)
    shown = sorted(valid)[:MANY] + ([f"... and {len(valid) - MANY} more"] if len(valid) > MANY else [])
    return f"did you mean {close[0]!r}?" if close else "valid: " + ", ".join(shown)


def said(e: BaseException) -> str:
    """Type and message of an exception in one line of at most 300 characters."""
    text = " ".join(f"{type(e).__name__}: {e}".split())
    return text if len(text) <= 300 else f"{text[:300]}..."


@contextmanager
def blamed(what: str, *kinds: type[BaseException], fix: str = "", through: type[Exception] | tuple[()] = ()) -> Iterator[None]:
    """An error of these `kinds` becomes a VimeError: `what`, then the error's type and message. One of `through` passes as it is."""
    try:
        yield
    except through:
        raise
    except kinds as e:
        raise VimeError(f"{what}: {said(e)}", fix) from e
