"""The critic of PPO: the model's layers with one number a token in place of the vocabulary, on the same ranks, with an optimizer of its own."""

from pathlib import Path

import torch
import torch.nn.functional as F

from vime.config import Config
from vime.trainer.layout import Layout, reshard
from vime.trainer.loss import value_loss
from vime.trainer.packing import Pack, Sealed
from vime.trainer.parallel import load_model

SUMS = ("value_loss", "value_clipfrac", "value", "return", "squares", "error", "weight")  # of tokens, all but the first times loss weights


class Critic:
    """Values are of the position that predicts a token, as logprobs are. Methods are collectives of all ranks. Raises: VimeError where the
    folder does not load, or transformers has no token classifier of the architecture."""

    def __init__(self, cfg: Config, path: str | Path, layout: Layout):
        self.clip, train = cfg.algo.value_clip, cfg.train
        self.model = load_model(path, train.dtype, layout, train.gradient_checkpointing, critic=True)
        score: torch.nn.Linear = self.model.score
        with torch.no_grad():  # a new head: every value is 0, whatever the seed and the number of ranks
            for p in score.parameters():
                p.zero_()
        # In float32 also where the layers compute in bfloat16, whose 8 bits are too few for a value.
        score.forward = lambda h: F.linear(h.float(), score.weight.float(), None if score.bias is None else score.bias.float())  # type: ignore[method-assign]

    def forward(self, batch: Pack) -> torch.Tensor:
        """Values (M,) of a micro-batch's trained tokens, float32."""
        out = self.model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False, packing=Sealed(batch)).logits
        return out[0, :, 0][batch.rows]

    @torch.no_grad()
    def values(self, batch: Pack) -> torch.Tensor:
        out = self.forward(batch)
        reshard(self.model)
        return out

    def backward(self, batch: Pack, total: torch.Tensor) -> None:
        """Forward and backward of one micro-batch; adds its sums (SUMS, float64) to `total`."""
        assert batch.values is not None and batch.returns is not None
        values = self.forward(batch)
        each, clipped = value_loss(values, batch.values, batch.returns, self.clip)
        loss = (each * batch.weights).sum()
        loss.backward()
        with torch.no_grad():
            seen = [clipped, values, batch.returns, batch.returns**2, (batch.returns - batch.values) ** 2, torch.ones_like(values)]
            total += torch.cat([loss.detach().double()[None], torch.stack(seen).double() @ batch.weights.double()])


def summary(sums: torch.Tensor, norms: list[float]) -> dict[str, float]:
    """Metrics from SUMS over all ranks and `len(norms)` steps. `explained_variance`: 1 knows the returns, 0 is no better than their mean."""
    row = dict(zip(SUMS, sums.tolist()))
    out = {"train/value_loss": row["value_loss"] / len(norms), "train/critic_grad_norm": sum(norms) / len(norms)}
    if w := row["weight"]:
        out |= {"train/value_clipfrac": row["value_clipfrac"] / w, "train/value_mean": row["value"] / w, "train/return_mean": row["return"] / w}
        if (spread := row["squares"] / w - (row["return"] / w) ** 2) > 1e-12:
            out["train/explained_variance"] = 1 - row["error"] / w / spread
    return out
