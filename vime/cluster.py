"""Ray: starts the servers, rollout workers and trainer ranks of one run, and ends them. Nothing else knows Ray."""

import contextlib
import io
import itertools
import json
import logging
import os
import re
import shutil
import sys
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
# Ray would SIGKILL the guards of procs.py before they can end the servers they guard.
os.environ.setdefault("RAY_kill_child_processes_on_worker_exit", "false")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
import ray
import ray.exceptions as rex

from vime import hooks, nodes
from vime.config import Config
from vime.data.ledger import Ledger
from vime.data.payload import fields_of, samples_of
from vime.data.plane import Plane, Ref, open_store
from vime.data.prompts import Prompts
from vime.data.records import dump_samples, reading, write_groups
from vime.errors import ELSEWHERE, VimeError, said
from vime.groups import DEAD, Rollouts
from vime.procs import Follower, free_port, stack
from vime.rollout.control import Control
from vime.rollout.engine import Engine, drafts_itself
from vime.rollout.gauges import Gauges, summary
from vime.rollout.health import Fleet
from vime.rollout.plugged import WHOLE_BATCH
from vime.rollout.router import Router
from vime.rollout.worker import Actor, GroupReport
from vime.sample import Sample, SampleMeta
from vime.trainer.batch import RankPlan
from vime.trainer.rank import Rank
from vime.weights import location, server_dtype

WORKER_BACK = 120.0  # seconds until Ray must have restarted a worker
STACKS_BY = 5.0  # seconds that ranks may begin and write their stacks later than the controller thinks


def cause(e: BaseException) -> BaseException:
    """The exception that code inside an actor raised, without Ray's wrapping and its 40-line traceback."""
    while isinstance(e, rex.RayTaskError) and isinstance(e.cause, BaseException) and e.cause is not e:
        e = e.cause
    return e


class Cluster:
    """The processes of one run: `start(checkpoint)`, and `close()` whatever happens, which ends everything that it started."""

    def __init__(self, cfg: Config, folder: Path, take_signals: Callable[[], None] = lambda: None, sources: dict[str, Prompts] | None = None):
        self.cfg, self.folder, self.take_signals = cfg, folder, take_signals
        self.local = cfg.ray.address is None
        self.sources = sources or {}  # of prompts, that the workers draw from by number
        self.engines: dict[int, Any] = {}  # by number: those that this run started
        self.changes: dict[int, dict[str, Any]] = {}  # vLLM arguments that `vime engines` gave them
        self.workers: list[Any] = []
        self.trainers: list[Any] = []  # the model's ranks, then the critic's own
        self.router: Router | None = None
        self.fleet: Fleet | None = None
        self.control: Control | None = None
        self.gauges: Gauges | None = None
        self.counts = Counter({"groups_redone": 0})
        self.turn = itertools.count()
        self.rollouts = Rollouts(self)
        self.plane: Any = None  # a Plane, once started
        self.lost_owner: Callable[[str], None] = lambda owner: None  # called when a worker has died
        self.meanwhile: Callable[[], None] = lambda: None  # called about every second while something else is waited for
        self._ray_pids: list[psutil.Process] = []
        self._follower: Follower | None = None
        self._given_out: Any = None  # reference to `sources`
        self._dumps: list[tuple[Any, list[Ref]]] = []  # tasks that write samples, and what may be freed after each
        self._puts = itertools.count()
        self._closing = threading.Event()
        self._notes = ThreadPoolExecutor(1, thread_name_prefix="pids")

    def start(self, checkpoint: Path | None) -> None:
        """Start Ray, engines, router, workers and trainer ranks, offline the latter only; returns when all answer. Raises: VimeError of the
        first part that cannot start, with its log tail."""
        cfg, local = self.cfg, self.local
        try:
            own: dict[str, Any] = {"num_cpus": 1024, "include_dashboard": False} if local else {"runtime_env": {"worker_process_setup_hook": nodes.setup_hook()}}
            quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
            ray.init(address=cfg.ray.address or "local", namespace=f"vime-{cfg.name}", **own, **quiet)
        except Exception as e:  # Ray raises half a dozen types here
            raise VimeError(f"Ray did not start: {type(e).__name__}: {e}", f"ray.address = {cfg.ray.address!r}; see `vime doctor`") from e
        self.take_signals()
        if local:
            me = psutil.Process()
            self._ray_pids = [p for p in me.children(recursive=True) if p.name() in ("gcs_server", "raylet")]
            self._follower = Follower([p.pid for p in self._ray_pids])
        else:
            nodes.check(cfg, self.folder)
        host = nodes.address(local)
        folder = str(self.folder.resolve())
        name = f"{cfg.name}-{zlib.crc32(folder.encode()):08x}"
        self.plane = Plane(cfg.data_plane, name, cfg.rollout.num_workers if cfg.served else 1, self.folder / "logs", host)
        puts = not cfg.served or cfg.rollout.function or any(hooks.paths(cfg, key) for key in WHOLE_BATCH)
        self.store = open_store(self.plane.spec, "driver" if puts else "")
        ready = [] if cfg.debug.rollout_only else self.start_trainers(checkpoint)
        self.engines = {i: self._engine(i, {}) for i in range(len(cfg.servers))}
        started = [e.start.remote() for e in self.engines.values()]
        if not cfg.served:
            self.gather(ready, "trainer rank")
            return self.write_pids()
        urls = [*self.gather(started, "engine"), *(u.rstrip("/") for u in cfg.rollout.engines)]
        self.router = Router(cfg, urls, folder, host)
        url = self.router.start()
        spread = {} if local else {"scheduling_strategy": "SPREAD"}
        worker = ray.remote(Actor).options(num_cpus=0, max_restarts=-1, max_concurrency=10_000, **spread)
        self.workers = [worker.remote(cfg, url, i, self.plane.spec) for i in range(cfg.rollout.num_workers)]
        self._given_out = ray.put(self.sources)
        prepared = [w.prepare.remote(self._given_out) for w in self.workers]
        external = range(len(started), len(urls))
        self.fleet = Fleet(urls, self.restart_engine, self.router, cfg.weights.in_flight, external)
        for i in self.engines:
            self._note_draft(i)
        self.fleet.probe()
        self.gather(prepared, "rollout worker")
        self.gather(ready, "trainer rank")
        self.write_pids()
        self.fleet.changed = self.changed
        try:
            self.control = Control(self.fleet, self.folder, self.restart_engine, self.start_engine)
        except VimeError as e:  # a file system without sockets
            print(f"warning: `vime engines` is off for this run: {e}", file=sys.stderr, flush=True)

    def start_trainers(self, checkpoint: Path | None) -> list[Any]:
        """The trainer ranks begin to load their model, that of a checkpoint where one is given; returns what to `gather` until they have."""
        cfg = self.cfg
        threads = str(max(1, (os.cpu_count() or 1) // cfg.ranks))
        env = {"OMP_NUM_THREADS": threads, "GOMP_SPINCOUNT": "10000", "TOKENIZERS_PARALLELISM": "false"}
        env |= {"CUBLAS_WORKSPACE_CONFIG": ":4096:8"} if cfg.debug.deterministic else {}
        env["THP_MEM_ALLOC_ENABLE"] = "1"  # torch's large tensors in huge pages: on a CPU page faults are a tenth of a step
        trainer = ray.remote(Rank)
        places = iter([{}] * cfg.ranks if self.local else nodes.for_ranks(cfg))
        alike = {"num_cpus": 1, "max_restarts": 0, "runtime_env": {"env_vars": env}}
        ready: list[Any] = []
        for first, own in zip((0, cfg.parallel.ranks), cfg.worlds):
            args = [(self.stacks(first + r).resolve(), self.plane.spec, own, r, own.parallel.ranks, first) for r in range(own.parallel.ranks)]
            ranks = [trainer.options(**alike, **next(places)).remote(*a) for a in args]
            meet = ranks[0].__ray_call__.remote(lambda _, local: nodes.meeting(local), self.local)
            hosts = [t.__ray_call__.remote(lambda _, local: nodes.address(local), self.local) for t in ranks]
            ready += [t.call.remote("setup", str(checkpoint) if checkpoint else None, meet, h) for t, h in zip(ranks, hosts)]
            self.trainers += ranks
        return ready

    def rank(self, r: int, sep: str = "-") -> str:
        """The name of trainers[r]: trainer-0, or critic-0 where it is one of the critic's own."""
        return f"trainer{sep}{r}" if r < (n := self.cfg.parallel.ranks) else f"critic{sep}{r - n}"

    def stacks(self, r: int) -> Path:
        """Where trainers[r] writes its stacks if it takes too long."""
        return self.folder / "logs" / f"{self.rank(r)}.stacks"

    def measure(self) -> None:
        fleet = self.fleet
        assert fleet
        self.gauges = Gauges(lambda: {i: fleet.urls[i] for i in fleet.serving()})

    def measured(self, step: int) -> tuple[dict[str, float], list[str]]:
        """The servers' metrics since the last call; in async mode also a line on each that begins to be idle."""
        assert self.gauges and self.fleet
        meters = self.gauges.take()
        lines = []
        if self.cfg.train.mode == "async":
            idle, news = self.gauges.idlers(meters)
            self.fleet.counts["idle_alarm"] += len(idle)
            told = "nothing to do: raise train.max_staleness or rollout.batch_size, or use fewer servers"
            lines = [f"engine {i} ({self.fleet.urls[i]}) was idle {1 - meters[i].share('busy'):.0%} of step {step}: {told}" for i in sorted(news)]
        return summary(meters.values()), lines

    def changed(self) -> None:
        """A process was started anew, or servers came or went: tell the workers and processes.json, without waiting for them."""
        if self.fleet and not self._closing.is_set():
            for w in self.workers:
                w.resize.remote(len(self.fleet.serving()))
            with contextlib.suppress(RuntimeError):  # the run ends
                self._notes.submit(self.write_pids)

    def write_pids(self) -> None:
        """processes.json: who is who, for a person with py-spy, gdb or kill. An actor that gives no answer in time is left out."""
        actors = {f"worker-{i}": a for i, a in enumerate(self.workers)} | {self.rank(i): a for i, a in enumerate(self.trainers)}
        pids = {k: a.__ray_call__.remote(lambda _: os.getpid()) for k, a in actors.items()}
        pids |= {f"engine-{i}": a.pid.remote() for i, a in self.engines.items()}
        found = {"driver": os.getpid(), "router": self.router.pid() if self.router else None} | {p.name(): p.pid for p in self._ray_pids}
        found |= {name: child.pid for name, (*_, child) in self.plane.running.items()}
        waiting, end = list(pids.values()), time.monotonic() + 30
        while waiting and time.monotonic() < end and not self._closing.is_set():
            _, waiting = ray.wait(waiting, num_returns=len(waiting), timeout=0.5)
        for name, ref in pids.items():
            if ref not in waiting:
                with contextlib.suppress(rex.RayError):
                    found[name] = ray.get(ref)
        tmp = self.folder / "processes.json.tmp"
        tmp.write_text(json.dumps(found, indent=1))
        tmp.replace(self.folder / "processes.json")

    def close(self) -> None:
        """End what this run started, in reverse order; safe to call twice and after any failure."""
        self._closing.set()
        if self.control:
            self.control.close()
        if self.gauges:
            self.gauges.close()
        if self.fleet:
            self.fleet.close()
        self._notes.shutdown(cancel_futures=True)  # before Ray: a call to it would start a new one
        if ray.is_initialized() and self.ray_alive():
            stops = [e.stop.remote() for e in self.engines.values()]
            ray.wait(stops, num_returns=len(stops), timeout=20) if stops else None
            for a in [*self.workers, *self.trainers, *self.engines.values()]:
                ray.kill(a)
        if self.router:
            self.router.stop()
        if self.plane:
            self.plane.close()
        self.fleet = self.router = self.control = self.gauges = None
        self.engines, self.workers, self.trainers = {}, [], []
        with contextlib.redirect_stderr(io.StringIO()):  # where Ray has died it would print its state here, for no reader
            ray.shutdown()
        if self._follower:
            self._follower.close()
        if self.cfg.weights.transport == "shm":
            shutil.rmtree(location(self.cfg), ignore_errors=True)

    def _engine(self, i: int, changes: dict[str, Any]) -> Any:
        given, folder = self.arguments(i, changes), str(self.folder.resolve())
        place = {"num_cpus": 0} if self.local else nodes.for_engine(given, self.cfg)
        port = free_port() if self.local else None  # of this host
        return ray.remote(Engine).options(max_restarts=-1, **place).remote(self.cfg, i, folder, port, changes, partial(nodes.address, self.local))

    def arguments(self, i: int, changes: dict[str, Any] | None) -> dict[str, Any]:
        """vLLM's, of server i."""
        return Engine(self.cfg, i, str(self.folder), 0, changes).arguments(0)

    def _note_draft(self, i: int) -> None:
        assert self.fleet
        args = self.arguments(i, self.changes.get(i))
        (self.fleet.drafts.add if drafts_itself(args) else self.fleet.drafts.discard)(i)

    def start_engine(self, i: int, changes: dict[str, Any]) -> str:
        """One more server, with number i; returns its URL."""
        engine = self._engine(i, changes)
        try:
            url = str(ray.get(engine.start.remote()))
        except (*DEAD, rex.RayTaskError) as e:
            ray.kill(engine)
            raise cause(e) from None
        self.engines[i], self.changes[i] = engine, changes
        self._note_draft(i)
        return url

    def restart_engine(self, i: int, changes: dict[str, Any] | None = None) -> str:
        """Start engine i anew on its port, with these and earlier changes of its vLLM arguments; Ray restarts its actor where that died, on
        another node where its own is gone. Returns its URL."""
        wanted = self.changes.get(i, {}) | (changes or {})
        tries, end = 2, time.monotonic() + WORKER_BACK
        while True:
            try:
                url = str(ray.get(self.engines[i].restart.remote(wanted)))
                self.changes[i] = wanted
                self._note_draft(i)
                return url
            except rex.ActorUnavailableError as e:  # its node does not answer, and Ray has not given it up yet
                if time.monotonic() > end:
                    raise VimeError(f"engine {i}: its node does not answer: {cause(e)}") from e
                time.sleep(1)
            except DEAD as e:
                tries -= 1
                if not tries:
                    raise VimeError(f"engine {i}: the process that holds it keeps dying: {cause(e)}") from e
            except rex.RayTaskError as e:
                raise cause(e) from None

    def ray_alive(self) -> bool:
        return all(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in self._ray_pids)

    def check(self) -> None:
        """Raises VimeError where Ray is gone, or an engine or a part of the data plane cannot be brought back."""
        if not self.ray_alive():
            raise VimeError("Ray is gone: its gcs_server or raylet has ended", "rerun with --resume")
        if self.fleet:
            self.fleet.check()
        if self.plane:
            for part in self.plane.check():
                self.counts["data_plane_restarts"] += 1
                print(f"{part} of the data plane had died and was started again", file=sys.stderr, flush=True)

    def gather(self, refs: list[Any], who: str, doing: str = "", first: int = 0) -> list[Any]:
        """Results of all refs, in order; fails as soon as one does: no rank waits for a dead one. `doing`: ranks', from `first`, within train.step_timeout."""
        pending, end = list(refs), time.monotonic() + self.cfg.train.step_timeout + STACKS_BY
        while pending:
            done, pending = ray.wait(pending, num_returns=1, timeout=1.0)
            self.check()
            self.meanwhile()
            if doing and not done and time.monotonic() > end:
                raise self.hung([first + refs.index(ref) for ref in pending], doing)
            for ref in done:
                try:
                    ray.get(ref)
                except (*DEAD, rex.RayTaskError):
                    raise self.blame(refs, who, first) from None
        return ray.get(refs)

    def blame(self, refs: list[Any], who: str, first: int = 0) -> VimeError:
        """The error to show when one of refs failed: the rank that died, rather than its peers that lost the connection to it."""
        done, _ = ray.wait(refs, num_returns=len(refs), timeout=3)
        found: dict[str, VimeError] = {}
        for ref in done:
            name = self.rank(first + refs.index(ref), " rank ") if who == "trainer rank" else f"{who} {refs.index(ref)}"
            try:
                ray.get(ref)
            except DEAD as e:
                lines, node = str(e).strip().splitlines(), re.search(r"\bip: (\S+)", str(e))
                why = f"its node {node[1]} is gone" if node and "node has died" in str(e) else lines[-1 if "creation task" in lines[0] else 0]
                found["died"] = VimeError(f"{name} died: {why}", "rerun with --resume")
            except rex.RayTaskError as e:
                c = cause(e)
                if isinstance(c, VimeError):
                    found.setdefault("peer" if c.what == ELSEWHERE else "known", self.named(c))
                else:
                    found["raised"] = VimeError(f"{name}: {type(c).__name__}: {c}", log=str(e)[-3000:])
        return next(found[kind] for kind in ("died", "known", "raised", "peer") if kind in found)

    def hung(self, late: list[int], doing: str) -> VimeError:
        """The error to show for trainer ranks that have not finished in time: where those are that don't just wait for others."""
        stacks = {r: stack(self.stacks(r), "/vime/trainer/") for r in late}
        at = [r for r, frames in stacks.items() if not any("/torch/distributed/" in f for f in frames[:4])] or late
        where = "; ".join(f"{self.rank(r, ' rank ')}: {stacks[r][0] if stacks[r] else 'no stack, its process is stopped or gone'}" for r in at)
        what = f"{doing}: not finished after {self.cfg.train.step_timeout:g} s (train.step_timeout); {where}"
        log = "\n".join(f"{self.rank(r)}, innermost frame first:\n  " + "\n  ".join(stacks[r][:30]) for r in at if stacks[r])
        return VimeError(what, "rerun with --resume; raise train.step_timeout where this may take longer", log)

    def named(self, e: VimeError) -> VimeError:
        """`e` with the number of each server whose URL it names: workers and the router know URLs only."""
        for i, url in enumerate(self.fleet.urls if self.fleet else []):
            e = type(e)(re.sub(rf"(?<!\()\b{re.escape(url)}\b", f"engine {i} ({url})", e.what), e.fix, e.log)
        return e

    def await_worker(self, i: int) -> None:
        """Wait until Ray has brought a rollout worker back: until then each call to it fails."""
        end = time.monotonic() + WORKER_BACK
        while True:
            self.check()
            try:
                return ray.get(self.workers[i].prepare.remote(self._given_out), timeout=5)
            except (*DEAD, rex.GetTimeoutError) as e:
                if time.monotonic() > end:
                    raise VimeError(f"rollout worker {i} died and does not come back: {said(e)}", "rerun with --resume") from e
                time.sleep(0.2)

    def interrupt(self, wave: int) -> None:
        """Tell the workers to give back the groups of `wave`, with what they have."""
        self.gather([w.interrupt.remote(wave) for w in self.workers], "rollout worker")

    def drain(self, timeout: float) -> Iterator[tuple[int, GroupReport, Any]]:
        """Interrupted groups as they come back, within `timeout`. Servers are asked to abort repeatedly: a request may have been on its way."""
        end = time.monotonic() + timeout
        assert self.fleet
        while (self.rollouts.pending or self.rollouts.suspects) and time.monotonic() < end:
            self.fleet.abort()
            yield from self.rollouts.finished(0.5, redo=False)
        self.rollouts.pending.clear()

    def evaluate(self, number: int, version: int, dataset: str) -> list[GroupReport]:
        """Generate and score the `number` groups of an eval dataset; returns their reports in order."""
        jobs = Rollouts(self)
        done: dict[int, GroupReport] = {}
        for i in range(number):
            jobs.submit(i, i, version, wave=-1, evaluation=dataset)
        while jobs.pending or jobs.suspects:
            done |= {key: report for key, report, _ in jobs.finished(1.0)}
            self.meanwhile()
        return [done[i] for i in range(number)]

    def train(self, step: int, plans: list[RankPlan], data: dict[int, Ref], critic: Sequence[RankPlan] = ()) -> dict[str, float] | list[int]:
        """One rollout step's optimizer steps, a plan for each of parallel.fsdp; `data`: where each group is; `critic`: plans of its own ranks,
        which give the advantages to the model's, past this process. Returns metrics, or lost groups."""
        n = self.cfg.parallel.ranks
        given = [*(plans[self.cfg.parallel.shard(r)] for r in range(n)), *critic]
        refs = [[data[g] for g in sorted({i.group_index for mini in plan.minibatches for i in mini})] for plan in given]
        self.rollouts.moved += sum(len(ray.cloudpickle.dumps(x)) for x in (given, refs))
        loading = [t.call.remote("load", step, mine) for t, mine in zip(self.trainers, refs)]
        if lost := set().union(*self.gather(loading, "trainer rank", f"step {step}, loading samples")):
            return [g for g, ref in data.items() if ref.key in lost]
        kept = [t.__ray_call__.remote(lambda rank, *a: ray.put(rank.call("advantages", *a)), step, p) for t, p in zip(self.trainers[n:], critic)]
        made = self.gather(kept, "trainer rank", f"step {step}, advantages", n)
        training = [t.call.remote("train", step, p, *(made if r < n else ())) for r, (t, p) in enumerate(zip(self.trainers, given))]
        every = self.gather(training, "trainer rank", f"step {step}, training")
        return every[-1] | every[0]

    def publish(self, version: int) -> dict[str, float]:
        """Trainer -> servers: weights `version`, proven by fence and canary. Returns metrics of what was sent."""
        fleet, tol = self.fleet, self.cfg.weights.canary_tol or (1e-3 if server_dtype(self.cfg) == "float32" else 0.25)
        assert fleet
        with fleet.lock:  # while a server is healed, the trainer must not go on from the weights that it is healed with
            receivers = fleet.hold() if self.cfg.weights.transport == "nccl" else None
            refs = [t.call.remote("publish", version, receivers) for t in self.trainers[: self.cfg.parallel.ranks]]
            new, canary = self.gather(refs, "trainer rank", f"publishing v{version}")[0]
            if self.cfg.weights.post_write:
                assert self.router
                args = hooks.plugin_args(self.cfg, self.router.url)
                hooks.call(self.cfg, "weights.post_write", args, str(Path(new.path).parent), list(fleet.urls))
            if self.cfg.rollout.colocate:
                fleet.wake()
            proof = canary if self.cfg.weights.canary else None
            fleet.publish(version, new.path, proof, tol, new.deltas, lambda: self.whole(version), sent=receivers is not None)
        return new.metrics | ({"weights/delta_refused": float(fleet.delta_refused)} if self.cfg.weights.delta else {})

    def whole(self, version: int) -> str:
        """Ask the trainer for weights `version` as one file; its path. Any thread may call this."""
        ref = self.trainers[0].call.remote("whole", version)
        try:
            return str(ray.get(ref))
        except (*DEAD, rex.RayTaskError):
            raise self.blame([ref], "trainer rank") from None

    def sleep(self) -> None:
        """Colocated mode: the servers leave their memory to the trainer until the next publish."""
        if self.cfg.rollout.colocate:
            assert self.fleet
            self.fleet.sleep(self.cfg.rollout.sleep_level)

    def save(self, folder: Path, keep: int | None = None) -> None:
        """Every rank writes its share of a checkpoint into `folder`; sample dumps under way are finished first. With `keep`, see Trainer.save."""
        self.flush_dumps()
        n = self.cfg.parallel.ranks
        for first, ranks in ((n, self.trainers[n:]), (0, self.trainers[:n])):  # the critic's own first: the model's may commit it
            self.gather([t.call.remote("save", str(folder.resolve()), keep) for t in ranks], "trainer rank", f"saving {folder.name}", first)

    def flush_dumps(self) -> None:
        self.gather([task for task, _ in self._dumps], "sample dump")

    def flush(self) -> None:
        self.gather([t.call.remote("flush") for t in self.trainers], "trainer rank", "writing a checkpoint")

    def groups(self, tasks: list[Any]) -> list[list[Sample]]:
        """The samples themselves, for plug-ins that run in the controller. Nothing else brings them here."""
        return [samples_of(self.store.get([t])[0]) if isinstance(t, Ref) else t if isinstance(t, list) else self.sources[""].again(t) for t in tasks]

    def fetch(self, data: dict[int, Ref]) -> list[Sample]:
        """As `groups`, all samples in one list, by group_index."""
        return [s for group in self.groups([data[g] for g in sorted(data)]) for s in group]

    def ledger(self, cursor: dict[str, Any] | None) -> Ledger:
        """Of the run's data plane; `cursor`: the checkpoint's, to go on from there. What an earlier process had is gone, or in the checkpoint."""
        journal = self.folder / "ledger.jsonl"
        if not cursor:
            journal.unlink(missing_ok=True)
        found = Ledger(self.plane.spec.budget, journal, cursor)
        found.lost(list(found.live))
        found.free()
        return found

    def put(self, group: list[Sample]) -> Ref:
        """Where samples are that a plug-in, or a file of examples, made."""
        return self.store.put({f"{self.cfg.name}/g{group[0].group_index}/driver-{next(self._puts)}": fields_of(group)})[0]

    def free(self, refs: list[Ref]) -> None:
        """These samples are not needed any more, once the dumps under way are written."""
        done = [(task, old) for task, old in self._dumps if ray.wait([task], timeout=0)[0]]
        self.counts["groups_not_dumped"] += sum(self.gather([task for task, _ in done], "sample dump"))
        self._dumps = [d for d in self._dumps if d not in done]
        if self._dumps:
            self._dumps[-1][1].extend(refs)
            refs = []
        self.store.free([r for old in [refs, *(old for _, old in done)] for r in old])

    def dump(self, path: Path, data: dict[int, Ref]) -> None:
        """Write a step's samples to a readable file, in a process of its own: the controller never holds them."""
        task = ray.remote(reading).options(num_cpus=0, max_retries=2)
        given = [data[g] for g in sorted(data)]
        self._dumps.append((task.remote(dump_samples, self.plane.spec, str(path.resolve()), given), []))

    def save_groups(self, path: Path, groups: list[Any]) -> None:
        """Write groups to `path`, one JSON list of samples a line."""
        task = ray.remote(reading).options(num_cpus=0)
        self.gather([task.remote(write_groups, self.plane.spec, str(path.resolve()), groups)], "writing the groups under way,")

    def load_groups(self, path: Path, ready: list[bool]) -> list[tuple[list[SampleMeta], Ref | None]]:
        """Read what save_groups wrote: (metadata of a finished group's samples, where they are) of each; no metadata for unfinished ones."""
        call = [self.workers[0].load_groups.remote(str(path.resolve()), ready)] if ready else []
        return self.gather(call, "reading the groups under way,")[0] if call else []
