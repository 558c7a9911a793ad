"""What each template family allows, as the probe says at the start, and turns appended to tokens."""

import itertools
import json

import pytest

from tests.agents_kit import FAMILIES, SPECIAL, model_folder, said
from vime.agents.gateway import Turn, parse
from vime.agents.gateway.render import Template
from vime.data.tokenizer import Tokenizer
from vime.errors import VimeError

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"properties": {"n": {"type": "integer"}, "s": {"type": "string"}}}}}]
USER = {"role": "user", "content": "question"}
CALLS = [{"id": f"call_{k}", "type": "function", "function": {"name": "f", "arguments": '{"a": "b"}'}} for k in range(2)]
RESULTS = [{"role": "tool", "tool_call_id": c["id"], "content": "result"} for c in CALLS]


@pytest.fixture(scope="module")
def templates(tmp_path_factory):
    return {f: Template(Tokenizer(model_folder(tmp_path_factory.mktemp(f), f))) for f in FAMILIES}


def test_probe_says_what_is_exact(templates):
    told = {f: {k: v.partition(":")[0].partition(" (")[0] for k, v in t.report.items()} for f, t in templates.items()}
    exact = {"text": "exact", "tool": "exact", "multi-tool": "exact", "reasoning": "appended"}
    assert told["chatml"] == told["mistral"] == exact
    assert told["llama3"] == exact | {"multi-tool": "not rendered as a whole"}
    assert set(told["qwen3"].values()) == {"appended"} and "drop the reasoning" in templates["qwen3"].report["reasoning"]
    assert {f for f, t in templates.items() if not t.runs or not t.late_system} == {"mistral"}


@pytest.mark.parametrize("family", ["chatml", "llama3", "mistral"])
def test_appended_is_as_rendered_anew(templates, family):
    """Where the probe says exact, a dialogue of appended turns has the tokens of the whole."""
    t = templates[family]
    end = t.tokenizer.encode([SPECIAL[family][0]], special_tokens=False)[0]
    calls, results = (CALLS[:1], RESULTS[:1]) if family == "llama3" else (CALLS, RESULTS)
    answers = [{"content": "one"}, {"content": "", "tool_calls": calls}, {"content": "three"}]
    told = [{"role": "system", "content": "about"}, USER]
    ids = t.full(told, [])
    for answer, after in zip(answers, ([USER], results, [USER])):
        answer = {"role": "assistant"} | answer
        whole = t.full([*told, answer], [])  # with the beginning of another answer after it
        sampled = whole[len(ids) :]
        sampled = sampled[: sampled.index(end[0]) + 1]
        ids = [*ids, *sampled, *t.delta(Turn("x", answer, sampled), after)]
        told += [answer, *after]
        assert ids == t.full(told, [])


@pytest.mark.parametrize("family", FAMILIES)
def test_an_answer_cut_off_is_closed(templates, family):
    t = templates[family]
    turn = Turn("x", {"role": "assistant", "content": "half"})
    whole, turn.ended = t.delta(turn, [USER]), False
    assert t.delta(turn, [USER]) == [t.end, *whole]


def test_messages_that_a_template_refuses_are_adapted(templates):
    late = [USER, {"role": "system", "content": "zq1"}, {"role": "system", "content": "zq2"}, {"role": "user", "content": "zq3"}]
    for t in templates.values():
        for messages in (late, [late[1], *late]):
            text = t.tokenizer.decode(t.full(messages, []), skip_special_tokens=False)
            assert all(text.count(w) == n for w, n in (("zq1", messages.count(late[1])), ("zq2", 1), ("zq3", 1)))
        after = t.tokenizer.decode(t.delta(Turn("x", {"role": "assistant", "content": "a"}), late), skip_special_tokens=False)
        assert "zq1" in after and "zq3" in after


def test_calls_that_a_template_does_not_take_are_told_as_text(templates, tmp_path):
    model_folder(tmp_path / "m")
    (tmp_path / "m" / "chat_template.jinja").write_text(
        "{% for m in messages %}{% if m.role != 'tool' %}<|im_start|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
    )
    without = Template(Tokenizer(tmp_path / "m"))
    assert without.report["tool"].startswith("as text") and without.report["text"] == "exact"
    answer = {"role": "assistant", "content": "", "tool_calls": CALLS}
    for t in (without, templates["llama3"]):
        text = t.tokenizer.decode(t.full([USER, answer, *RESULTS], []), skip_special_tokens=False)
        assert text.count('"name":"f"') == 2 and text.count("result") == 2
        assert "result" in t.tokenizer.decode(t.delta(Turn("x", answer), RESULTS))


def test_a_template_that_renders_nothing_is_refused(tmp_path):
    folder = tmp_path / "m"
    model_folder(folder)
    (folder / "chat_template.jinja").write_text("{{ raise_exception('no') }}")
    with pytest.raises(VimeError, match="no"):
        Template(Tokenizer(folder))


@pytest.mark.parametrize(("reasoning", "text", "n"), list(itertools.product(["", "thought"], ["", "words \u00e9"], range(3))))
def test_hermes_takes_apart_what_was_put_together(reasoning, text, n):
    calls = [("f", {"n": k, "s": '</x> " {}'}) for k in range(n)]
    p = parse.own("hermes", said(text, calls, reasoning), TOOLS)
    assert (p.reasoning, p.content, p.ill_formed) == (reasoning, text, False)
    assert [(name, json.loads(a)) for name, a in p.calls] == calls


@pytest.mark.parametrize(
    ("parser", "text"),
    [
        ("hermes", "<tool_call>{}</tool_call>"), ("hermes", '<tool_call>{"name": "f", "arguments": "x"}</tool_call>'), ("hermes", "<tool_call>"),
        ("hermes", 'x<tool_call>{"name": "f", "arguments": {}}</tool_call><tool_call>'), ("qwen_xml", "<tool_call><function=f>x</function></tool_call>"),
        ("qwen_xml", "<function=f></function>"), ("qwen_xml", "<tool_call><function=f><parameter=n>x</parameter></function></tool_call>"),
        ("hermes", '[TOOL_CALLS][{"name": "f", "arguments": {}}]'), ("qwen_xml", '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
    ],
)  # fmt: skip
def test_malformed_is_text_and_flagged(parser, text):
    assert parse.own(parser, text, TOOLS) == parse.Parsed("", text, [], True)
    assert parse.own(parser, text, []) == parse.Parsed("", text, [], False), "without tools it is text like any other"


def test_qwen_xml_and_thinking_begun_by_the_prompt():
    text = "deep\n</think>\n\nso<tool_call>\n<function=f>\n<parameter=n>\n4\n</parameter>\n<parameter=s>\n5\n</parameter>\n</function>\n</tool_call>"
    assert parse.own("qwen_xml", text, TOOLS, thinking=True) == parse.Parsed("deep", "so", [("f", '{"n": 4, "s": "5"}')], False)
    assert parse.own("hermes", "cut off", TOOLS, thinking=True) == parse.Parsed("cut off", "", [], False)
    assert parse.own("text", "<think>x</think>", TOOLS) == parse.Parsed("", "<think>x</think>", [], False)
