"""Whole runs on the tiny model: the numbers are right, the folder holds what the docs say."""

import json

from transformers import AutoModelForCausalLM

from tests.e2e.harness import job
from vime import config


def test_numbers_of_ten_steps(tmp_path, tiny_model, reverse_prompts, tiny_server):
    """fp32: the trainer's logprobs equal the sampled ones; the first micro-step of each batch is on-policy; two optimizer steps a batch."""
    with job(tmp_path, tiny_model, reverse_prompts, train={"steps": 10, "global_batch_size": 32}, rollout={"engines": [tiny_server]}) as j:
        assert j.run() == 0, j.printed[-3000:]
        rows = [m for m in j.metrics if "train/loss" in m]
        assert [m["step"] for m in rows] == list(range(1, 11))
        assert max(m.get("train/logprob_abs_diff", 0) for m in rows) < 1e-4
        first = [abs(m["train/ppo_kl_first"]) for m in rows if "train/ppo_kl_first" in m]  # not of a first half whose rewards are all equal
        assert len(first) >= 5 and max(first) < 1e-6
        assert max(abs(m.get("train/ppo_kl", 0)) for m in rows) > 1e-6, "the second optimizer step must be off-policy, else the check above shows nothing"


def test_run_folder(tmp_path, tiny_model, reverse_prompts, tiny_server):
    """Every file that the docs name is there and readable; held-out evaluation before, between and after; a failing reward is counted."""
    changes = {"reward": {"function": "tests.e2e.odd_reward:odd", "on_error": "skip"}}
    changes["reward"] |= {"post_process": "tests.e2e.odd_reward:centred"}
    changes |= {"log": {"tensorboard": True, "rollout_hook": "tests.e2e.odd_reward:note", "eval_hook": "tests.e2e.odd_reward:note_eval"}}
    few = [{"name": "a", "prompts": f"{reverse_prompts}@[0:8]"}, {"name": "b", "prompts": f"{reverse_prompts}@[8:12]", "reward": "exact"}]
    changes |= {"eval": {"datasets": few, "interval": 2, "n_samples_per_prompt": 4}, "train": {"steps": 3, "lr": 1e-6}}
    weights = {"post_write": "tests.e2e.odd_reward:note_write", "delta": True, "delta_full_every": 2}
    changes |= {"weights": weights, "vllm": {"dtype": "bfloat16"}, "args": {"note": str(tmp_path / "written")}}
    with job(tmp_path, tiny_model, reverse_prompts, rollout={"engines": [tiny_server]}, checkpoint={"interval": 1, "keep": 1}, **changes) as j:
        assert j.run() == 0, j.printed[-3000:]
        assert [m["step"] for m in j.metrics if "eval/reward" in m] == [0, 2, 3]
        assert [m.get("eval/a/dropped") for m in j.metrics] == [1, None, 1, 1] and "eval/b/dropped" not in j.metrics[0]
        for m in (j.metrics[i] for i in (0, 2, 3)):
            assert {"eval/a/pass@4", "eval/b/pass@1", "eval/b/reward_stderr", "eval/b/truncated"} <= set(m) and m["eval/seen"] == 28 + 16
            assert abs(m["eval/reward"] - (m["eval/a/reward"] + m["eval/b/reward"]) / 2) < 1e-9
            assert m["eval/b/pass@1"] <= m["eval/b/pass@2"] <= m["eval/b/pass@4"]
        assert [m.get("rollout/seen") for m in j.metrics] == [None, 64, 64, 64]
        assert [line.split()[0] for line in (tmp_path / "written").read_text().splitlines()] == ["1", "1", "1", "1"]
        assert [m.get("rollout/dropped_reward_error") for m in j.metrics] == [None, 1, None, None]
        assert j.trained_ids() == [i for i in range(4 * 64) if i // 8 != 3][: 3 * 64]  # the next prompt took the failing one's place
        wanted = {
            "rollout/raw_reward", "rollout/response_len", "rollout/truncated", "train/loss", "train/pg_clipfrac", "train/ppo_kl", "train/entropy",
            "train/grad_norm", "train/logprob_abs_diff", "perf/rollout_s", "perf/train_s", "perf/step_s", "weights/sync_s",
        }  # fmt: skip
        assert wanted <= set(j.metrics[-1])
        rows = j.metrics[1:]  # versions 0 and 2 are whole
        assert [m["weights/delta_fraction"] < 0.1 for m in rows] == [True, False, True] and rows[-1]["weights/delta_refused"] == 0
        assert all(0 < m["weights/changed_fraction"] < 0.03 and m["weights/full_bytes"] > 1e6 for m in rows)
        assert config.load(j.folder / "config.toml").train.steps == 3
        assert (j.folder / "reward.png").read_bytes()[:4] == b"\x89PNG"
        assert list((j.folder / "checkpoints").iterdir()) == [j.folder / "checkpoints" / "step_000003"]
        AutoModelForCausalLM.from_pretrained(j.folder / "checkpoints" / "step_000003" / "hf")
        row = json.loads((j.folder / "samples" / "step_000001.jsonl").read_text().splitlines()[0])
        assert {"index", "prompt", "response", "reward", "label", "status"} <= set(row)
        assert list(j.folder.rglob("events.out.tfevents*"))
        assert j.left_behind() == []
        # the same command again must not destroy the run; a resume that would do nothing is an error
        assert j.run() == 1 and "--overwrite" in j.printed.splitlines()[-1]
        assert j.run("--resume") == 1 and "would do nothing" in j.printed.splitlines()[-1]
