"""Weights on their way from trainer to servers."""

from dataclasses import dataclass

# How a server begins its refusal of an update that it found wrong before it touched its model.
UNTOUCHED = "weights refused, the model is unchanged"


@dataclass(frozen=True)
class Canary:
    """A fixed prompt and the trainer's logprobs of its tokens 1..n-1 given their prefix, under the published weights (temperature 1)."""

    token_ids: list[int]
    log_probs: list[float]
