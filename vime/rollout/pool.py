"""Which groups are on their way. With `train.max_staleness` = s, tokens sampled with weights v are trained by step v + s + 1 at the latest
(step t starts from weights t - 1). That is earliest-deadline-first scheduling, `batch_size` groups a step: `fill` admits as many as fit,
`take` never picks a set that would leave too many others for the steps they have left."""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vime import hooks
from vime.config import Config
from vime.data.ledger import Ledger
from vime.data.plane import Ref
from vime.data.prompts import Prompts
from vime.errors import VimeError
from vime.rollout.plugged import UserPrompts, choose_buffered
from vime.rollout.worker import GroupReport, Task
from vime.sample import Sample, SampleMeta

if TYPE_CHECKING:
    from vime.cluster import Cluster

GROUPS = "groups.jsonl"  # in a checkpoint: the samples of every group under way, a group a line
UNBOUND = 1 << 60  # `oldest` of a group that waits without tokens: no step is too late for it
DRAWS = 10  # batches of groups that may be dropped in one step: a filter that drops all would otherwise draw prompts forever


@dataclass
class Flight:
    """One group on its way. `group`: what is submitted next, or was last."""

    group_index: int
    group: Task
    oldest: int  # weight version of the oldest token that will be trained; while there is none, of the weights it was started with, or UNBOUND
    metas: list[SampleMeta] = field(default_factory=list)  # once it is finished
    data: Ref | None = None  # where the finished samples are
    origin: Task | None = None  # its prompt, to begin anew from
    born: int = field(default_factory=time.time_ns)  # for its samples' spans, and so are the next two: when it was finished, and taken
    ready: int = 0
    taken: int = 0


def feasible(deadlines: Iterable[int], step: int, batch: int) -> bool:
    """Whether groups with these deadlines can be trained in time by steps of `batch` groups each, the first of them `step`."""
    return all(step + math.ceil(n / batch) - 1 <= deadline for n, deadline in enumerate(sorted(deadlines), 1))


def too_late(cfg: Config, groups: list[dict[str, Any]], step: int) -> set[int]:
    """Which of a snapshot's groups `cfg` could not train in time from `step` on, as its bound or batch may be smaller than the checkpoint's; as few
    as possible. They start again from their prompts. Raises: VimeError where there are some and data.source cannot give their prompts again."""
    r, bound = cfg.rollout, cfg.train.max_staleness
    goes_on = r.mask_offpolicy_prefix or r.function or (bound > 0 and (r.partial_rollout or cfg.train.mode == "async"))
    late, fit = set(), 0
    for g in sorted(groups, key=lambda g: (g["oldest"], not g["ready"])):
        if g["oldest"] == UNBOUND or (not g["ready"] and (r.mask_offpolicy_prefix or r.function)):
            continue  # no tokens, or they are not trained, or the user's own affair
        if (g["ready"] or goes_on) and step + fit // r.batch_size <= g["oldest"] + bound + 1:
            fit += 1
        else:
            late.add(g["group_index"])
    if late and cfg.data.source:
        now = f"train.max_staleness = {bound} and rollout.batch_size = {r.batch_size}"
        what = f"{len(late)} groups of the checkpoint are too old to be trained with {now}, and data.source cannot give their prompts again"
        raise VimeError(what, "resume with the values that the run had, they are in its config.toml")
    return late


class Pool:
    """The groups of a run that are drawn from the prompts and not trained yet, by reference; the ledger says whose bytes are whose."""

    def __init__(self, cfg: Config, cluster: Cluster, prompts: Prompts | UserPrompts, step: int, args: hooks.Args | None = None,
                 ledger: Ledger | None = None):  # fmt: skip
        self.ledger = ledger or Ledger(1 << 62)
        self.typical = 0  # bytes of a group, of late
        self.cfg, self.cluster, self.prompts, self.args = cfg, cluster, prompts, args
        self.step = step  # the next one that takes a batch
        self.version = step - 1  # newest published weights
        self.waiting: list[Flight] = []  # interrupted or restored: they go on before new prompts are drawn
        self.running: dict[int, Flight] = {}
        self.ready: list[Flight] = []
        self.streamed: list[Flight] = []  # this step's, taken by `stream` already
        self.counts: Counter[str] = Counter()  # since the last take
        self.wave = 0  # number of the current submissions, for interrupting them
        r = cfg.rollout
        self.batch, self.bound = r.batch_size, cfg.train.max_staleness
        self.target = r.over_sampling_batch_size or self.batch
        cluster.lost_owner = self.lost_owner

    def flight(self, group: list[Sample]) -> Flight:
        versions = [v for s in group for v, trained in zip(s.token_versions, s.loss_mask) if trained]
        return Flight(group[0].group_index, group, min(versions, default=UNBOUND), origin=group)

    def drawn(self) -> Flight:
        """The next group of the prompts: its number alone, where these are in files."""
        if isinstance(self.prompts, UserPrompts):
            return self.flight(self.prompts.next(1)[0])
        (number,) = self.prompts.numbers(1)
        return Flight(number, number, UNBOUND, origin=number)

    def deadline(self, f: Flight) -> int:
        return f.oldest + self.bound + 1

    def fill(self) -> None:
        """Submit waiting groups, then new ones: in sync mode up to the over-sampling target, in async mode all that the bound admits."""
        room = self.batch * (self.version + self.bound + 2 - self.step)  # what can be trained of groups that start now
        target = room if self.cfg.train.mode == "async" else min(self.target, room) if self.bound else self.target
        if self.cfg.train.mode == "sync" and self.choose() is not None:
            return
        while len(self.running) + len(self.ready) + len(self.streamed) < target:
            flight = self.waiting.pop(0) if self.waiting else self.drawn()
            if not self.ledger.reserve(flight.group_index, "", self.typical):
                self.counts["held_back"] += 1
                self.waiting.insert(0, flight)
                if not self.running and self.choose() is None:
                    what = f"{self.ledger.stored} bytes are stored, {self.batch} groups of about {self.typical} make a batch"
                    raise VimeError(f"data_plane.budget_bytes = {self.ledger.budget} is too little: {what}", "raise it")
                return
            masked = self.bound == 0 or self.cfg.rollout.mask_offpolicy_prefix
            flight.oldest = self.version if masked else min(flight.oldest, self.version)
            self.running[flight.group_index] = flight
            self.cluster.rollouts.submit(flight.group_index, flight.group, self.version, self.wave)

    def pump(self, timeout: float = 0.0) -> None:
        """Note what has finished, waiting up to `timeout` seconds for something to, and refill."""
        for key, report, data in self.cluster.rollouts.finished(timeout):
            self.note(self.running.pop(key), report, data)
        self.fill()

    def note(self, flight: Flight, report: GroupReport, data: Any) -> None:
        for name in ("retries", "fenced", "continued"):
            self.counts[name] += getattr(report, name)
        if data is not None:
            self.typical = max(data.nbytes, self.typical * 9 // 10)
            self.ledger.publish(flight.group_index, data, self.version, whole=not report.interrupted)
        if report.dropped:
            self.counts[f"dropped_{report.dropped}"] += 1
            self.ledger.drop([flight.group_index], report.dropped)
        elif report.interrupted:
            self.put_back(flight, data, report.oldest)
        else:
            flight.metas, flight.data = report.metas, data
            flight.oldest = flight.oldest if report.oldest is None else report.oldest
            flight.ready = time.time_ns()
            self.ready.append(flight)

    def put_back(self, flight: Flight, data: Any, oldest: int | None) -> None:
        """A group that was interrupted waits for its next turn: with the tokens it has, or from its prompt where those can't be trained."""
        keep = self.cfg.rollout.partial_rollout and data is not None
        self.counts["interrupted" if keep else "restarted"] += 1
        if keep:
            self.ledger.reopen([flight.group_index])
            flight.group, flight.oldest = data, self.version if oldest is None else oldest
        else:
            if flight.origin is None:
                what = f"group {flight.group_index} must begin anew, and data.source cannot give its prompt again after a resume"
                raise VimeError(what, "start a new run, or resume from another checkpoint")
            self.ledger.lost([flight.group_index])
            flight.group, flight.oldest = flight.origin, UNBOUND
        flight.metas, flight.data = [], None
        self.waiting.append(flight)
        self.waiting.sort(key=lambda f: (f.oldest, f.group_index))

    def take(self) -> list[Flight]:
        """The next step's batch, once there is one that leaves the others their time. Raises: VimeError where filters drop too much, or as check()."""
        if self.waiting and self.cfg.rollout.buffer_filter:
            assert self.args
            choose_buffered(self, self.args)
        self.fill()
        while (chosen := self.choose()) is None:
            self.pump(1.0)
            self.refuse_to_drop_all()
        self.ready = [f for f in self.ready if f not in chosen]
        self.ledger.lease([f.group_index for f in chosen], f"step {self.step}", math.inf)
        self.close(chosen)
        return sorted(chosen, key=lambda f: f.group_index)

    def stream(self) -> Iterator[list[Flight]]:
        """The next step's batch in parts, as groups finish; `lost` takes back from the last part. Raises: as take."""
        self.fill()
        while room := self.batch - len(self.streamed):
            if part := self.ready[:room]:
                self.ready = self.ready[room:]
                self.streamed += part
                self.ledger.lease([f.group_index for f in part], f"step {self.step}", math.inf)
                yield part
            else:
                self.pump(1.0)
                self.refuse_to_drop_all()
        chosen, self.streamed = self.streamed, []
        self.close(chosen)

    def close(self, chosen: list[Flight]) -> None:
        for f in chosen:
            f.taken = time.time_ns()
        if self.cfg.train.mode == "sync":
            self.interrupt()
        self.step += 1

    def redone(self, batch: list[Flight], lost: list[int]) -> list[Flight]:
        """In place of `batch`, taken last, one that has no groups which the data plane has lost: these are generated again."""
        self.step -= 1
        self.lost(batch, lost)
        return self.take()

    def lost(self, part: list[Flight], lost: list[int]) -> None:
        """Of these groups, leased for this step, the data plane has lost some: they begin anew, the others are ready again."""
        self.ledger.nack([f.group_index for f in part], f"step {self.step}")
        self.streamed = [f for f in self.streamed if f not in part]
        for f in part:
            if f.group_index in lost or self.ledger.where(f.group_index) != "ready":  # its owner may have died since a rank read it
                self.counts["lost"] += 1
                self.put_back(f, None, None)
            else:
                self.ready.append(f)

    def lost_owner(self, owner: str) -> None:
        """A worker has died, and with it the bytes that only it had: finished groups begin anew. (Unfinished ones, too, when they are read.)"""
        gone = set(self.ledger.owner_died(owner))
        for f in [f for f in self.ready if f.group_index in gone]:
            self.ready.remove(f)
            self.counts["lost"] += 1
            self.put_back(f, None, None)

    def trained(self, step: int, batch: list[Flight]) -> list[Ref]:
        """The optimizer step on `batch` is done. Returns what the data plane may free."""
        self.version = step
        own = {f.data.key: f.data for f in batch if f.data}
        for n in (f.group_index for f in batch):
            if (g := self.ledger.live.get(n)) and g.ref:
                own.pop(g.ref.key, None)
        self.ledger.ack([f.group_index for f in batch if f.group_index in self.ledger.live], step, f"step {step}")
        return [*own.values(), *self.ledger.free()]  # the former were put by plug-ins in place of the workers' samples

    def refuse_to_drop_all(self) -> None:
        dropped = {k: n for k, n in self.counts.items() if k.startswith("dropped_")}
        if sum(dropped.values()) > DRAWS * self.batch:
            raise VimeError(f"{sum(dropped.values())} groups dropped in one step: {dropped}", "look at the reward function and the filters")

    def choose(self) -> list[Flight] | None:
        """`batch` finished groups for this step, or None where there are none yet without making another one late."""
        if len(self.ready) < self.batch:
            return None
        self.ready.sort(key=lambda f: (f.oldest, f.group_index))
        chosen, rest = self.ready[: self.batch], self.ready[self.batch :]
        others = [self.deadline(f) for f in (*rest, *self.running.values(), *self.waiting)]
        # with bound 0 no other is bound by what it has: it starts again, or its old tokens are masked
        return chosen if self.bound == 0 or feasible(others, self.step + 1, self.batch) else None

    def interrupt(self) -> None:
        """End what is in flight, keeping it for the next step: servers and trainer take turns in sync mode."""
        if self.running:
            self.cluster.interrupt(self.wave)
            self.wave += 1
            for key, report, data in self.cluster.drain(self.cfg.rollout.abort_timeout + 5):
                self.note(self.running.pop(key), report, data)
            for flight in self.running.values():  # they did not answer: their results, should they come, are not wanted any more
                self.counts["abandoned"] += 1
                self.put_back(flight, None, None)
            self.running = {}
        if self.bound == 0:  # finished ones beyond the batch are a version too old by the next step
            for flight in self.ready:
                self.put_back(flight, flight.data if self.cfg.rollout.mask_offpolicy_prefix else None, None)
            self.ready = []

    def metrics(self) -> dict[str, float]:
        """Counts since the last call, and where the groups are now."""
        out = {f"rollout/{k}": float(v) for k, v in self.counts.items()}
        self.counts.clear()
        out |= {"rollout/in_flight": len(self.running), "rollout/ready": len(self.ready), "rollout/buffered": len(self.waiting)}
        out |= {"data/stored_bytes": float(self.ledger.stored), "data/group_bytes": float(self.typical)}
        return {"rollout/retries": 0.0, "rollout/fenced": 0.0} | out

    def snapshot(self) -> tuple[dict[str, Any], list[Any]]:
        """What a checkpoint must keep: JSON-able state, and references to every group drawn and not trained; a running one as it was submitted."""
        flights = [(f, f.oldest, True, f.data) for f in self.ready] + [(f, f.oldest, False, f.group) for f in self.waiting]
        for f in self.running.values():  # its samples are here only where it was new when it was submitted
            flights.append((f, self.flight(f.group).oldest if isinstance(f.group, list) else UNBOUND if f.group == f.origin else f.oldest, False, f.group))
        stored = [(f, oldest, ready, ref) for f, oldest, ready, ref in flights if not isinstance(ref, int)]
        groups = [{"group_index": f.group_index, "oldest": oldest, "ready": ready} for f, oldest, ready, _ in stored]
        fresh = sorted(f.group_index for f, _, _, ref in flights if isinstance(ref, int))
        counts = {"prompts": self.prompts.state(), "groups": groups, "fresh": fresh, "counts": dict(self.counts), "ledger": self.ledger.state()}
        return counts, [ref for *_, ref in stored]

    def restore(self, state: dict[str, Any], folder: Path) -> None:
        """Continue where `snapshot` was taken; `folder` holds the checkpoint. Raises: VimeError as Prompts.load_state and `too_late`."""
        self.prompts.load_state(state["prompts"])
        self.counts.update(state["counts"])
        late = too_late(self.cfg, state["groups"], self.step)
        self.waiting = [Flight(n, n, UNBOUND, origin=n) for n in state["fresh"]]
        loaded = self.cluster.load_groups(folder / GROUPS, [g["ready"] for g in state["groups"]])
        for kept, (metas, ref) in zip(state["groups"], loaded, strict=True):
            n = kept["group_index"]
            flight = Flight(n, n if ref is None else ref, kept["oldest"], origin=None if isinstance(self.prompts, UserPrompts) else n)
            if ref:
                self.ledger.reserve(n, "", 0)
                self.ledger.publish(n, ref, self.version, whole=kept["ready"])
            if n in late or ref is None:
                self.put_back(flight, None, None)
            elif kept["ready"]:
                flight.metas, flight.data = metas, ref
                self.ready.append(flight)
            else:
                self.waiting.append(flight)
        self.waiting.sort(key=lambda f: (f.oldest, f.group_index))
