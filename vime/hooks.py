"""Extension points are dotted paths ("package.module:function" or "package.module.function"), checked at start-up."""

import importlib
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from vime.config import Config
from vime.errors import VimeError, nearest

# Functions of the loss side, shaped as slime's: key -> number of positional arguments, names of keyword arguments.
TIS = ("pg_loss", "train_log_probs", "rollout_log_probs", "loss_masks", "total_lengths", "response_lengths")
LOSS_SIDE: dict[str, tuple[int, Sequence[str]]] = {
    "algo.custom_tis": (1, TIS),  # (args, *, pg_loss, ...) -> (pg_loss, masks, metrics)
    "algo.custom_advantage": (2, ()),  # (args, rollout_data) -> None
    "loss.custom": (4, ()),  # (args, batch, logits, sum_of_sample_mean) -> (loss, metrics)
    "loss.custom_reducer": (4, ()),  # (total_lengths, response_lengths, loss_masks, calculate_per_token_loss) -> (token losses) -> number
}


def loss_side(cfg: Config) -> dict[str, Callable[..., Any]]:
    """The functions of LOSS_SIDE that this run names, by key. Raises: VimeError as load."""
    paths = {key: getattr(getattr(cfg, key.split(".")[0]), key.split(".")[1]) for key in LOSS_SIDE}
    return {key: load(path, key, *LOSS_SIDE[key]) for key, path in paths.items() if path}


def arguments(cfg: Config) -> SimpleNamespace:
    """`args` for functions of the loss side: the keys of rollout, algo, loss and train under slime's names, and vime's sections."""
    flat = {k: v for section in (cfg.rollout, cfg.algo, cfg.loss, cfg.train) for k, v in dict(section).items()}
    named = {
        "eps_clip_high": cfg.algo.eps_clip if cfg.algo.eps_clip_high is None else cfg.algo.eps_clip_high,
        "tis_clip_low": cfg.algo.tis_low,
        "use_tis": cfg.algo.custom_tis is not None or cfg.algo.correction in ("tis", "icepop"),
        "use_rollout_logprobs": cfg.algo.correction == "rollout_logprobs",
        "use_kl_loss": cfg.algo.kl_loss_coef > 0,
        "calculate_per_token_loss": cfg.loss.aggregate == "token-mean",
        "rollout_temperature": cfg.rollout.temperature,
        "rollout_top_p": cfg.rollout.top_p,
    }
    return SimpleNamespace(**flat | named | dict(cfg))


def load(path: str, key: str, positional: int | None = None, keywords: Sequence[str] = ()) -> Callable[..., Any]:
    """Import the function at `path`.

    Args:
        path: "package.module:function"; a last dot in place of the colon works too.
        key: the configuration key that names it, for the error message.
        positional, keywords: how many positional arguments vime will call it with, and the names of the others; checked against its
            signature.

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
            inspect.signature(fn).bind(*[None] * positional, **dict.fromkeys(keywords))
        except TypeError as e:
            shown = f"{name}{inspect.signature(fn)}"
            named = f" and {', '.join(keywords)}" if keywords else ""
            raise VimeError(f"{key} = {path!r}: {shown} does not take {positional} positional arguments{named}: {e}") from e
    return fn
