"""The Gateway in front of a router and a real vLLM server."""

import asyncio
import json
from collections.abc import Callable, Iterator

import pytest
from transformers import AutoModelForCausalLM, Qwen3Config

from tests.agents_kit import model_folder, post, said
from tests.conftest import Server
from tests.integration.rollout_kit import Stack
from vime.agents.gateway import Gateway
from vime.agents.gateway.parse import by_server
from vime.agents.gateway.record import Asked, Turn
from vime.config import Config
from vime.data.tokenizer import Tokenizer
from vime.errors import VimeError
from vime.rollout.engine import Engine
from vime.rollout.http import EngineClient
from vime.sections import GatewayConfig

TOOLS = [{"type": "function", "function": {"name": "run", "parameters": {"type": "object", "properties": {"command": {"type": "string"}}}}}]


@pytest.fixture(scope="module")
def parsing(make_config: Callable[..., Config], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server with parsers, over random weights: the session's model has no brackets, so it can't say a call."""
    folder = tmp_path_factory.mktemp("parsing")
    model = model_folder(folder / "model", "qwen3")
    shape = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 32}
    shape |= {"vocab_size": Tokenizer(model).size, "max_position_embeddings": 1024, "dtype": "float32"}
    AutoModelForCausalLM.from_config(Qwen3Config(**shape)).save_pretrained(model)
    parsers = {"enable_auto_tool_choice": True, "tool_call_parser": "hermes", "reasoning_parser": "deepseek_r1"}
    cfg = make_config(model=model, rollout={"max_context_len": 1024, "concurrency": 8}, vllm=parsers)
    engine = Engine(cfg, 0, str(folder))
    try:
        yield Server(engine, engine.start(), cfg)
    finally:
        engine.stop()


def test_rows_have_the_tokens_and_logprobs_of_the_server(stack: Stack):
    """A dialogue over HTTP and one in this process: logprobs are what the server gives for the row's tokens, scored as a whole."""

    async def go():
        g = await Gateway.open(stack.url, stack.server.cfg.model, GatewayConfig(parser="text"), context=stack.server.cfg.rollout.max_context_len)
        client = EngineClient(stack.server.url)
        try:
            await g.start()
            s = g.session(sampling={"temperature": 1.0})
            messages = [{"role": "user", "content": "abc"}]
            for text in ("de", "fgh"):
                url = f"{g.base_url(s)}/chat/completions"
                status, got = await post(url, {"messages": messages, "max_tokens": 6, "temperature": 0.1})
                assert status == 200, got
                messages += [got["choices"][0]["message"], {"role": "user", "content": text}]
            turn = await s.turn(messages, params={"max_tokens": 4})
            assert turn.prompt_tokens > got["usage"]["total_tokens"]
            (row,) = s.finish()
            scored = (await client.prompt_logprobs(row.tokens))[row.prompt_length - 1 :]
            assert len(row.turns) == 3 and sum(row.loss_mask) >= 3 and len(scored) == len(row.loss_mask)
            for mask, lp, other in zip(row.loss_mask, row.logprobs, scored):
                assert (lp == pytest.approx(other, abs=1e-3)) if mask else lp == 0.0
            with pytest.raises(VimeError, match="too long"):
                await g.session().turn([{"role": "user", "content": "a" * 200}])
        finally:
            await client.close()
            await g.close()

    asyncio.run(go())


def test_a_server_without_parsers_says_how_to_start_it(stack: Stack):
    """Also behind a router, which does not parse."""
    for url in (stack.server.url, stack.url):
        with pytest.raises(VimeError, match=rf"{stack.server.url} was started without parsers.*--tool-call-parser"):
            asyncio.run(Gateway.open(url, stack.server.cfg.model, context=100))


def test_the_servers_parsers_take_texts_apart(parsing: Server):
    """What the Gateway reads off tokens by default (gateway.parser = "server")."""
    call, again = ("run", {"command": "ls"}), ("run", {"command": "echo 'ä'\n"})
    broken = 'Now.\n<tool_call>\n{"name": "run", "arguments": {"command": \n</tool_call>'
    texts = {  # reasoning, content, calls, whether it is ill-formed
        said(calls=[call]): ("", "", [call], False),
        said("I look.", [call]): ("", "I look.", [call], False),
        said(calls=[call, again]): ("", "", [call, again], False),
        said("I look.", [call], "What is there?"): ("What is there?", "I look.", [call], False),
        said("Done.", reasoning="Nothing is left."): ("Nothing is left.", "Done.", [], False),
        "a < b, {c}": ("", "a < b, {c}", [], False),
        broken: ("", broken, [], True),
    }

    async def go():
        g = await Gateway.open(parsing.url, parsing.cfg.model)
        try:
            asked = Asked([{"role": "user", "content": "ls"}], TOOLS)
            prompt = g.template.full(asked.messages, TOOLS)
            for text, (reasoning, content, calls, ill_formed) in texts.items():
                whole = text if text.startswith("<think>") else f"<think>\n\n</think>\n\n{text}"  # what nothing ends is all reasoning
                turn = Turn("t", output_ids=g.tokenizer.encode([whole + g.tokenizer.special["eos_token"]], False)[0], ended=True)
                m = await g._message(turn, asked, prompt)
                called = [(c["function"]["name"], json.loads(c["function"]["arguments"])) for c in m.get("tool_calls", [])]
                assert (m.get("reasoning_content", ""), m["content"], called, turn.ill_formed) == (reasoning, content, calls, ill_formed), text
            only_ended = Turn("t", output_ids=turn.output_ids[-1:], ended=True)
            assert (await g._message(only_ended, asked, prompt))["content"] == "" and not only_ended.ill_formed
        finally:
            await g.close()

    asyncio.run(go())


def test_what_a_parsing_server_samples_is_its_parsed_message(parsing: Server):
    """End to end: sampled by the server, parsed by it, and the row is of the tokens that were sampled."""

    async def go():
        g = await Gateway.open(parsing.url, parsing.cfg.model)
        try:
            await g.start()
            s = g.session(sampling={"temperature": 1.0, "ignore_eos": True})
            body = {"messages": [{"role": "user", "content": "ls"}], "tools": TOOLS, "max_tokens": 12}
            status, got = await post(f"{g.base_url(s)}/chat/completions", body)
            assert status == 200, got
            (row,) = s.finish()
            sampled = row.tokens[row.prompt_length :]
            p = await by_server(g.parsing, sampled, row.tokens[: row.prompt_length][-256:], TOOLS, "auto", g.tokenizer.decode(sampled))
            message = got["choices"][0]["message"]
            assert 0 < sum(row.loss_mask) == got["usage"]["completion_tokens"] <= 12
            assert (message.get("reasoning_content") or "", message["content"] or "") == (p.reasoning, p.content) and any((p.reasoning, p.content))
        finally:
            await g.close()

    asyncio.run(go())
