"""Spans: each sample's way is one OpenTelemetry trace, written by every process that it passes, and put together when it is read.

Trace ids are computed from run name and sample number, so that no context travels with a sample: a span of sample 7 in the worker, one in a
trainer rank and one in the controller are of the same trace. Each process appends to <run>/trace/<process>.jsonl, and sends to an OTLP endpoint.
"""

import hashlib
import sys
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from vime.config import Config
from vime.errors import VimeError

FOLDER = "trace"  # in the run's folder
SIBLINGS = 1 << 40  # Sample.uid modulo this is the number that samples of one rollout share
STAGES = ["prompt", "queue", "generate", "reward", "put", "lease", "load", "train", "publish"]  # of a sample's way, in order
scope: ContextVar[str] = ContextVar("scope", default="")  # the eval dataset whose samples are under way in this task


class Out(NamedTuple):
    """Where this process's spans go: the run's name, this process's, a file of lines or None, an OpenTelemetry processor or None, and its resource."""

    run: str
    process: str
    file: Any
    otlp: Any
    resource: Any


_out: Out | None = None  # None: nothing is recorded, `span` and `record` return at once


def start(cfg: Config, process: str) -> None:
    """Record this process's spans from here on, if [trace] says so. `process`: its name, unlike that of any other of the run."""
    global _out
    if not (cfg.trace.file or cfg.trace.otlp):
        return
    otlp = file = resource = None
    if cfg.trace.file:
        (cfg.folder / FOLDER).mkdir(parents=True, exist_ok=True)
        file = open(cfg.folder / FOLDER / f"{process}.jsonl", "ab", buffering=0)  # noqa: SIM115 (the process's end closes it)
    if cfg.trace.otlp:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        otlp = BatchSpanProcessor(OTLPSpanExporter(cfg.trace.otlp), max_queue_size=1 << 16, schedule_delay_millis=500, max_export_batch_size=1 << 13)
        resource = Resource({"service.name": "vime", "service.instance.id": process, "vime.run": cfg.name})
    _out = Out(cfg.name, process, file, otlp, resource)


def stop() -> None:
    """Send what waits, and record nothing more."""
    global _out
    if _out and _out.otlp:
        _out.otlp.shutdown()
    if _out and _out.file:
        _out.file.close()
    _out = None


def ids(run: str, what: str) -> tuple[int, int]:
    """(trace id, id of its root span) of sample or step `what`, the same in every process."""
    digest = hashlib.blake2b(f"{run}/{what}".encode(), digest_size=24).digest()
    return int.from_bytes(digest[:16]) or 1, int.from_bytes(digest[16:]) or 1


def record(name: str, start: int, end: int, uids: Iterable[int] = (), **attributes: Any) -> None:
    """A span from `start` to `end` (ns since the epoch) in the trace of each sample, by uid; of none: of this process, in the trace of its `step`."""
    global _out
    if not _out:
        return
    lines, evaluation = [], scope.get()
    for uid in [*uids] or (None,):
        own = attributes | ({} if uid is None else {"sample": uid}) | ({"eval": evaluation} if evaluation else {})
        what = f"step {attributes.get('step')}" if uid is None else f"{evaluation}sample {uid % SIBLINGS}"
        trace, root = ids(_out.run, what)
        span = root if name == "sample" else ids(_out.run, f"{what} {uid} {name} {start} {_out.process}")[1]
        parent = None if span == root else root
        if _out.otlp:
            _out.otlp.on_end(_readable(name, trace, span, parent, start, end, own))
        hexed = {"trace": f"{trace:032x}", "span": f"{span:016x}", "parent": parent and f"{parent:016x}"}
        lines.append(orjson.dumps({"name": name} | hexed | {"start": start, "end": end, "attributes": own}))
    try:
        if _out.file:
            _out.file.write(b"\n".join([*lines, b""]))
    except OSError as e:  # a full disk: that is no reason to lose the run
        print(f"warning: spans are not written any more: {_out.file.name}: {e}", file=sys.stderr, flush=True)
        _out = _out._replace(file=None)


def _readable(name: str, trace: int, span: int, parent: int | None, start: int, end: int, attributes: dict[str, Any]) -> Any:
    """A finished span of OpenTelemetry's SDK; it has no other way to say where a span that is over began."""
    from opentelemetry.sdk.trace import ReadableSpan
    from opentelemetry.trace import SpanContext, TraceFlags

    assert _out
    flags = TraceFlags(TraceFlags.SAMPLED)
    here, above = SpanContext(trace, span, False, flags), SpanContext(trace, parent, False, flags) if parent else None
    return ReadableSpan(name, here, above, _out.resource, attributes, start_time=start, end_time=end)


@contextmanager
def span(name: str, uids: Iterable[int] = (), phase: bool = False, **attributes: Any) -> Iterator[list[int]]:
    """`record` the block for the samples `uids`, and those that the block adds to the list it gets; with `phase` for the process, too. Where the
    block raises, the span has the attribute `error`."""
    of: list[int] = []
    if not _out:
        yield of
        return
    of, start = list(uids), time.time_ns()
    try:
        yield of
    except BaseException as e:
        attributes["error"] = f"{type(e).__name__}: {e}"[:200]
        raise
    finally:
        end = time.time_ns()
        if phase:
            record(name, start, end, **attributes)
        if of:
            record(name, start, end, of, **attributes)


def step(number: int, phases: dict[str, tuple[float, float]], batch: Iterable[Any]) -> None:
    """The controller's phases of a step, by time.monotonic(); and of each sample of its batch (of Flights) the way as a whole, the wait to be
    taken, and the publish that made its step count."""
    if not _out:
        return
    shift = time.time_ns() - time.monotonic_ns()
    at = {name: (int(a * 1e9) + shift, int(b * 1e9) + shift) for name, (a, b) in phases.items()}
    for name, times in at.items():
        record(name, *times, step=number)
    for f in batch:
        of = [m.index for m in f.metas]
        record("lease", f.ready or f.born, f.taken or f.ready or f.born, of, step=number)
        record("publish", *at["sync"], of, step=number)
        for m in f.metas:
            known = {"group": f.group_index, "reward": m.reward, "status": str(m.status), "response_length": m.response_length}
            record("sample", f.born, at["sync"][1], [m.index], step=number, **known)


def load(folder: Path) -> tuple[list[dict[str, Any]], int]:
    """All spans of a run in order of their start, each with its `process`, and how many lines were no span (torn by a kill)."""
    found, bad = [], 0
    for file in sorted((folder / FOLDER).glob("*.jsonl")):
        for line in file.read_bytes().splitlines():
            try:
                found.append(orjson.loads(line) | {"process": file.stem})
            except (orjson.JSONDecodeError, TypeError):
                bad += 1
    return sorted(found, key=lambda s: s["start"]), bad


def ways(spans: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per trained sample its `sample`, `step`, `seconds`, and `stages`: seconds in each, `other` being the rest. Slowest first. Of a sample that
    was trained twice, as a resume does, the last time counts; a stage counts as far as it lies within the way."""
    of: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for s in spans:
        if "sample" in s["attributes"] and "eval" not in s["attributes"]:
            of[s["attributes"]["sample"]].append(s)
    out = []
    for own in of.values():
        if root := next((s for s in reversed(own) if s["name"] == "sample"), None):
            stages = dict.fromkeys(STAGES, 0.0)
            for s in own:
                if s["name"] in stages:
                    stages[s["name"]] += max(0, min(s["end"], root["end"]) - max(s["start"], root["start"])) / 1e9
            seconds = (root["end"] - root["start"]) / 1e9
            out.append(root["attributes"] | {"seconds": seconds, "stages": stages | {"other": max(0.0, seconds - sum(stages.values()))}})
    return sorted(out, key=lambda w: -w["seconds"])


def perfetto(spans: Sequence[dict[str, Any]], file: Path) -> int:
    """Write Chrome's trace-event JSON, which ui.perfetto.dev opens: a process each, its phases in the first row, samples in as many more as there
    were at once; arrows join the spans of a sample. Returns the number of spans."""
    pids = {p: i for i, p in enumerate(dict.fromkeys(s["process"] for s in spans), 1)}
    events: list[dict[str, Any]] = [{"ph": "M", "name": "process_name", "pid": i, "tid": 0, "args": {"name": p}} for p, i in pids.items()]
    lanes: dict[str, list[int]] = defaultdict(list)  # when each row of a process is free again
    seen: set[int] = set()
    for s in spans:
        free, tid, uid = lanes[s["process"]], 0, s["attributes"].get("sample")
        if uid is not None:
            tid = next((i for i, end in enumerate(free, 1) if end <= s["start"]), len(free) + 1)
            free[tid - 1 :] = [s["end"], *free[tid:]]
        at = {"pid": pids[s["process"]], "tid": tid, "ts": s["start"] / 1e3}
        events.append(at | {"ph": "X", "name": s["name"], "dur": (s["end"] - s["start"]) / 1e3, "args": s["attributes"] | {"trace": s["trace"]}})
        if uid is not None and s["name"] != "sample":
            events.append(at | {"ph": "t" if uid in seen else "s", "name": "way", "cat": "way", "id": s["trace"]})
            seen.add(uid)
    file.write_bytes(orjson.dumps({"traceEvents": events, "displayTimeUnit": "ms"}))
    return len(spans)


def command(run: str, slowest: int, file: str | None) -> int:
    """`vime trace`. Raises: VimeError where the run recorded nothing."""
    spans, bad = load(Path(run))
    rows, names = ways(spans), [*STAGES, "other"]
    if not spans:
        raise VimeError(f"{run}/{FOLDER} holds no spans", "run with trace.file=true")
    seconds = sum(r["seconds"] for r in rows) or 1.0
    shares = sorted(((sum(r["stages"][k] for r in rows) / seconds, k) for k in names), reverse=True)
    print(
        f"{len(rows)} trained samples, {len(spans)} spans, {bad} damaged lines; of their time "
        + ", ".join(f"{k} {v:.0%}" for v, k in shares if v >= 0.005)
    )
    print(f"{'sample':>10}{'step':>7}{'seconds':>9}" + "".join(f"{k:>10}" for k in names))
    for r in rows[:slowest]:
        print(f"{r['sample']:>10}{r['step']:>7}{r['seconds']:>9.3f}" + "".join(f"{r['stages'][k]:>10.3f}" for k in names))
    if file:
        print(f"{perfetto(spans, Path(file))} spans in {file}: open it at https://ui.perfetto.dev")
    return 0
