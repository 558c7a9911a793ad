"""Dynamic sampling filters: which finished groups are worth training on. Shapes are slime's."""

from collections.abc import Callable
from typing import Any

from vime import hooks
from vime.errors import ANY, VimeError, blamed, nearest
from vime.hooks import DynamicFilterOutput
from vime.sample import Sample


def nonzero_std(args: Any, samples: list[Sample], **kw: Any) -> DynamicFilterOutput:
    """Keep groups whose rewards differ: the others have advantage 0 under GRPO (DAPO's dynamic sampling, arXiv:2503.14476, eq. 11)."""
    rewards = {s.reward_value(args.reward.key) for s in samples}
    return DynamicFilterOutput(len(rewards) > 1, "zero_std")


BUILT_IN: dict[str, Callable[..., Any]] = {"nonzero_std": nonzero_std}


def resolve(path: str | None) -> Callable[..., Any] | None:
    """The function that `rollout.dynamic_filter` names. Raises: VimeError for an unknown name, path or signature."""
    if path is None or path in BUILT_IN:
        return BUILT_IN[path] if path else None
    if not {":", "."} & set(path):
        raise VimeError(f"rollout.dynamic_filter = {path!r}: no such built-in", nearest(path, list(BUILT_IN)))
    return hooks.load(path, "rollout.dynamic_filter")


def verdict(fn: Callable[..., Any] | None, args: Any, samples: list[Sample]) -> str | None:
    """Why the filter drops this group, if so. Raises: VimeError where it fails."""
    if fn is None:
        return None
    with blamed(f"rollout.dynamic_filter = {args.rollout.dynamic_filter!r} failed on group {samples[0].group_index}", *ANY):
        out = hooks.keeps(fn(args, samples))
    return None if out.keep else out.reason or "dynamic_filter"
