"""The servers' /metrics, read again and again, as numbers of a stretch of time. A look at a server counts as busy where a request runs and
the server made a step since the look before, so neither an empty server counts nor one that a weight update has frozen."""

import asyncio
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping

from prometheus_client.parser import text_string_to_metric_families

from vime.errors import VimeError
from vime.rollout.http import EngineClient, EngineSlow

LOOK = 0.25  # seconds between two looks at a server
ALARM = 0.2  # a server of an async run that was idle for a larger share of a step is named
ENOUGH = 8  # looks below which no alarm is raised
NOW = {"vllm:num_requests_running": "running", "vllm:num_requests_waiting": "waiting"}
COUNTED = {
    "vllm:generation_tokens_total": "tokens", "vllm:prompt_tokens_total": "prompt_tokens", "vllm:iteration_tokens_total_count": "iterations",
    "vllm:prefix_cache_queries_total": "cache_queries", "vllm:prefix_cache_hits_total": "cache_hits",
    "vllm:request_queue_time_seconds_sum": "queue_s", "vllm:request_queue_time_seconds_count": "queued",
    "vllm:spec_decode_num_drafts_total": "drafts", "vllm:spec_decode_num_draft_tokens_total": "drafted",
    "vllm:spec_decode_num_accepted_tokens_total": "accepted",
}  # fmt: skip


def read(text: str) -> dict[str, float]:
    """The values wanted of a server's /metrics, under our names, summed over its engine cores. Raises: VimeError for other text."""
    names = NOW | COUNTED
    lines = [x for x in text.splitlines() if x.partition("{")[0].partition(" ")[0] in names]  # the page has thousands
    out: dict[str, float] = {}
    for family in text_string_to_metric_families("\n".join(lines) + "\n"):
        for s in family.samples:
            out[names[s.name]] = out.get(names[s.name], 0.0) + s.value
    if missing := sorted({"running", "waiting", "tokens", "iterations"} - set(out)):
        raise VimeError(f"/metrics lacks {', '.join(missing)}", "is it a vLLM server?")
    return out


class Meter:
    """One server over a stretch of time, which begins with the look `last` at `at`, or with the first one."""

    def __init__(self, last: dict[str, float] | None = None, at: float | None = None) -> None:
        self.last, self.at = last, at
        self.sums: Counter[str] = Counter()  # of counters: the increase; of `running`, `waiting`, `busy`: value x seconds
        self.seconds, self.looks = 0.0, 0

    def add(self, now: dict[str, float] | None, at: float) -> None:
        """One look at `at` (seconds); None: the server is down, and does nothing."""
        before, begun = self.last, self.at
        self.last, self.at = now or before, at
        if begun is None:
            return
        dt = at - begun
        self.seconds += dt
        self.looks += 1
        if now is None:
            return
        for name in COUNTED.values():  # a counter that is smaller than before is that of a server started anew
            value, old = now.get(name, 0.0), (before or {}).get(name, 0.0)
            self.sums[name] += value - old if value >= old else value  # type: ignore[assignment]
        stepped = before is None or now["iterations"] != before["iterations"]
        for name, value in (("running", now["running"]), ("waiting", now["waiting"]), ("busy", float(now["running"] > 0 and stepped))):
            self.sums[name] += value * dt  # type: ignore[assignment]

    def share(self, name: str) -> float:
        """Mean over time of `running`, `waiting`, `busy`."""
        return self.sums[name] / self.seconds if self.seconds else 0.0


def ratio(sums: Mapping[str, float], part: str, whole: str) -> float:
    return sums.get(part, 0.0) / sums[whole] if sums.get(whole) else 0.0


def balance(tokens: Iterable[float]) -> float:
    """Tokens of the server that made most, over the mean: 1 is even, n means that one of n made all. 0 where none made any."""
    values = list(tokens)
    return max(values) * len(values) / sum(values) if sum(values) else 0.0


def summary(meters: Iterable[Meter]) -> dict[str, float]:
    """The step's metrics of all servers together; those of speculative decoding where there is any."""
    seen = [m for m in meters if m.seconds]
    if not seen:
        return {}
    total: Counter[str] = Counter()
    for m in seen:
        total.update(m.sums)
    out = {
        "rollout/engine_busy": sum(m.share("busy") for m in seen) / len(seen),
        "rollout/engine_busy_min": min(m.share("busy") for m in seen),
        "rollout/engine_running": sum(m.share("running") for m in seen),
        "rollout/engine_waiting": sum(m.share("waiting") for m in seen),
        "rollout/engine_queue_s": ratio(total, "queue_s", "queued"),
        "rollout/engine_prefix_hits": ratio(total, "cache_hits", "cache_queries"),
        "rollout/engine_balance": balance(m.sums["tokens"] for m in seen),
    }
    if any(m.last and "drafts" in m.last for m in seen):
        out["rollout/spec_drafted"], out["rollout/spec_accepted"] = float(total["drafted"]), float(total["accepted"])
        out["rollout/spec_acceptance"] = ratio(total, "accepted", "drafted")
        out["rollout/spec_mean_len"] = 1.0 + ratio(total, "accepted", "drafts")  # tokens per step of a sequence
    return out


class Gauges:
    """Looks at every server each LOOK seconds, in a thread of its own. `targets()` says which there are, by index."""

    def __init__(self, targets: Callable[[], dict[int, str]]):
        self.targets = targets
        self.meters: dict[int, Meter] = {}
        self.idle: set[int] = set()
        self._lock, self._end = threading.Lock(), threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()), daemon=True, name="gauges")
        self._thread.start()

    async def _watch(self) -> None:
        clients: dict[str, EngineClient] = {}

        async def look(i: int, url: str) -> None:
            now = None
            try:
                now = read(await clients.setdefault(url, EngineClient(url)).metrics(timeout=5))
            except EngineSlow:
                return  # it is busy, or this machine is; the next look covers this time, too
            except VimeError:
                pass
            with self._lock:
                self.meters.setdefault(i, Meter()).add(now, time.monotonic())

        while not self._end.is_set():
            targets = self.targets()
            with self._lock:
                for i in set(self.meters) - set(targets):  # out: its time does not count
                    self.meters[i].at = None
            await asyncio.gather(*(look(i, url) for i, url in targets.items()), asyncio.sleep(LOOK))
        for c in clients.values():
            await c.close()

    def take(self) -> dict[int, Meter]:
        """Each server's meter of the time since the last call."""
        with self._lock:
            taken = {i: m for i, m in self.meters.items() if m.seconds}
            for i, m in taken.items():
                self.meters[i] = Meter(m.last, m.at)
            return taken

    def idlers(self, meters: dict[int, Meter]) -> tuple[set[int], set[int]]:
        """Servers that were idle for more than ALARM of the time, and those of them that weren't the time before."""
        found = {i for i, m in meters.items() if m.looks >= ENOUGH and m.share("busy") < 1 - ALARM}
        news, self.idle = found - self.idle, found
        return found, news

    def close(self) -> None:
        self._end.set()
        self._thread.join(timeout=10)
