"""One half of a run at a time, and runs that repeat: what is refused, what is read, which seeds are sent."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from vime import config
from vime.data.records import dump_samples, write_groups
from vime.errors import VimeError
from vime.observe import diff
from vime.rollout.generate import seed_of
from vime.rollout.offline import Recorded, recorded
from vime.sample import Sample, Status


def cfg(**sections):
    return config.validate({"model": "m", "data": {"prompts": "p"}} | sections, "test")


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"debug": {"rollout_only": True, "train_only": "runs/a"}}, "leave nothing to run"),
        (
            {"debug": {"rollout_only": True}, "train": {"mode": "async", "max_staleness": 1}, "algo": {"correction": "tis"}},
            "debug.rollout_only takes whole steps",
        ),
        ({"debug": {"train_only": "runs/a"}, "train": {"max_staleness": 1}, "algo": {"correction": "tis"}}, "debug.train_only takes whole steps"),
        ({"debug": {"deterministic": True}, "rollout": {"over_sampling_batch_size": 9}}, "debug.deterministic: async mode"),
        ({"debug": {"train_only": "runs/a"}, "train": {"objective": "sft"}}, "debug.train_only takes whole steps"),
    ],
)
def test_what_does_not_go_together_is_refused(sections, said):
    with pytest.raises(VimeError, match=said):
        cfg(**sections)


def test_train_only_has_no_servers():
    c = cfg(debug={"train_only": "runs/a"})
    assert not c.served and c.servers == [] and not c.offline and cfg().served


def group(n: int, version: int) -> list[Sample]:
    out = []
    for i in range(2):
        s = Sample(group_index=n, index=2 * n + i, tokens=[1, 2], reward=float(i), status=Status.COMPLETED)
        s.append_tokens([3, 4], [-0.5, -0.25], versions=version)
        s.append_tokens([5], trainable=False)
        out.append(s)
    return out


def test_recorded_rollouts_are_read_step_by_step(tmp_path):
    recorded(tmp_path, 3).parent.mkdir()
    write_groups(str(recorded(tmp_path, 3)), group(0, 2), None, group(1, -1))
    recorded(tmp_path, 4).write_text('[{"tokens": ')
    put: list[list[Sample]] = []
    plane = SimpleNamespace(cfg=cfg(debug={"train_only": str(tmp_path)}), put=lambda g: put.append(g) or f"ref{len(put)}")
    pool = Recorded(plane.cfg, plane, None, 3)
    flights = pool.take()
    assert [f.group_index for f in flights] == [0, 1] and [f.data for f in flights] == ["ref1", "ref2"], "a group that was lost is left out"
    assert put[0] == group(0, 2) and put[1][0].token_versions == [2, 2, -1], "what servers sampled before a publish counts as fresh"
    assert [m.reward for f in flights for m in f.metas] == [0, 1, 0, 1]
    assert pool.trained(3, flights) == ["ref1", "ref2"]
    with pytest.raises(VimeError, match=r"step_000004.jsonl cannot be read"):
        pool.take()


def test_each_sample_of_a_run_has_its_own_seed():
    """The server adds a choice's number to the seed of a request for a whole group."""
    seeds = [seed_of(Sample(group_index=g, index=64 * g), 42) + i for g in range(500) for i in range(64)]
    assert len(set(seeds)) == len(seeds) and max(seeds) < 2**32
    assert seed_of(Sample(), 1) != seed_of(Sample(), 2)


def test_dumped_samples_can_be_replayed(tmp_path):
    """The dump holds what a replay sends, and which weights sampled which token."""
    dump_samples(str(tmp_path / "samples/step_000001.jsonl"), group(0, 2))
    row = diff.samples(tmp_path, 1)[1]
    assert row["prompt_tokens"] == [1, 2] and row["tokens"] == [3, 4, 5] and row["version_runs"] == [[2, 2], [-1, 1]] and row["uid"] == 1
    assert list(json.loads(Path(tmp_path / "samples/step_000001.jsonl").read_text().splitlines()[0]))[-6:] == [
        *("metadata", "tokens", "log_probs", "loss_mask", "prompt_tokens", "version_runs")
    ], "the dashboard reads up to `tokens`"
