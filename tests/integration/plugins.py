"""Plug-ins that the integration tests name by dotted path."""

import copy

from vime.rollout.generate import generate, link, running
from vime.sample import Sample


def length(args, sample):
    return float(sample.response_length)


def broken(args, sample):
    raise KeyError("no such answer")


async def twice(args, sample, sampling_params):
    """Two turns with a tool's words between them."""
    sample = await generate(args, sample, sampling_params | {"max_tokens": 3})
    sample.append_tokens([5, 6], trainable=False)
    sample = await generate(args, sample, sampling_params | {"max_tokens": sample.response_length + 3})
    sample.metadata["turns"] = 2
    return sample


async def crash(args, sample, sampling_params):
    raise RuntimeError("sandbox lost")


async def two_segments(args, sample, sampling_params):
    """One Sample a turn, built by hand: no versions, no rollout_id, an index that repeats."""
    out, tokens = [], list(sample.tokens)
    for _ in range(2):
        (c,) = await link.get().client.generate(tokens, {"temperature": args.rollout_temperature, "max_tokens": 3})
        running.get().versions |= set(c.versions)
        n = len(c.token_ids)
        out.append(Sample(tokens=tokens + c.token_ids, response_length=n, rollout_log_probs=c.log_probs, status=Sample.Status.COMPLETED))
        tokens = tokens + c.token_ids + [5]
    return out


async def aborted_once(args, sample, sampling_params, tried=set()):  # noqa: B006 (it is to remember)
    out = await two_segments(args, sample, sampling_params)
    if sample.index not in tried:
        out[1].status = Sample.Status.ABORTED
    tried.add(sample.index)
    for s in out:
        s.reward = 0.0
    return out


def mark(args, sample, rollout_id, evaluation):
    sample = copy.deepcopy(sample)
    sample.metadata["seen"] = [rollout_id, evaluation]
    return sample


async def mark_async(args, sample):
    sample.metadata["seen"].append("async")
    sample.metadata["seen"].pop()


async def ranks(args, samples):
    """Rewards of a whole group: each rollout's rank by id."""
    order = sorted({s.rollout_id for s in samples})
    return [order.index(s.rollout_id) for s in samples]


def by_part(args, sample):
    return float(sample.part)


async def plain(args, sample, sampling_params):
    return await generate(args, sample, sampling_params)
