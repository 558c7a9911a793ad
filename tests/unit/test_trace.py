"""Spans: of one trace whoever records them, within their sample's way, and readable for Perfetto and OTLP."""

import http.server
import json
import re
import threading
import time
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime import config
from vime.cli import main
from vime.config import Config
from vime.errors import VimeError
from vime.observe import trace
from vime.sample import SIBLING


def cfg(folder: Path, **keys) -> Config:
    return config.validate({"name": "r", "run_dir": str(folder), "model": "m", "data": {"prompts": "p"}, "trace": keys}, "test")


@pytest.fixture(autouse=True)
def off():
    yield
    trace.stop()


def way(folder: Path, uids: list[int], **keys) -> None:
    """What the processes of a run record of some samples."""
    c = cfg(folder, **keys)
    trace.start(c, "worker-0")
    with trace.span("generate", uids), pytest.raises(ValueError), trace.span("reward", uids):
        time.sleep(0.002)
        raise ValueError("wrong")
    trace.stop()
    trace.start(c, "trainer-0")
    with trace.span("train", phase=True, step=1) as of:
        of += uids
    trace.stop()
    trace.start(c, "controller")
    now, metas = time.time_ns(), [SimpleNamespace(index=u, reward=1.0, status="completed", response_length=3) for u in uids]
    flight = SimpleNamespace(metas=metas, group_index=0, born=now - 10**9, ready=now - 10**8, taken=now)
    t = time.monotonic()
    trace.step(1, {"rollout": (t - 1, t), "sync": (t, t + 0.5)}, [flight])
    trace.stop()


def test_a_samples_spans_are_one_trace_in_every_process(tmp_path):
    way(tmp_path, [7, 8, 7 + SIBLING], file=True)
    spans, bad = trace.load(tmp_path / "r")
    assert bad == 0
    of = defaultdict(set)
    for s in (s for s in spans if "sample" in s["attributes"]):
        of[s["attributes"]["sample"] % SIBLING].add(s["trace"])
    assert {k: len(v) for k, v in of.items()} == {7: 1, 8: 1} and of[7] != of[8], "one trace a rollout, its siblings included"
    own = [s for s in spans if s["attributes"].get("sample") == 8]
    assert {s["process"] for s in own} == {"worker-0", "trainer-0", "controller"}
    assert sorted(s["name"] for s in own) == ["generate", "lease", "publish", "reward", "sample", "train"]
    (root,) = (s for s in own if s["name"] == "sample")
    assert root["parent"] is None and {s["parent"] for s in own if s is not root} == {root["span"]}
    assert len({s["span"] for s in spans if s["name"] != "sample"}) == sum(s["name"] != "sample" for s in spans)
    assert next(s for s in own if s["name"] == "reward")["attributes"]["error"] == "ValueError: wrong"
    assert [s["attributes"] for s in spans if s["name"] == "train" and "sample" not in s["attributes"]] == [{"step": 1}], "the rank's own phase"


def test_off_nothing_is_recorded(tmp_path):
    way(tmp_path, [1])
    assert not (tmp_path / "r").exists()
    with pytest.raises(VimeError, match="holds no spans"):
        trace.command(str(tmp_path / "r"), 5, None)


def test_an_evaluations_samples_are_no_trained_ones(tmp_path):
    trace.start(cfg(tmp_path, file=True), "worker-0")
    token = trace.scope.set("held-out")
    trace.record("generate", 1, 2, [7])
    trace.scope.reset(token)
    trace.stop()
    way(tmp_path, [7], file=True)
    spans, _ = trace.load(tmp_path / "r")
    assert len({s["trace"] for s in spans if s["attributes"].get("sample") == 7}) == 2
    assert [w["sample"] for w in trace.ways(spans)] == [7] and trace.ways(spans)[0]["stages"]["generate"] < 1


def test_command_shows_the_slowest_and_tolerates_torn_lines(tmp_path, capsys):
    way(tmp_path, [3, 4], file=True)
    with open(tmp_path / "r/trace/worker-0.jsonl", "a") as f:
        f.write('{"name": "gener')
    assert main(["trace", str(tmp_path / "r"), "--slowest", "1", "--perfetto", str(tmp_path / "p.json")]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("2 trained samples") and "1 damaged lines" in lines[0]
    assert lines[1].split() == ["sample", "step", "seconds", *trace.STAGES, "other"] and lines[2].split()[0] in ("3", "4")
    assert float(lines[2].split()[2]) == pytest.approx(1.5, abs=0.3)
    events = json.loads((tmp_path / "p.json").read_text())["traceEvents"]
    assert {e["args"]["name"] for e in events if e["ph"] == "M"} == {"worker-0", "trainer-0", "controller"}


spans_of_a_run = st.lists(
    st.tuples(st.sampled_from([*trace.STAGES, "sample"]), st.integers(0, 4), st.integers(0, 1000), st.integers(0, 500), st.sampled_from("ab")),
    max_size=40,
)


@given(spans_of_a_run)
def test_stages_lie_within_the_way_and_lanes_never_overlap(tmp_path_factory, drawn):
    spans = sorted(
        ({"name": n, "start": a, "end": a + d, "process": p, "trace": str(u), "attributes": {"sample": u, "step": 1}} for n, u, a, d, p in drawn),
        key=lambda s: s["start"],
    )
    for w in trace.ways(spans):
        assert all(0 <= v <= w["seconds"] * len(spans) + 1e-12 for v in w["stages"].values())
        assert sum(w["stages"].values()) >= w["seconds"] - 1e-12, "every second is accounted for"
    file = tmp_path_factory.mktemp("p") / "p.json"
    assert trace.perfetto(spans, file) == len(spans)
    rows = defaultdict(list)
    for e in (e for e in json.loads(file.read_text())["traceEvents"] if e["ph"] == "X"):
        rows[e["pid"], e["tid"]].append((e["ts"], e["ts"] + e["dur"]))
    for row in rows.values():
        assert all(b <= a2 + 1e-9 for (_, b), (a2, _) in pairwise(row))


def test_spans_reach_an_otlp_endpoint(tmp_path):
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    got: list[bytes] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            got.append(self.rfile.read(int(self.headers["Content-Length"])))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        way(tmp_path, [5], otlp=f"http://127.0.0.1:{server.server_port}/v1/traces", file=True)
        server.shutdown()
    resources = [r for body in got for r in ExportTraceServiceRequest.FromString(body).resource_spans]
    sent = {s.span_id.hex(): s for r in resources for scope in r.scope_spans for s in scope.spans}
    spans, _ = trace.load(tmp_path / "r")
    assert {s["span"]: (s["trace"], s["parent"] or "", s["start"], s["end"]) for s in spans} == {
        k: (s.trace_id.hex(), s.parent_span_id.hex(), s.start_time_unix_nano, s.end_time_unix_nano) for k, s in sent.items()
    }
    named = {a.key: a.value.string_value for r in resources for a in r.resource.attributes}
    assert named["service.name"] == "vime" and named["vime.run"] == "r"


def test_grafanas_board_asks_for_metrics_that_there_are():
    root = Path(__file__).parents[2]
    text = "".join(p.read_text() for p in (root / "vime").rglob("*.py"))
    known = {"vime_" + re.sub(r"[^a-zA-Z0-9]+", "_", k) for k in re.findall(r'"([a-z]+/[a-z_]+)"', text)}
    known |= {f"vime_train_{k}" for k in re.findall(r'"([a-z_]+)"', (root / "vime/trainer/engine.py").read_text())}
    board = json.loads((root / "docs/grafana.json").read_text())
    asked = [t["expr"].partition("{")[0] for panel in board["panels"] for t in panel["targets"]]
    assert len(asked) > 15 and set(asked) <= known, set(asked) - known
