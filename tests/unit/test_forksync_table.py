"""The translation table: order, scopes, protected spans, settling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from forksync.git import ForksyncError
from forksync.table import Protect, Rule, Table, TableFile, needles, parsed, renames

ENGINE = TableFile(
    path=[Rule(source="slate", to="vane")],
    protect=[Protect(pattern=r"https?://x\.org/slate/\d+"), Protect(pattern=r"\bglang\.srt(?:\.\w+)*")],
    rule=[
        Rule(kind="flag", source="--glang-mem-static", to="--vapor-memory"),
        Rule(kind="flag", source="--glang-dp", to="--vapor-data-parallel", twin=False),
        Rule(kind="word", source="Args", to="Arguments", scope=["docs/*", "*.md"]),
        Rule(kind="regex", source=r"^([ \t]*(?:sudo )?pkill -9) glang[ \t]*$", to=r"\1 -f vapor"),
        Rule(kind="regex", source=r"(?<=[A-Za-z0-9_])GLang|GLang(?=[A-Z_0-9])", to="VAPOR"),
        Rule(source="GLang", to="vapoR"),
        Rule(source="glang", to="vapor"),
        Rule(source="slate", to="vane"),
    ],
)
TABLE = Table(ENGINE)
PIECES = ["slate", "glang", "GLang", "GLangEngine", "FakeGLang", "glang.srt.utils", "--glang-mem-static", "glang_mem_static", "--glang-mem-static-x", "glang_dp", "--glang-dp",
          "https://x.org/slate/7", "Args", "pkill -9 glang", "sudo pkill -9 glang", "\n", "\n", "\r\n", " ", "  ", "_", "x", ".", "\u4e2d", "\udcff"]  # fmt: skip


@pytest.mark.parametrize(
    ("source", "path", "out"),
    [
        ("import slate.glang", "a.py", "import vane.vapor"),
        ("from glang.srt.utils import x", "a.py", "from glang.srt.utils import x"),
        ("see https://x.org/slate/7 of slate", "a.md", "see https://x.org/slate/7 of vane"),
        ("class GLangEngine(FakeGLang): GLang", "a.py", "class VAPOREngine(FakeVAPOR): vapoR"),
        ("--glang-mem-static args.glang_mem_static", "a.py", "--vapor-memory args.vapor_memory"),
        ("--glang-dp args.glang_dp", "a.py", "--vapor-data-parallel args.vapor_dp"),
        ("--glang-mem-static-x", "a.py", "--vapor-mem-static-x"),
        ("Args", "a.py", "Args"),
        ("Args", "docs/en/a.rst", "Arguments"),
        ("  sudo pkill -9 glang\nglang\n", "a.sh", "  sudo pkill -9 -f vapor\nvapor\n"),
    ],
)
def test_rules_in_order_with_scopes_and_protected_spans(source, path, out):
    assert TABLE.text(source, path) == out


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.sampled_from(["a.py", "docs/a.md"]))
def test_translating_twice_is_translating_once(pieces, path):
    once = TABLE.text("".join(pieces), path)
    assert TABLE.text(once, path) == once


@given(st.lists(st.sampled_from(PIECES), max_size=12), st.sampled_from(["a.py", "docs/a.md"]))
def test_looking_for_literals_first_changes_nothing(pieces, path):
    slow = Table(ENGINE)
    slow.rules = [(name, scope, None, step) for name, scope, _, step in slow.rules]
    slow.protects = [(pattern, None) for pattern, _ in slow.protects]
    assert slow.text("".join(pieces), path) == TABLE.text("".join(pieces), path)


@pytest.mark.parametrize(
    ("pattern", "found"),
    [(r"ab?cdef", ["cdef"]), (r"abc|xyz-q", ["abc", "xyz-q"]), (r"[abc]+|xyz", None), (r"(?i:abc)/slime", ["/slime"]), (r"(?i)abcd", None), (r"(abc|xyz)", None)],
)
def test_needles_say_nothing_that_is_not_sure(pattern, found):
    assert needles(pattern) == found


def test_binary_and_bytes_that_are_no_text_survive():
    assert TABLE.blob(b"slate\0", "x.bin", "100644") == b"slate\0"
    assert TABLE.blob(b"caf\xe9 slate\r\n", "x.txt", "100644") == b"caf\xe9 vane\r\n"
    assert TABLE.blob(b"../slate/x", "link", "120000") == b"../vane/x"


def test_a_table_that_feeds_itself_is_refused():
    with pytest.raises(ForksyncError, match=r"a\.py does not settle.*rule\.0 \(ab\)"):
        Table(TableFile(rule=[Rule(source="ab", to="abab")])).text("ab", "a.py")
    with pytest.raises(ForksyncError, match="swallows a protected span"):
        Table(TableFile(protect=[Protect(pattern="keep")], rule=[Rule(kind="regex", source="x.*", to="y")])).text("x keep", "a.py")


def test_plain_renaming_and_its_example():
    table = Table(parsed(TableFile, renames("slate", "vane"), "t"))
    assert table.text("Slate SLATE slate https://github.com/x/slate/pull/3", "a") == "Vane VANE vane https://github.com/x/slate/pull/3"
    assert table.failing_examples() == []
    table.data.example[0].out = "import vain"
    assert "example.0" in table.failing_examples()[0]
