"""vime.testing tells plug-ins that keep the contract from those that don't."""

import os
import subprocess
import sys

import pytest

from vime.errors import VimeError
from vime.testing import check

HERE = "tests.unit.contract_plugins"


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("rollout.custom_generate", "good_generate"), ("rollout.custom_generate", "good_as_in_slime"),
        ("rollout.custom_generate", "good_numpy"), ("reward.function", "good_reward"),
        ("rollout.dynamic_filter", "good_filter"), ("rollout.buffer_filter", "good_buffer"), ("rollout.sample_filter", "good_sample_filter"),
        ("rollout.sample_hook", "good_hook"), ("reward.post_process", "good_post"), ("log.rollout_hook", "good_log"), ("data.source", "GoodSource"),
    ],
)  # fmt: skip
def test_good_plugins_pass(key: str, name: str) -> None:
    check(key, f"{HERE}:{name}")


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("rollout.custom_generate", "tokenizes_anew", "were not sampled with their logprobs: text tokenized anew"),
        ("rollout.custom_generate", "forgets_a_logprob", r"rollout_log_probs has \d+ entries for \d+ response tokens"),
        ("rollout.custom_generate", "stays_pending", "a sample that is still pending"),
        ("rollout.custom_generate", "shares_a_list", "samples share a list or dict"),
        ("rollout.custom_generate", "keeps_a_set", r"ValueError: sample 0: metadata\['seen'\] is of type set, which JSON cannot hold"),
        ("reward.function", "reward_of_bytes", r"the reward\['why'\] is of type bytes"),
        ("rollout.custom_generate", "gives_nothing", "returned None, not a Sample"),
        ("rollout.custom_generate", "is_not_async", "can't be used in 'await' expression"),
        ("rollout.custom_generate", "good_reward", r"expected async \(args, sample, sampling_params"),
        ("reward.function", "nan_reward", "the reward is nan"),
        ("reward.function", "clips_the_response", "it changed response of sample 0"),
        ("rollout.dynamic_filter", "silent_filter", "returned None, neither"),
        ("rollout.dynamic_filter", "filter_that_edits", "it changed reward of sample 0"),
        ("rollout.buffer_filter", "keeps_in_buffer", "still in the buffer"),
        ("rollout.sample_filter", "sample_filter_that_scores", "it changed reward of sample 0"),
        ("rollout.sample_hook", "hook_of_text", "returned str, neither a Sample nor None"),
        ("reward.post_process", "post_of_groups", "8 numbers each"),
        ("log.rollout_hook", "log_of_text", "returned 'logged', not a bool"),
        ("data.source", "ForgetfulSource", "after save and load it goes on with another prompt"),
    ],
)
def test_bad_plugins_are_told_what_is_wrong(key: str, name: str, said: str) -> None:
    with pytest.raises(VimeError, match=f"(?s){key}.*{said}"):
        check(key, f"{HERE}:{name}")


def test_an_unknown_point() -> None:
    with pytest.raises(VimeError, match=r"no such point: 'rollout\.filter'.*rollout\.dynamic_filter"):
        check("rollout.filter", f"{HERE}:good_filter")


def test_a_group_reward_and_a_reward_with_keys() -> None:
    check("reward.function", f"{HERE}:group_of_dicts", reward={"group": True, "key": "acc"})
    with pytest.raises(VimeError, match=r"set reward\.key to one of them"):
        check("reward.function", f"{HERE}:group_of_dicts", reward={"group": True})
    with pytest.raises(VimeError, match="1 rewards came back for 4 samples"):
        check("reward.function", f"{HERE}:one_for_all", reward={"group": True})


def test_the_command_line() -> None:
    def run(*words: str) -> subprocess.CompletedProcess:
        return subprocess.run([sys.executable, "-m", "vime.testing", *words], capture_output=True, text=True, timeout=120, env=os.environ)

    good = run("rollout.buffer_filter", f"{HERE}:good_buffer")
    assert good.returncode == 0 and good.stdout == f"rollout.buffer_filter = {HERE}:good_buffer: fits\n", good.stderr
    bad = run("rollout.buffer_filter", f"{HERE}:keeps_in_buffer")
    assert bad.returncode == 1 and bad.stderr.startswith("vime.testing: rollout.buffer_filter = ") and "trained twice" in bad.stderr
