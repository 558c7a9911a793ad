import sys
from pathlib import Path

import pytest

from vime.errors import VimeError
from vime.hooks import load


def two(args: object, sample: object) -> float:
    return 1.0


async def three(args: object, sample: object, sampling_params: object) -> object:
    return sample


class Callable2:
    def __call__(self, args: object, sample: object) -> float:
        return 1.0


instance = Callable2()
number = 3


@pytest.mark.parametrize("path", [f"{__name__}:two", f"{__name__}.two", f"{__name__}:instance"])
def test_both_spellings_and_callable_objects(path: str) -> None:
    assert load(path, "reward.function", 2) in (two, instance)


def test_async_functions_and_defaults() -> None:
    assert load(f"{__name__}:three", "k", 3) is three
    assert load("json:dumps", "k", 1) is not None and load("json:dumps", "k") is not None


@pytest.mark.parametrize(
    ("path", "positional", "said"),
    [
        ("two", 2, "is not a dotted path"),
        (":two", 2, "is not a dotted path"),
        ("no_such_pkg.mod:two", 2, "cannot import no_such_pkg.mod: ModuleNotFoundError"),
        (f"{__name__}:tow", 2, "no function 'tow'.*did you mean 'two'"),
        (f"{__name__}:number", 2, "no function 'number'"),
        (f"{__name__}:", 2, "no function ''"),
        (f"{__name__}:two", 3, r"two\(args.*does not take 3 positional arguments: too many"),
        (f"{__name__}:three", 2, "does not take 2 positional arguments: missing"),
    ],
)
def test_every_fault_names_key_and_path(path: str, positional: int, said: str) -> None:
    with pytest.raises(VimeError, match=f"(?s)^some.key = '{path}'.*{said}"):
        load(path, "some.key", positional)


def test_a_module_that_fails_on_import(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "breaks_on_import.py").write_text("1 / 0\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(VimeError, match="cannot import breaks_on_import: ZeroDivisionError: division by zero"):
        load("breaks_on_import:fn", "reward.function", 2)
