"""PPO whose critic has ranks of its own, as a user runs it; and from its checkpoint on."""

from tests.e2e.harness import job


def test_a_run_with_a_critic_on_a_rank_of_its_own(tmp_path, tiny_model, reverse_prompts, tiny_server):
    changes = {"rollout": {"engines": [tiny_server]}, "algo": {"advantage_estimator": "gae", "critic_ranks": 1}}
    with job(tmp_path, tiny_model, reverse_prompts, train={"steps": 2}, **changes) as j:
        assert j.run() == 0, j.printed[-3000:]
        assert {"trainer-0", "critic-0"} <= j.pids().keys() and "trainer-1" not in j.pids()
        assert [m["step"] for m in j.metrics] == [1, 2]
        for m in j.metrics:
            assert m["train/value_loss"] > 0 and m["train/grad_norm"] > 0 and m["train/critic_grad_norm"] > 0 and m["train/trained_tokens"] > 64
        assert j.metrics[0]["train/value_mean"] == 0 != j.metrics[1]["train/value_mean"]
        assert all((j.folder / f"checkpoints/step_00000{k}/{part}/.metadata").exists() for k in (1, 2) for part in ("trainer", "critic"))
        assert j.left_behind() == []
    with job(tmp_path, tiny_model, reverse_prompts, train={"steps": 3}, checkpoint={"async_save": True}, **changes) as j:
        assert j.run("--resume") == 0, j.printed[-3000:]
        assert [m["step"] for m in j.metrics] == [1, 2, 3]
        assert (j.folder / "checkpoints/step_000003/critic/.metadata").exists()
