import copy
import pickle
import sys
from pathlib import Path

import pytest

from vime.config import Config, validate
from vime.errors import VimeError
from vime.hooks import POINTS, DynamicFilterOutput, accepted, keeps, load, plugin_args

BASE = {"model": "m", "data": {"prompts": "p.jsonl"}}


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
    assert load(path, "reward.function") in (two, instance)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("two", "is not a dotted path"),
        (":two", "is not a dotted path"),
        ("no_such_pkg.mod:two", "cannot import no_such_pkg.mod: ModuleNotFoundError"),
        (f"{__name__}:tow", "has no 'tow' .did you mean 'two'"),
        (f"{__name__}:number", "'number' of .* is of type int, not a function"),
        (f"{__name__}:", "has no ''"),
        ("..mod:two", "cannot import ..mod"),
        ("__future__:that", "it has no function at all"),
    ],
)
def test_every_fault_names_key_and_path(path: str, said: str) -> None:
    with pytest.raises(VimeError, match=f"(?s)^some.key = '{path}'.*{said}"):
        load(path, "some.key")


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("1 / 0", "ZeroDivisionError: division by zero"),
        ("import sys; sys.exit()", "SystemExit: "),
        ("import sys; sys.exit(0)", "SystemExit: 0"),
        ("raise GeneratorExit", "GeneratorExit: "),
        ("class Odd(BaseException): ...\nraise Odd('skipped')", "Odd: skipped"),
        ("import no_such_package_at_all", "ModuleNotFoundError: No module named 'no_such_package_at_all'"),
        ("x = (", "SyntaxError: "),
        ("raise ValueError('word\\n' * 10_000)", "ValueError: word word"),
    ],
)
def test_a_module_that_fails_on_import_in_any_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str, said: str) -> None:
    name = f"breaks_{abs(hash(code))}"
    (tmp_path / f"{name}.py").write_text(code + "\n")
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(VimeError) as e:
        load(f"{name}:fn", "reward.function")
    line = str(e.value)
    assert f"cannot import {name}: {said}" in line and "PYTHONPATH" not in line and "\n" not in line and len(line) < 600


def test_a_long_module_is_not_listed_in_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "long_module.py").write_text("".join(f"def f{i:04d}(): ...\n" for i in range(500)))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(VimeError, match=r"valid: f0000, f0001, .*\.\.\. and 488 more") as e:
        load("long_module:zzz", "reward.function")
    assert len(str(e.value)) < 400


@pytest.mark.parametrize("builtin", ["max", "dict", "print", "int", "type", "getattr"])
def test_builtins_fit_or_are_refused_in_one_line(builtin: str) -> None:
    """Some have a signature, some have none: neither is a traceback."""
    with pytest.raises(VimeError, match=f"^rollout.sample_filter = 'builtins:{builtin}': expected|^$") as e:
        load(f"builtins:{builtin}", "rollout.sample_filter")
        raise VimeError("")  # it fits
    assert "\n" not in str(e.value)


# ------------------------------------------------------------------ points


async def generate(args: object, sample: object, sampling_params: object, evaluation: bool = False) -> object:
    return sample


async def async_filter(args: object, samples: object) -> bool:
    return True


def rollout_function(args: object, rollout_id: int, data_source: object, evaluation: bool = False) -> object:
    return None


def no_evaluation(args: object, rollout_id: int, data_source: object) -> object:
    return None


def tis(args: object, *, pg_loss: object, loss_masks: object, **kw: object) -> None: ...


def reducer(total_lengths: object, response_lengths: object, loss_masks: object) -> None: ...


class Source:
    def __init__(self, args: object) -> None: ...
    def get_samples(self, n: int) -> list: ...
    def add_samples(self, groups: list) -> None: ...
    def save(self, rollout_id: int) -> None: ...
    def load(self, rollout_id: int | None = None) -> None: ...
    def __len__(self) -> int: ...


class Half:
    def __init__(self, args: object) -> None: ...
    def get_samples(self, n: int) -> list: ...


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("rollout.custom_generate", "generate"), ("rollout.custom_generate", "three"), ("rollout.function", "rollout_function"),
        ("data.source", "Source"), ("reward.function", "two"), ("algo.custom_tis", "tis"), ("rollout.dynamic_filter", "two"),
    ],
)  # fmt: skip
def test_plugins_that_fit(key: str, name: str) -> None:
    assert load(f"{__name__}:{name}", key) is globals()[name]


@pytest.mark.parametrize(
    ("key", "name", "said"),
    [
        ("rollout.custom_generate", "two", r"expected async \(args, sample, sampling_params\[, evaluation\]\) -> Sample .*found two\(args.*too many"),
        ("rollout.function", "no_evaluation", r"expected \(args, rollout_id, data_source, evaluation=\).*found no_evaluation.*'evaluation'"),
        ("rollout.dynamic_filter", "async_filter", r"expected \(args, samples\) -> DynamicFilterOutput \| bool, found async async_filter"),
        ("rollout.dynamic_filter", "three", r"missing a required argument: 'sampling_params'"),
        ("loss.custom_reducer", "reducer", r"expected \(total_lengths, .* found reducer\(total_lengths.*too many positional"),
        ("algo.custom_tis", "two", r"expected \(args, pg_loss=, train_log_probs=.*missing a required argument"),
        ("data.source", "Half", "Half has no add_samples, save, load, __len__"),
        ("log.rollout_hook", "two", r"\(rollout_id, args, samples, extra_metrics, rollout_time\) -> bool, found two"),
    ],
)
def test_plugins_that_do_not_fit_show_both_signatures(key: str, name: str, said: str) -> None:
    with pytest.raises(VimeError, match=f"(?s)^{key} = '{__name__}:{name}': .*{said}"):
        load(f"{__name__}:{name}", key)


def test_every_point_is_a_key_of_the_configuration_and_documented() -> None:
    docs = (Path(__file__).parents[2] / "docs/plugins.md").read_text()
    for key, point in POINTS.items():
        section, name = key.split(".")
        assert name in Config.model_fields[section].annotation.model_fields
        shape = str(point).replace("|", "\\|")
        assert f"| `{key}` | `--{point.flag}` | `{shape}` |" in docs, key


def test_keywords_go_to_those_that_take_them() -> None:
    assert accepted(generate, evaluation=True, rollout_id=3) == {"evaluation": True}
    assert accepted(lambda args, **kw: None, evaluation=True) == {"evaluation": True} and accepted(two, evaluation=True) == {}


# ------------------------------------------------------------------ args


def test_args_have_sections_flat_names_and_own_settings() -> None:
    given = {"rollout": {"batch_size": 3, "temperature": 0.5}, "reward": {"function": "exact"}, "args": {"max_turns": 7, "rm_type": "f1"}}
    args = plugin_args(validate(BASE | given, "t"), "http://10.0.0.1:81")
    assert args.rollout_batch_size == args.rollout.batch_size == 3 and args.rollout_temperature == 0.5 and args.hf_checkpoint == "m"
    assert (args.sglang_router_ip, args.vllm_router_port) == ("10.0.0.1", 81)
    assert args.max_turns == 7 and args.rm_type == "f1", "[args] wins over a flat name"
    assert args.global_batch_size == 24 and args.partial_rollout is False and args.dynamic_sampling_filter_path is None
    with pytest.raises(AttributeError, match="args has no 'rollout_batchsize'; did you mean 'rollout_batch_size'"):
        _ = args.rollout_batchsize
    assert getattr(args, "no_such_thing", 5) == 5
    again = pickle.loads(pickle.dumps(copy.deepcopy(args)))
    again.results_dict = {}
    assert again.rollout == args.rollout and again.lr == args.lr and not hasattr(args, "results_dict")


def test_args_of_the_loss_side() -> None:
    args = plugin_args(validate(BASE | {"algo": {"correction": "icepop"}, "loss": {"aggregate": "token-mean"}}, "t"))
    assert (args.tis_clip_low, args.tis_clip, args.use_tis, args.calculate_per_token_loss, args.eps_clip_high) == (0.5, 2.0, True, True, 0.2)
    assert args.algo.correction == "icepop" and args.rollout_temperature == 1.0


def test_args_without_a_router_and_with_a_section_hidden() -> None:
    with pytest.raises(AttributeError, match="sglang_router_ip"):
        _ = plugin_args(validate(BASE, "t")).sglang_router_ip
    with pytest.raises(VimeError, match=r"\[args\] rollout: the configuration has a section"):
        plugin_args(validate(BASE | {"args": {"rollout": 1}}, "t"))


def test_filter_answers() -> None:
    assert keeps(True).keep and keeps(DynamicFilterOutput(False, "flat")).reason == "flat"
    with pytest.raises(TypeError, match="neither"):
        keeps(None)
