"""A reward for tests: it fails for one group, the one with index 3."""

from vime.sample import Sample


def odd(args: object, sample: Sample) -> float:
    if sample.group_index == 3:
        raise RuntimeError("judge is out")
    return float(sample.response == sample.label)
