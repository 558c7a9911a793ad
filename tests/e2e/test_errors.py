"""Errors a person meets: one line, exit code 1, no traceback, nothing left behind."""

import json
import socket

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
        assert j.run() == 1
        assert not j.folder.exists()


ROWS = {
    "bad JSON line": ('{"prompt": "ab", "label": "ba"}\n{"prompt": \n', ":2"),
    "row without prompt": ('{"prompt": "ab", "label": "ba"}\n{"label": "ba"}\n', ":2"),
    "prompt longer than the context": (json.dumps({"prompt": "a" * 40, "label": "x"}) + "\n", "max_context_len"),
    "empty dataset": ("", "holds no prompts"),
}


@pytest.mark.parametrize("case", ROWS)
def test_bad_rows_are_refused(tmp_path, tiny_model, case):
    text, word = ROWS[case]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(text)
    with job(tmp_path, tiny_model, prompts) as j:
        assert j.run("--dry-run") == 1
        assert word in j.printed and "prompts.jsonl" in j.printed and "Traceback" not in j.printed, j.printed


def test_dry_run_prints_the_plan_and_starts_nothing(tmp_path, tiny_model, reverse_prompts):
    with job(tmp_path, tiny_model, reverse_prompts) as j:
        assert j.run("--dry-run") == 0
        assert "8 prompts x 8 = 64 samples" in j.printed
        assert not j.folder.exists()


def test_taken_port(tmp_path, tiny_model, reverse_prompts):
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        with job(tmp_path, tiny_model, reverse_prompts, vllm={"port": port}) as j:
            assert j.run() == 1
            assert str(port) in j.printed and "Traceback" not in j.printed, j.printed
            assert j.left_behind() == []


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
