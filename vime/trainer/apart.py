"""A critic on ranks of its own (algo.critic_ranks): they see a step's samples, say their advantages, and train nothing but the critic."""

from pathlib import Path

import numpy as np
import torch

from vime.config import Config
from vime.sample import Sample
from vime.trainer import state
from vime.trainer.batch import RankPlan
from vime.trainer.context import lay_out
from vime.trainer.critic import Critic
from vime.trainer.engine import Trainer, adamw
from vime.trainer.faults import alone, named, together
from vime.trainer.packing import Pack, pack
from vime.trainer.returns import per_token


class CriticTrainer(Trainer):
    """Rank `rank` of the critic's `world`, which comes after the `first` ranks of the model. A step is `advantages`, then `train`."""

    def __init__(self, cfg: Config, rank: int, world: int, first: int, master_addr: str = "", master_port: int = 0):
        super().__init__(cfg, rank, world, master_addr, master_port)
        self.first = first
        self.steps: list[list[Pack]] = []  # with values and returns, of the step under way
        self.shaped: dict[str, float] = {}

    def setup(self, folder: str | None = None) -> None:
        """Join the critic's other ranks, load it; with the folder of a checkpoint, continue from it exactly."""
        self.join(folder, self.first)
        self.critic = Critic(self.cfg, self.cfg.algo.critic_model or self.source, self.layout)
        self.model = self.critic.model
        self.parts = {"critic.": (self.model, adamw(self.model, self.cfg.train))}
        self.restore(folder, "critic")

    def advantages(self, step: int, plan: RankPlan, samples: list[Sample]) -> dict[int, np.ndarray]:
        """Those of this rank's samples, by uid: float32 of a sample's trained tokens, whitened over the samples of all ranks."""
        with together(f"step {step}, critic rank {self.rank}"):
            by_uid = {s.uid: s for s in samples}
            self.steps = [lay_out([pack(items, by_uid) for items in mini], self.layout) for mini in plan.steps]
        batches = [b for mini in self.steps for b in mini]
        for k, batch in enumerate(batches):
            with alone(f"step {step}, {named(batches, k)}, values"):
                batch.values = self.critic.values(batch)  # type: ignore[union-attr]
        with alone(f"step {step}, critic rank {self.rank}, advantages per token"):
            self.shaped = per_token(self.cfg.algo, batches, [b.rollout_log_probs for b in batches], self.device)
        parts = [(b.samples, b.advantages.cpu().split([sum(s.loss_mask) for s in b.samples])) for b in batches]
        return {s.uid: a.numpy() for ss, found in parts for s, a in zip(ss, found)}

    def train(self, step: int, plan: RankPlan, *groups: list[Sample], advantages: dict[int, np.ndarray] | None = None) -> dict[str, float]:
        """The critic's optimizer steps on what `advantages` laid out. Returns: its metrics, the same on every rank."""
        self.set_rates(step)
        steps, self.steps = self.steps, []
        return self.shaped | self.train_critic(step, steps)

    def save(self, folder: str, keep: int | None = None) -> None:
        """Write this rank's part of a checkpoint, also where the model's ranks only copy theirs: who commits it finds all of the critic's there."""
        state.save_share(Path(folder), state.share(self.parts, torch.float32, copied=False), self.source, at="critic")
