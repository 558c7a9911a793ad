"""The Gateway in front of a router and a real vLLM server."""

import asyncio

import pytest

from tests.agents_kit import post
from tests.integration.rollout_kit import Stack
from vime.agents.gateway import Gateway
from vime.errors import VimeError
from vime.rollout.http import EngineClient
from vime.sections import GatewayConfig


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
