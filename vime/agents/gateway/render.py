"""Messages to tokens: a whole history, or only what comes after an answer whose tokens we have, which are never made from text again."""

import logging
from typing import Any

import orjson

from vime.agents.gateway.record import PRIVATE, Turn, loaded
from vime.data.tokenizer import Tokenizer
from vime.errors import VimeError, said

log = logging.getLogger("vime.gateway")
STAND_IN = "xq7Zanswer7qx"  # takes the place of an answer whose tokens are known; the template's text after it is what comes next
USER: dict[str, Any] = {"role": "user", "content": "q"}
CALL: dict[str, Any] = {"id": "call00001", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
TOOLS: list[dict[str, Any]] = [{"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object", "properties": {}}}}]
BROKEN = Exception  # templates raise what they like


class Template:
    """A chat template, and what it takes: found out once. `report` says in words, for each kind of turn, whether going on from tokens gives
    what rendering everything anew would. Raises: VimeError where it can't render a system prompt and a question."""

    def __init__(self, tokenizer: Tokenizer, template: str | None = None, options: dict[str, Any] | None = None):
        self.tokenizer, self.template, self.options = tokenizer, template, options or {}
        self.system, self.late_system, self.runs = True, True, True
        try:
            self._text([USER])
        except BROKEN as e:
            raise VimeError(f"the chat template can't render a user message: {said(e)}", "set data.chat_template") from e
        system, answer = {"role": "system", "content": "zq5"}, {"role": "assistant", "content": "a"}
        self.system = self._takes([system, USER], "zq5")
        self.late_system = self._takes([USER, system, answer, USER, system], "zq5")
        self.runs = self._takes([USER, USER])
        called = {"role": "assistant", "content": "", "tool_calls": [CALL]}
        self.tools = self._takes([USER, called, {"role": "tool", "tool_call_id": CALL["id"], "name": "f", "content": "zq5"}], "zq5")
        closing = self._after([USER, {"role": "assistant", "content": STAND_IN}], answer=False)
        self.closing: str = closing or ""
        ends = tokenizer.encode([self.closing], special_tokens=False)[0][:1]
        self.end = ends[0] if ends and tokenizer.decode(ends) == "" else None  # the token that ends an answer, if the template has one
        self.report = self._probe()

    def full(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]]) -> list[int]:
        """Token ids of a whole prompt. Raises: VimeError where the template refuses the messages."""
        for flat in (not self.tools, True):  # a template may know tools, and refuse two calls in a message, or their ids
            try:
                text = self._text(self._adapted(messages, flat), tools=tools or None)
                return self.tokenizer.encode([text], special_tokens=False)[0]
            except BROKEN as e:
                why = said(e)
                log.warning("the chat template refuses messages (%s)%s", why, "" if flat else ": calls and results are given to it as text")
        raise VimeError(f"the chat template refuses these messages: {why}")

    def delta(self, turn: Turn, messages: list[dict[str, Any]]) -> list[int] | None:
        """Token ids of what comes after the answer of `turn`: the end of its message, unless the model sampled that, `messages`, and the
        beginning of the next answer. None: the template does not say."""
        text = self._delta_text(turn.message, self._adapted(messages, not self.tools, after=True))
        if text is None:
            return None
        ids = self.tokenizer.encode([text], special_tokens=False)[0]
        return ids[1:] if turn.ended and self.end is not None and ids[:1] == [self.end] else ids

    def _delta_text(self, answer: dict[str, Any], messages: list[dict[str, Any]]) -> str | None:
        for stand_in in _stand_ins(answer.get("tool_calls") or [] if messages and messages[0]["role"] == "tool" else []):
            before = self._after([USER, stand_in], answer=False)
            after = self._after([USER, stand_in, *messages])
            if before is not None and after is not None and after.startswith(before):
                return self.closing + after[len(before) :]
        return None

    def _text(self, messages: list[dict[str, Any]], answer: bool = True, **kw: Any) -> str:
        return self.tokenizer.render([_given(m) for m in messages], self.template, answer, **self.options, **kw)

    def _after(self, messages: list[dict[str, Any]], answer: bool = True) -> str | None:
        try:
            _, found, after = self._text(messages, answer).partition(STAND_IN)
        except BROKEN:
            return None
        return after if found else None

    def _takes(self, messages: list[dict[str, Any]], content: str = "") -> bool:
        try:
            return content in self._text(messages)
        except BROKEN:
            return False

    def _adapted(self, messages: list[dict[str, Any]], flat: bool, after: bool = False) -> list[dict[str, Any]]:
        """The messages in the order and the roles that this template takes; `flat`: calls and results as text; `after`: they follow an answer."""
        out: list[dict[str, Any]] = []
        for m in messages:
            if flat and m["role"] == "tool":
                m = {"role": "user", "content": m["content"]}
            elif flat and m.get("tool_calls"):
                calls = [orjson.dumps(c["function"]).decode() for c in m["tool_calls"]]
                m = {"role": "assistant", "content": "\n".join([str(m.get("content") or ""), *calls]).strip()}
            late = after or any(o["role"] != "system" for o in out)
            if m["role"] == "system" and not (self.late_system if late else self.system):
                m = {"role": "user", "content": m["content"]}
            last = out[-1]["role"] if out else ""
            if m["role"] == last and (last == "system" or (last == "user" and not self.runs)):
                out[-1] = out[-1] | {"content": f"{out[-1]['content']}\n\n{m['content']}"}
            else:
                out.append(m)
        return out

    def _probe(self) -> dict[str, str]:
        """For text, tool, multi-tool and reasoning turns: "exact", or what differs."""
        calls = [CALL, CALL | {"id": "call00002"}]
        results = [{"role": "tool", "tool_call_id": c["id"], "name": "f", "content": "r"} for c in calls]
        cases: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
            "text": ({"content": "answer"}, [USER]),
            "tool": ({"content": "", "tool_calls": calls[:1]}, results[:1]),
            "multi-tool": ({"content": "", "tool_calls": calls}, results),
            "reasoning": ({"content": "answer", "reasoning_content": "thought"}, [USER]),
        }
        return {name: self._compare({"role": "assistant"} | answer, after) for name, (answer, after) in cases.items()}

    def _compare(self, answer: dict[str, Any], after: list[dict[str, Any]]) -> str:
        if answer.get("tool_calls") and not self.tools:
            return "as text: the template has no tools"
        tools = TOOLS if answer.get("tool_calls") else None
        delta = self._delta_text(answer, after)
        if delta is None:
            return "refused: the template does not render what follows such a turn, so each begins a row of its own"
        try:
            asked, told = self._text([USER], tools=tools), self._text([USER, answer], answer=False, tools=tools)
            whole = self._text([USER, answer, *after], tools=tools)
        except BROKEN as e:
            return f"not rendered as a whole ({said(e)}); turns are appended"
        if not told.startswith(asked):
            return "appended: rendered anew, the answer would begin otherwise than the policy was prompted"
        encode = self.tokenizer.encode
        here = told[: len(told) - len(self.closing)] if self.closing and told.endswith(self.closing) else told
        first, second, third = encode([here, delta, whole], special_tokens=False)
        if answer.get("reasoning_content") and "thought" not in whole:
            return "appended: rendered anew, the template would drop the reasoning, which the policy has seen"
        return "exact" if first + second == third else "appended: rendered anew, earlier turns would have other tokens"


def _stand_ins(calls: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Answers to render what follows one: templates differ in whether they show text next to calls, and whether results need calls."""
    plain: dict[str, Any] = {"role": "assistant", "content": STAND_IN}
    if not calls:
        return [plain]
    named = calls[-1] | {"function": calls[-1]["function"] | {"arguments": orjson.dumps({"a": STAND_IN}).decode()}}
    return [plain | {"tool_calls": calls}, plain | {"content": "", "tool_calls": [*calls[:-1], named]}, plain]


def _given(message: dict[str, Any]) -> dict[str, Any]:
    """As templates want a message: content is a string, arguments are an object."""
    out = {k: v for k, v in message.items() if k not in PRIVATE} | {"content": message.get("content") or ""}
    if out.get("tool_calls"):
        out["tool_calls"] = [c | {"function": c["function"] | {"arguments": loaded(c["function"].get("arguments"))}} for c in out["tool_calls"]]
    return out
