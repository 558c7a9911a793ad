"""The dashboard's server: what it hands out of a run's folder, what it tolerates, and whom it answers."""

import asyncio
import json
import os
from pathlib import Path
from typing import Any

import pytest
from aiohttp.test_utils import TestClient, TestServer

from benchmarks.dash import make_run
from vime.cli import main
from vime.errors import VimeError
from vime.observe import dash


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "made"
    make_run(folder, samples=200, steps=5, tokens=12)
    return folder


def ask(folder: Path, *paths: str, token: str = "", engines: Any = None, **headers: str) -> list[tuple[int, Any, Any]]:
    """(status, body, headers) of each path, of one server."""

    async def go() -> list[tuple[int, Any, Any]]:
        out = []
        async with TestClient(TestServer(dash.application([folder], token, engines or (lambda f: [])))) as client:
            for path in paths:
                async with client.get(path, headers=headers) as r:
                    body = await r.read()
                    out.append((r.status, json.loads(body) if "json" in r.content_type else body, r.headers))
        return out

    return asyncio.run(go())


def test_index_and_samples(made):
    (_, index, _), (_, rest, _), (_, sample, _), (_, heads, _), (_, hits, _) = ask(
        made, "/api/index/0", "/api/index/0?from=150", "/api/sample/0/199", "/api/heads/0?ids=3,199", "/api/search/0?q=What%20is%207%20%2B"
    )
    assert index["whole"] and index["bad"] == 0 and index["first"] == 0 and set(index["columns"]) == set(dash.COLUMNS)
    assert index["columns"]["uid"] == list(range(200)) and rest["columns"]["uid"] == list(range(150, 200)) and rest["first"] == 150
    assert index["columns"]["step"] == [i // 40 + 1 for i in range(200)] and sum(index["columns"]["blocked"]) == 4
    assert sample["uid"] == 199 and len(sample["train_log_probs"]) == sum(sample["loss_mask"])
    assert heads[1]["response"] == sample["response"][:300] and heads[0]["label"] == "42"
    asked = [json.loads(line) for f in sorted((made / "samples").glob("*.jsonl")) for line in f.read_text().splitlines()]
    assert hits == [i for i, row in enumerate(asked) if "What is 7 +" in row["prompt"]] and hits


def test_what_is_damaged_is_left_out_and_counted(made, tmp_path):
    (tmp_path / "samples").mkdir()
    lines = (made / "samples/step_000001.jsonl").read_bytes().splitlines()
    odd = json.loads(lines[1]) | {"metadata": {"x": 1, "tokens": [1]}, "reward": {"score": 0.25}, "prompt": 'a "quoted", "tokens": [ text'}
    broken = [lines[0], b"\xff\xfe not json", lines[2][:200], json.dumps(odd).encode(), b"[1, 2]", b"", lines[3][:-30]]
    (tmp_path / "samples/step_000001.jsonl").write_bytes(b"\n".join(broken))
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "tr')
    (_, index, _), (_, whole, _), (_, metrics, head), (status, _, _) = ask(
        tmp_path, "/api/index/0", "/api/sample/0/1", "/api/file/0/metrics.jsonl", "/api/sample/0/99"
    )
    assert index["columns"]["uid"] == [0, 1] and index["bad"] == 4
    assert index["columns"]["reward"][1] == 0.25 and whole["prompt"] == odd["prompt"]
    assert metrics == b'{"step": 1}\n{"step": 2}\n' and head["X-From"] == "0"
    assert status == 404


def test_a_run_that_goes_on_and_one_that_begins_anew(made, tmp_path):
    rows = (made / "samples/step_000001.jsonl").read_bytes()
    (tmp_path / "samples").mkdir()
    first = tmp_path / "samples/step_000001.jsonl"
    first.write_bytes(rows)
    run = dash.Run(tmp_path)
    run.look()
    (tmp_path / "samples/step_000002.jsonl").write_bytes(rows)
    run.look()
    assert len(run.places) == 80 and run.columns[0] == [1] * 40 + [2] * 40
    first.write_bytes(rows[: rows.index(b"\n") + 1])
    os.utime(first, ns=(1, 1))
    run.look()
    assert len(run.places) == 41 and run.columns[0] == [1] + [2] * 40
    file = tmp_path / "metrics.jsonl"
    file.write_text('{"step": 1}\n')
    at = len(file.read_bytes())
    assert ask(tmp_path, f"/api/file/0/metrics.jsonl?from={at}")[0][1] == b""
    file.write_text('{"step": 1}\n{"step": 2}\n')
    assert ask(tmp_path, f"/api/file/0/metrics.jsonl?from={at}")[0][1:][0] == b'{"step": 2}\n'
    for last, wanted in ((-1, b""), (-12, b""), (-13, b'{"step": 2}\n'), (-999, b'{"step": 1}\n{"step": 2}\n')):
        _, body, head = ask(tmp_path, f"/api/file/0/metrics.jsonl?from={last}")[0]
        assert body == wanted and int(head["X-From"]) == 24 - len(wanted)
    file.write_text('{"s": 9}\n')  # a resume cuts lines off
    _, body, head = ask(tmp_path, f"/api/file/0/metrics.jsonl?from={at}")[0]
    assert body == b'{"s": 9}\n' and head["X-From"] == "0"


def test_only_files_of_the_run_are_handed_out(made):
    (made.parent / "secret.jsonl").write_text("{}\n")
    tried = ["/api/file/0/../secret.jsonl", "/api/file/0/trace/..%2f..%2fsecret.jsonl", "/api/file/0/%2e%2e/secret.jsonl", "/web/../dash.py", "/web/%2e%2e/dash.py",
             "/api/file/0/processes.json", "/api/file/7/metrics.jsonl", "/api/index/7"]  # fmt: skip
    assert [status for status, _, _ in ask(made, *tried)] == [404] * len(tried)
    assert ask(made, "/api/file/0/trace/controller.jsonl")[0][0] == 200


def test_a_token_is_asked_for_and_other_names_are_refused(made):
    assert [s for s, _, _ in ask(made, "/", "/api/runs", "/web/app.js", "/?token=wrong", token="right")] == [401] * 4
    first, then = ask(made, "/?token=right", "/api/runs", token="right")
    assert first[0] == 200 and "HttpOnly" in first[2]["Set-Cookie"] and "SameSite=Strict" in first[2]["Set-Cookie"] and then[0] == 200, (
        "the cookie suffices"
    )
    assert ask(made, "/api/runs", Host="evil.example")[0][0] == 403, "a name that was pointed at 127.0.0.1"
    assert ask(made, "/", token="right", Cookie="vime_token=right", Host="node7:80")[0][0] == 200
    policy = ask(made, "/")[0][2]["Content-Security-Policy"]
    assert "default-src 'self'" in policy and "unsafe-eval" not in policy


def test_engines_of_a_run_that_is_over(made):
    def over(folder: Path) -> list[dict]:
        raise VimeError(f"no run answers in {folder}")

    assert ask(made, "/api/engines/0", engines=over)[0][1] == {"error": f"no run answers in {made}"}
    assert ask(made, "/api/engines/0", engines=lambda f: [{"engine": 0}])[0][1] == {"engines": [{"engine": 0}]}


def test_live_is_who_holds_the_lock(made):
    import fcntl

    assert ask(made, "/api/runs")[0][1][0]["live"] is False
    with open(made / ".lock", "w") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        (run,) = ask(made, "/api/runs")[0][1]
        assert run["live"] is True and "controller.jsonl" in run["trace"]


def test_what_is_no_run_is_refused(tmp_path, capsys):
    assert main(["dash", str(tmp_path / "nothing")]) == 1
    assert "is no run's folder" in capsys.readouterr().err
