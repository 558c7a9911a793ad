"""Answers that come with their prompts: which of their tokens are trained, and what is refused."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from vime import config
from vime.data.examples import Examples
from vime.data.tokenizer import Tokenizer
from vime.errors import VimeError
from vime.model import EOS, _char_tokenizer, encode
from vime.sample import meta_of

FOLDER = Path(tempfile.mkdtemp())
_char_tokenizer().save_pretrained(FOLDER)
TURNS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token + '.' if m.role == 'assistant' else '>' }}{% endfor %}"


def opened(path: Path, rows: list[Any], objective: str = "sft", **data: Any) -> Examples:
    if path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    tree = {"model": "m", "data": {"prompts": str(path), "shuffle": False, "chat_template": TURNS} | data, "train": {"objective": objective}}
    return Examples(config.validate(tree | {"rollout": {"max_response_len": 30, "max_context_len": 60}}, "t"), Tokenizer(FOLDER))


def turns(*contents: str) -> list[dict[str, str]]:
    return [{"role": "assistant" if i % 2 else "user", "content": c} for i, c in enumerate(contents)]


def shown(s: Any) -> str:
    """The sample's text, trained tokens in capitals, <eos> as !."""
    text = lambda t: "!" if t == EOS else Tokenizer(FOLDER).decode([t])  # noqa: E731
    mask = [0] * s.prompt_length + s.loss_mask
    return "".join(text(t).upper() if m else text(t) for t, m in zip(s.tokens, mask))


def test_an_answer_a_dialogue_and_its_continuation(tmp_path: Path) -> None:
    """Each assistant's turn is trained up to its <eos>; what the template puts behind it, and the user's turns, are not."""
    rows = [{"prompt": "ab", "response": "ba"}, {"prompt": turns("ab", "ba", "cd", "dc")}]
    rows += [{"prompt": turns("ab", "ba", "cd"), "response": turns("ab", "ba", "cd", "dc")[-1:]}]
    groups = opened(tmp_path / "a.jsonl", rows).next(3)
    assert [shown(g[0]) for g in groups] == ["ab>BA!", "ab>BA!.cd>DC!", "ab>ba!.cd>DC!"]
    for (s,) in groups:
        m = meta_of(s)
        assert m.trained_tokens == sum(s.loss_mask) and m.rollout_id == m.group_index == s.index
    assert groups[1][0].prompt_length == 4 and groups[2][0].prompt_length == 11
    plain = opened(tmp_path / "b.jsonl", rows[:1], apply_chat_template=False, chat_template=None)
    assert plain.next(1)[0][0].tokens[-3:] == [*encode("ba"), EOS]
    assert plain.text(plain.peek()).endswith("ba<eos>")


def test_pairs_share_prompt_group_and_rollout(tmp_path: Path) -> None:
    rows = [{"prompt": "ab", "chosen": "ba", "rejected": "abab"}, {"prompt": turns("ab"), "chosen": turns("ab", "ba"), "rejected": turns("ab", "a")}]
    pq.write_table(pa.Table.from_pylist(rows[:1]), tmp_path / "a.parquet")
    for path, n in ((tmp_path / "a.jsonl", 2), (tmp_path / "a.parquet", 1)):
        groups = opened(path, rows, "dpo").next(n)
        assert [[shown(s) for s in g] for g in groups] == [["ab>BA!", "ab>ABAB!"], ["ab>BA!", "ab>A!"]][:n]
        assert [[(s.index, s.rollout_id, s.reward) for s in g] for g in groups] == [[(0, 0, 1.0), (1, 0, 0.0)], [(2, 1, 1.0), (3, 1, 0.0)]][:n]


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "ab"}, "'response' must be a text"),
        ({"prompt": turns("ab")}, "no 'response'"),
        ({"prompt": turns("ab", "ba", "cd")}, "of which the assistant's is the last"),
        ({"prompt": "ab", "response": ""}, "'response' must be a text"),
        ({"prompt": "ab", "response": "a" * 30}, "has 31 tokens, longer than rollout.max_response_len 30"),
        ({"response": "ba"}, "no prompt under 'prompt'"),
        (3, "a row must be an object"),
    ],
)
def test_rows_that_cannot_be_trained_on(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(VimeError, match=said):
        opened(tmp_path / "a.jsonl", [{"prompt": "ab", "response": "ba"}, row])


def test_a_template_that_shows_turns_anew_is_refused(tmp_path: Path) -> None:
    with pytest.raises(VimeError, match="does not render a turn as what came before"):
        opened(tmp_path / "a.jsonl", [{"prompt": "ab", "response": "ba"}], chat_template="{{ messages|length }}{{ messages[-1].content }}")


def test_a_changed_answer_is_another_file(tmp_path: Path) -> None:
    a, b = (opened(tmp_path / f"{x}.jsonl", [{"prompt": "ab", "response": x}]) for x in ("ba", "bb"))
    with pytest.raises(VimeError, match="content was"):
        b.load_state(a.state())
