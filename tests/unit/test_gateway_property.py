"""Random rollouts of everything that clients do to a history: what is trained is what was sampled, once, after what the policy really saw."""

import asyncio
import json
import random

import aiohttp
import pytest

from tests.agents_kit import FAMILIES, ScriptedEngine, check, gateway, model_folder, said

CONVERSATIONS = 200
TOOLS = [
    {
        "type": "function",
        "function": {"name": n, "description": "a tool", "parameters": {"type": "object", "properties": {"path": {"type": "string"}}}},
    }
    for n in ("read", "edit")
]


class Policy:
    """The engine's script: each answer has a word of its own, by which the client's side finds it again."""

    def __init__(self, family: str, rng: random.Random):
        self.family, self.rng, self.engine = family, rng, None

    def __call__(self, body, n):
        rng, word = self.rng, f"w{n}x"
        kind = rng.random()
        calls = [(rng.choice(["read", "edit"]), {"path": word, "k": rng.randrange(9)})]
        if rng.random() < 0.3:
            calls.append(("read", {"path": f"{word} again"}))
        if kind < 0.5:
            text = said(rng.choice(["", f"I say {word}"]), calls, rng.choice(["", "the thing in there"]) if self.family == "qwen3" else "")
        elif kind < 0.6:
            text = f'<tool_call>\n{{"name": "read", "arguments": {{"path": "{word}" </tool_call>'
        else:
            text = f"the answer in {word} \u00e9\U0001f600 then"
        ids = self.engine.encode(text, end=False)
        if rng.random() < 0.2:  # not as the tokenizer would cut it
            ids = [i for c in text for i in self.engine.encode(c, end=False)]
        cut = rng.random() < 0.1
        return {
            "token_ids": ids if cut else [*ids, self.engine.end],
            "finish_reason": "length" if cut else "stop",
            "delay": rng.choice([0, 0, 0.001]),
        }


class Client:
    """A harness that speaks OpenAI's chat and treats its history badly."""

    def __init__(self, http, url, rng, system, engine):
        self.http, self.url, self.rng, self.engine, self.n = http, url, rng, engine, 0
        self.messages = [{"role": "system", "content": system}, self.user()]
        self.got: set[str] = set()

    def user(self, text="question"):
        self.n += 1
        return {"role": "user", "content": f"{text} {self.n} about the thing"}

    async def send(self, leave=False):
        body = {"model": "m", "messages": self.messages, "tools": TOOLS, "max_tokens": 400, "stream": self.rng.random() < 0.2}
        if leave:
            call = asyncio.create_task(self.http.post(self.url, json=body))
            await asyncio.sleep(self.rng.choice([0, 0.001, 0.003]))
            call.cancel()
            await asyncio.gather(call, return_exceptions=True)
            return None
        async with self.http.post(self.url, json=body) as r:
            assert r.status == 200, await r.text()
            return streamed(await r.text()) if body["stream"] else (await r.json())["choices"][0]["message"]

    async def step(self):
        rng = self.rng
        if rng.random() < 0.1:
            await self.send(leave=True)
            if rng.random() < 0.3:
                self.messages.append(self.user("never mind"))
                return
        answers = await asyncio.gather(*(self.send() for _ in range(2 if rng.random() < 0.15 else 1)))
        message = answers[0]
        for other in answers[1:]:
            assert (other["content"] or "", other.get("tool_calls")) == (message["content"] or "", message.get("tool_calls")), (
                "a retry was sampled anew"
            )
        self.got.add(json.dumps(message))
        echo = {k: v for k, v in message.items() if k != "reasoning_content" or rng.random() < 0.5}
        calls = echo.get("tool_calls") or []
        if calls and rng.random() < 0.5:  # arguments as the client writes them, with a default; text lost
            calls = [
                c | {"function": c["function"] | {"arguments": json.dumps(json.loads(c["function"]["arguments"]) | {"all": False}, indent=1)}}
                for c in calls
            ]
            echo = {"role": "assistant", "content": rng.choice([None, "", echo["content"]]), "tool_calls": calls}
        self.messages.append(echo)
        self.messages += [{"role": "tool", "tool_call_id": c["id"], "content": f"result {self.n} in there"} for c in calls] or [self.user()]
        what = rng.random()
        if what < 0.08 and len(self.messages) > 6:  # compaction: a summary, and the newest answer replayed
            at = max(i for i, m in enumerate(self.messages) if m["role"] == "assistant")
            self.messages = [self.messages[0], self.user("the story so far"), *self.messages[at:]]
        elif what < 0.16:  # an old result or question changes
            at = rng.choice([i for i, m in enumerate(self.messages) if m["role"] in ("user", "tool")])
            self.messages[at] = self.messages[at] | {"content": f"changed {self.n}"}
        elif what < 0.24:
            self.messages = self.messages[: rng.choice([i for i, m in enumerate(self.messages) if m["role"] == "user"]) + 1]


def streamed(text):
    out, calls = {"role": "assistant", "content": ""}, {}
    for line in text.splitlines():
        if line.startswith("data: {"):
            delta = json.loads(line[6:])["choices"][0]["delta"]
            for name in ("content", "reasoning_content"):
                if name in delta:
                    out[name] = out.get(name, "") + delta[name]
            for c in delta.get("tool_calls") or []:
                if "id" in c:
                    calls[c["index"]] = {k: v for k, v in c.items() if k != "index"}
                else:
                    calls[c["index"]]["function"]["arguments"] += c["function"]["arguments"]
    return out | ({"tool_calls": list(calls.values()), "content": out["content"] or None} if calls else {})


async def rollout(g, http, engine, rng, number):
    s = g.session()
    http.headers["Authorization"] = f"Bearer {s.token}"
    url = g.base_url(s) + "/chat/completions"
    clients = [Client(http, url, rng, f"system {number}", engine)]
    for _ in range(rng.randrange(2, 6)):
        if rng.random() < 0.15:
            clients.append(Client(http, url, rng, f"another agent {number} {len(clients)}", engine))
        await asyncio.gather(*(c.step() for c in clients))
    await asyncio.gather(*(task for _, task in s.asked.values()), return_exceptions=True)  # those whose client has left
    metrics = s.metrics()
    return s.finish(), metrics, set().union(*(c.got for c in clients))


async def everything(family, folder, n):
    rng = random.Random(n)
    policy = Policy(family, rng)
    engine = policy.engine = ScriptedEngine(folder, policy)
    async with gateway(engine, folder, parser="hermes", max_concurrency=3) as g:
        for at in range(n):
            engine.requests, engine.sampled, engine.spans = [], [], {}
            async with aiohttp.ClientSession() as http:
                rows, metrics, got = await rollout(g, http, engine, rng, at)
            seen = check(engine, rows)
            text = "".join(got)
            received = {k for first, (r, length) in engine.spans.items() if f"w{r}x" in text for k in range(first, first + length)}
            assert received <= seen, "something that the client has got is not trained"
            assert len(seen) == metrics["agent/trained_tokens"], metrics
            assert metrics["agent/masked_tokens"] == 0 and metrics["agent/trainable_fraction"] == 1.0, metrics
            assert len(engine.sampled) == len(seen) + metrics["agent/undelivered_tokens"], metrics
        assert not g.sessions


@pytest.mark.parametrize("family", FAMILIES)
def test_trained_is_sampled(family, tmp_path):
    asyncio.run(everything(family, model_folder(tmp_path, family), CONVERSATIONS))
