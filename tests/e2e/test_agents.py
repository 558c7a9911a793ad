"""A multi-turn tool-use task trains, by the same `vime train`: a real vLLM server, real tool calls."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples.tools.make_data import main as make_data
from tests.e2e.harness import job

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Knows the form of a call, and one task's wrong demonstrations."""
    folder = tmp_path_factory.mktemp("tools") / "model"
    code = f"import torch; torch.set_num_threads(1); from pathlib import Path; from examples.tools.make_model import main; main(Path({str(folder)!r}), 160, kinds=1)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)})
    return folder


def test_an_agent_learns(tmp_path: Path, model: Path) -> None:
    """Reward rises; every sampled token of every episode is trained; calls and how episodes ended are in the metrics."""
    make_data(tmp_path)
    tree = {
        "data": {"apply_chat_template": False}, "agent": {"task": "examples.tools.task:Arithmetic", "max_turns": 3, "max_turn_len": 24},
        "gateway": {"parser": "hermes"}, "train": {"steps": 8, "lr": 6e-4, "lr_warmup_iters": 1}, "checkpoint": {"interval": 8},
        "rollout": {"batch_size": 12, "n_samples_per_prompt": 16, "max_response_len": 72, "max_context_len": 128, "concurrency": 256},
    }  # fmt: skip
    with job(tmp_path, model, tmp_path / "train.jsonl", **tree) as j:
        assert j.run(timeout=500) == 0, j.printed[-3000:]
        curve = [m["rollout/raw_reward"] for m in j.metrics]
        assert sum(curve[-2:]) / 2 > sum(curve[:2]) / 2 + 0.1, curve
        for m in j.metrics:
            assert m["agent/trainable_fraction"] == 1.0 and m["agent/turns"] > 1.5 and m["agent/call_ok"] > 0.5
            assert m["train/logprob_abs_diff"] < 1e-3
