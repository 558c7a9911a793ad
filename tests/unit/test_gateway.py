"""The Gateway's recordings, limits, and what it does with input that means it harm."""

import asyncio
import gc
import gzip
import importlib.util
import json
import weakref
from pathlib import Path

import aiohttp
import orjson
import pytest
import zstandard

from benchmarks.gateway_replay import replay
from tests.agents_kit import ScriptedEngine, check, gateway, model_folder, post, said
from vime.agents.gateway import Gateway, Refused, Session, parse
from vime.errors import VimeError
from vime.sample import Sample, Status
from vime.sections import GatewayConfig

WIRE = sorted((Path(__file__).parents[1] / "data" / "wire").glob("*.json"))
USER = [{"role": "user", "content": "hello"}]
TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return model_folder(tmp_path_factory.mktemp("model"))


def run(folder, script, go, **limits):
    """go(gateway, engine) in a loop of its own."""

    async def main():
        engine = ScriptedEngine(folder, script, limits.pop("context", 1 << 20))
        async with gateway(engine, folder, **limits) as g:
            return await go(g, engine)

    return asyncio.run(main())


def at(g, path, control=False):
    return f"http://127.0.0.1:{g.control_port if control else g.port}{path}"


@pytest.mark.parametrize("file", WIRE, ids=lambda p: p.stem)
def test_recordings_are_trained_whole(file, folder):
    got = asyncio.run(replay(json.loads(file.read_text()), folder))
    titles = file.stem in ("claude_code_bare", "opencode")
    assert got["agent/trainable_fraction"] == 1.0 and got["agent/undelivered_tokens"] == 0
    assert bool(got["agent/masked_tokens"]) == titles == bool(got["agent/title_turns"])
    assert got["agent/trained_tokens"] + got["agent/masked_tokens"] == got["sampled"]
    assert got["agent/subagent_turns"] == (4 if file.stem == "claude_code_subagents" else 0)
    assert got["agent/compaction_turns"] == (1 if "compaction" in file.stem else 0)
    assert got["agent/turns"] == got["requests"] - got["agent/retries"] and got["agent/retries"] == ("retry" in file.stem)
    assert got["agent/rows"] == {"claude_code_subagents": 3, "claude_code_compaction": 3, "codex_compaction": 3}.get(file.stem, 1)


def test_gemini_is_trained_whole(folder):
    """As its CLI does: thoughts are dropped from the echo, calls get a signature of the client's own."""
    ask = {"role": "user", "parts": [{"text": "fix it"}]}
    call = {"functionCall": {"id": "a1", "name": "read", "args": {"path": "calc.py"}}, "thoughtSignature": "skip_thought_signature_validator"}
    result = {"role": "user", "parts": [{"functionResponse": {"id": "a1", "name": "read", "response": {"output": "text"}}}]}
    told = [ask, {"role": "model", "parts": [{"text": "I read."}, call]}, result, {"role": "model", "parts": [{"text": "All is well."}]}, ask]
    bodies = [{"contents": told[:n], "systemInstruction": {"parts": [{"text": "about"}]}, "generationConfig": {"temperature": 1}} for n in (1, 3, 5)]
    paths = [f"/v1beta/models/m:{a}" for a in ("streamGenerateContent", "generateContent", "streamGenerateContent")]
    headers = {"x-goog-api-key": "<token>"}
    posts = [{"method": "POST", "path": p, "query": "alt=sse", "headers": headers, "body": b} for p, b in zip(paths, bodies)]
    got = asyncio.run(replay(posts, folder))
    assert got["agent/trainable_fraction"] == 1.0 and got["agent/rows"] == 1 and got["agent/turns"] == 3 and got["agent/echo_edited"] == 0


def test_rows_become_samples(folder):
    async def go(g, engine):
        s = g.session()
        messages = list(USER)
        for text in ("again", "and again"):
            turn = await s.turn(messages, [TOOL])
            messages += [turn.message, {"role": "user", "content": text}]
        engine.version = 3
        last = await s.turn(messages, [TOOL], {"max_tokens": 2})
        (row,) = s.finish()
        sample = row.to_sample(Sample(index=5, group_index=2, label="l", metadata={"a": 1}))
        assert sample.tokens == row.tokens and sample.prompt_length == row.prompt_length and sample.weight_versions == [0, 3]
        assert sample.loss_mask == row.loss_mask and sample.rollout_log_probs == row.logprobs and sample.status is Status.TRUNCATED
        assert sample.label == "l" and sample.metadata == {"a": 1, "agent_kind": "main", "agent_turns": 3} and "one" in sample.response
        assert row.turns[-1] == last.id and last.finish_reason == "length" and len(last.output_ids) == 2
        sample.check()
        with pytest.raises(Refused):
            await s.turn(messages, [])

    run(folder, ["one", "two", "three"], go)


def test_malformed_calls_stay_text(folder):
    broken = '<tool_call>{"name": "f", "arguments": {"a" </tool_call>'

    async def go(g, engine):
        s = g.session()
        for _ in range(2):
            turn = await s.turn(USER, [TOOL])
            assert turn.ill_formed and turn.message["content"] == broken and "tool_calls" not in turn.message
        turn = await s.turn(USER, [TOOL])
        assert not turn.ill_formed and turn.message["tool_calls"][0]["function"] == {"name": "f", "arguments": '{"a": 1}'}
        assert s.metrics()["agent/ill_formed"] == 2 and len(check(engine, s.finish())) == len(engine.sampled)

    run(folder, [broken, broken, said("", [("f", {"a": 1})])], go)


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/chat/completions", "/v1/responses", "/v1beta/models/m:generateContent"])
@pytest.mark.parametrize(
    "arguments",
    ['{"a": NaN}', '{"a": 1e999}', '{"a": "\\ud83d"}', '{"a": ' + "[" * 240 + "]" * 240 + "}", '{"a": ' + "[" * 99_999],
    ids=["nan", "inf", "half", "deep", "endless"],
)
def test_calls_that_no_answer_can_carry_stay_text(path, arguments, folder):
    """Each is JSON to one reader or another; the client's answer must be whole whatever the policy samples."""
    sampled = '<tool_call>{"name": "f", "arguments": ' + arguments + "}</tool_call>"
    tools = {"/v1/messages": [{"name": "f"}], "/v1/chat/completions": [TOOL], "/v1/responses": [TOOL["function"] | {"type": "function"}]}
    body = PROTOCOLS[path] | {"tools": tools.get(path, [{"functionDeclarations": [{"name": "f"}]}])}
    body.pop("max_tokens", None)

    async def go(g, engine):
        s = g.session()
        status, got = await post(at(g, path), body, s.token)
        assert status == 200 and "<tool_call>" in str(got)
        assert s.turns[0].ill_formed and len(check(engine, s.finish())) == len(engine.sampled)

    run(folder, [sampled], go)


def test_types_of_a_parameter_may_be_several():
    kinds = {"a": {"type": ["string", "null"]}, "b": {"type": ["integer", "null"]}, "c": True, "d": {}}
    tools = [{"function": {"name": "f", "parameters": {"properties": kinds}}}]
    call = "<tool_call><function=f>%s</function></tool_call>"
    got = parse.own(
        "qwen_xml", call % "".join(f"<parameter={k}>{v}</parameter>" for k, v in {"a": "x y", "b": "3", "c": "z", "d": "7"}.items()), tools
    )
    assert json.loads(got.calls[0][1]) == {"a": "x y", "b": 3, "c": "z", "d": "7"} and not got.ill_formed
    tools[0]["function"]["parameters"]["properties"] = [1]
    assert parse.own("qwen_xml", call % "", tools).ill_formed, "a schema that is none"


PROTOCOLS = {
    "/v1/messages": {"model": "m", "max_tokens": 50, "messages": USER},
    "/v1/chat/completions": {"model": "m", "messages": USER},
    "/v1/responses": {"model": "m", "input": "hello"},
    "/v1beta/models/m:generateContent": {"contents": [{"role": "user", "parts": [{"text": "hello"}]}]},
}


@pytest.mark.parametrize("path", PROTOCOLS)
def test_each_protocol_refuses_in_its_own_shape(path, folder):
    body = PROTOCOLS[path]
    gemini = "v1beta" in path

    def shaped(got):
        assert set(got) == ({"type", "error"} if path == "/v1/messages" else {"error"})
        said_ = got["error"]["message"]
        assert isinstance(said_, str) and "\n" not in said_ and isinstance(got["error"].get("status", got["error"].get("type")), str)
        return True

    async def go(g, engine):
        s = g.session()
        url, key = at(g, path), s.token
        deep = orjson.dumps(body)[:-1] + b',"x":' + b"[" * 300 + b"]" * 300 + b"}"
        wrong = [
            b"", b"{", b"[1]", b"null", b'"x"', b"\xff\xfe", b"[" * 2000, {}, {"messages": 3}, {"messages": [3]}, {"messages": [{}]}, {"messages": []},
            {"input": 7}, {"input": [7]}, {"contents": [7]}, {"contents": "x"}, deep, body | {"tools": [7]}, body | {"tools": [{"functionDeclarations": [{}]}]},
        ]  # fmt: skip
        for given in wrong[:-1] if not gemini else wrong:
            status, got = await post(url, given, key)
            assert status == 400 and shaped(got), given
        lone = orjson.dumps(body).replace(b"hello", b"\\ud83d")
        assert (await post(url, lone, key))[0] == 400 and not engine.requests
        for headers, status in (({}, 401), ({"Authorization": "Bearer nonsense"}, 401), ({"x-api-key": g.secret}, 401)):
            assert (await post(url, body, headers=headers))[0] == status
        status, got = await post(url, b"x" * 3000, key)
        assert status == 413 and shaped(got)
        for encoding, pack in (("gzip", gzip.compress), ("zstd", zstandard.compress), ("GZIP", gzip.compress)):
            h = {"Content-Encoding": encoding}
            assert (await post(url, pack(orjson.dumps(body)), key, headers=h))[0] == 200
            assert (await post(url, pack(b" " * 10_000_000), key, headers=h))[0] == 413, "a bomb"
            assert (await post(url, b"no such thing", key, headers=h))[0] == 400
        assert (await post(url, body, key, headers={"Content-Encoding": "rot13"}))[0] == 415
        odd = body | {"betas": ["x"], "unknown": {"a": []}, "tool_choice": {"type": "any"}, "metadata": {"user_id": "\U0001f600"}}
        assert (await post(url, odd, "", headers={"x-goog-api-key": key}))[0] == 200
        assert (await post(f"{at(g, '/sessions/' + key)}{path}", odd | {"unknown": 2}, "EMPTY"))[0] == 200, "the path names it"
        engine.script = lambda body, n: 500
        status, got = await post(url, body | {"unknown": 3}, key)
        assert status == 529 and shaped(got)
        engine.script = lambda body, n: 422
        status, got = await post(url, body | {"unknown": 4}, key)
        assert status == 400 and shaped(got) and "422" in got["error"]["message"]
        s.finish()
        status, got = await post(url, body, key)
        assert status == 401 and shaped(got) and len(engine.requests) == 5

    run(folder, lambda body, n: "hi", go, max_body=2048)


WITHOUT = {"content": [{"token_id": 1, "logprob": None}]}


@pytest.mark.parametrize("answer", [{"choices": "x"}, {"choices": [3]}, {"choices": [{"token_ids": [1]}]}, {"choices": [{"index": 0, "token_ids": 1}]},
                                    {"choices": [{"index": 0, "token_ids": [1], "logprobs": WITHOUT, "finish_reason": "stop"}]}])  # fmt: skip
def test_an_engine_that_answers_nonsense_is_down(answer, folder):
    async def go(g, engine):
        status, got = await post(at(g, "/v1/messages"), PROTOCOLS["/v1/messages"], g.session().token)
        assert status == 529 and "vLLM's form" in got["error"]["message"]

    run(folder, [{"raw": answer}], go)


def test_unknown_blocks_and_choices_are_no_faults(folder):
    blocks = [
        {"type": "text", "text": "hello"},
        {"type": "novel", "x": 1},
        {"type": "image", "source": {"data": "A" * 100}},
        {"type": "tool_result", "tool_use_id": "t"},
    ]
    echo = [
        {"type": "server_tool_use", "id": "s", "name": "w"},
        {"type": "redacted_thinking", "data": "z"},
        {"type": "tool_use", "id": "t", "name": "f"},
    ]

    async def go(g, engine):
        s = g.session()
        body = {
            "messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": echo}, {"role": "user", "content": blocks}],
            "tool_choice": 7,
        }
        assert (await post(at(g, "/v1/messages"), body, s.token))[0] == 200
        prompt = g.tokenizer.decode(engine.requests[0]["token_ids"])
        assert "[image omitted]" in prompt and '"novel"' in prompt and "AAAA" not in prompt
        items = [{"type": "web_search_call", "id": "w"}, {"type": "custom_tool_call", "call_id": "c", "name": "patch", "input": "x"}]
        items += [{"type": "custom_tool_call_output", "call_id": "c", "output": [{"type": "input_text", "text": "fine"}]}]
        tools = [
            {"type": "web_search"},
            {"type": "custom", "name": "patch"},
            {"type": "namespace", "name": "n", "tools": [{"type": "function", "name": "f"}]},
        ]
        engine.script = [said("", [("patch", {"input": "*** x"}), ("f", {})])]
        _, got = await post(at(g, "/v1/responses"), {"input": items, "tools": tools, "model": "m"}, s.token)
        assert got["output"][0]["type"] == "custom_tool_call" and got["output"][0]["input"] == "*** x" and got["output"][1]["namespace"] == "n"
        assert (await post(at(g, "/v1/chat/completions"), {"messages": USER, "n": 2}, s.token))[0] == 400
        engine.script = ["x"]
        assert (await post(at(g, "/v1/chat/completions"), {"messages": USER, "presence_penalty": 0, "top_k": -1}, s.token))[0] == 200
        assert (await post(at(g, "/v1/messages/count_tokens"), {"messages": USER}, s.token))[1]["input_tokens"] > 3

    run(folder, ["x"], go)


def test_a_task_that_sounds_like_a_title_is_trained(folder):
    """A client without tools, whose task has the words of a title request: what goes on was none."""

    async def go(g, engine):
        s, body = g.session(), {"messages": [{"role": "user", "content": "Fix: create table must quote the title column"}]}
        for _ in range(2):
            _, got = await post(at(g, "/v1/chat/completions"), body, s.token)
            body["messages"] += [got["choices"][0]["message"], {"role": "user", "content": "go on"}]
        assert [t.kind for t in s.turns] == ["main", "main"] and s.metrics()["agent/masked_tokens"] == 0
        assert len(check(engine, s.finish())) == len(engine.sampled)

    run(folder, ["one", "two"], go)


def test_small_calls(folder):
    async def go(g, engine):
        async with aiohttp.ClientSession() as http:
            async with http.head(at(g, "/")) as r:
                assert r.status == 200
            async with http.get(at(g, "/v1/models")) as r:
                assert (await r.json())["data"][0]["id"] == "scripted"
            for method, path in (("GET", "/nope"), ("POST", "/v1/nope"), ("PUT", "/v1/messages"), ("GET", "/sessions/x/v1/y")):
                async with http.request(method, at(g, path)) as r:
                    assert r.status == 404 and "error" in await r.json()

    run(folder, [], go)


def test_policy_has_no_way_to_its_reward(folder):
    async def go(g, engine):
        made = (await post(at(g, "/sessions", True), {"metadata": {"task": 1}}, g.secret))[1]
        path = f"/sessions/{made['id']}/reward"
        assert (await post(at(g, "/v1/messages"), {"messages": USER}, made["id"]))[0] == 401, "an id, which samples and logs have, is no key"
        for key in (made["token"], "", "x", made["id"]):
            assert (await post(at(g, path, True), {"reward": 1}, key))[0] == 401
        assert (await post(at(g, path), {"reward": 1}, made["token"]))[0] == 404
        assert (await post(at(g, f"/sessions/{made['token']}/reward"), {"reward": 1}, g.secret))[0] == 404
        assert (await post(at(g, path, True), {"reward": 0.5}, g.secret))[1]["reward"] == 0.5
        for wrong in ({"limits": {"nope": 1}}, {"limits": [1]}, {"sampling": "x"}):
            assert (await post(at(g, "/sessions", True), wrong, g.secret))[0] == 400
        assert (await post(at(g, "/sessions/zz", True), {}, g.secret))[0] == 404
        assert (await post(made["base_urls"]["anthropic"] + "/v1/messages", {"messages": USER}))[0] == 200
        done = (await post(at(g, f"/sessions/{made['id']}/finish", True), {}, g.secret))[1]
        assert done["reward"] == 0.5 and done["metadata"] == {"task": 1} and done["trajectories"][0]["status"] == "completed"
        assert (await post(at(g, f"/sessions/{made['id']}/finish", True), {}, g.secret))[0] == 404

    run(folder, ["hi"], go)


def test_caps(folder):
    async def go(g, engine):
        s = g.session()
        ask = lambda n: post(at(g, "/v1/chat/completions"), {"messages": [{"role": "user", "content": str(n)}]}, s.token)  # noqa: E731
        got = await asyncio.gather(*(ask(n) for n in range(9)))
        assert sorted(status for status, _ in got) == [200] * 6 + [400] * 3 and engine.most == 2
        assert all("max_requests" in b["error"]["message"] for status, b in got if status == 400)
        tight = g.session(limits={"max_tokens": 3})
        assert len((await tight.turn(USER)).output_ids) == 3
        with pytest.raises(Refused, match="max_tokens"):
            await tight.turn(USER)
        with pytest.raises(Refused, match="too long"):
            await g.session().turn([{"role": "user", "content": "x" * 300}])
        assert (await post(at(g, "/v1/messages"), {"messages": [{"role": "user", "content": "x" * 300}]}, g.session().token))[0] == 400

    run(folder, lambda body, n: {"text": "hello there", "delay": 0.02}, go, max_requests=6, max_concurrency=2, context=200)


def test_pings_and_failures_while_streaming(folder):
    async def go(g, engine):
        s = g.session()
        for path, ping, end in (("/v1/messages", "event: ping", "message_stop"), ("/v1/responses", ": ping", "response.completed")):
            body = PROTOCOLS[path] | {"stream": True}
            status, text = await post(at(g, path), body, s.token)
            assert status == 200 and ping in text and end in text and text.index(ping) > text.index("data: ")
            engine.script = lambda body, n: {"token_ids": [], "delay": 0.6}
            status, text = await post(at(g, path), body | {"again": 1}, s.token)
            assert status == 200 and ("event: error" in text or "response.failed" in text)
            engine.script = lambda body, n: {"text": "hi", "delay": 0.6}

    run(folder, lambda body, n: {"text": "hi", "delay": 0.6}, go, ping=0.05)


def test_aborted_generations_go_on(folder):
    async def go(g, engine):
        s = g.session()
        turn = await s.turn(USER)
        assert turn.message["content"] == "one two" and turn.versions[0] == turn.versions[-1] == 0 and turn.finish_reason == "stop"
        first = engine.spans[0][1]
        assert engine.requests[2]["token_ids"] == engine.requests[0]["token_ids"] + turn.output_ids[:first]
        assert len(check(engine, s.finish())) == len(engine.sampled)

    run(folder, [{"text": "one ", "finish_reason": "abort"}, {"text": "", "finish_reason": "abort"}, "two"], go)


def test_closing_ends_what_runs(folder):
    async def go(g, engine):
        s = g.session()
        asked = asyncio.create_task(post(at(g, "/v1/messages"), PROTOCOLS["/v1/messages"], s.token))
        inside = asyncio.create_task(s.turn(USER))
        while engine.running < 2:
            await asyncio.sleep(0.005)
        assert s.abort() == [] and not g.sessions
        assert (await asked)[0] == 409
        with pytest.raises(Refused):
            await inside
        while engine.running:
            await asyncio.sleep(0.005)

    run(folder, lambda body, n: {"text": "hi", "delay": 30}, go)


def test_journal_survives_a_crash(folder, tmp_path):
    journal, script = tmp_path / "j.jsonl", ["one", said("", [("f", {"a": 1})]), "three", "four"]

    async def go(g, engine):
        kept, gone = g.session(metadata={"k": 1}), g.session()
        await gone.turn(USER)
        gone.finish()
        body = {"messages": list(USER), "tools": [TOOL]}
        _, got = await post(at(g, "/v1/chat/completions"), body, kept.token)
        message = got["choices"][0]["message"]
        lost, task = kept.ask(*asked_for(kept, [*USER, {"role": "user", "content": "b"}]))
        await task  # sampled, and the crash comes before it is sent
        assert journal.stat().st_mode & 0o777 == 0o600
        whole = journal.read_bytes()
        journal.write_bytes(whole + b'{"e":"turn","session":"' + kept.id.encode())  # torn
        body["messages"] += [message, {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "r"}]
        other = await Gateway.open(engine.url, folder, GatewayConfig(parser="hermes"), journal=journal)
        await other.start()
        try:
            assert set(other.sessions) == {kept.id, kept.token}
            again = other.sessions[kept.id]
            assert again.metadata == {"k": 1} and [t.id for t in again.turns] == [t.id for t in kept.turns] and again.sampled == kept.sampled
            assert (await post(f"http://127.0.0.1:{other.port}/v1/chat/completions", body, kept.token))[0] == 200
            assert again.turns[-1].parent is again.turns[0] and lost.id in again.index
            assert again.ask(*asked_for(again, []))[0] is again.index[lost.id] and again.requests == 3, "a retry is joined, also now"
            assert again.metrics()["agent/undelivered_tokens"] == len(lost.output_ids)
            check(engine, again.finish())
        finally:
            await other.close()
        journal.write_bytes(b"nonsense\n" + whole)
        begun = whole.splitlines(keepends=True)
        for bad in (b"nonsense\n" + whole, b"[1]\n" + whole, b'{"e":"turn"}\n' + whole, b"".join(begun[1:]), whole.replace(b'"token"', b'"tokem"')):
            journal.write_bytes(bad)
            with pytest.raises(VimeError, match=r"j.jsonl.*damaged"):
                await Gateway.open(engine.url, folder, GatewayConfig(parser="hermes"), journal=journal)

    run(folder, script, go, journal=str(journal))


def test_nothing_is_kept_of_what_is_finished(folder):
    async def go(g, engine):
        kept = []
        for end in (Session.finish, Session.abort):
            s = g.session()
            for path in PROTOCOLS:
                assert (await post(at(g, path), PROTOCOLS[path], s.token))[0] == 200
            kept += [weakref.ref(s), *(weakref.ref(t) for t in s.turns)]
            end(s)
        del s
        await asyncio.sleep(0)
        gc.collect()
        assert len(kept) == 10 and [r() for r in kept if r() is not None] == [] and not g.sessions

    run(folder, lambda body, n: "hi", go)


def asked_for(session, messages):
    from vime.agents.gateway import Asked

    return Asked(messages), "key"


def test_servers_without_parsers_are_refused(folder):
    async def go(g, engine):
        with pytest.raises(VimeError, match="--tool-call-parser"):
            await Gateway.open(engine.url, folder, GatewayConfig())
        with pytest.raises(VimeError, match=r"127\.0\.0\.1:1/"):
            await Gateway.open("http://127.0.0.1:1", folder, GatewayConfig())

    run(folder, [], go)


def test_zstandard_is_there():
    assert importlib.util.find_spec("zstandard")
