"""Plug-ins that see whole batches, in real runs: what they do to the samples is what is trained."""

import json

from tests.e2e.harness import job

HERE = "tests.e2e.batch_plugins"


def test_source_filters_and_postprocessing(tmp_path, tiny_model, reverse_prompts, tiny_server, monkeypatch):
    monkeypatch.setenv("LONGTAIL_MEDIAN", "0.15")
    monkeypatch.setenv("LONGTAIL_SIGMA", "1.0")
    rollout = {
        "engines": [tiny_server], "custom_generate": "benchmarks.longtail:slow_turns", "over_sampling_batch_size": 16, "partial_rollout": True,
        "buffer_filter": f"{HERE}:youngest_first", "sample_filter": f"{HERE}:drop_first", "all_samples_process": f"{HERE}:look",
        "data_postprocess": f"{HERE}:mask_last",
    }  # fmt: skip
    changes = {"rollout": rollout, "train": {"steps": 3, "max_staleness": 1}, "algo": {"correction": "tis"}, "args": {"notes": str(tmp_path / "trace")}}
    with job(tmp_path, tiny_model, reverse_prompts, **(changes | {"data": {"source": f"{HERE}:Words"}})) as j:
        assert j.run() == 0, j.printed[-3000:]
        assert j.run("--resume", "train.steps=4") == 0, j.printed[-3000:]
        seen = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
        looked = [s for s in seen if "looked" in s]
        assert len(looked) == 4 and all(s["removed"] == 8 and s["prompts"] == 1000 for s in looked)
        saved, loaded = [s for s in seen if "saved" in s], [s for s in seen if "loaded" in s]
        assert all(s["saved"] == s["at"] for s in saved) and [s["loaded"] for s in loaded] == [saved[2]["saved"]]
        rows = [json.loads(x) for f in sorted((j.folder / "samples").glob("step_*.jsonl")) for x in f.read_text().splitlines()]
        assert len(rows) == 4 * 64 and sum(r["removed"] for r in rows) == 4 * 8
        assert all(r["loss_mask"][-1] == 0 and len(r["prompt"]) == 5 for r in rows)
        trained = [m["train/trained_tokens"] for m in j.metrics]
        assert max(trained) <= 64 * 6
        groups = [g for s in looked for g in s["looked"]]
        assert len(set(groups)) == len(groups) == 32
        dropped = [g for s in seen for g in s.get("dropped", [])]
        assert not set(dropped) & set(groups)
        assert sum(m.get("rollout/dropped_buffer_filter", 0) for m in j.metrics) == len(dropped)
        assert any(s.get("buffered") for s in seen)


def test_a_rollout_function_and_an_eval_function_of_the_users_own(tmp_path, tiny_model, reverse_prompts, tiny_server):
    rollout = {"engines": [tiny_server], "function": f"{HERE}:whole", "eval_function": f"{HERE}:whole", "batch_size": 4}
    with job(tmp_path, tiny_model, reverse_prompts, rollout=rollout, train={"steps": 2, "skip_zero_advantage": False}, args={"notes": str(tmp_path / "trace")}) as j:
        assert j.run() == 0, j.printed[-3000:]
        assert [m.get("rollout/own") for m in j.metrics] == [None, 0.0, 1.0]
        assert [0 <= m["eval/own/reward"] <= 1 for m in j.metrics if m["step"] in (0, 2)] == [True, True]
        assert len(j.trained_ids()) == len(set(j.trained_ids())) == 64
        assert max(m["train/logprob_abs_diff"] for m in j.metrics if "train/loss" in m) < 1e-4
