"""Plug-ins that run in the controller. They see whole samples, which are fetched for them and for nothing else."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from vime import hooks
from vime.config import Config
from vime.data.tokenizer import load
from vime.errors import ANY, VimeError, blamed
from vime.rollout.worker import fill_in, finished
from vime.sample import Sample, Status, meta_of

if TYPE_CHECKING:
    from vime.rollout.pool import Flight, Pool

WHOLE_BATCH = ("rollout.sample_filter", "rollout.all_samples_process", "rollout.data_postprocess")


class UserPrompts:
    """data.source in place of vime.data.prompts.Prompts: the user's object gives the groups, this numbers and tokenizes them."""

    def __init__(self, cfg: Config, args: hooks.Args):
        self.cfg, self.given = cfg, 0
        self.path = f"data.source = {cfg.data.source!r}"
        with self._blamed("it"):
            self.source = hooks.load(cfg.data.source or "", "data.source")(args)

    def _blamed(self, what: str) -> AbstractContextManager[None]:
        return blamed(f"{self.path}: {what} failed", *ANY, through=VimeError)

    def __len__(self) -> int:
        return len(self.source)

    def next(self, k: int) -> list[list[Sample]]:
        want = self.cfg.rollout.n_samples_per_prompt
        with self._blamed("get_samples"):
            groups = self.source.get_samples(k)
        if len(groups) != k or any(len(g) != want for g in groups):
            what = f"get_samples({k}) gave groups of {[len(g) for g in groups]} samples"
            raise VimeError(f"{self.path}: {what}", f"{k} of rollout.n_samples_per_prompt = {want} are needed")
        for g, group in enumerate(groups, self.given):
            for i, s in enumerate(group):
                s.group_index, s.index, s.rollout_id, s.session_id = g, g * want + i, g * want + i, f"group-{g}"
                with self._blamed(f"prompt {g}"):
                    self._made_ready(s)
        self.given += k
        return groups

    def _made_ready(self, s: Sample) -> None:
        s.make_plain()
        if not s.tokens:
            tokenizer, data = load(self.cfg.model), self.cfg.data
            text = s.prompt if isinstance(s.prompt, str) else tokenizer.render(s.prompt, data.chat_template)
            s.tokens = tokenizer.encode([text], special_tokens=not data.apply_chat_template)[0]

    def state(self) -> dict[str, Any]:
        """The user's object saves its own state under the number of groups given out."""
        with self._blamed("save"):
            self.source.save(self.given)
        return {"given": self.given, "source": self.cfg.data.source}

    def load_state(self, d: dict[str, Any]) -> None:
        if d.get("source") != self.cfg.data.source:
            raise VimeError(f"{self.path}: this run began with {d.get('source')!r}")
        self.given = d["given"]
        with self._blamed("load"):
            self.source.load(self.given)


class Buffer:
    """slime's data source as plug-ins see it: buffered groups first, then the run's prompts. Checkpoints are the run's own affair."""

    def __init__(self, pool: Pool):
        self.pool = pool

    def get_samples(self, num_samples: int) -> list[list[Sample]]:
        kept, self.pool.waiting = self.pool.waiting[:num_samples], self.pool.waiting[num_samples:]
        groups = self.pool.cluster.groups([f.group for f in kept])
        self.pool.ledger.lost(f.group_index for f in kept)  # they are the plug-in's now
        return groups + self.pool.prompts.next(num_samples - len(kept))

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self.pool.waiting += [self.pool.flight(g) for g in groups if g]

    def __len__(self) -> int:
        return len(self.pool.prompts)


def choose_buffered(pool: Pool, args: hooks.Args) -> None:
    """rollout.buffer_filter: the groups it returns go on first, those it leaves in the buffer after them, the rest is dropped."""
    groups = pool.cluster.groups([f.group for f in pool.waiting])
    by_index = {f.group_index: f for f in pool.waiting}
    buffer = list(groups)
    chosen = hooks.call(pool.cfg, "rollout.buffer_filter", args, pool.step - 1, buffer, pool.target)
    order = dict.fromkeys(g[0].group_index for g in [*chosen, *buffer])
    pool.waiting = [by_index.pop(g) for g in order]
    if by_index:
        pool.counts["dropped_buffer_filter"] += len(by_index)
        pool.ledger.drop(by_index, "buffer_filter")


def process_batch(pool: Pool, args: hooks.Args, batch: list[Flight]) -> None:
    """The plug-ins that see or change a whole batch before it is trained, in slime's order."""
    set_ = [key for key in WHOLE_BATCH if hooks.paths(pool.cfg, key)]
    if not set_:
        return
    groups = pool.cluster.groups([f.data for f in batch])
    for key in set_:
        given: list[Any] = [groups]
        if key == "rollout.all_samples_process":
            given = [groups, Buffer(pool)]
        elif key == "rollout.data_postprocess":
            given = [[s for g in groups for s in g]]
        hooks.call(pool.cfg, key, args, *given)
    for f, group in zip(batch, groups, strict=True):
        settle(pool, f, group)


def settle(pool: Pool, f: Flight, group: list[Sample]) -> None:
    try:
        for s in group:
            s.make_plain()
        f.metas = [meta_of(s, pool.cfg.reward.key) for s in group]
    except ValueError as e:
        raise VimeError(f"group {f.group_index}: {e}", "look at the plug-ins") from e
    f.data = pool.cluster.put(group)


def whole_rollout(pool: Pool, args: hooks.Args) -> tuple[list[Flight], dict[str, float]]:
    """rollout.function: a step's batch, and metrics to log with it. Tokens without a weight version are taken to be of the newest."""
    out = hooks.call(pool.cfg, "rollout.function", args, pool.step - 1, Buffer(pool))
    groups, metrics = (out.samples, dict(out.metrics or {})) if isinstance(out, hooks.RolloutFnTrainOutput) else (out, {})
    at = f"rollout.function = {pool.cfg.rollout.function!r}"
    if len(groups) != pool.batch:
        raise VimeError(f"{at} gave {len(groups)} groups", f"rollout.batch_size = {pool.batch} are needed")
    batch = []
    for group in groups:
        for part, s in enumerate(group):
            if not finished(s):
                raise VimeError(f"{at}: sample {s.index} is {s.status}", "add_samples() takes back what is not finished")
            fill_in(s, pool.version)
            s.part = part if [o.index for o in group].count(s.index) > 1 else s.part
        f = pool.flight(group)
        settle(pool, f, group)
        batch.append(f)
    pool.step += 1
    return sorted(batch, key=lambda f: f.group_index), metrics


def whole_evaluation(cfg: Config, args: hooks.Args, pool: Pool, version: int) -> dict[str, float]:
    """rollout.eval_function: mean reward and share of truncated samples of each dataset that it returns."""
    out = hooks.call(cfg, "rollout.eval_function", args, version, Buffer(pool))
    data, metrics = (out.data, dict(out.metrics or {})) if isinstance(out, hooks.RolloutFnEvalOutput) else (out, {})
    means = {}
    for name, d in data.items():
        means[name] = sum(d["rewards"]) / len(d["rewards"])
        metrics[f"eval/{name}/reward"] = means[name]
        if cut := d.get("truncated"):
            metrics[f"eval/{name}/truncated"] = sum(c is True or c is Status.TRUNCATED for c in cut) / len(cut)
    return metrics | {"eval/reward": sum(means.values()) / len(means)}
