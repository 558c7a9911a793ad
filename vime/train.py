"""THE loop. One step: prompts -> groups -> rollout -> advantages -> shards -> optimizer step -> publish. Read it top to bottom."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console

from vime import hooks, model, rewards
from vime.config import Config, DataConfig
from vime.data.examples import Examples
from vime.data.prompts import Prompts
from vime.data.tokenizer import load
from vime.errors import VimeError
from vime.folder import Start, look, opened, summary
from vime.observe import trace
from vime.observe.evals import eval_metrics
from vime.observe.metrics import MetricLogger, plot, read
from vime.rollout import filters
from vime.rollout.engine import claim_port, on_cpu
from vime.rollout.offline import Offline, Recorded, recorded
from vime.rollout.plugged import WHOLE_BATCH, UserPrompts, process_batch, whole_evaluation, whole_rollout
from vime.rollout.pool import GROUPS, Flight, Pool, too_late
from vime.sample import Sample, SampleMeta, Status
from vime.trainer import axes, checkpoint
from vime.trainer.advantage import estimate
from vime.trainer.batch import denominator, plan
from vime.weights import server_dtype

if TYPE_CHECKING:
    from vime.cluster import Cluster

console = Console(stderr=True, highlight=False)


class Interrupt:
    """Ctrl-C, SIGTERM or a terminal that is closed: while starting, stop now. In the loop: once finishes the step and saves, twice stops now."""

    def __init__(self) -> None:
        self.requested = self.looping = False
        self.terminal = [fd for fd in (1, 2) if os.isatty(fd)]

    def __call__(self, number: int, *_: object) -> None:
        if number == signal.SIGHUP:
            for fd in self.terminal:  # whatever is printed there from now on would be an error
                os.dup2(os.open(os.devnull, os.O_WRONLY), fd)
        if self.requested or not self.looping:
            raise KeyboardInterrupt
        self.requested = True
        console.print(f"[yellow]{signal.Signals(number).name}: finishing this step, then saving. Again to stop now.[/]")

    def install(self) -> None:
        """Take the signals; again after Ray has started, which takes SIGTERM for itself."""
        for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if s != signal.SIGHUP or signal.getsignal(s) != signal.SIG_IGN:  # nohup: the run is to outlive its terminal
                signal.signal(s, self)


def preflight(cfg: Config) -> tuple[Prompts, dict[str, Prompts]]:
    """Read model folder, data, plug-ins. Returns the prompts to train on and those of each eval dataset. Raises: a VimeError of every fault."""
    faults: list[str] = []
    tokenizer = None

    def attempt(place: str, check: Callable[..., Any], *args: Any) -> Any:
        try:
            return check(*args)
        except VimeError as e:
            faults.append(f"{place}{e}")

    for key, path in {"model": cfg.model, "algo.ref_model": cfg.algo.ref_model, "algo.critic_model": cfg.algo.critic_model}.items():
        faults += [f"{key} = {path!r}: {fault}" for fault in (() if path is None else model.faults(path))]
    if os.path.isdir(cfg.model):
        tokenizer = attempt("model: ", load, cfg.model)
        attempt("", axes.check, cfg)
        size = model.shape(cfg.model).get("vocab_size")
        if tokenizer and size and tokenizer.size > size:
            faults.append(f"model {cfg.model}: its tokenizer has {tokenizer.size} tokens, the model a vocabulary of {size}: is it another model's?")
        if cfg.rollout.routing_replay:
            from vime.trainer.routing import check_model  # torch takes seconds to import

            for path in {cfg.model, (cfg.needs_reference and cfg.algo.ref_model) or cfg.model}:
                attempt("rollout.routing_replay: ", check_model, path)
        if cfg.lora.rank:
            from vime.trainer import adapters

            attempt("", adapters.check, cfg)
        if cfg.algo.advantage_estimator == "gae":
            from vime.trainer.parallel import class_of

            attempt("algo.advantage_estimator: ", class_of, cfg.algo.critic_model or cfg.model, True)
    for key, first, n in (
        ("vllm.port", cfg.vllm.get("port"), len(cfg.servers)), ("router.port", cfg.router.get("port"), 1), ("log.prometheus_port", cfg.log.prometheus_port, 1),
    ):  # fmt: skip
        for port in range(first, first + n) if first else ():
            attempt("", claim_port, port, key)

    def read_prompts(place: str, data: DataConfig, path: str, n: int, max_response_len: int) -> Any:
        if tokenizer:
            return attempt(place, Prompts, data, path, tokenizer, n, cfg.seed, cfg.rollout.max_context_len - max_response_len)
        if not os.path.exists(path.partition("@")[0]):
            faults.append(f"{place}no such prompt file: {path}")

    prompts: Any = None
    if cfg.offline and tokenizer:
        prompts = attempt("data.prompts: ", Examples, cfg, tokenizer)
    else:
        prompts = read_prompts("data.prompts: ", cfg.data, cfg.data.prompts, cfg.rollout.n_samples_per_prompt, cfg.rollout.max_response_len)
    held_out = {}
    for d in cfg.eval.datasets:
        data = cfg.data.model_copy(update={k: v for k in ("input_key", "label_key") if (v := getattr(d, k))})
        length = d.max_response_len or cfg.rollout.max_response_len
        held_out[d.name] = read_prompts(f"eval dataset {d.name}: ", data, d.prompts, d.n_samples_per_prompt or 1, length)
        attempt(f"eval dataset {d.name}: ", rewards.resolve, cfg.reward, d.reward)
        if d.custom_generate:
            attempt(f"eval dataset {d.name}: ", hooks.load, d.custom_generate, "rollout.custom_generate")
    if cfg.rollout.colocate and cfg.servers and on_cpu():
        faults.append("rollout.colocate: this vLLM is built for the CPU, where a server that is told to sleep frees nothing; leave it out")
    if cfg.debug.train_only and not (last := recorded(cfg.debug.train_only, cfg.train.steps)).exists():
        faults.append(f"debug.train_only: there is no {last}; train.steps is {cfg.train.steps}")
    attempt("", rewards.resolve, cfg.reward)
    attempt("", filters.resolve, cfg.rollout.dynamic_filter)
    if cfg.weights.delta and attempt("", server_dtype, cfg) == "float32":
        what = "weights.delta saves nothing with servers in float32: a step changes nearly every element"
        faults.append(f'{what}; set train.dtype or vllm.dtype = "bfloat16", or leave it out')
    shm = {"weights.transport": cfg.weights.transport, "data_plane.backend": cfg.data_plane.backend}
    if (named := [k for k, v in shm.items() if v == "shm"]) and not cfg.offline and not os.access("/dev/shm", os.W_OK):
        faults.append(f'{", ".join(named)} = "shm": /dev/shm is missing or read-only; mount it, or set weights.transport = "file", data_plane.backend = "ray"')
    if cfg.weights.transport == "nccl" and not cfg.offline:
        lacks = "the vLLM here is built for the CPU" if on_cpu() else ""
        if not lacks and not cfg.ray.address and import_module("vime.accel").kind() == "cpu":  # torch takes seconds to import
            lacks = "there is no GPU here"
        faults += [f'weights.transport = "nccl": {lacks}; set it to "shm" or "file"'] * bool(lacks)
    if cfg.agent.task:
        from vime.agents import rollout

        attempt("", rollout.check, cfg)
    attempt("", hooks.plugin_args, cfg)
    for key in sorted(set(hooks.POINTS) - {"reward.function", "rollout.dynamic_filter"}):
        for path in hooks.paths(cfg, key):
            attempt("", hooks.load, path, key)
    if faults:
        raise VimeError(f"{len(faults)} fault{'s' if len(faults) > 1 else ''} found before the start:\n  " + "\n  ".join(faults))
    return prompts, held_out


def describe(cfg: Config, prompts: Prompts, held_out: dict[str, Prompts], resume: bool, overwrite: bool) -> str:
    """What a run of this configuration would do: --dry-run. Raises: VimeError where it would be refused."""
    if resume:
        restarted = check_start(cfg, prompts, look(cfg, resume, overwrite))
    place = summary(cfg, resume, overwrite) + (f", {restarted} of them from their prompts" if resume and restarted else "")
    r = cfg.rollout
    group = prompts.peek()
    servers = ", ".join([f"{len(cfg.servers)} vLLM server(s)"] * bool(cfg.servers) + r.engines)
    evaluated = "; eval " + (", ".join(f"{name}: {len(p)}" for name, p in held_out.items()) or "none")
    optimizer_steps = cfg.samples_per_step // (cfg.train.global_batch_size or cfg.samples_per_step)
    rollout = f"{r.batch_size} prompts x {r.n_samples_per_prompt} = {cfg.samples_per_step} samples a step on {servers}, vllm-router"
    rollout = f"none: {r.batch_size} {'pairs' if cfg.train.objective == 'dpo' else 'dialogues'} a step" if cfg.offline else rollout
    rollout = f"none: samples of {cfg.debug.train_only}" if cfg.debug.train_only else rollout
    return f"""\
run        {cfg.folder}: {cfg.train.steps} steps, checkpoint every {cfg.checkpoint.interval}, seed {cfg.seed}
data       {cfg.data.prompts}: {len(prompts)} prompts{evaluated}
rollout    {rollout}{f", {r.num_workers} worker(s)" if cfg.served else ""}
train      {optimizer_steps} optimizer step(s) a rollout step on {cfg.ranks} rank(s), {cfg.train.dtype}, lr {cfg.train.lr:g}
reward     {"none, train.objective = " + cfg.train.objective if cfg.offline else cfg.agent.task or cfg.reward.function}
folder     {place}
{"next" if resume else "1st "} prompt {len(group.tokens)} tokens, label {group.label!r}: {prompts.text(group)!r}"""


def check_start(cfg: Config, prompts: Prompts, start: Start) -> int:
    """Move the prompts to where a resume goes on; returns how many groups of the checkpoint begin again. Raises: VimeError where the run
    cannot go on from there with this configuration and data."""
    if not start.ckpt:
        return 0
    checkpoint.refuse_other_model(start.ckpt, cfg.model)
    if not cfg.data.source:
        prompts.load_state(start.state["prompts"])
    return len(too_late(cfg, start.state["groups"], start.step + 1))


def evaluate(cfg: Config, args: hooks.Args, cluster: Cluster, pool: Pool, held_out: dict[str, Prompts], version: int) -> dict[str, float]:
    """Every dataset in whole: its metrics, and eval/reward, the mean of the datasets' mean rewards."""
    if cfg.rollout.eval_function:
        return whole_evaluation(cfg, args, pool, version)
    metrics: dict[str, float] = {}
    data: dict[str, dict[str, list[Any]]] = {}
    for d in cfg.eval.datasets:
        done = cluster.evaluate(len(held_out[d.name]), version, d.name)
        kept = [report for report in done if not report.dropped]
        if not kept:
            raise VimeError(f"eval dataset {d.name}: every group was dropped: {done[0].dropped}", "look at its reward function")
        metas = [m for report in kept for m in report.metas]
        metrics |= eval_metrics(d.name, metas, d.solved if d.solved is not None else 1.0)
        metrics |= {f"eval/{d.name}/dropped": float(len(done) - len(kept))} if len(kept) < len(done) else {}
        if cfg.log.eval_hook:
            truncated = [m.status is Status.TRUNCATED for m in metas]
            refs = [report.ref for report in kept if report.ref]
            samples = cluster.fetch(dict(enumerate(refs)))
            cluster.free(refs)
            data[d.name] = {"rewards": [m.reward for m in metas], "truncated": truncated, "samples": samples}
    metrics["eval/reward"] = float(np.mean([metrics[f"eval/{d.name}/reward"] for d in cfg.eval.datasets]))
    extra: dict[str, float] = {}
    if cfg.log.eval_hook and hooks.call(cfg, "log.eval_hook", version, args, data, extra):
        return {}
    return metrics | extra


def post_processed(cfg: Config, args: hooks.Args, samples: list[Sample], metas: list[SampleMeta]) -> tuple[list[SampleMeta], list[float]]:
    """Metas with the raw rewards, and the advantages, that reward.post_process makes of a step's samples."""
    raw, advantages = hooks.call(cfg, "reward.post_process", args, samples)
    values = np.array([raw, advantages], dtype=np.float64)
    if values.shape != (2, len(metas)) or not np.isfinite(values).all():
        raise VimeError(f"reward.post_process = {cfg.reward.post_process!r}: it must return two finite numbers for each of {len(metas)} samples")
    return [replace(m, reward=float(r)) for m, r in zip(metas, values[0])], values[1].tolist()


def streamed(cfg: Config, cluster: Cluster, pool: Pool, step: int, width: int) -> tuple[list[Flight], list[SampleMeta], dict[str, float]]:
    """train.stream: train the step's groups as they finish; the last part makes the update. Returns: them, their samples, metrics."""
    batch: list[Flight] = []
    metas: list[SampleMeta] = []
    skipped, stats = 0, dict[str, float]()
    for part in pool.stream():
        found, advantages = estimate([m for f in part for m in f.metas], cfg)
        plans, all_ = plan(found, advantages, cfg, cfg.parallel.fsdp, width, part=True), metas + found
        if len(batch) + len(part) == pool.batch:
            trained = [0 if m.removed else m.trained_tokens for m in all_]
            over = denominator(trained, [m.rollout_id for m in all_], cfg.loss.aggregate)
            plans = [replace(p, factor=1 / over, skipped=skipped + p.skipped) for p in plans]
        got = cluster.train(step, plans, {f.group_index: f.data for f in part if f.data})
        if isinstance(got, list):
            pool.lost(part, got)
            continue
        batch, metas, skipped, stats = batch + part, all_, skipped + plans[0].skipped, got
    return sorted(batch, key=lambda f: f.group_index), metas, stats


def rollout_metrics(metas: list[SampleMeta], version: int, seconds: float) -> dict[str, float]:
    """Of one batch, trained from weights `version`; `seconds` is how long the trainer waited for it."""
    by_group: dict[int, set[float]] = {}
    for m in metas:
        by_group.setdefault(m.group_index, set()).add(m.reward)
    tokens = sum(m.response_length for m in metas)
    lags = [version - v for m in metas for v in m.versions]
    ran = [one for one in {m.rollout_id: m.metrics for m in metas}.values() if one]
    agents = {k: sum(one.get(k, 0.0) for one in ran) / len(ran) for k in sorted(set().union(*ran))}
    return agents | {
        "rollout/raw_reward": float(np.mean([m.reward for m in metas])),
        "rollout/reward_std": float(np.std([m.reward for m in metas])),
        "rollout/response_len": tokens / len(metas),
        "rollout/truncated": float(np.mean([m.status is Status.TRUNCATED for m in metas])),
        "rollout/mixed_groups": float(np.mean([len(v) > 1 for v in by_group.values()])),
        "rollout/staleness_max": float(max(lags, default=0)),
        "perf/rollout_s": seconds,
        "perf/rollout_tokens_per_s": tokens / seconds,
    }


def train(cfg: Config, resume: bool = False, overwrite: bool = False) -> int:
    """Run the job. Returns the exit code: 0, or 130 after Ctrl-C. Raises: VimeError for anything a person can act on."""
    prompts, held_out = preflight(cfg)
    with opened(cfg, resume, overwrite, partial(check_start, cfg, prompts)) as start:
        return run(cfg, prompts, held_out, start)


def run(cfg: Config, prompts: Prompts, held_out: dict[str, Prompts], begin: Start) -> int:
    """`train` in the run's folder."""
    from vime.cluster import Cluster  # Ray takes seconds to import: not before the inputs are known to be good

    folder, ckpt, state, start = cfg.folder, *begin
    width = int(model.shape(cfg.model).get("hidden_size") or 0)
    log = MetricLogger(cfg, folder, cfg.train.steps, start)
    trace.start(cfg, "controller")
    saved = start

    def save(step: int) -> None:
        nonlocal saved
        state, groups = pool.snapshot()

        def fill(tmp: Path, keep: int | None = None) -> None:
            cluster.save_groups(tmp / GROUPS, groups)
            cluster.save(tmp, keep)

        if not cfg.checkpoint.async_save:
            checkpoint.write(folder / "checkpoints", step, {"step": step} | state, fill, cfg.checkpoint.keep)
        else:
            cluster.flush()
            fill(checkpoint.begin(folder / "checkpoints", step, {"step": step} | state), cfg.checkpoint.keep)
            if step == cfg.train.steps or interrupt.requested:
                cluster.flush()
        saved = step

    interrupt = Interrupt()
    interrupt.install()
    with closing(Cluster(cfg, folder, interrupt.install, {} if cfg.offline else held_out | {"": prompts})) as cluster:
        try:
            t = time.monotonic()
            with console.status("starting vLLM servers, router, rollout workers and trainer ranks"):
                cluster.start(ckpt)
                args = hooks.plugin_args(cfg, cluster.router.url if cluster.router else None)
                source = UserPrompts(cfg, args) if cfg.data.source else prompts
                online = Pool(cfg, cluster, source, start + 1, args, cluster.ledger(state["ledger"] if ckpt else None)) if cfg.served else None
                pool = online or (Recorded if cfg.debug.train_only else Offline)(cfg, cluster, prompts, start + 1)
                if ckpt:
                    pool.restore(state, ckpt)
                if cluster.fleet:
                    if not cfg.debug.rollout_only:
                        cluster.publish(start)
                    cluster.fleet.watch()
                    cluster.measure()
                interrupt.looping = True
            if online and cfg.train.mode == "async":
                cluster.meanwhile = online.pump
            servers = f"; weights v{start} published to {len(cluster.fleet.urls)} engine(s)" if cluster.fleet else ""
            console.print(f"started in {time.monotonic() - t:.0f} s{servers}")
            evaluated = held_out or cfg.rollout.eval_function
            if online and cfg.debug.rollout_only:
                return generate_only(cfg, args, cluster, online, log, interrupt)
            if online and evaluated and start == 0:
                log.log(0, evaluate(cfg, args, cluster, online, held_out, 0))
            for step in range(start + 1, cfg.train.steps + 1):
                t0 = time.monotonic()
                stats: Any = []
                own: dict[str, float] = {}
                if online and cfg.train.stream:
                    batch, metas, stats = streamed(cfg, cluster, online, step, width)
                    t1 = time.monotonic() - stats["perf/train_s"]
                    data = {f.group_index: f.data for f in batch if f.data}
                else:
                    batch, own = whole_rollout(online, args) if online and cfg.rollout.function else (pool.take(), {})
                    if online:
                        process_batch(online, args, batch)
                    t1 = time.monotonic()
                    cluster.sleep()
                while isinstance(stats, list):  # of groups that the data plane has lost: they are generated again
                    if stats and (not online or cfg.rollout.function or any(hooks.paths(cfg, key) for key in WHOLE_BATCH)):
                        raise VimeError(f"step {step}: the data plane has lost the samples of groups {stats}, which a plug-in made", "rerun with --resume")
                    batch = online.redone(batch, stats) if online and stats else batch
                    data = {f.group_index: f.data for f in batch if f.data}
                    metas = [m for f in batch for m in f.metas]
                    if cfg.reward.post_process:
                        metas, advantages = post_processed(cfg, args, cluster.fetch(data), metas)
                    else:
                        metas, advantages = (metas, [1.0] * len(metas)) if cfg.offline else estimate(metas, cfg)
                    plans, *critic = (plan(metas, advantages, world, world.parallel.fsdp, width) for world in cfg.worlds)
                    stats = cluster.train(step, plans, data, *critic)
                t2 = time.monotonic()

                sent = cluster.publish(step) if online else {}
                done = pool.trained(step, batch)
                t3 = time.monotonic()
                if cfg.log.samples:
                    cluster.dump(folder / "samples" / f"step_{step:06d}.jsonl", data)
                if cfg.debug.save_rollouts:
                    cluster.save_groups(recorded(folder, step), [data[g] for g in sorted(data)])
                hook, extra, metrics = cfg.log.rollout_hook, pool.metrics() | own, dict(stats)
                if cfg.offline:
                    metrics |= extra
                elif not (hook and hooks.call(cfg, "log.rollout_hook", step - 1, args, cluster.fetch(data), extra, t1 - t0)):
                    metrics |= rollout_metrics(metas, step - 1, t1 - t0) | extra
                cluster.free(done)
                if cluster.fleet:
                    of_servers, lines = cluster.measured(step)
                    for line in lines:
                        console.print(f"[yellow]{line}[/]", soft_wrap=True)
                    metrics |= of_servers | {"weights/sync_s": t3 - t2, "weights/version": float(step)} | sent
                    metrics["data/controller_bytes"], cluster.rollouts.moved = float(cluster.rollouts.moved), 0
                    metrics |= {f"health/{k}": float(v) for k, v in (cluster.fleet.counts | cluster.counts).items()}
                last = step == cfg.train.steps or interrupt.requested
                if online and evaluated and (step % cfg.eval.interval == 0 or step == cfg.train.steps):
                    metrics |= evaluate(cfg, args, cluster, online, held_out, step)
                metrics["perf/step_s"] = time.monotonic() - t0
                log.log(step, metrics)
                if step % cfg.checkpoint.interval == 0 or last:
                    save(step)
                trace.step(step, {"rollout": (t0, t1), "train": (t1, t2), "sync": (t2, t3), "rest": (t3, time.monotonic())}, batch)
                if last:
                    break
        finally:
            log.close()
            trace.stop()
    if cfg.trace.file:
        trace.perfetto(trace.load(folder)[0], folder / "trace.json")
    picture = plot(folder)
    if interrupt.requested and saved < cfg.train.steps:
        console.print(f"stopped after step {saved}, saved; continue with --resume")
        return 130
    report(folder, picture)
    return 0


def generate_only(cfg: Config, args: hooks.Args, cluster: Cluster, pool: Pool, log: MetricLogger, interrupt: Interrupt) -> int:
    """debug.rollout_only: the first half of each step. The servers keep the weights that they have: -1, those they started with."""
    assert cluster.fleet
    version = cluster.fleet.version_at(0)
    for step in range(1, cfg.train.steps + 1):
        t0, pool.version = time.monotonic(), version
        batch, own = whole_rollout(pool, args) if cfg.rollout.function else (pool.take(), {})
        process_batch(pool, args, batch)
        data = {f.group_index: f.data for f in batch if f.data}
        seconds = time.monotonic() - t0
        cluster.save_groups(recorded(cfg.folder, step), [data[g] for g in sorted(data)])
        if cfg.log.samples:
            cluster.dump(cfg.folder / "samples" / f"step_{step:06d}.jsonl", data)
        of_servers, _ = cluster.measured(step)
        metrics = rollout_metrics([m for f in batch for m in f.metas], version, seconds) | pool.metrics() | own | of_servers
        cluster.free(pool.trained(step, batch))
        log.log(step, metrics | {"perf/step_s": time.monotonic() - t0})
        if interrupt.requested:
            break
    cluster.flush_dumps()
    console.print(f"samples of {step} steps in {recorded(cfg.folder, step).parent}; train on them with debug.train_only={cfg.folder}", soft_wrap=True)
    return 130 if step < cfg.train.steps else 0


def report(folder: Path, picture: Path) -> None:
    """The run in four lines: reward before and after, where the picture is."""
    rows = read(folder)
    curve = [r["rollout/raw_reward"] for r in rows if "rollout/raw_reward" in r]
    evals = [r["eval/reward"] for r in rows if "eval/reward" in r]
    if curve:
        console.print(f"reward, sampled while training: {curve[0]:.3f} -> {curve[-1]:.3f} (first -> last step)")
    if len(evals) > 1:
        console.print(f"reward, held-out prompts:       {evals[0]:.3f} -> {evals[-1]:.3f} (before -> after)")
    console.print(f"curve {picture}, metrics {folder}/metrics.jsonl, samples {folder}/samples, model {folder}/checkpoints", soft_wrap=True)
