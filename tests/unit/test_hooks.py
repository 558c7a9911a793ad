import sys
from pathlib import Path

import pytest

from vime import config
from vime.errors import VimeError
from vime.hooks import arguments, load, loss_side


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


def tis(args: object, *, pg_loss: object, loss_masks: object, **kw: object) -> None: ...


def reducer(total_lengths: object, response_lengths: object, loss_masks: object) -> None: ...


def test_the_loss_side_is_checked_by_shape() -> None:
    def cfg(**changes: dict[str, str]) -> config.Config:
        return config.validate({"model": "m", "data": {"prompts": "p"}} | changes, "t")

    assert loss_side(cfg()) == {}
    assert loss_side(cfg(algo={"custom_tis": f"{__name__}:tis"})) == {"algo.custom_tis": tis}
    with pytest.raises(VimeError, match=r"^loss.custom_reducer = .*reducer\(total_lengths.*does not take 4 positional"):
        loss_side(cfg(loss={"custom_reducer": f"{__name__}:reducer"}))
    with pytest.raises(VimeError, match=r"^algo.custom_tis = .*two\(.*and pg_loss, train_log_probs.*missing a required argument"):
        loss_side(cfg(algo={"custom_tis": f"{__name__}:two"}))


def test_arguments_have_slimes_names() -> None:
    cfg = config.validate({"model": "m", "data": {"prompts": "p"}, "algo": {"correction": "icepop"}, "loss": {"aggregate": "token-mean"}}, "t")
    args = arguments(cfg)
    assert (args.tis_clip_low, args.tis_clip, args.use_tis, args.calculate_per_token_loss, args.eps_clip_high) == (0.5, 2.0, True, True, 0.2)
    assert args.algo.correction == "icepop" and args.rollout_temperature == 1.0
