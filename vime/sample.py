"""The Sample: one rollout's record. Token ids are the record; text is derived from them."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from itertools import accumulate, chain
from typing import Any, ClassVar

SIBLING = 1 << 40  # apart from each other in uid: samples that one rollout yielded


class Status(StrEnum):
    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


State = Status  # inside Sample, Status is the attribute
FINISHED = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}  # by the server's finish reason


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
        trainable: bool = True,
    ) -> None:
        """Append response tokens with all their per-token data, or change nothing and raise.

        Trainable tokens need one logprob and one weight version each (`versions` may be one int for all), and all of the sample's or
        none of them a `sampling_mask`: the ids that each could be drawn from, its own among them. Tokens that no policy sampled
        (tool output) take trainable=False and none of the three. loss_mask, rollout_log_probs and token_versions grow in place.

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
        self._append_support(tokens, sampling_mask, trainable)
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

    def append_response_tokens(
        self, args: Any = None, *, tokens: list[int] | None = None, log_probs: list[float] | None = None, trainable: bool = True,
        meta_info: dict[str, Any] | None = None, text: str | None = None, update_terminal_info: bool = True,
    ) -> None:  # fmt: skip
        """slime's name of append_tokens. Weight versions and sampling mask come from `meta_info` (of vime.slime.post), or the versions stay
        -1 for the worker to fill in; its finish reason sets the status. Raises: ValueError as append_tokens."""
        new, info = [int(t) for t in tokens or []], meta_info or {}
        known = {"versions": info.get("token_versions", -1), "sampling_mask": info.get("sampling_mask")} if trainable else {}
        self.append_tokens(new, log_probs if trainable else log_probs or None, trainable=trainable, **known)
        self.response += text or ""
        if update_terminal_info and "finish_reason" in info:
            self.status = FINISHED[info["finish_reason"]["type"]]

    def check(self) -> None:
        """Raises ValueError unless every per-token array has length `response_length`."""
        for name in ("loss_mask", "rollout_log_probs", "token_versions"):
            if (n := len(getattr(self, name) or ())) != self.response_length:
                raise ValueError(f"sample {self.index}: {name} has {n} entries for {self.response_length} response tokens")
        if (n := len(self.rollout_top_p_token_offsets or ())) and n != self.response_length + 1:
            raise ValueError(f"sample {self.index}: rollout_top_p_token_offsets has {n} entries for {self.response_length} response tokens")
        if self.response_length > len(self.tokens):
            raise ValueError(f"sample {self.index}: response_length {self.response_length} exceeds {len(self.tokens)} tokens")

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

    def to_dict(self) -> dict[str, Any]:
        return {k: list(v) if isinstance(v, array) else v for k, v in asdict(self).items()} | {"status": self.status.value}

    @classmethod
    def from_dict(cls, d: dict[str, Any]) -> Sample:
        ids, offsets = array("i", d["rollout_top_p_token_ids"] or ()), array("q", d["rollout_top_p_token_offsets"] or ())
        return cls(**(d | {"status": Status(d["status"]), "rollout_top_p_token_ids": ids, "rollout_top_p_token_offsets": offsets}))


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


def meta_of(s: Sample, reward_key: str | None = None) -> SampleMeta:
    """The controller's view of a finished sample; checks its arrays first."""
    s.check()
    rollout = s.index if s.rollout_id is None else s.rollout_id
    trained = 0 if s.remove_sample else sum(s.loss_mask)
    lengths = (s.prompt_length, s.response_length, trained)
    return SampleMeta(s.uid, s.group_index, rollout, *lengths, s.reward_value(reward_key), s.status, s.remove_sample, tuple(s.weight_versions))
