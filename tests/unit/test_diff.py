"""vime diff: the first step where two runs part, and there the cause before its effects."""

import copy
import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime.cli import main
from vime.observe.diff import apart

SAMPLE = {
    "index": 3, "uid": 3, "group_index": 1, "prompt": "p", "prompt_tokens": [1, 2], "tokens": [4, 5, 6], "log_probs": [-0.1, -0.2, -0.3],
    "loss_mask": [1, 1, 1], "reward": 1.0, "status": "completed",
}  # fmt: skip


def write(folder: Path, steps: int = 3, **changed) -> str:
    """A run of equal steps, but for what `changed` says of its step 2: reward=0.0, or metric=1.0, or train=[...]."""
    (folder / "samples").mkdir(parents=True)
    rows = []
    for step in range(1, steps + 1):
        sample, now = copy.deepcopy(SAMPLE), changed if step == 2 else {}
        sample |= {k: v for k, v in now.items() if k in sample}
        (folder / f"samples/step_{step:06d}.jsonl").write_text(json.dumps(sample) + '\n{"torn')
        (folder / f"samples/step_{step:06d}.train-0.json").write_text(json.dumps({"3": now.get("train", [-0.1, None, -0.3])}))
        rows.append(
            {"step": step, "train/loss": now.get("metric", 0.5), "perf/step_s": hash(str(folder)) % 97, "rollout/engine_busy": hash(str(folder)) % 89}
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(folder)


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"tokens": [4, 9, 6]}, "step 2: sample 3 (group 1) tokens[1] 5 | 9"),
        ({"tokens": [4, 5]}, "step 2: sample 3 (group 1) tokens has 3 | 2 entries"),
        ({"log_probs": [-0.1, -0.2, -0.31]}, "step 2: sample 3 (group 1) log_probs[2] -0.3 | -0.31"),
        ({"tokens": [4, 9, 6], "log_probs": [-0.1, -0.5, -0.6]}, "step 2: sample 3 (group 1) tokens[1] 5 | 9"),
        ({"tokens": [4, 9, 6], "log_probs": [-0.11, -0.5, -0.6]}, "step 2: sample 3 (group 1) log_probs[0] -0.1 | -0.11"),
        ({"reward": 0.0}, "step 2: sample 3 (group 1) reward 1.0 | 0.0"),
        ({"reward": {"score": 0.0}}, 'step 2: sample 3 (group 1) reward 1.0 | {"score": 0.0}'),
        ({"train": [-0.1, -0.5, -0.3]}, "step 2: sample 3 trainer's log_probs[1] null | -0.5"),
        ({"metric": 0.6}, "step 2: metric train/loss 0.5 | 0.6"),
        ({"metric": None}, "step 2: metric train/loss 0.5 | null"),
        ({"uid": 4}, "step 2: sample 3 is in {a} only"),
        ({"metric": 0.6, "reward": 0.0, "tokens": [0, 0, 0]}, "step 2: sample 3 (group 1) tokens[0] 4 | 0"),
    ],
)
def test_first_difference_is_named(tmp_path, capsys, changed, said):
    a, b = write(tmp_path / "a"), write(tmp_path / "b", **changed)
    assert main(["diff", a, b]) == 1
    assert capsys.readouterr().out.splitlines()[0] == said.replace("{a}", a)


def test_equal_runs_and_tolerance(tmp_path, capsys):
    a, b, c = write(tmp_path / "a"), write(tmp_path / "b", steps=4), write(tmp_path / "c", log_probs=[-0.1, -0.2, -0.3001])
    assert main(["diff", a, b]) == 0, "time and load are not compared"
    assert capsys.readouterr().out.strip() == f"the same in 3 steps that both have; {b} goes on to step 4"
    assert main(["diff", a, c, "--tol", "1e-3"]) == 0 and main(["diff", a, c, "--tol", "1e-5"]) == 1
    assert main(["diff", a, str(tmp_path)]) == 1 and "no metrics.jsonl" in capsys.readouterr().err


numbers = st.recursive(st.none() | st.integers(-9, 9) | st.floats(-9, 9) | st.text(max_size=3), lambda s: st.lists(s, max_size=4), max_leaves=8)


@given(numbers, numbers)
def test_apart_is_nothing_exactly_where_values_are_equal(a, b):
    assert apart(a, copy.deepcopy(a), 0.0) == ""
    assert (apart(a, b, 0.0) == "") == (a == b)
