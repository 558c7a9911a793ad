"""A trainer rank's process: the trainer, and what feeds it."""

import os
from pathlib import Path
from typing import Any

import psutil

from vime.config import Config
from vime.data.plane import Ref, Spec
from vime.data.records import dump_log_probs
from vime.observe import trace
from vime.procs import watched
from vime.sample import Sample
from vime.trainer.batch import RankPlan


class Rank:
    """What Ray calls in the process. The trainer is imported here, and not in the driver, which saves half of a run's start."""

    def __init__(self, stacks: Path, spec: Spec, cfg: Config, rank: int, world: int, first: int = 0):
        """`first`: where this is one of the critic's own ranks, how many the model has."""
        from vime.trainer.apart import CriticTrainer
        from vime.trainer.engine import Trainer

        self.trainer: Any = CriticTrainer(cfg, rank, world, first) if first else Trainer(cfg, rank, world)
        self.stacks, self.spec, self.timeout = stacks, spec, cfg.train.step_timeout
        self.samples: list[Sample] = []
        self.lead = False  # of the ranks of this host that train the same samples: it records their spans
        trace.start(cfg, stacks.stem)

    def call(self, method: str, *args: Any) -> Any:
        held = self.samples
        with watched(self.stacks, self.timeout), trace.span(method, phase=True) as of:
            out = getattr(self if hasattr(self, method) else self.trainer, method)(*args)
            of += [s.uid for s in held or self.samples if self.lead]
        return out

    def setup(self, checkpoint: str | None, address: tuple[str, int], host: str) -> None:
        """`address`: where rank 0 meets the others; `host`: this rank's own on the network between them."""
        from vime.trainer.feed import Feed

        self.trainer.address = address
        for name, addresses in psutil.net_if_addrs().items():
            if any(a.address == host for a in addresses) and host != "127.0.0.1":  # gloo would take what the host's name resolves to
                os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        self.trainer.setup(checkpoint)
        self.feed = Feed(self.spec, self.trainer)
        self.lead = self.feed.first == self.trainer.rank

    def load(self, step: int, refs: list[Ref]) -> list[str]:
        """Take this rank's part of a batch from the data plane. Returns the keys that are lost, the same on every rank: then none is loaded."""
        self.samples, lost = self.feed.pull(step, refs)
        return lost

    def advantages(self, step: int, plan: RankPlan) -> Any:
        return self.trainer.advantages(step, plan, self.samples)

    def train(self, step: int, plan: RankPlan, *advantages: dict[int, Any]) -> Any:
        """`advantages`: what each of the critic's own ranks made, where it has such."""
        samples, self.samples = self.samples, []
        out = self.trainer.train(step, plan, samples, advantages={uid: a for part in advantages for uid, a in part.items()} or None)
        if out:  # the step is done, not only a part of it
            seen, self.trainer.seen = self.trainer.seen, {}
            if seen:
                dump_log_probs(self.stacks.parents[1] / "samples" / f"step_{step:06d}.train-{self.trainer.rank}.json", seen)
        return out
