"""The providers' own client libraries, which vLLM brings along, read what the Gateway says."""

import asyncio
import json

import anthropic
import openai
import pytest

from tests.agents_kit import ScriptedEngine, check, gateway, model_folder, said

SCHEMA = {"type": "object", "properties": {"path": {"type": "string"}}}
FIRST = said("I read.", [("read", {"path": "a.py"}), ("read", {"path": "b.py"})], "thinking of it")


def run(tmp_path, go):
    folder = model_folder(tmp_path)

    async def main():
        engine = ScriptedEngine(folder, [FIRST, "It is done.", {"text": "cut", "finish_reason": "length"}])
        async with gateway(engine, folder) as g:
            s = g.session()
            await go(g, s)
            metrics, rows = s.metrics(), s.finish()
            assert metrics["agent/trainable_fraction"] == 1.0 and len(rows) == 1 and len(check(engine, rows)) == len(engine.sampled), metrics

    asyncio.run(main())


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic(tmp_path, stream):
    async def go(g, s):
        async with anthropic.AsyncAnthropic(base_url=f"http://127.0.0.1:{g.port}", auth_token=s.token, api_key=None, max_retries=0) as client:
            tools = [{"name": "read", "description": "reads", "input_schema": SCHEMA}]
            messages = [{"role": "user", "content": "go"}]
            for reason in ("tool_use", "end_turn", "max_tokens"):
                kw = {"model": "m", "max_tokens": 500, "messages": messages, "tools": tools}
                if stream:
                    async with client.messages.stream(**kw) as events:
                        got = await events.get_final_message()
                else:
                    got = await client.messages.create(**kw)
                assert got.stop_reason == reason and got.usage.input_tokens > 10 and got.usage.output_tokens > 2
                uses = [b for b in got.content if b.type == "tool_use"]
                if uses:
                    assert [b.type for b in got.content] == ["thinking", "text", "tool_use", "tool_use"] and got.content[
                        0
                    ].thinking == "thinking of it"
                    assert [b.input for b in uses] == [{"path": "a.py"}, {"path": "b.py"}]
                results = [{"type": "tool_result", "tool_use_id": b.id, "content": "text"} for b in uses]
                messages += [{"role": "assistant", "content": got.content}, {"role": "user", "content": results or "go on"}]
            assert (await client.messages.count_tokens(model="m", messages=messages[:1])).input_tokens > 5
            assert (await client.models.list()).data[0].id == "scripted"
            s.finish()
            with pytest.raises(anthropic.AuthenticationError, match="closed"):
                await client.messages.create(model="m", max_tokens=5, messages=messages)

    run(tmp_path, go)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_chat(tmp_path, stream):
    async def go(g, s):
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{g.port}/v1", api_key=s.token, max_retries=0) as client:
            tools = [{"type": "function", "function": {"name": "read", "description": "reads", "parameters": SCHEMA}}]
            messages = [{"role": "user", "content": "go"}]
            for reason in ("tool_calls", "stop", "length"):
                kw = {"model": "m", "messages": messages, "tools": tools}
                if stream:
                    async with client.chat.completions.stream(**kw, stream_options={"include_usage": True}) as events:
                        async for _ in events:
                            pass
                        got = await events.get_final_completion() if reason != "length" else events.current_completion_snapshot
                else:
                    got = await client.chat.completions.create(**kw)
                choice = got.choices[0]
                assert choice.finish_reason == reason and got.usage.prompt_tokens > 10
                calls = choice.message.tool_calls or []
                if calls:
                    assert [json.loads(c.function.arguments) for c in calls] == [{"path": "a.py"}, {"path": "b.py"}]
                messages.append(
                    {
                        "role": "assistant",
                        "content": choice.message.content,
                        **({"tool_calls": [c.model_dump(include={"id", "type", "function"}) for c in calls]} if calls else {}),
                    }
                )
                messages += [{"role": "tool", "tool_call_id": c.id, "content": "text"} for c in calls] or [{"role": "user", "content": "go on"}]
            assert (await client.models.list()).data[0].id == "scripted"
            with pytest.raises(openai.BadRequestError):
                await client.chat.completions.create(model="m", messages=[{"role": "nobody", "content": ""}])

    run(tmp_path, go)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_responses(tmp_path, stream):
    async def go(g, s):
        async with openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{g.port}/v1", api_key=s.token, max_retries=0) as client:
            tools = [{"type": "function", "name": "read", "description": "reads", "parameters": SCHEMA, "strict": False}]
            items = [{"role": "developer", "content": "about"}, {"role": "user", "content": "go"}]
            for status in ("completed", "completed", "incomplete"):
                kw = {"model": "m", "input": items, "tools": tools, "store": False}
                if stream:
                    async with client.responses.stream(**kw) as events:
                        seen = [e.type async for e in events]
                        assert seen[0] == "response.created" and seen[-1] == f"response.{status}"
                        got = await events.get_final_response() if status == "completed" else None
                else:
                    got = await client.responses.create(**kw)
                if got is None:
                    break
                assert got.status == status and got.usage.input_tokens > 10
                calls = [i for i in got.output if i.type == "function_call"]
                if calls:
                    assert [i.type for i in got.output] == ["reasoning", "message", "function_call", "function_call"] and got.output_text == "I read."
                    assert [json.loads(c.arguments) for c in calls] == [{"path": "a.py"}, {"path": "b.py"}]
                items += [i.model_dump(exclude_none=True, exclude={"parsed_arguments", "parsed"}) for i in got.output]
                items += [{"type": "function_call_output", "call_id": c.call_id, "output": "text"} for c in calls] or [
                    {"role": "user", "content": "go on"}
                ]

    run(tmp_path, go)
