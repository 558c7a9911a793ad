"""How a step's samples reach a trainer rank: one rank of a host pulls them for all ranks there that train the same ones."""

import socket
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from vime.data.payload import ROUTING, samples_of
from vime.data.plane import Fields, Lost, Ref, Spec, layout, open_store, pack, unpack
from vime.sample import Sample
from vime.trainer.engine import Trainer
from vime.trainer.faults import alone

LOCAL = ("shm", "ray")  # every rank reads its host's memory: there is nothing to pull once


class Feed:
    """Ranks of one data-parallel group (pp x cp x tp) train the same samples: on each host the first reads, the others get its bytes. Of recorded
    experts a rank reads its own stages' only. A collective, and so are its methods."""

    def __init__(self, spec: Spec, trainer: Trainer):
        self.at = at = trainer.layout
        self.total = trainer.model.config.get_text_config().num_hidden_layers
        layers = self.total if trainer.cfg.rollout.routing_replay else 0
        own = [i for stage in at.stages for i in at.layers(stage, layers)]
        self.ranges = {ROUTING: (min(own), max(own) + 1)} if own and len(own) < layers else {}
        mine = (socket.gethostname(), at.dp, at.pp if self.ranges else 0)
        where: list[Any] = [None] * at.world
        dist.all_gather_object(where, mine)
        self.first, self.group = where.index(mine), None
        if spec.settings.backend not in LOCAL:
            shared = [[r for r, w in enumerate(where) if w == key] for key in dict.fromkeys(where) if where.count(key) > 1]
            self.group = dist.new_subgroups_by_enumeration(shared)[0] if shared else None
        self.store = open_store(spec) if self.group is None or trainer.rank == self.first else None

    def pull(self, step: int, refs: list[Ref]) -> tuple[list[Sample], list[str]]:
        """The samples of these groups, and the keys that are lost for any rank; where there are such, no samples."""
        groups: list[Fields] = []
        lost: tuple[str, ...] = ()
        with alone(f"step {step}, loading samples"):
            try:
                groups = self.store.get(refs, None, self.ranges) if self.store else []
            except Lost as e:
                lost = e.keys
        every: list[tuple[str, ...]] = [()] * self.at.world
        dist.all_gather_object(every, lost)
        if any(every):
            return [], sorted({key for keys in every for key in keys})
        if self.group is not None:
            groups = self.shared(groups, len(refs))
        samples = [s for g in groups for s in samples_of(g)]
        for s in samples if self.ranges else ():
            if (rows := s.rollout_routed_experts) is not None:  # other stages' layers are never looked up here
                s.rollout_routed_experts = np.zeros((len(rows), self.total, rows.shape[2]), rows.dtype)
                s.rollout_routed_experts[:, slice(*self.ranges[ROUTING])] = rows
        return samples, []

    def shared(self, groups: list[Fields], n: int) -> list[Fields]:
        """The first rank's groups on all ranks of the host that share them."""
        heads = [layout(g) for g in groups]
        sizes = self._sent(torch.tensor([size for _, size in heads] if groups else [0] * n, dtype=torch.int64))
        cuts, whole = np.cumsum(sizes.numpy())[:-1], np.empty(int(sizes.sum()), np.uint8)
        for (head, _), fields, part in zip(heads, groups, np.split(whole, cuts)):
            pack(head, fields, part)
        parts = np.split(self._sent(torch.from_numpy(whole)).numpy(), cuts)
        return [unpack("", p.copy() if p.ctypes.data % 64 else p) for p in parts]

    def _sent(self, t: torch.Tensor) -> torch.Tensor:
        t = t.to(self.at.device)
        dist.broadcast(t, self.first, self.group)
        return t.cpu()
