import json
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.sample import Sample, Status, meta_of, plain

ids = st.lists(st.integers(0, 50), max_size=6)
maybe_ids = st.none() | ids
call = st.tuples(ids, st.none() | st.lists(st.floats(-9, 0), max_size=6), maybe_ids | st.integers(0, 3), st.booleans())


@settings(deadline=None)
@given(prompt=ids, calls=st.lists(call, max_size=8))
def test_arrays_stay_aligned_whatever_is_appended(prompt: list[int], calls: list[Any]) -> None:
    """A call either grows every array by the same number or raises and changes nothing."""
    s = Sample(tokens=list(prompt))
    for tokens, log_probs, versions, trainable in calls:
        before = s.to_dict()
        try:
            s.append_tokens(tokens, log_probs, versions=versions, trainable=trainable)
        except ValueError:
            assert s.to_dict() == before
        else:
            assert s.tokens == before["tokens"] + tokens and s.response_length == before["response_length"] + len(tokens)
            assert s.loss_mask == before["loss_mask"] + [int(trainable)] * len(tokens)
        s.check()
        assert len(s.loss_mask) == len(s.rollout_log_probs) == len(s.token_versions) == s.response_length
        assert s.prompt_length == len(prompt) and s.tokens[: len(prompt)] == prompt


def test_valid_calls_are_accepted() -> None:
    s = Sample(tokens=[1, 2])
    s.append_tokens([3, 4], [-0.5, -1.0], versions=[2, 3])
    s.append_tokens([5], trainable=False)
    s.append_tokens([6], [-0.25], versions=2)
    assert (s.tokens, s.response_length, s.prompt_length) == ([1, 2, 3, 4, 5, 6], 4, 2)
    assert (s.loss_mask, s.rollout_log_probs, s.token_versions) == ([1, 1, 0, 1], [-0.5, -1.0, 0.0, -0.25], [2, 3, -1, 2])
    assert s.weight_versions == [2, 3]


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"versions": 1}, "no logprobs; none are ever filled in"),
        ({"log_probs": [-1.0], "versions": 1}, "2 trainable tokens came with 1 logprobs"),
        ({"log_probs": [-1.0, -1.0]}, "need the weight version"),
        ({"log_probs": [-1.0, -1.0], "versions": [1]}, "2 tokens came with 1 weight versions"),
        ({"log_probs": [-1.0, -1.0], "trainable": False}, "carry no logprobs"),
    ],
)
def test_a_call_that_does_not_fit_names_the_sample(kwargs: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"sample 7: .*{said}"):
        Sample(index=7).append_tokens([1, 2], **kwargs)


@settings(deadline=None)
@given(prompt=ids, tokens=ids, removed=st.booleans(), status=st.sampled_from(Status), reward=st.floats(-5, 5))
def test_a_round_trip_through_json_loses_nothing(prompt: list[int], tokens: list[int], removed: bool, status: Status, reward: float) -> None:
    s = Sample(index=2, rollout_id=5, tokens=prompt, remove_sample=removed, status=status, reward={"acc": reward}, metadata={"a": [1]})
    s.append_tokens(tokens, [-0.1] * len(tokens), versions=3)
    assert Sample.from_dict(json.loads(json.dumps(s.to_dict()))) == s
    m = meta_of(s, "acc")
    assert (m.reward, m.trained_tokens, m.removed, m.rollout_id) == (reward, 0 if removed else len(tokens), removed, 5)
    assert m.prompt_length + m.response_length == len(prompt) + len(tokens)


def test_slimes_way_to_append() -> None:
    """As the public retool and search-r1 plug-ins do it: None to start over, a list kept aside, versions from the server's answer."""
    s = Sample(index=3, tokens=[1, 2], rollout_log_probs=None, loss_mask=[])
    kept = s.loss_mask
    s.append_response_tokens(None, tokens=[3], log_probs=[-0.5], meta_info={"token_versions": [4], "finish_reason": {"type": "stop"}}, text="c")
    s.append_response_tokens(None, tokens=[8, 9], trainable=False)
    s.append_response_tokens(None, tokens=[5], log_probs=[-1.0], meta_info={"finish_reason": {"type": "length"}})
    assert kept is s.loss_mask and kept == [1, 0, 0, 1] and s.token_versions == [4, -1, -1, -1]
    assert (s.status, s.response, s.effective_response_length) == (Sample.Status.TRUNCATED, "c", 2)
    with pytest.raises(ValueError, match="sample 3: 1 trainable tokens came with no logprobs"):
        s.append_response_tokens(None, tokens=[5])
    assert s.response_length == 4
    s.rollout_log_probs = None
    with pytest.raises(ValueError, match="rollout_log_probs has 0 entries for 4"):
        s.append_response_tokens(None, tokens=[5], log_probs=[-1.0])


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, lambda v: np.array(v, np.float32), iter])
def test_slimes_way_takes_lists_arrays_tensors_and_nothing(kind: Any) -> None:
    s, info = Sample(tokens=[1]), {"token_versions": [4, 4], "finish_reason": {"type": "length"}}
    s.append_response_tokens(None, tokens=kind([7, 8]), log_probs=kind([-0.5, -1.0]), meta_info={"token_versions": [4, 4]})
    s.append_response_tokens(None, tokens=kind([9]), trainable=False)
    for none in (None, [], kind([])):
        s.append_response_tokens(None, tokens=none, text="x")
        s.append_response_tokens(None, tokens=none, log_probs=[], trainable=False)
    s.append_response_tokens(None, meta_info=info)
    assert (s.tokens, s.loss_mask, s.rollout_log_probs) == ([1, 7, 8, 9], [1, 1, 0], [-0.5, -1.0, 0.0]) and type(s.tokens[1]) is int
    assert s.response == "xxx" and s.status is Status.TRUNCATED
    for tokens, log_probs in ((None, [-1.0]), (kind([5]), None), (kind([5, 6]), kind([-1.0]))):
        with pytest.raises(ValueError, match="trainable tokens came with"):
            s.append_response_tokens(None, tokens=tokens, log_probs=log_probs)
    assert s.response_length == 3


def test_meta_of_refuses_a_sample_that_is_not_whole() -> None:
    s = Sample(index=4, reward=1.0)
    s.append_tokens([1], [-1.0], versions=0)
    for name in ("loss_mask", "rollout_log_probs", "token_versions"):
        broken = Sample.from_dict(s.to_dict() | {name: []})
        with pytest.raises(ValueError, match=f"sample 4: {name} has 0 entries for 1"):
            meta_of(broken)
    with pytest.raises(ValueError, match="exceeds 0 tokens"):
        meta_of(Sample.from_dict(s.to_dict() | {"tokens": []}))
    assert meta_of(s).rollout_id == 4  # without a rollout_id a sample is its own rollout


def test_reward_value() -> None:
    assert Sample(reward=True).reward_value() == 1.0 and Sample(reward={"a": 2}).reward_value("a") == 2.0
    bad = ((None, None, "has no reward"), ({"a": 1}, None, "reward.key"), ({"a": 1}, "b", "keys"), ({"a": None}, "a", "has no reward"))
    for reward, key, said in bad:
        with pytest.raises(ValueError, match=f"sample 6.*{said}"):
            Sample(index=6, reward=reward).reward_value(key)


@settings(deadline=None)
@given(turns=st.lists(st.tuples(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=4), max_size=4), st.booleans()), max_size=4))
def test_supports_stay_aligned(turns: list[tuple[list[list[int]], bool]]) -> None:
    """Tokens drawn from given ids, and tool tokens between them: offsets always say which ids belong to which token."""
    s = Sample(tokens=[1])
    rows: list[list[int]] = []
    for masks, tool in turns:
        if tool:
            s.append_tokens([7] * len(masks), trainable=False)
            rows += [[] for _ in masks]
        else:
            s.append_tokens([m[-1] for m in masks], [-1.0] * len(masks), versions=0, sampling_mask=masks)
            rows += masks
        s.check()
        if off := s.rollout_top_p_token_offsets:
            assert [list(s.rollout_top_p_token_ids[a:b]) for a, b in pairwise(off)] == rows
        assert Sample.from_dict(json.loads(json.dumps(s.to_dict()))) == s


@pytest.mark.parametrize(
    ("first", "then", "said"),
    [
        (None, [[5], [6, 2]], "some without"),
        ([[1], [2]], None, "some without"),
        ([[1], [2]], [[5]], "does not fit"),
        ([[1], [2]], [[5], [5]], "does not fit"),
    ],
)
def test_supports_that_do_not_fit(first: list[list[int]] | None, then: list[list[int]] | None, said: str) -> None:
    s = Sample(index=7)
    s.append_tokens([1, 2], [-1.0, -1.0], versions=0, sampling_mask=first)
    before = s.to_dict()
    with pytest.raises(ValueError, match=f"sample 7: .*{said}"):
        s.append_tokens([5, 6], [-1.0, -1.0], versions=0, sampling_mask=then)
    assert s.to_dict() == before


leaves = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5)
arrays = st.lists(st.floats(-9, 9, width=32), max_size=3).flatmap(
    lambda v: st.sampled_from([np.array(v, np.float32), np.array(v), torch.tensor(v), [np.float32(x) for x in v], tuple(v)])
) | st.integers(0, 9).map(np.int64) | st.booleans().map(np.bool_)  # fmt: skip
trees = st.recursive(leaves | arrays, lambda t: st.lists(t, max_size=3) | st.dictionaries(st.text(max_size=3), t, max_size=3), max_leaves=12)
foreign = st.sampled_from([{1}, b"x", 1j, object(), {3: 1}, {("a",): 1}, np.datetime64("2020-01-01", "D"), range(2), np.array([1j])])


@given(st.dictionaries(st.text(max_size=3), trees, max_size=3), trees)
def test_what_can_be_plain_goes_through_json_unchanged(metadata: dict[str, Any], label: Any) -> None:
    s = Sample(metadata=metadata, label=label, status="completed", tokens=np.array([1, 2]), loss_mask=[np.int64(1)], response_length=1)  # type: ignore[arg-type]
    s.rollout_log_probs, s.token_versions = torch.tensor([-1.0]), np.array([3])  # type: ignore[assignment]
    s.make_plain()
    assert s.metadata is metadata and s.status is Status.COMPLETED
    again = Sample.from_dict(json.loads(json.dumps(s.to_dict())))
    assert again == s and again.tokens == [1, 2] and again.rollout_log_probs == [-1.0]


@given(foreign, st.lists(st.booleans(), max_size=4), st.sampled_from(["label", "metadata", "reward"]))
def test_what_json_cannot_hold_is_named_wherever_it_is(value: Any, path: list[bool], name: str) -> None:
    for as_list in path:
        value = [value] if as_list else {"k": value}
    s = Sample(index=6, **{name: {"deep": value}})
    with pytest.raises(ValueError, match=rf"^sample 6: {name}\['deep'\].*JSON"):
        s.make_plain()


def test_nesting_and_an_unknown_status() -> None:
    deep: Any = []
    for _ in range(5000):
        deep = [deep]
    with pytest.raises(ValueError, match=r"^x is nested deeper than 100 levels"):
        plain(deep, "x")
    with pytest.raises(ValueError, match="sample 2: 'done' is not a valid Status"):
        Sample(index=2, status="done").make_plain()  # type: ignore[arg-type]
