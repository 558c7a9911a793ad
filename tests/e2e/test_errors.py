"""Errors a person meets: one line, exit code 1, no traceback, nothing left behind."""

import json

import pytest

from tests.e2e.harness import job

# what is changed in a good run file -> what the message must name
BAD = {
    "misspelt key and wrong type together": ({"train": {"lrr": 1e-3, "steps": "many"}}, ["train.lrr", "'lr'", "train.steps", "2 faults"]),
    "missing model": ({"model": "no/such/model"}, ["no/such/model", "vime model get"]),
    "missing data": ({"data": {"prompts": "no/such.jsonl"}}, ["data.prompts", "no/such.jsonl"]),
    "reward that is not there": ({"reward": {"function": "math.no_such"}}, ["reward.function", "no_such"]),
    "batch not divisible": ({"train": {"global_batch_size": 7}}, ["train.global_batch_size", "64"]),
}


@pytest.mark.parametrize("case", BAD)
def test_refused_before_anything_starts(tmp_path, tiny_model, reverse_prompts, case):
    changes, words = BAD[case]
    with job(tmp_path, tiny_model, reverse_prompts, **changes) as j:
        assert j.run("--dry-run") == 1
        dry = j.printed
        assert all(w in dry for w in words), dry
        assert "Traceback" not in dry
        assert not j.folder.exists()


def test_all_bad_rows_are_named_with_their_lines(tmp_path, tiny_model):
    prompts = tmp_path / "prompts.jsonl"
    rows = ['{"prompt": "ab", "label": "ba"}', '{"prompt": ', '{"label": "ba"}', json.dumps({"prompt": "a" * 40, "label": "x"})]
    prompts.write_text("\n".join(rows))
    with job(tmp_path, tiny_model, prompts) as j:
        assert j.run("--dry-run") == 1
        assert all(f"prompts.jsonl:{n}" in j.printed for n in (2, 3, 4)) and "prompts.jsonl:1:" not in j.printed, j.printed
        assert "max_context_len" in j.printed and "Traceback" not in j.printed


def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path, tiny_model, reverse_prompts):
    with job(tmp_path, tiny_model, reverse_prompts) as j:
        assert j.run("--dry-run") == 0
        assert "8 prompts x 8 = 64 samples" in j.printed
        assert not j.folder.exists()


def test_vllm_that_cannot_start_shows_its_last_lines_in_one_screen(tmp_path, tiny_model, reverse_prompts):
    with job(tmp_path, tiny_model, reverse_prompts, vllm={"no-such-flag": 3}) as j:
        assert j.run() == 1
        lines = j.printed.splitlines()
        error = next(i for i, line in enumerate(lines) if line.startswith("vime: error"))
        assert "engine 0" in lines[error] and "no-such-flag" in "\n".join(lines[error:])
        assert len(lines) - error <= 45
        assert j.left_behind() == []


def test_a_reward_that_raises_names_the_sample_or_is_skipped_and_counted(tmp_path, tiny_model, reverse_prompts, tiny_server, monkeypatch):
    (tmp_path / "odd_reward.py").write_text(
        "def odd(args, sample):\n    if sample.group_index == 3:\n        raise RuntimeError('judge is out')\n    return float(sample.response == sample.label)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with job(tmp_path, tiny_model, reverse_prompts, reward={"function": "odd_reward:odd"}, rollout={"engines": [tiny_server]}, train={"steps": 1}) as j:
        assert j.run() == 1
        assert "sample 2" in j.printed and "judge is out" in j.printed and "Traceback" not in j.printed, j.printed
        assert j.left_behind() == []
        assert j.run("--overwrite", "reward.on_error=skip") == 0, j.printed
        assert j.metrics[-1]["rollout/dropped_reward_error"] == 1
        assert j.metrics[-1]["step"] == 1
        assert j.trained_ids() == [i for i in range(72) if i // 8 != 3]
