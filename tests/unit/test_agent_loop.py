"""The agent loop with a scripted model: what ends it, what it records, and that no failure of a tool is lost."""

import asyncio
import base64
import json
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel

from vime import config
from vime.agents import interaction
from vime.agents.interaction import Episode, interact
from vime.agents.tools import Context, Observation, Submit, Tool, clipped, make
from vime.errors import VimeError

PNG = b"\x89PNG\r\n"


class Echo(Tool):
    name, description, timeout_s = "echo", "Says it again.", 0.05

    class Args(BaseModel):
        text: str
        mode: str = "ok"

    async def run(self, args: Args, ctx: Context) -> Observation:
        ctx.state.setdefault("said", []).append(args.text)
        match args.mode:
            case "raise":
                raise KeyError("lost")
            case "hang":
                await asyncio.sleep(60)
            case "broken":
                raise VimeError("the sandbox is gone")
        return Observation(args.text, [PNG] if args.mode == "image" else [], metadata={"length": len(args.text)})


def turn(content: str = "", *calls: tuple[str, Any], reason: str = "stop", ill_formed: bool = False) -> SimpleNamespace:
    asked = [
        {"id": f"c{i}", "type": "function", "function": {"name": n, "arguments": a if isinstance(a, str) else json.dumps(a)}}
        for i, (n, a) in enumerate(calls)
    ]
    message = {"role": "assistant", "content": content} | ({"tool_calls": asked} if asked else {})
    return SimpleNamespace(id="t", message=message, output_ids=[1, 2], finish_reason=reason, seconds=0.1, ill_formed=ill_formed)


def episode(*turns: SimpleNamespace, **kw: Any) -> tuple[Episode, list[list[dict]], Context]:
    seen: list[list[dict]] = []
    left = list(turns)

    async def model(messages: list[dict], tools: list[dict]) -> Any:
        seen.append(list(messages))
        assert [t["function"]["name"] for t in tools] == ["echo", "submit"]
        if kw.get("hang"):
            await asyncio.sleep(60)
        return left.pop(0)

    async def go() -> tuple[Episode, Context]:
        async with Context() as ctx:
            known = {k: v for k, v in kw.items() if k != "hang"}
            return await interact(model, [{"role": "user", "content": "go"}], [Echo(), Submit()], ctx, **known), ctx

    done, ctx = asyncio.run(go())
    return done, seen, ctx


def test_turns_calls_and_observations_alternate_until_an_answer() -> None:
    done, seen, _ = episode(turn("", ("echo", {"text": "a"}), ("echo", {"text": "b"})), turn("bye"))
    assert (done.status, done.answer) == ("answered", "bye")
    assert [m["role"] for m in done.messages] == ["user", "assistant", "tool", "tool", "assistant"]
    assert [(m["content"], m["tool_call_id"]) for m in done.messages if m["role"] == "tool"] == [("a", "c0"), ("b", "c1")]
    assert seen[1] == done.messages[:4]
    assert [(c.tool, c.status, c.metadata) for c in done.calls] == [("echo", "ok", {"length": 1})] * 2
    json.dumps(done.record())


@pytest.mark.parametrize(
    ("turns", "kw", "ends"),
    [
        ([turn("", ("submit", {"answer": "42"})), turn("never")], {}, "submitted"),
        ([turn("", ("echo", {"text": "a"}))] * 9, {"max_turns": 3}, "max_turns"),
        ([turn("cut", reason="length")], {}, "context"),
        ([turn("cut", ("echo", {"text": "a"}), reason="length")], {}, "context"),
        ([], {"hang": True, "wall_s": 0.05}, "wall"),
        ([turn("", ("echo", {"text": "a", "mode": "hang"}))], {"wall_s": 0.03}, "wall"),
        ([turn("", ("echo", {"text": "a", "mode": "broken"}), ("echo", {"text": "b"}))], {}, "failed"),
    ],
)
def test_what_ends_an_episode(turns: list[SimpleNamespace], kw: dict[str, Any], ends: str) -> None:
    done, _, ctx = episode(*turns, **kw)
    assert done.status == ends
    if ends == "submitted":
        assert done.answer == "42"
    if ends == "failed":
        assert "the sandbox is gone" in done.error and ctx.state["said"] == ["a"]
        assert done.calls[0].exception == "the sandbox is gone"
    if ends == "context":
        assert done.calls == [], "a turn that was cut off acts on nothing"
    if ends == "wall" and turns:
        assert done.calls[0].status == "cancelled"


@pytest.mark.parametrize(
    ("asked", "status", "told"),
    [
        (("echo", {"text": "a", "mode": "raise"}), "error", "echo failed: KeyError: 'lost'"),
        (("echo", {"text": "a", "mode": "hang"}), "timeout", "echo was stopped: it took more than 0.05 s"),
        (("echo", {"txt": "a"}), "error", "echo was not run: text: Field required"),
        (("echo", "{not json"), "error", "echo was not run: arguments: Invalid JSON"),
        (("ecko", {}), "error", "there is no tool 'ecko'; did you mean 'echo'?"),
    ],
)
def test_what_goes_wrong_in_a_tool_is_seen_and_recorded(asked: tuple[str, Any], status: str, told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(interaction, "GRACE", 0.0)
    done, _, _ = episode(turn("", asked, ("echo", {"text": "still"})), turn("bye"))
    assert done.status == "answered"
    assert [c.status for c in done.calls] == [status, "ok"]
    assert done.messages[2]["content"].startswith(told)
    assert done.calls[0].seconds >= 0


def test_two_tools_of_one_name_are_refused() -> None:
    with pytest.raises(VimeError, match="same name, of echo, submit, echo"):
        asyncio.run(interact(None, [], [Echo(), Submit(), Echo()], Context()))  # type: ignore[arg-type]


def test_images_reach_the_model_as_image_parts() -> None:
    done, _, _ = episode(turn("", ("echo", {"text": "look", "mode": "image"})), turn("bye"))
    text, image = done.messages[2]["content"]
    assert text == {"type": "text", "text": "look"} and image["type"] == "image_url"
    assert base64.b64decode(image["image_url"]["url"].removeprefix("data:image/png;base64,")) == PNG


def test_prompt_history_and_observations_are_the_callers() -> None:
    turns = [turn("", ("echo", {"text": "a"})), turn("hm"), turn("bye")]
    own = {
        "view": lambda m: m[-1:], "observe": lambda call, seen: {"role": "user", "content": f"<{call.tool}>{seen.text}"},
        "reply": lambda t: "go on" if t.message["content"] == "hm" else None,
    }  # fmt: skip
    done, seen, _ = episode(*turns, **own)
    assert [m[0]["content"] for m in seen] == ["go", "<echo>a", "go on"]
    assert done.status == "answered" and len(done.messages) == 6


def test_a_call_that_cannot_be_read_is_asked_for_again() -> None:
    done, seen, _ = episode(turn("<tool_call>{", ill_formed=True), turn("bye"))
    assert "could not be read" in seen[1][-1]["content"] and done.steps[0].ill_formed


class Guard:
    """Blocks calls that say "no"; finds that what said "oops" has changed what it must not."""

    async def before(self, tool: str, args: dict) -> SimpleNamespace:
        return SimpleNamespace(decision={"no": "block", "hm": "warn"}.get(args["text"], "allow"), rule="r1", reason="that is a test file")

    async def after(self, tool: str, args: dict) -> SimpleNamespace:
        return SimpleNamespace(decision="block" if args["text"] == "oops" else "allow", rule="r2", reason="a test file changed")


def guarded(*turns: SimpleNamespace) -> tuple[Episode, Context]:
    left = list(turns)

    async def model(messages: list[dict], tools: list[dict]) -> Any:
        return left.pop(0)

    async def go() -> tuple[Episode, Context]:
        async with Context("a sandbox", Guard()) as ctx:
            return await interact(model, [], [Echo()], ctx), ctx

    return asyncio.run(go())


def test_a_blocked_action_is_not_run_and_the_model_is_told() -> None:
    done, ctx = guarded(turn("", ("echo", {"text": "no"}), ("echo", {"text": "b"}), ("echo", {"text": "hm"})), turn("bye"))
    assert ctx.state["said"] == ["b", "hm"] and done.hacked and done.status == "answered"
    assert done.messages[1]["content"] == "not run: that is a test file"
    assert [c.metadata for c in done.calls] == [{"rule": "r1"}, {"length": 1}, {"length": 2, "warned": "r1"}]


def test_a_deed_that_the_guard_finds_afterwards_ends_the_episode() -> None:
    done, ctx = guarded(turn("", ("echo", {"text": "oops"}), ("echo", {"text": "b"})))
    assert ctx.state["said"] == ["oops"] and done.hacked and done.status == "blocked"


@given(st.text(max_size=300), st.integers(2, 50))
def test_clipped_keeps_both_ends(text: str, limit: int) -> None:
    out, cut = clipped(text, limit)
    assert cut == (len(text) > limit)
    assert out == text if not cut else out.startswith(text[: limit // 2]) and out.endswith(text[len(text) - limit // 2 :])


def test_a_schema_is_made_from_the_arguments() -> None:
    assert Echo.schema() == {
        "type": "function",
        "function": {
            "name": "echo", "description": "Says it again.",
            "parameters": {
                "type": "object", "properties": {"text": {"type": "string"}, "mode": {"type": "string", "default": "ok"}}, "required": ["text"],
            },
        },
    }  # fmt: skip


class Lacking(Echo):
    needs = ("asyncio", "no_such_program")


@pytest.mark.parametrize(
    ("names", "options", "match"),
    [
        (["shel"], {}, "no tool 'shel' .did you mean 'shell'?"),
        (["shell"], {"shell": {"timeout": 1}}, "'shell' cannot be made with"),
        (["shell"], {"editor": {}}, "'editor' is none of agent.tools"),
        (["no.such:Tool"], {}, "cannot import no.such"),
        ([f"{__name__}:turn"], {}, "is no class of tools"),
        ([f"{__name__}:Lacking"], {}, r"needs no_such_program .pip install .vime.agents"),
    ],
)
def test_wrong_tools_are_refused_by_name(names: list[str], options: dict[str, Any], match: str) -> None:
    with pytest.raises(VimeError, match=match):
        make(names, options)


def test_all_tools_are_there_and_describe_themselves() -> None:
    from vime.agents.tools import NAMED

    given = {"search": {"url": "http://h"}, "open": {"url": "http://h"}, "desktop": {"command": ["true"]}}
    for name, tool in zip(NAMED, make(list(NAMED), given), strict=True):
        assert tool.schema()["function"]["name"] == tool.name == name and tool.description.endswith(".")


BASE = {"model": "m", "data": {"prompts": "p", "apply_chat_template": False}}


def test_the_agent_section_makes_the_rollout() -> None:
    cfg = config.validate(BASE | {"agent": {"task": "a:b"}, "gateway": {"parser": "hermes"}}, "test")
    assert cfg.rollout.custom_generate == config.AGENTS
    import tomllib

    assert config.validate(tomllib.loads(config.dump(cfg)), "test") == cfg


@pytest.mark.parametrize(
    ("tree", "match"),
    [
        ({"agent": {"task": "a:b"}, "rollout": {"custom_generate": "c:d"}}, "agent.task generates every sample"),
        ({"agent": {"task": "a:b"}, "data": {"prompts": "p"}}, "set data.apply_chat_template = false"),
        ({"agent": {"max_turns": 3}}, "agent.task is unset"),
        ({"agent": {"task": "a:b"}, "vllm": {"max-num-seqs": 2}}, "needs servers that parse"),
        ({"agent": {"task": "a:b", "on_hack": "penaltie"}}, "did you mean 'penalty'"),
    ],
)
def test_what_does_not_go_with_agents_is_refused(tree: dict[str, Any], match: str) -> None:
    with pytest.raises(VimeError, match=match):
        config.validate(BASE | tree, "test")
