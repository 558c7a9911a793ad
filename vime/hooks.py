"""Extension points are dotted paths ("package.module:function" or "package.module.function"), checked at start-up."""

import importlib
import inspect
from collections.abc import Callable
from typing import Any

from vime.errors import VimeError, nearest


def load(path: str, key: str, positional: int | None = None) -> Callable[..., Any]:
    """Import the function at `path`.

    Args:
        path: "package.module:function"; a last dot in place of the colon works too.
        key: the configuration key that names it, for the error message.
        positional: how many positional arguments vime will call it with; checked against its signature.

    Raises: VimeError naming key and path where the module, the function or the signature does not fit.
    """
    module, _, name = path.partition(":") if ":" in path else path.rpartition(".")
    if not module:
        raise VimeError(f"{key} = {path!r} is not a dotted path", "write it as package.module:function")
    try:
        mod = importlib.import_module(module)
    except Exception as e:  # a user's module may fail in any way while it is imported
        raise VimeError(f"{key} = {path!r}: cannot import {module}: {type(e).__name__}: {e}", "is it on PYTHONPATH?") from e
    fn = getattr(mod, name, None)
    if not callable(fn):
        known = [n for n in vars(mod) if not n.startswith("_")]
        raise VimeError(f"{key} = {path!r}: {module} has no function {name!r}", nearest(name, known))
    if positional is not None:
        try:
            inspect.signature(fn).bind(*[None] * positional)
        except TypeError as e:
            shown = f"{name}{inspect.signature(fn)}"
            raise VimeError(f"{key} = {path!r}: {shown} does not take {positional} positional arguments: {e}") from e
    return fn
