"""The Sample: one rollout's record. Token ids are the record; text is derived from them."""

from __future__ import annotations

import base64
import io
import math
from array import array
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import accumulate, chain
from typing import Any, ClassVar

import numpy as np

PER_TOKEN = ("loss_mask", "rollout_log_probs", "token_versions")  # one entry for each token of the response
DEEPEST = 100  # levels of nesting in a label or metadata; copying and writing them recurses
SIBLING = 1 << 40  # apart from each other in uid: samples that one rollout yielded


class Status(StrEnum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


State = Status  # inside Sample, Status is the attribute
FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}  # by the server's finish reason


def plain(value: Any, at: str, depth: int = 0) -> Any:
    """`value` as JSON holds it, converted in place where it can be: numpy and torch scalars, arrays and tuples become numbers and lists.
    Raises: ValueError that names the place under `at`, for anything else (sets, bytes, dates, keys that are no strings), and too deep nesting."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if depth >= DEEPEST:
        raise ValueError(f"{at.partition('[')[0]} is nested deeper than {DEEPEST} levels")
    if isinstance(value, tuple) or callable(getattr(value, "tolist", None)):
        return plain(list(value) if isinstance(value, tuple) else value.tolist(), at, depth + 1)
    if not isinstance(value, dict | list):
        raise ValueError(f"{at} is of type {type(value).__name__}, which JSON cannot hold")
    for k, v in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if isinstance(value, dict) and not isinstance(k, str):
            raise ValueError(f"{at} has the key {k!r:.40}, and JSON's keys are strings")
        value[k] = plain(v, f"{at}[{k!r:.40}]", depth + 1)
    return value


def _listed(values: Any) -> list[Any] | None:
    return values if values is None else values.tolist() if hasattr(values, "tolist") else list(values)


@dataclass
class Sample:
    """Field names are slime's, so that its users' plug-ins find what they expect.

    `tokens` holds prompt ids followed by `response_length` response ids. The per-token arrays `loss_mask` (1 = trained),
    `rollout_log_probs` (logprob of the sampled token under the sampling distribution, natural log) and `token_versions`
    (weight version that sampled it, -1 for tokens no policy sampled) have length `response_length` each;
    `append_tokens` keeps them so. A rollout that yields several samples gives them one `rollout_id`; `index` may repeat among them.

    `multimodal_inputs` of a prompt with images: "images", their references (vime/data/images.py), and "token_ids", the prompt with one
    placeholder per image; in `tokens` the server has expanded these once it has sampled.

    Where sampling was truncated (top-p, top-k), response token i was drawn from the ids
    rollout_top_p_token_ids[offsets[i] : offsets[i + 1]], offsets being `rollout_top_p_token_offsets`, of length response_length + 1
    (int32 and int64 arrays; both empty where nothing was truncated).

    With rollout.routing_replay, `rollout_routed_experts` (tokens, layers, top_k), uint8 or uint16, are the experts that the servers sent
    tokens 0, 1, ... to: all tokens but the last sampled one, which was never forwarded, and those after it.
    """

    Status: ClassVar[type[State]] = State  # slime's spelling: Sample.Status.COMPLETED

    group_index: int = 0
    index: int = 0
    rollout_id: int | None = None
    prompt: str | list[dict[str, Any]] = ""
    tokens: list[int] = field(default_factory=list)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: float | dict[str, Any] | None = None
    loss_mask: list[int] = field(default_factory=list)
    rollout_log_probs: list[float] = field(default_factory=list)
    token_versions: list[int] = field(default_factory=list)
    rollout_top_p_token_ids: array[int] = field(default_factory=lambda: array("i"))
    rollout_top_p_token_offsets: array[int] = field(default_factory=lambda: array("q"))
    rollout_routed_experts: np.ndarray | None = field(default=None, compare=False)
    multimodal_inputs: dict[str, Any] | None = None
    status: State = State.PENDING
    remove_sample: bool = False
    session_id: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None  # in place of rollout.custom_generate
    custom_rm_path: str | None = None  # in place of reward.function
    train_metadata: dict[str, Any] | None = None
    non_generation_time: float = 0.0  # seconds in tools and environments
    part: int = 0  # position among the samples of one rollout; the worker counts
    greedy: bool = False  # remax: the most likely response, only its reward matters

    @property
    def prompt_length(self) -> int:
        return len(self.tokens) - self.response_length

    @property
    def images(self) -> list[dict[str, str]]:
        """References to the prompt's images."""
        return (self.multimodal_inputs or {}).get("images", [])

    @property
    def uid(self) -> int:
        """Unlike `index`, different for every sample of a run."""
        return self.index + self.part * SIBLING

    @property
    def effective_response_length(self) -> int:
        return sum(self.loss_mask)

    @property
    def routed(self) -> int:
        """Of how many tokens, from the first, the experts are known."""
        return 0 if self.rollout_routed_experts is None else len(self.rollout_routed_experts)

    @property
    def weight_versions(self) -> list[int]:
        """Weight versions that sampled this response's trained tokens, ascending, without repeats."""
        return sorted({v for v, trained in zip(self.token_versions, self.loss_mask) if trained})

    def append_tokens(
        self,
        tokens: list[int],
        log_probs: list[float] | None = None,
        *,
        versions: list[int] | int | None = None,
        sampling_mask: Sequence[Sequence[int]] | None = None,
        routed_experts: np.ndarray | None = None,
        trainable: bool = True,
    ) -> None:
        """Append response tokens with all their per-token data, or change nothing and raise.

        Trainable tokens need one logprob and one weight version each (`versions` may be one int for all), and all of the sample's or
        none of them a `sampling_mask`: the ids that each could be drawn from, its own among them; likewise `routed_experts`: the experts of
        the tokens from number `routed` on, up to the last but one of the new. Tokens that no policy sampled (tool output) take
        trainable=False and none of the four. loss_mask, rollout_log_probs and token_versions grow in place.

        Raises: ValueError naming the sample on any length mismatch or missing logprob.
        """
        n = len(tokens)
        if trainable:
            if log_probs is None or len(log_probs) != n:
                got = "no" if log_probs is None else len(log_probs)
                raise ValueError(f"sample {self.index}: {n} trainable tokens came with {got} logprobs; none are ever filled in")
            if versions is None:
                raise ValueError(f"sample {self.index}: trainable tokens need the weight version that sampled them")
            vers = [versions] * n if isinstance(versions, int) else list(versions)
            if len(vers) != n:
                raise ValueError(f"sample {self.index}: {n} tokens came with {len(vers)} weight versions")
            lps = [float(x) for x in log_probs]
        else:
            if log_probs is not None:
                raise ValueError(f"sample {self.index}: tokens that are not trained carry no logprobs")
            lps, vers = [0.0] * n, [-1] * n
        new = {"loss_mask": [int(trainable)] * n, "rollout_log_probs": lps, "token_versions": vers}
        for name in new:
            if getattr(self, name) is None and not self.response_length:  # how slime's plug-ins start a sample over
                setattr(self, name, [])
        self.check()
        routing = self._joined_routing(n, routed_experts, trainable)
        self._append_support(tokens, sampling_mask, trainable)
        self.rollout_routed_experts = routing
        self.tokens = self.tokens + list(tokens)
        for name, values in new.items():
            getattr(self, name).extend(values)
        self.response_length += n

    def _append_support(self, tokens: list[int], mask: Sequence[Sequence[int]] | None, trainable: bool) -> None:
        known = bool(self.rollout_top_p_token_offsets)
        if mask is None and not (known and tokens):
            return
        if trainable and (mask is None or (not known and any(self.loss_mask))):
            raise ValueError(f"sample {self.index}: some of its trainable tokens came with a sampling mask, some without")
        rows = mask if mask is not None else [()] * len(tokens)
        if len(rows) != len(tokens) or (trainable and any(t not in row for t, row in zip(tokens, rows))):
            raise ValueError(f"sample {self.index}: the sampling mask of {len(rows)} rows does not fit the {len(tokens)} tokens drawn from it")
        offsets = self.rollout_top_p_token_offsets if known else array("q", [0]) * (self.response_length + 1)
        ids = self.rollout_top_p_token_ids if known else array("i")  # slime's plug-ins set both to None to start over
        ends = accumulate(map(len, rows), initial=offsets[-1])
        self.rollout_top_p_token_offsets = offsets[:-1] + array("q", ends)
        self.rollout_top_p_token_ids = ids + array("i", chain.from_iterable(rows))

    def _joined_routing(self, n: int, rows: np.ndarray | None, trainable: bool) -> np.ndarray | None:
        """The experts known once `n` tokens are appended that came with `rows`."""
        have = self.rollout_routed_experts
        if rows is None:
            if have is not None and trainable and n:
                raise ValueError(f"sample {self.index}: some of its trainable tokens came with their experts, some without")
            return have
        missing = len(self.tokens) + n - 1 - self.routed
        if not trainable or rows.ndim != 3 or len(rows) != missing or (have is not None and have.shape[1:] != rows.shape[1:]):
            known = "" if have is None else f", which join {have.shape}"
            raise ValueError(f"sample {self.index}: experts of shape {rows.shape} for {missing} tokens{known}")
        return rows if have is None else np.concatenate([have, rows])

    def append_response_tokens(
        self, args: Any = None, *, tokens: Any = None, log_probs: Any = None, trainable: bool = True,
        meta_info: dict[str, Any] | None = None, text: str | None = None, update_terminal_info: bool = True,
    ) -> None:  # fmt: skip
        """slime's name of append_tokens; tokens and log_probs may be lists, arrays, tensors or nothing. Weight versions, sampling mask and
        experts come from `meta_info` (of vime.slime.post), or the versions stay -1 for the worker to fill in; its finish reason sets the
        status. Raises: ValueError as append_tokens."""
        new, lps, info = [int(t) for t in _listed(tokens) or ()], _listed(log_probs), meta_info or {}
        rows = info.get("routed_experts")  # of all tokens
        known = {"versions": info.get("token_versions", -1), "sampling_mask": info.get("sampling_mask")} if trainable else {}
        known |= {"routed_experts": rows[self.routed :]} if trainable and rows is not None else {}
        if new or lps:  # else there is nothing to append, as where a turn ended before it began
            self.append_tokens(new, lps if trainable else lps or None, trainable=trainable, **known)
        self.response += text or ""
        if update_terminal_info and "finish_reason" in info:
            self.status = FINISHED[info["finish_reason"]["type"]]

    def make_plain(self) -> None:
        """What plug-ins put into label, reward, metadata and the per-token arrays as JSON holds it, see `plain`; the status as a Status.
        Raises: ValueError naming sample and field."""
        try:
            for name in ("tokens", *PER_TOKEN):
                values = getattr(self, name)
                if values is not None and not (isinstance(values, list) and set(map(type, values)) <= {int, float, bool}):
                    setattr(self, name, plain(values, name))
            for name in ("label", "reward", "metadata", "train_metadata", "prompt"):
                setattr(self, name, plain(getattr(self, name), name))
            self.status = State(self.status)
        except ValueError as e:
            raise ValueError(f"sample {self.index}: {e}") from None

    def check(self) -> None:
        """Raises ValueError unless every per-token array has length `response_length`."""
        for name in PER_TOKEN:
            if (n := len(getattr(self, name) or ())) != self.response_length:
                raise ValueError(f"sample {self.index}: {name} has {n} entries for {self.response_length} response tokens")
        if (n := len(self.rollout_top_p_token_offsets or ())) and n != self.response_length + 1:
            raise ValueError(f"sample {self.index}: rollout_top_p_token_offsets has {n} entries for {self.response_length} response tokens")
        if self.response_length > len(self.tokens):
            raise ValueError(f"sample {self.index}: response_length {self.response_length} exceeds {len(self.tokens)} tokens")
        if self.rollout_routed_experts is not None:
            last = max((self.prompt_length + i for i, m in enumerate(self.loss_mask) if m), default=0)
            if not last <= self.routed <= max(0, len(self.tokens) - 1):
                what = f"experts of {self.routed} tokens for {len(self.tokens)} tokens, the last trained one being number {last}"
                raise ValueError(f"sample {self.index}: {what}")

    def reward_value(self, key: str | None = None) -> float:
        """The scalar reward; `key` picks it out of a dict reward.

        Raises: ValueError where the sample has no reward or the dict no such key.
        """
        r = self.reward
        if isinstance(r, dict):
            if key is None or key not in r:
                raise ValueError(f"sample {self.index}: the reward has the keys {sorted(r)}; set reward.key to one of them (now {key!r})")
            r = r[key]
        if r is None:
            raise ValueError(f"sample {self.index} has no reward")
        if not math.isfinite(value := float(r)):
            raise ValueError(f"sample {self.index}: its reward is {value}")
        return value

    def get_reward_value(self, args: Any) -> float:
        return self.reward_value(args.reward_key)

    def greedy_twin(self) -> Sample:
        """A sample of the same prompt that is generated greedily, scored, and not trained."""
        keep = ("group_index", "prompt", "label", "metadata", "session_id", "generate_function_path", "custom_rm_path", "multimodal_inputs")
        at, tokens = -1 - self.index, self.tokens[: self.prompt_length]
        same = {name: deepcopy(getattr(self, name)) for name in keep}
        return Sample(index=at, rollout_id=at, tokens=tokens, remove_sample=True, greedy=True, **same)

    def to_dict(self) -> dict[str, Any]:
        """Of plain JSON types; the experts are base64 text."""
        plain = {k: list(v) if isinstance(v, array) else v for k, v in asdict(self).items()}
        rows = self.rollout_routed_experts
        return plain | {"status": str(self.status), "rollout_routed_experts": None if rows is None else npy_text(rows)}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Sample:
        ids, offsets = array("i", d["rollout_top_p_token_ids"] or ()), array("q", d["rollout_top_p_token_offsets"] or ())
        rows = npy_array(text) if (text := d.get("rollout_routed_experts")) else None
        arrays = {"rollout_top_p_token_ids": ids, "rollout_top_p_token_offsets": offsets, "rollout_routed_experts": rows}
        return cls(**(d | arrays | {"status": Status(d["status"])}))


def npy_text(rows: np.ndarray) -> str:
    """An array as base64 of its .npy form, which is how vLLM sends one."""
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    return base64.b64encode(buffer.getvalue()).decode()


def npy_array(text: str) -> np.ndarray:
    """The way back. Raises: ValueError."""
    return np.load(io.BytesIO(base64.b64decode(text)), allow_pickle=False)


@dataclass(frozen=True)
class SampleMeta:
    """What the controller sees of a sample: scalars only, constant size whatever the payload. `index` is the sample's uid."""

    index: int
    group_index: int
    rollout_id: int
    prompt_length: int
    response_length: int
    trained_tokens: int
    reward: float
    status: Status
    removed: bool
    versions: tuple[int, ...]
    greedy: bool = False
    metrics: dict[str, float] = field(default_factory=dict, hash=False)  # of its rollout: metadata["agent_metrics"]


def meta_of(s: Sample, reward_key: str | None = None) -> SampleMeta:
    """The controller's view of a finished sample; checks its arrays first."""
    s.check()
    rollout = s.index if s.rollout_id is None else s.rollout_id
    trained = 0 if s.remove_sample else sum(s.loss_mask)
    lengths = (s.prompt_length, s.response_length, trained)
    reward, versions = s.reward_value(reward_key), tuple(s.weight_versions)
    metrics = s.metadata.get("agent_metrics", {})
    return SampleMeta(s.uid, s.group_index, rollout, *lengths, reward, s.status, s.remove_sample, versions, s.greedy, metrics)
