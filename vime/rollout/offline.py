"""In place of the pool where samples come from a file, answers and all."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime.config import Config
from vime.data.plane import Ref
from vime.data.prompts import Prompts
from vime.errors import blamed
from vime.rollout.pool import Flight
from vime.sample import Sample, meta_of

if TYPE_CHECKING:
    from vime.cluster import Cluster


class Offline:
    """`rollout.batch_size` groups a step, as Pool gives them."""

    def __init__(self, cfg: Config, cluster: Cluster, examples: Prompts, step: int):
        self.batch, self.cluster, self.examples, self.version = cfg.rollout.batch_size, cluster, examples, step - 1

    def take(self) -> list[Flight]:
        groups = self.examples.next(self.batch)
        for s in (s for group in groups for s in group):
            s.token_versions = [v if v < 0 else self.version for v in s.token_versions]
        return self.flights(groups)

    def flights(self, groups: list[list[Sample]], key: str | None = None) -> list[Flight]:
        numbered = [(group[0].group_index, group) for group in groups]
        return [Flight(n, n, self.version, [meta_of(s, key) for s in group], self.cluster.put(group)) for n, group in numbered]

    def trained(self, step: int, batch: list[Flight]) -> list[Ref]:
        self.version = step
        return [f.data for f in batch if f.data]

    def metrics(self) -> dict[str, float]:
        return {"data/epoch": self.examples.given / len(self.examples)}

    def snapshot(self) -> tuple[dict[str, Any], list[Any]]:
        return {"prompts": self.examples.state(), "groups": [], "fresh": [], "counts": {}, "ledger": {"step": 0, "settled": [], "counts": {}}}, []

    def restore(self, state: dict[str, Any], folder: Path) -> None:
        self.examples.load_state(state["prompts"])


ROLLOUTS = "rollouts"  # in a run's folder, of debug.save_rollouts


def recorded(folder: str | Path, step: int) -> Path:
    return Path(folder) / ROLLOUTS / f"step_{step:06d}.jsonl"


class Recorded(Offline):
    """debug.train_only: the groups of each step that another run has written. What servers sampled with weights of no step of
    this run, as with rollout_only, counts as fresh."""

    def take(self) -> list[Flight]:
        file = recorded(self.cluster.cfg.debug.train_only or "", self.version + 1)
        fix = "debug.train_only is the folder of a run with debug.save_rollouts"
        with blamed(f"{file} cannot be read", OSError, ValueError, TypeError, KeyError, fix=fix):
            groups = [[Sample.from_dict(d) for d in row] for row in map(json.loads, file.read_text().splitlines()) if row]
        for s in (s for group in groups for s in group):
            s.token_versions = [v if 0 <= v <= self.version or not m else self.version for v, m in zip(s.token_versions, s.loss_mask)]
        return self.flights(groups, self.cluster.cfg.reward.key)

    def metrics(self) -> dict[str, float]:
        return {}
