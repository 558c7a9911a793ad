"""A whole run with adapters: real servers get the merged weights, and a stopped run goes on."""

import tomllib
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from tests.e2e.harness import job

EXAMPLE = Path(__file__).parents[2] / "examples" / "reverse" / "lora.toml"


def test_a_run_with_adapters(tmp_path, tiny_model, reverse_prompts, tiny_server):
    """The example's settings, KL to the start model included: the servers' logprobs are the trainer's in every step (the canary holds, too),
    also after a resume; the checkpoint's model is the merged one."""
    example = tomllib.loads(EXAMPLE.read_text())
    changes = {k: example[k] for k in ("lora", "algo")} | {"rollout": {"engines": [tiny_server]}}
    with job(tmp_path, tiny_model, reverse_prompts, train={"steps": 3, "lr": example["train"]["lr"]}, **changes) as j:
        assert j.run() == 0, j.printed[-3000:]
        j.config.write_text(j.config.read_text().replace("steps = 3", "steps = 4"))
        assert j.run("--resume") == 0, j.printed[-3000:]
        assert [m["step"] for m in j.metrics] == [1, 2, 3, 4]
        assert max(m["train/logprob_abs_diff"] for m in j.metrics) < 1e-4
        assert abs(j.metrics[0]["train/kl_loss"]) < 1e-8 and all(m["train/kl_loss"] > 1e-7 for m in j.metrics[1:])
        exported = AutoModelForCausalLM.from_pretrained(j.folder / "checkpoints" / "step_000004" / "hf").state_dict()
        start = AutoModelForCausalLM.from_pretrained(tiny_model).state_dict()
        assert {k for k in start if not torch.equal(start[k], exported[k])} == {k for k in start if k.endswith("_proj.weight")}
        assert j.left_behind() == []
