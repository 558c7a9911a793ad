"""The two halves of a run, each by itself, against the whole; spans of a whole run; one sample sent again."""

import json

from tests.e2e.harness import job
from vime.cli import main
from vime.observe import trace
from vime.procs import free_port


def test_halves_of_a_run_do_what_the_whole_does(tmp_path, tiny_model, reverse_prompts, tiny_server, capsys):
    changes = {"train": {"steps": 2, "lr": 1e-12}, "checkpoint": {"interval": 9}, "rollout": {"engines": [tiny_server]}}
    debug = {"deterministic": True, "save_rollouts": True}
    with job(tmp_path, tiny_model, reverse_prompts, debug=debug, trace={"file": True}, log={"prometheus_port": free_port()}, **changes) as whole:
        assert whole.run() == 0, whole.printed[-3000:]
        # every trained sample's way is there, from the prompt to the publish
        spans, bad = trace.load(whole.folder)
        ways = trace.ways(spans)
        assert bad == 0 and sorted(w["sample"] for w in ways) == list(range(128)) == sorted(whole.trained_ids())
        for w in ways:
            names = {s["name"] for s in spans if s["attributes"].get("sample") == w["sample"]}
            assert {"sample", "prompt", "queue", "generate", "reward", "put", "lease", "publish"} <= names
            assert 0 < w["stages"]["generate"] <= w["seconds"] - w["stages"]["other"]
        assert {s["process"] for s in spans} == {"controller", "worker-0", "trainer-0"}
        assert any(s["name"] == "train" and s["attributes"].get("sample") is not None for s in spans)
        assert len(json.loads((whole.folder / "trace.json").read_text())["traceEvents"]) > len(spans)
        # the weights have not moved, so the server says what it said
        assert main(["replay", str(whole.folder), "--sample", "70", "--engine", tiny_server]) == 0
        said = capsys.readouterr().out
        assert "sample 70 of step 2" in said and "sampled again: the same response" in said
        assert main(["replay", str(whole.folder), "--sample", "999", "--engine", tiny_server]) == 1

        half = {"train": {"steps": 2, "lr": 1e-12}, "debug": {"train_only": str(whole.folder), "deterministic": True}, "checkpoint": {"interval": 9}}
        with job(tmp_path, tiny_model, reverse_prompts, "trained", **half) as trained:
            assert trained.run() == 0, trained.printed[-3000:]
            assert "engine-0" not in trained.pids()
            assert main(["diff", str(whole.folder), str(trained.folder)]) == 0, capsys.readouterr().out
        with job(tmp_path, tiny_model, reverse_prompts, "generated", debug={"rollout_only": True, "deterministic": True}, **changes) as generated:
            assert generated.run() == 0, generated.printed[-3000:]
            assert not any(name.startswith("trainer") for name in generated.pids())
            rows = [[json.loads(line) for line in (j.folder / "rollouts/step_000002.jsonl").read_text().splitlines()] for j in (whole, generated)]
            assert [[s["tokens"] for s in g] for g in rows[0]] == [[s["tokens"] for s in g] for g in rows[1]]
