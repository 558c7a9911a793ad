import json
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from vime.config import DataConfig, validate
from vime.data.prompts import Prompts
from vime.data.tokenizer import Tokenizer
from vime.errors import VimeError
from vime.hooks import plugin_args
from vime.model import _char_tokenizer, encode
from vime.rollout.plugged import UserPrompts
from vime.sample import Sample

FOLDER = Path(tempfile.mkdtemp())
_char_tokenizer().save_pretrained(FOLDER)
TOKENIZER = Tokenizer(FOLDER)


def write(path: Path, rows: list[Any]) -> str:
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(path)


def words(k: int) -> list[dict[str, Any]]:
    return [{"prompt": f"w{i}", "label": str(i), "metadata": {"i": [i]}} for i in range(k)]


def open_prompts(path: str, n: int = 2, seed: int = 0, limit: int = 20, **data: Any) -> Prompts:
    return Prompts(DataConfig(prompts=path, **data), path, TOKENIZER, n, seed, limit)


def labels(p: Prompts, k: int) -> list[str]:
    return [g[0].label for g in p.next(k)]


def in_file_order(p: Prompts) -> list[str]:
    return [p.row(i, 1)[0].label for i in range(len(p))]


def test_a_group_is_n_fresh_samples_of_one_prompt(tmp_path: Path) -> None:
    p = open_prompts(write(tmp_path / "a.jsonl", words(3)), n=3, shuffle=False)
    first, second = p.next(2)
    assert [s.index for s in first + second] == [0, 1, 2, 3, 4, 5] == [s.rollout_id for s in first + second]
    assert {s.group_index for s in second} == {1} and {s.session_id for s in second} == {"group-1"}
    assert first[0].tokens == [1, *encode("w0>")] and first[0].prompt == "<bos>w0>" and first[0].response_length == 0
    first[0].metadata["i"].append(9)
    first[0].tokens.append(9)
    assert first[1].metadata == {"i": [0]} and first[1].tokens == [1, *encode("w0>")] and p.row(0, 1)[0].metadata == {"i": [0]}
    assert p.text(second[0]) == "<bos>w1>"


def test_peek_moves_nothing(tmp_path: Path) -> None:
    p = open_prompts(write(tmp_path / "a.jsonl", words(5)))
    seen = p.peek()
    assert p.next(1)[0][0].to_dict() == seen.to_dict()


@settings(deadline=None, max_examples=40)
@given(rows=st.integers(1, 9), takes=st.lists(st.integers(0, 7), max_size=8), cut=st.integers(0, 8), seed=st.integers(0, 5))
def test_resume_anywhere_continues_the_same_order(
    tmp_path_factory: pytest.TempPathFactory, rows: int, takes: list[int], cut: int, seed: int
) -> None:
    path = write(tmp_path_factory.mktemp("p") / "a.jsonl", words(rows))
    whole, before, after = (open_prompts(path, seed=seed) for _ in range(3))
    expected = [s.to_dict() for k in takes for g in whole.next(k) for s in g]
    got = [s.to_dict() for k in takes[:cut] for g in before.next(k) for s in g]
    after.load_state(json.loads(json.dumps(before.state())))
    assert got + [s.to_dict() for k in takes[cut:] for g in after.next(k) for s in g] == expected


def test_each_epoch_is_another_permutation_of_all_rows(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", words(30))
    p = open_prompts(path, seed=1)
    one, two = labels(p, 30), labels(p, 30)
    assert sorted(one) == sorted(two) == sorted(r["label"] for r in words(30)) and one != two
    assert labels(open_prompts(path, seed=1), 30) == one != labels(open_prompts(path, seed=2), 30)
    assert in_file_order(p) == [str(i) for i in range(30)]


@pytest.mark.parametrize("change", ["content", "label", "n", "seed", "rows"])
def test_a_changed_stream_is_refused(tmp_path: Path, change: str) -> None:
    path = tmp_path / "a.jsonl"
    state = open_prompts(write(path, words(4))).state()
    rows, n, seed = words(4), 2, 0
    if change == "content":
        rows[2]["prompt"] = "other"
    elif change == "label":
        rows[2]["label"] = "other"
    elif change == "rows":
        rows.append({"prompt": "x"})
    elif change == "n":
        n = 3
    else:
        seed = 7
    with pytest.raises(VimeError, match=f"{change if change != 'label' else 'content'} was"):
        open_prompts(write(path, rows), n=n, seed=seed).load_state(state)


def test_slices_parquet_and_messages(tmp_path: Path) -> None:
    rows = [{"q": [{"role": "user", "content": f"a{i}"}], "answer": i} for i in range(6)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "a.parquet")
    keys = {"input_key": "q", "label_key": "answer", "shuffle": False}
    for path in (str(tmp_path / "a.parquet"), write(tmp_path / "a.jsonl", rows)):
        assert in_file_order(open_prompts(path, **keys)) == [0, 1, 2, 3, 4, 5]
        assert in_file_order(open_prompts(path + "@[2:4]", **keys)) == [2, 3]
        assert in_file_order(open_prompts(path + "@[-2:]", **keys)) == [4, 5]
        assert open_prompts(path + "@[:1]", **keys).peek().tokens == [1, *encode("a0>")]


def test_without_and_with_another_template(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "ab"}])
    assert open_prompts(path, apply_chat_template=False).peek().tokens == encode("ab")
    assert open_prompts(path, chat_template="{{ messages[0].content }}=").peek().tokens == encode("ab=")


def test_all_bad_rows_are_named_at_once(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "ok"}\n{"prompt": \n\n{"text": "x"}\n[1]\n{"prompt": "' + "a" * 30 + '"}\n{"prompt": "b", "metadata": 3}\n')
    with pytest.raises(VimeError) as e:
        open_prompts(str(path))
    text = str(e.value)
    assert "5 bad rows" in text and "bad.jsonl:2: not JSON" in text and "bad.jsonl:4: no prompt under 'prompt'" in text
    assert "['text']" in text and "bad.jsonl:5: a row must be an object" in text and "bad.jsonl:7: 'metadata'" in text
    assert "bad.jsonl:6: prompt of 32 tokens, longer than the 20" in text and "max_context_len" in text


def test_many_bad_rows_are_counted(tmp_path: Path) -> None:
    with pytest.raises(VimeError, match=r"25 bad rows") as e:
        open_prompts(write(tmp_path / "a.jsonl", [{"prompt": "", "n": i} for i in range(25)] + [{"prompt": "a"}]))
    assert str(e.value).count("no prompt under") == 10 and "and 15 more" in str(e.value)


def test_a_fault_of_every_row_is_said_once(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", words(25))
    for template, said in (
        ("{% if %}", "the chat template fails"), ("{{ messages[9].content.x }}", "the chat template fails"), ("{# #}", "rendered to nothing"),
    ):  # fmt: skip
        with pytest.raises(VimeError, match=f"25 bad rows.*\n  every row: .*{said}") as e:
            open_prompts(path, chat_template=template)
        assert str(e.value).count(said) == 1 and len(str(e.value)) < 700


BAD_ROWS = {
    '{"prompt": "a\\ud800b"}': "the prompt holds '\\ud800', half of a surrogate pair, at position 6",
    '{"prompt": ' + "[" * 100_000: "not JSON",
    '{"prompt": "a", "metadata": {"x": ' + "[" * 400 + "]" * 400 + "}}": "metadata is nested deeper than 100 levels",
    '{"prompt": "a", "label": ' + "[" * 400 + "]" * 400 + "}": "label is nested deeper than 100 levels",
    '{"prompt": "a", "label": 1' + "0" * 5000 + "}": "not JSON",
    '{"prompt": [{"role": "user", "content": null}]}': "message 0 of 'prompt', of role 'user': its content is None, not a text",
    '{"prompt": [{"role": "user", "content": "a"}, {"role": "user"}]}': "message 1 of 'prompt'",
    '{"prompt": [{"role": "user", "content": 7}]}': "message 0 of 'prompt', of role 'user': its content is 7",
    "\x00": "not JSON",
}


@pytest.mark.parametrize("line", BAD_ROWS, ids=list(BAD_ROWS.values()))
def test_odd_rows_are_named_and_the_others_are_not(tmp_path: Path, line: str) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\n' + line + '\n{"prompt": "b"}\n')
    with pytest.raises(VimeError) as e:
        open_prompts(str(path))
    text = str(e.value)
    assert "1 bad row;" in text and f"a.jsonl:2: {BAD_ROWS[line]}" in text and len(text) < 700


def test_content_may_be_missing_beside_a_tool_call(tmp_path: Path) -> None:
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": None, "tool_calls": [{}]}, {"role": "user", "content": "b"}]
    template = "{% for m in messages %}{{ m.content or '' }}{% endfor %}"
    assert open_prompts(write(tmp_path / "a.jsonl", [{"prompt": chat}]), chat_template=template).peek().tokens == encode("ab")


def test_parquet_columns_that_have_no_counterpart(tmp_path: Path) -> None:
    """One that is not used does no harm; one that is used is named."""
    path = tmp_path / "a.parquet"
    when = pa.array([1, 2], pa.timestamp("ns"))
    pq.write_table(pa.table({"prompt": ["a", "b"], "when": when}), path)
    assert open_prompts(str(path), shuffle=False).peek().tokens == [1, *encode("a>")]
    with pytest.raises(VimeError, match=r"'when' timestamp\[ns\] has no counterpart|label.* datetime.*JSON|when is of type"):
        open_prompts(str(path), label_key="when")
    with pytest.raises(VimeError, match=r"no column 'prompts' .data.input_key. .did you mean 'prompt'"):
        open_prompts(str(path), input_key="prompts")
    pq.write_table(pa.table({"prompt": ["a", "b"], "label": [b"x", b"y"]}), path)
    with pytest.raises(VimeError, match="label is of type bytes, which JSON cannot hold"):
        open_prompts(str(path))


def test_a_file_that_breaks_while_it_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").symlink_to("/proc/self/mem")  # opens, and gives EIO
    with pytest.raises(VimeError, match=r"a.jsonl: it cannot be read: OSError: .Errno 5"):
        open_prompts(str(tmp_path / "a.jsonl"))
    for path in ("a\0.jsonl", "a" * 5000 + ".jsonl"):
        with pytest.raises(VimeError, match=r"it cannot be read|no such prompt file") as e:
            open_prompts(path)
        assert "\n" not in str(e.value)


TOKENIZER_FILES = {
    "tokenizer.json": [b"", b"[]", b"{}", b"\xff", b'{"model": 3}', None],
    "tokenizer_config.json": [b"[]", b"3", b"{", b"\xff", b'{"chat_template": 3}', b'{"chat_template": [{"name": "default"}]}', b'{"eos_token": {}}'],
    "chat_template.jinja": [b"\xff\xfe", b"{{ caf\xe9 }}"],
}


@pytest.mark.parametrize(("name", "content"), [(k, c) for k, cs in TOKENIZER_FILES.items() for c in cs])
def test_tokenizer_files_that_are_not_what_they_should_be(tmp_path: Path, name: str, content: bytes | None) -> None:
    folder = tmp_path / "m"
    shutil.copytree(FOLDER, folder)
    (folder / name).unlink(missing_ok=True)
    if content is not None:
        (folder / name).write_bytes(content)
    if name == "tokenizer_config.json":
        (folder / "chat_template.jinja").unlink(missing_ok=True)
    with pytest.raises(VimeError, match=f"its tokenizer does not load: {name}: ") as e:
        Tokenizer(folder)
    assert "\n" not in str(e.value) and len(str(e.value)) < 700


def test_a_prompt_of_exactly_the_limit_fits(tmp_path: Path) -> None:
    assert len(open_prompts(write(tmp_path / "a.jsonl", [{"prompt": "a" * 18}])).peek().tokens) == 20


def test_bad_rows_outside_the_slice_pass(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"prompt": "a"}\nnonsense\n{"prompt": "b"}\n')
    assert len(open_prompts(f"{path}@[2:]")) == 1


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("none.jsonl", None, "no such prompt file"),
        ("e.jsonl", "", "holds no prompts"),
        ("e.jsonl@[-:2]", '{"prompt": "a"}\n', "no such prompt file.*a slice is written"),
        ("e.jsonl@[--1:]", '{"prompt": "a"}\n', "no such prompt file.*a slice is written"),
        ("e.jsonl@[5:]", '{"prompt": "a"}\n', "holds no prompts"),
        ("a.parquet", "not parquet", "not a readable parquet file"),
        ("a.csv", "prompt\n", "must be .jsonl or .parquet"),
    ],
)
def test_files_that_cannot_be_used(tmp_path: Path, name: str, content: str | None, said: str) -> None:
    if content is not None:
        (tmp_path / name.partition("@")[0]).write_text(content)
    with pytest.raises(VimeError, match=said):
        open_prompts(str(tmp_path / name))


def test_templates_that_cannot_be_used(tmp_path: Path) -> None:
    path = write(tmp_path / "a.jsonl", [{"prompt": "ab"}])
    with pytest.raises(VimeError, match="the chat template fails"):
        open_prompts(path, chat_template="{% if %}")
    bare = Tokenizer(FOLDER)
    bare.chat_template = None
    with pytest.raises(VimeError, match="no chat template"):
        Prompts(DataConfig(prompts=path), path, bare, 2, 0, 20)


class OddSource:
    """[args] odd names the method that ends, or what is wrong with its samples."""

    def __init__(self, args: Any) -> None:
        self.args = args
        self.at("__init__")

    def at(self, where: str) -> None:
        if self.args.odd == where:
            sys.exit(0)

    def get_samples(self, n: int) -> list[list[Sample]]:
        self.at("get_samples")
        odd = {"set": Sample(prompt="a", label={1}), "surrogate": Sample(prompt="\ud800")}
        return [[odd.get(self.args.odd, Sample(prompt="a")) for _ in range(2)] for _ in range(n)]

    def add_samples(self, groups: list[Any]) -> None: ...

    def save(self, rollout_id: int) -> None:
        self.at("save")

    def load(self, rollout_id: int | None = None) -> None:
        self.at("load")

    def __len__(self) -> int:
        return 1


@pytest.mark.parametrize(
    ("odd", "said"),
    [
        ("__init__", "SystemExit"), ("get_samples", "get_samples failed: SystemExit"), ("save", "save failed"), ("load", "load failed"),
        ("set", "prompt 0 failed: ValueError: sample 0: label is of type set"), ("surrogate", "prompt 0 failed"),
    ],
)  # fmt: skip
def test_a_data_source_that_fails_in_any_way_is_named(odd: str, said: str) -> None:
    data = {"prompts": "-", "source": f"{__name__}:OddSource"}
    cfg = validate({"model": str(FOLDER), "data": data, "rollout": {"n_samples_per_prompt": 2}, "args": {"odd": odd}}, "t")
    with pytest.raises(VimeError, match=f"^data.source = '{__name__}:OddSource': .*{said}") as e:
        prompts = UserPrompts(cfg, plugin_args(cfg))
        prompts.next(1)
        prompts.load_state(prompts.state())
    assert "\n" not in str(e.value)
