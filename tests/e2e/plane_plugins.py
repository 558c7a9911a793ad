"""Plug-ins of the data plane's runs: samples that depend on their index alone, and a reward step that loses bytes once."""

import os
import random
from pathlib import Path

import numpy as np

from vime.sample import Sample


async def made_up(args, sample, sampling_params):
    """The same tokens, logprobs and reward whoever asks, and whenever: a run's weights then depend on nothing that a server does."""
    rng = random.Random(sample.index)
    n = rng.randint(2, 6)
    sample.append_tokens([rng.randint(3, 12) for _ in range(n)], [-rng.random() * 3 for _ in range(n)], versions=sample.index // 64)  # 64 samples a step
    sample.status, sample.reward = Sample.Status.COMPLETED, float(rng.random() < 0.5)
    return sample


def lose_one(args, samples):
    """reward.post_process, which runs between rollout and training. The first time that it sees group 10 it removes that group's bytes."""
    done = Path(os.environ["LOST_ONCE"])
    if any(s.group_index == 10 for s in samples) and not done.exists():
        (found,) = Path("/dev/shm").glob("vime-loses-*/*g10%2F*")
        found.unlink()
        done.touch()
    rewards = np.array([s.reward for s in samples])
    return rewards.tolist(), (rewards - rewards.mean()).tolist()
