"""The serving side as the controller sees it: probe, publish weights, watch, heal."""

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterable
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar

from vime.errors import VimeError, said
from vime.rollout import gauges
from vime.rollout.http import ABORT, DRAFT_START, FINISH, INIT, PAUSE, RESUME, SLEEP, START, UPDATE, WAKE_UP, EngineClient, EngineDown, EngineSlow
from vime.rollout.router import Router
from vime.weights import UNTOUCHED, Canary, Receiver

T = TypeVar("T")
INTERVAL = 2.0  # seconds between two looks at every server
SLOW = 3  # timeouts in a row until a server that only doesn't answer counts as dead
TRIES = 3  # failed healings of one server in a row that end the run


class Weights(NamedTuple):
    version: int
    path: str
    canary: Canary | None
    tol: float
    deltas: tuple[str, ...] = ()  # to lay over `path`, in order
    whole: Callable[[], str] | None = None  # makes one file of them, for servers that refuse the deltas or, without a `path`, have none
    sent: bool = False  # to every server that serves: they have them already


class Fleet:
    """All servers of a run, by index. restart(i) blocks until server i is up again and returns its URL, another one where its node was lost;
    None where all were started elsewhere, as those in `external` were. The draft model of those in `.drafts` is the policy itself. Sync
    methods; the HTTP calls run in a private event loop thread. Publishing, healing and whoever holds `lock` exclude each other."""

    def __init__(
        self, urls: list[str], restart: Callable[[int], str] | None, router: Router | None, in_flight: str = "keep", external: Iterable[int] = ()
    ):
        self.urls, self.restart, self.router, self.in_flight = list(urls), restart, router, in_flight
        self.external, self.drafts = set(external), set[int]()
        self.out = set[int]()  # those that `vime engines` took out; they get no requests and no weights
        self.counts = {"engine_restarts": 0, "router_restarts": 0, "idle_alarm": 0}
        self.changed: Callable[[], None] = lambda: None  # called when a server or the router has another process, or their number changed
        self.delta_refused = 0
        self.loads = 0  # of weights as files, which is what a new process gets first
        self._clients = [EngineClient(u) for u in urls]
        self._current: Weights | None = None
        self._slow: Counter[int] = Counter()  # timeouts in a row
        self._error: VimeError | None = None
        self.lock = threading.RLock()
        self._closed = threading.Event()
        self._watcher: threading.Thread | None = None
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True, name="fleet-http")
        self._thread.start()

    def _run(self, coro: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coro, self._loop).result()

    def serving(self) -> list[int]:
        return [i for i in range(len(self.urls)) if i not in self.out]

    def append(self, url: str, external: bool) -> None:
        with self.lock:
            self.out.add(len(self.urls))
            self.external |= {len(self.urls)} if external else set()
            self._clients.append(EngineClient(url))
            self.urls.append(url)

    def pop(self) -> None:
        """Forget the last server, which was never in."""
        with self.lock:
            self.urls.pop()
            self._run(self._clients.pop().close())
            for numbers in (self.out, self.external, self.drafts):
                numbers.discard(len(self.urls))

    def probe(self, only: int | None = None) -> None:
        """Ask every server, or one, for each endpoint that the run needs, for our plugin and for logprobs. VimeError names what one lacks."""
        for i in self.serving() if only is None else [only]:
            c = self._clients[i]
            try:
                self._run(c.probe())
                self._run(c.post(INIT, {"init_info": {}}))
                self._run(c.prompt_logprobs([0, 0]))
            except VimeError as e:
                raise VimeError(f"engine {i}: start-up probe: {e.what}", e.fix or "does it have vime's plugin?") from e
            if i in self.drafts and DRAFT_START not in self._run(c.paths()):
                self.drafts.discard(i)
                print(f"engine {i} ({c.url}) has no {DRAFT_START}: its draft model keeps the weights it has", file=sys.stderr, flush=True)

    def bring_in(self, i: int) -> None:
        """Give server i, which is out, the current weights, prove that they took, and let it serve. Raises: VimeError as `publish`."""
        with self.lock:
            if self._current:
                self._run(self._apply(i, self._current))
            if self.router:
                self.router.add(self.urls[i])
            self._slow[i] = 0
            self.out.discard(i)
        self.changed()

    def take_out(self, i: int) -> None:
        """No new request goes to server i from here on; those it has go on, and while it `is_busy` it must stay up."""
        with self.lock:
            if self.router:
                self.router.remove(self.urls[i])
            self.out.add(i)
        self.changed()

    def busy(self, i: int) -> float:
        """Requests that server i has, running or waiting. Raises: VimeError where it doesn't answer."""
        now = gauges.read(self._run(self._clients[i].metrics()))
        return now["running"] + now["waiting"]

    def version_at(self, i: int) -> int:
        """Weight version that server i serves. Raises: VimeError where it doesn't answer."""
        return self._run(self._clients[i].weight_version(timeout=10))

    def sleep(self, level: int) -> None:
        """Free the servers' memory for the trainer; `wake` must follow. Weights go to the host (1), or are dropped (2): a publish must follow, too."""
        with self.lock:
            self._each(lambda c: c.post(SLEEP, timeout=600, level=str(level), mode="wait"))  # for running requests

    def wake(self) -> None:
        with self.lock:
            self._each(lambda c: c.post(WAKE_UP, timeout=600))

    def _each(self, call: Callable[[EngineClient], Coroutine[Any, Any, None]], which: Iterable[int] | None = None) -> None:
        """On every server, or `which`, at once; a dead one is left to the watch, which restarts it."""

        async def one(i: int) -> None:
            with suppress(EngineDown):
                await call(self._clients[i])

        async def every() -> None:
            await asyncio.gather(*map(one, self.serving() if which is None else which))

        self._run(every())

    def abort(self) -> None:
        """End every request on every server; each gives back what it has. A dead server has none."""
        self._each(lambda c: c.post(ABORT, {}, timeout=10), range(len(self.urls)))  # one that is being drained, too

    def hold(self) -> list[Receiver]:
        """For weights that trainer ranks send: bring back what is dead, then pause every server. `publish` must follow."""
        with self.lock:
            for i in self.serving():
                self._mend(i)
            self._each(self._pause)
            return [Receiver(i, self.urls[i], self._run(self._clients[i].world_size()), self.loads) for i in self.serving()]

    def publish(
        self, version: int, path: str, canary: Canary | None, tol: float = 1e-3, deltas: tuple[str, ...] = (),
        whole: Callable[[], str] | None = None, sent: bool = False,
    ) -> None:  # fmt: skip
        """Bring weights `version`, the safetensors at `path` under `deltas`, to every server, one that dies meanwhile included, and prove
        that they took. A server that refuses a delta gets the file that `whole()` makes; after `hold` they were `sent` already. Raises:
        VimeError where a server refuses the weights (it then serves the last good ones), where its logprobs of the canary differ by more than
        `tol` on average, or where it can't be brought back."""
        wanted = Weights(version, path, canary, tol, deltas, whole)
        with self.lock:
            faults = self._run(self._apply_to(self.serving(), wanted._replace(sent=sent)))
            refused = [e for e in faults if e and not isinstance(e, EngineDown)]
            for i, e in zip(self.serving(), faults):
                if isinstance(e, EngineDown):  # dead, or alive with half a model: only a restart brings it back
                    if not isinstance(e, EngineSlow) and self._run(self._state(i)) is not None:
                        refused.append(VimeError(f"engine {i} ({self.urls[i]}): weights v{version} did not take: {e.what}", f"see {path}" if path else "see its log"))
                    self._heal(i, self._current if refused else wanted, e)
            if refused:
                raise refused[0]
            self._current = wanted

    async def _pause(self, c: EngineClient) -> None:
        """Freeze the server between two tokens until RESUME. Requests stay, or with mode "abort" end at once and give back what they have."""
        await c.post(PAUSE, mode=self.in_flight)

    async def _apply_to(self, servers: list[int], w: Weights) -> list[BaseException | None]:
        """Update them all; the error of each that has one."""
        return await asyncio.gather(*(self._apply(i, w) for i in servers), return_exceptions=True)

    async def _apply(self, i: int, w: Weights) -> None:
        """Update server i in place. It stays paused where it fails midway: its model may be half loaded. EngineDown says so."""
        c, at = self._clients[i], f"engine {i} ({self.urls[i]}): weights v{w.version} did not take"
        if w.sent:
            return await self._confirm(i, w)
        path = w.path or (await asyncio.to_thread(w.whole) if w.whole else "")
        info = {"update_info": {"path": path, "deltas": w.deltas}}
        self.loads += 1
        await c.post(INIT, {"init_info": {}})
        await self._pause(c)
        await c.post(START)
        try:
            await c.post(UPDATE, info, timeout=1800)
        except EngineDown as e:
            if UNTOUCHED not in e.what:
                raise
            await c.post(RESUME)
            if w.deltas and w.whole:
                self.delta_refused += 1
                return await self._apply(i, w._replace(path=await asyncio.to_thread(w.whole), deltas=()))
            why = e.what.partition(UNTOUCHED)[2].partition("', please check")[0]
            raise VimeError(f"{at}: {w.path}{why}", "it keeps the weights it had") from e
        if i in self.drafts:
            await c.post(FINISH, {"weight_version": str(w.version)}, timeout=600)
            await c.post(DRAFT_START)
            await c.post(UPDATE, info, timeout=1800)
        await c.post(FINISH, {"weight_version": str(w.version)}, timeout=600)
        await self._confirm(i, w)

    async def _confirm(self, i: int, w: Weights) -> None:
        """Let server i, which has loaded them, go on, and prove that they took."""
        c, at = self._clients[i], f"engine {i} ({self.urls[i]}): weights v{w.version} did not take"
        await c.reset_prefix_cache()  # else new requests would build on keys and values of the old weights
        await c.post(RESUME)
        if (got := await c.weight_version()) != w.version:
            raise VimeError(f"{at}: the server reports version {got}")
        if w.canary:
            ours, theirs = w.canary.log_probs, await c.prompt_logprobs(w.canary.token_ids)
            diff = sum(abs(a - b) for a, b in zip(ours, theirs, strict=True)) / len(ours)
            if not diff <= w.tol:  # NaN is a failure, too
                raise VimeError(f"{at}: its logprobs of the canary are off by {diff:.2g} on average", f"{w.tol:g} is allowed")

    async def _state(self, i: int) -> int | None:
        """Weight version that server i serves; None where it is dead."""
        try:
            await self._clients[i].health()
            self._slow[i] = 0
            return await self._clients[i].weight_version(timeout=10)
        except EngineSlow:
            self._slow[i] += 1
            return None if self._slow[i] >= SLOW else self._version()
        except VimeError:
            return None

    def _version(self) -> int:
        return self._current.version if self._current else -1

    def _heal(self, i: int, weights: Weights | None, why: BaseException | str) -> None:
        """Restart server i and give it `weights` (None: those it starts with). Raises VimeError after TRIES failures in a row."""
        at, restart = f"engine {i} ({self.urls[i]})", self.restart
        if restart is None or i in self.external:
            raise VimeError(f"{at} is down: {why}", "it was started elsewhere: start it again")

        def start() -> None:
            self.moved(i, restart(i))
            self._slow[i] = 0
            self.changed()
            if weights:
                self._run(self._apply(i, weights))

        self._again(at, "engine_restarts", start)

    def _again(self, who: str, count: str, start: Callable[[], None]) -> None:
        """`start` until it succeeds. Raises: VimeError after TRIES failures."""
        for last in range(1, TRIES + 1):
            if self._closed.is_set():
                return
            self.counts[count] += 1
            try:
                return start()
            except Exception as e:  # whatever the holder of the server raises
                if last == TRIES:
                    known = e if isinstance(e, VimeError) else VimeError(said(e))
                    raise VimeError(f"{who} was not brought back in {TRIES} tries: {known.what}", known.fix, known.log) from e

    def watch(self) -> None:
        """Start the thread that looks at every server and the router each INTERVAL, and heals what is dead."""
        self._watcher = threading.Thread(target=self._watch, daemon=True, name="fleet-watch")
        self._watcher.start()

    def _watch(self) -> None:
        while not self._closed.wait(INTERVAL):
            try:
                for i in self.serving():
                    if self._run(self._state(i)) != self._version():
                        with self.lock:
                            self._mend(i)
                with self.lock:
                    if self.router and not self.router.alive():
                        self._mend_router()
            except Exception as e:  # a watch that ends in silence would be worse than a run that ends
                self._error = e if isinstance(e, VimeError) else VimeError(f"watching the servers failed: {said(e)}")
                return

    def _mend(self, i: int) -> None:
        """Bring server i to the current weights; under the lock. Looks again first: a publish may just have ended."""
        state = self._run(self._state(i))
        elsewhere = self.restart is None or i in self.external
        if self._closed.is_set() or i in self.out or state == self._version() or (state is None and elsewhere):
            return  # a server started elsewhere gets its weights when it is back
        fault: BaseException | None = None
        if state is not None and self._current:  # restarted by someone else, so it serves its first weights
            (fault,) = self._run(self._apply_to([i], self._current))
        if state is None or fault:
            self._heal(i, self._current, fault or "no answer")

    def moved(self, i: int, url: str) -> None:
        """Server i is at `url` now. Where that is another node, requests to the old one would wait in vain: a new router ends them, to be redone."""
        if url == self.urls[i]:
            return
        old, self.urls[i] = self.urls[i], url
        self._run(self._clients[i].close())
        self._clients[i] = EngineClient(url)
        if self.router:
            self.router.engine_urls = [url if u == old else u for u in self.router.engine_urls]
            self._mend_router()

    def _mend_router(self) -> None:
        def start() -> None:
            assert self.router
            self.router.restart()
            self.changed()

        self._again("vllm-router", "router_restarts", start)

    def check(self) -> None:
        """Raises the VimeError that ended the watch, if any."""
        if self._error:
            raise self._error

    def close(self) -> None:
        """Stop watching. Servers and router are left to those who started them."""
        self._closed.set()
        if self._watcher:
            self._watcher.join(timeout=INTERVAL + 5)
        for c in self._clients:
            self._run(c.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)
