"""Errors a person meets: one line, exit code 1, no traceback, nothing left behind."""

import json

import pytest

from tests.e2e.harness import job
from vime.cli import main

# what is changed in a good run file -> what the message must name
BAD = {
    "misspelt key and wrong type together": ({"train": {"lrr": 1e-3, "steps": "many"}}, ["train.lrr", "'lr'", "train.steps", "2 faults"]),
    "missing model": ({"model": "no/such/model"}, ["no/such/model", "vime model get"]),
    "missing data": ({"data": {"prompts": "no/such.jsonl"}}, ["data.prompts", "no/such.jsonl"]),
    "reward that is not there": ({"reward": {"function": "math.no_such"}}, ["reward.function", "no_such"]),
    "delta in float32": ({"weights": {"delta": True}}, ["weights.delta", "float32", "vllm.dtype"]),
    "batch not divisible": ({"train": {"global_batch_size": 7}}, ["train.global_batch_size", "64"]),
}


def dry_run(j, capsys):
    """`vime train CONFIG --dry-run` in this process, which has paid for the imports already: exit code, what it printed."""
    code = main(["train", str(j.config), "--dry-run"])
    said = capsys.readouterr()
    assert not j.folder.exists()
    return code, said.out + said.err


@pytest.mark.parametrize("case", BAD)
def test_refused_before_anything_starts(tmp_path, tiny_model, reverse_prompts, capsys, case):
    changes, words = BAD[case]
    with job(tmp_path, tiny_model, reverse_prompts, **changes) as j:
        code, said = dry_run(j, capsys)
        assert code == 1 and all(w in said for w in words), said


def test_all_bad_rows_are_named_with_their_lines(tmp_path, tiny_model, capsys):
    prompts = tmp_path / "prompts.jsonl"
    rows = ['{"prompt": "ab", "label": "ba"}', '{"prompt": ', '{"label": "ba"}', json.dumps({"prompt": "a" * 40, "label": "x"})]
    prompts.write_text("\n".join(rows))
    with job(tmp_path, tiny_model, prompts) as j:
        code, said = dry_run(j, capsys)
        assert code == 1 and all(f"prompts.jsonl:{n}" in said for n in (2, 3, 4)) and "prompts.jsonl:1:" not in said, said
        assert "max_context_len" in said


def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path, tiny_model, reverse_prompts, capsys):
    with job(tmp_path, tiny_model, reverse_prompts) as j:
        code, said = dry_run(j, capsys)
        assert code == 0 and "8 prompts x 8 = 64 samples" in said, said


def test_vllm_that_cannot_start_shows_its_last_lines_in_one_screen(tmp_path, tiny_model, reverse_prompts):
    """In a process of its own: also the exit code, and no traceback, as a user sees them."""
    with job(tmp_path, tiny_model, reverse_prompts, vllm={"no-such-flag": 3}) as j:
        assert j.run() == 1
        lines = j.printed.splitlines()
        error = next(i for i, line in enumerate(lines) if line.startswith("vime: error"))
        assert "engine 0" in lines[error] and "no-such-flag" in "\n".join(lines[error:])
        assert len(lines) - error <= 45 and "Traceback" not in j.printed.split("--- log tail ---")[0]
        assert j.left_behind() == []


def test_a_reward_that_raises_stops_the_run_and_names_the_sample(tmp_path, tiny_model, reverse_prompts, tiny_server):
    """reward.on_error = "skip" is run in test_runs.py."""
    reward = {"function": "tests.e2e.odd_reward:odd"}
    with job(tmp_path, tiny_model, reverse_prompts, reward=reward, rollout={"engines": [tiny_server]}, train={"steps": 1}) as j:
        assert j.run() == 1
        assert "sample 2" in j.printed and "judge is out" in j.printed and "Traceback" not in j.printed, j.printed
        assert j.left_behind() == []
