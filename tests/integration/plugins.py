"""Plug-ins that the integration tests name by dotted path."""

from vime.rollout.generate import generate


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
