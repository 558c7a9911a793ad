import pickle

from vime.errors import VimeError, nearest, said


def test_the_line_a_person_sees() -> None:
    assert str(VimeError("it broke")) == "it broke"
    assert str(VimeError("it broke", "mend it")) == "it broke (mend it)"
    assert str(VimeError("it broke", "mend it", "last\nwords\n")) == "it broke (mend it)\n--- log tail ---\nlast\nwords"


def test_an_error_survives_pickling() -> None:
    e = pickle.loads(pickle.dumps(VimeError("what", "fix", "log")))
    assert isinstance(e, VimeError) and (e.what, e.fix, e.log) == ("what", "fix", "log")


def test_nearest() -> None:
    assert nearest("stpes", ["steps", "lr"]) == "did you mean 'steps'?"
    assert nearest("zzzz", ["steps", "lr"]) == "valid: lr, steps"
    assert nearest("zzzz", [f"n{i:03d}" for i in range(100)]).endswith("n011, ... and 88 more")


def test_said_is_one_short_line() -> None:
    assert said(ValueError("a\n  b")) == "ValueError: a b"
    assert len(said(ValueError("x" * 5000))) < 310
