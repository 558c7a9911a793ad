"""The tiny model learns its task."""

import pytest

from tests.e2e.harness import job


@pytest.mark.parametrize("seed", [0, 1])
def test_tiny_learns(tmp_path, tiny_model, reverse_prompts, tiny_server, seed):
    """Two seeds end above 0.85, from below 0.5, in 40 steps of 256 samples; the last one trains on groups as they finish."""
    train = {"steps": 40, "lr": 3e-4, "lr_warmup_iters": 8, "lr_decay_style": "linear", "lr_decay_start": 0.6, "min_lr": 3e-5, "stream": seed == 1}
    rollout = {"engines": [tiny_server], "batch_size": 32, "concurrency": 512}
    with job(tmp_path, tiny_model, reverse_prompts, seed=seed, train=train, rollout=rollout, checkpoint={"interval": 40}) as j:
        assert j.run(timeout=500) == 0, j.printed[-3000:]
        curve = [m["rollout/raw_reward"] for m in j.metrics]
        assert sum(curve[:3]) / 3 < 0.5
        assert sum(curve[-3:]) / 3 > 0.85, curve
