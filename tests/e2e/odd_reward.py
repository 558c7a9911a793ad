"""Plug-ins for tests: a reward that fails for one group, the one with index 3, and hooks that leave a trace."""

import os
from pathlib import Path

from benchmarks.longtail import slow_turns
from vime.sample import Sample


def odd(args: object, sample: Sample) -> float:
    if sample.group_index == 3:
        raise RuntimeError("judge is out")
    return float(sample.response == sample.label)


def centred(args, samples):
    """What grpo does, without the standard deviation."""
    raw = [s.get_reward_value(args) for s in samples]
    mean = {g: sum(r) / len(r) for g in {s.group_index for s in samples} if (r := [x for x, s in zip(raw, samples) if s.group_index == g])}
    return raw, [r - mean[s.group_index] for r, s in zip(raw, samples)]


def note(rollout_id, args, samples, extra_metrics, rollout_time):
    assert rollout_time > 0 and len({s.uid for s in samples}) == len(samples) == args.global_batch_size
    extra_metrics["rollout/seen"] = len(samples)


def note_eval(rollout_id, args, data, extra_metrics):
    extra_metrics["eval/seen"] = sum(len(d["samples"]) for d in data.values())


def note_write(args, version_dir, rollout_engines):
    with Path(args.note).open("a") as f:
        f.write(f"{len(rollout_engines)} {sorted(os.listdir(version_dir))}\n")


async def long_turns(args, sample, sampling_params):
    """benchmarks.longtail's slow environment, for the whole length."""
    return await slow_turns(args, sample, sampling_params | {"ignore_eos": True})
