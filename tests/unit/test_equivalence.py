"""The equivalence test: exact where it can be, and by simulation that it accepts what it should and hardly ever what it should not."""

import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from vime import cli, config, parity
from vime.errors import VimeError
from vime.observe.equivalence import MOST, POWER, seeds_needed, t_quantile, t_tail, tost

MARGIN, ALPHA = 0.05, 0.05


def runs(rng: np.random.Generator, n: int, steps: int, sd: float, hang: float) -> np.ndarray:
    """[n, steps] stationary AR(1) noise of standard deviation `sd`: each step keeps the share `hang` of the one before, as a run's do."""
    out = np.empty((n, steps))
    out[:, 0] = rng.normal(0, sd, n)
    for t in range(1, steps):
        out[:, t] = hang * out[:, t - 1] + rng.normal(0, sd * math.sqrt(1 - hang**2), n)
    return out


def accepted(rng: np.random.Generator, shift: float, n: int, steps: int, window: int, sd: float, hang: float, times: int) -> float:
    """Share of simulated pairs of variants, `shift` apart, that are called equivalent."""
    found = 0
    for _ in range(times):
        a, b = runs(rng, n, steps, sd, hang), runs(rng, n, steps, sd, hang) + shift
        found += tost(a, b, MARGIN, ALPHA, window).equivalent
    return found / times


@given(st.floats(-30, 30), st.integers(1, 60))
def test_the_tail_is_that_of_students_t(t: float, df: int) -> None:
    """Against the density, integrated over the angle that makes the range finite."""
    angles = np.linspace(math.atan2(t, math.sqrt(df)), math.pi / 2, 20_001)
    density = np.cos(angles) ** (df - 1) * math.exp(math.lgamma((df + 1) / 2) - math.lgamma(df / 2)) / math.sqrt(math.pi)
    assert t_tail(t, df) == pytest.approx(np.trapezoid(density, angles), abs=1e-6)


@given(st.floats(1e-4, 0.49), st.integers(1, 200))
def test_the_quantile_is_its_inverse(tail: float, df: int) -> None:
    assert t_tail(t_quantile(tail, df), df) == pytest.approx(tail, rel=1e-6)
    assert t_quantile(0.05, 2) == pytest.approx(2.919986, abs=1e-6)  # of any table


@given(st.integers(2, 6), st.integers(1, 40), st.integers(1, 40), st.integers(0, 99))
def test_what_holds_of_any_curves(n: int, steps: int, window: int, seed: int) -> None:
    """Windows cover the steps; a curve equals itself; sides and order of seeds don't matter; the verdict is what the interval says."""
    rng = np.random.default_rng(seed)
    a, b = rng.normal(0, 0.03, (2, n, steps))
    v = tost(a, b, MARGIN, ALPHA, window)
    assert [s for first, last in v.windows for s in range(first, last + 1)] == list(range(1, steps + 1))
    assert all(last - first + 1 >= min(window, steps) for first, last in v.windows)
    assert v.equivalent == all(abs(d) + h < MARGIN for d, h in zip(v.difference, v.half_width))
    assert len(tost(a, b, MARGIN).windows) <= 4  # by default
    assert tost(b[::-1], a[::-1], MARGIN, ALPHA, window).p == pytest.approx(v.p)
    assert tost(a, a, MARGIN, ALPHA, window).equivalent and not tost(a, a + 2 * MARGIN, MARGIN, ALPHA, window).equivalent
    assert v.equivalent or v.needed is None or v.needed > n


@pytest.mark.parametrize(("n", "steps", "window", "hang"), [(2, 1, 1, 0.0), (3, 20, 20, 0.9), (5, 20, 5, 0.95), (10, 8, 1, 0.5)])
def test_variants_a_margin_apart_are_hardly_ever_accepted(n: int, steps: int, window: int, hang: float) -> None:
    """However much the steps of a run hang together: at most alpha, here + 3 standard errors of the simulation."""
    rng = np.random.default_rng(7)
    share = accepted(rng, MARGIN, n, steps, window, 0.02, hang, 2000)
    assert share <= ALPHA + 3 * math.sqrt(ALPHA * (1 - ALPHA) / 2000)
    if steps <= window:  # one window: then it is alpha, not less
        assert share >= ALPHA - 3 * math.sqrt(ALPHA * (1 - ALPHA) / 2000)


def test_steps_taken_for_observations_would_accept_far_too_much() -> None:
    """Why seeds are the unit: the same data, each step a row of its own, are accepted several times as often as alpha allows."""
    rng, found = np.random.default_rng(3), 0
    for _ in range(500):
        d = runs(rng, 3, 20, 0.02, 0.95) + MARGIN
        found += tost(d.reshape(-1, 1), np.zeros((60, 1)), MARGIN, ALPHA, 1).equivalent
    assert found / 500 > 4 * ALPHA


@pytest.mark.parametrize("shift", [0.0, 0.02])
def test_the_number_of_seeds_it_asks_for_would_do(shift: float) -> None:
    sd = 0.04  # of one seed's difference; accepted() draws both sides
    n = seeds_needed([shift], [sd], MARGIN, ALPHA)
    assert n and 3 < n < 40
    rng = np.random.default_rng(1)
    assert accepted(rng, shift, n, 1, 1, sd / math.sqrt(2), 0, 2000) > POWER - 0.03
    assert accepted(rng, shift, n // 2, 1, 1, sd / math.sqrt(2), 0, 2000) < POWER - 0.1


def test_too_few_seeds_are_said_to_be_too_few() -> None:
    rng = np.random.default_rng(0)
    a, b = rng.normal(0.5, 0.05, (2, 3, 20))
    assert "2 at least are needed" in str(tost(a[:1], a[:1], MARGIN))
    v = tost(a, b, MARGIN)
    assert not v.equivalent and v.needed and f"3 seed(s); about {v.needed} would be needed" in str(v)
    assert f"{MOST} would not do" in str(tost(a, b + 1, MARGIN))
    with pytest.raises(VimeError, match="cannot be compared"):
        tost(a, b[:, :19], MARGIN)
    with pytest.raises(VimeError, match="margin = 0"):
        tost(a, b, 0)


def finished(folder: Path, seed: int, rewards: list[Any], file: Path | None = None, overrides: tuple[str, ...] = ()) -> str:
    """A folder as a finished run leaves it: its configuration and its metrics."""
    folder.mkdir(parents=True)
    cfg = config.load(file, list(overrides)) if file else config.validate({"model": "m", "data": {"prompts": "p"}, "seed": seed}, "test")
    (folder / "config.toml").write_text(config.dump(cfg))
    rows = [
        {"step": 0, "eval/reward": 0.1},
        *({"step": i, "rollout/raw_reward": r, "train/logprob_abs_diff": 1e-6} for i, r in enumerate(rewards, 1)),
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    return str(folder)


def test_the_command_on_finished_runs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Exit codes 0, 1 and 2, the JSON, the picture; seeds are paired whatever the order of the folders."""
    a = [finished(tmp_path / f"a{k}", k, [0.1 * k + 0.01 * i for i in range(8)]) for k in range(3)]
    b = [finished(tmp_path / f"b{k}", k, [0.1 * k + 0.01 * i + 0.001 * k for i in range(8)]) for k in (2, 0, 1)]
    far = [finished(tmp_path / f"far{k}", k, [0.5 + 0.1 * k] * 8) for k in range(3)]
    assert cli.main(["parity", "--runs-a", *a, "--runs-b", *b, "--json", "--out", str(tmp_path / "out")]) == 0
    said = json.loads(capsys.readouterr().out)
    reward = said["metrics"]["rollout/raw_reward"]
    assert said["equivalent"] and said["seeds"] == [0, 1, 2] and reward["difference"] == pytest.approx([-0.001] * 4)
    assert reward["windows"] == [[1, 2], [3, 4], [5, 6], [7, 8]] and (tmp_path / "out/parity.png").read_bytes()[1:4] == b"PNG"
    assert cli.main(["parity", "--runs-a", *a, "--runs-b", *far, "--out", str(tmp_path / "out")]) == 1
    assert "not shown to be equivalent" in capsys.readouterr().out
    for words, fault in (
        ([*a, "--runs-b", *b[:2]], "seeds 0 1 2 on side a, 2 0 on side b"),
        ([a[0], a[0], a[1], "--runs-b", *b], "seeds 0 0 1 on side a"),
        ([a[0], "--runs-b", finished(tmp_path / "short", 0, [0.1] * 7)], "all must have the same steps"),
        ([a[0], "--runs-b", finished(tmp_path / "gap", 0, [0.1] * 7 + [None])], "first .*gap/metrics.jsonl, step 8: rollout/raw_reward"),
        ([*a, "--runs-b", *b, "--a", "seed=1"], "nothing to judge"),
        ([*a, "--runs-b", "nowhere", "--margin-reward", "0"], "margin = 0"),  # seen before anything is read or run
    ):
        assert cli.main(["parity", "--runs-a", *words, "--out", str(tmp_path / "out")]) == 2
        assert re.search(fault, capsys.readouterr().err)


def test_finished_runs_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is started, with which overrides; a folder of another configuration is refused."""
    file, out, started = tmp_path / "run.toml", tmp_path / "out", []
    file.write_text('model = "m"\n[data]\nprompts = "p"\n[train]\nsteps = 2\n')

    def train(file: str, cfg: config.Config, overrides: list[str]) -> None:
        started.append((cfg.name, cfg.seed, cfg.train.lr))
        finished(cfg.folder, cfg.seed, [0.5, 0.6], Path(file), tuple(overrides))

    monkeypatch.setattr(parity, "run", train)
    monkeypatch.setattr(parity.train, "preflight", lambda cfg: None)
    sides = {"a": [], "b": ["train.lr=1e-3"]}
    parity.both(str(file), sides, [0, 1], out)
    default = config.load(file).train.lr
    assert started == [("a-seed0", 0, default), ("b-seed0", 0, 1e-3), ("a-seed1", 1, default), ("b-seed1", 1, 1e-3)]
    assert parity.both(str(file), sides, [0, 1, 2], out)[1] == [out / f"b-seed{k}" for k in (0, 1, 2)] and len(started) == 6
    with pytest.raises(VimeError, match="b-seed0 holds a run of another configuration"):
        parity.both(str(file), {"a": [], "b": ["train.lr=2e-3"]}, [0], out)
    with pytest.raises(VimeError, match="seed=3: vime parity sets seed, name, run_dir itself"):
        parity.both(str(file), {"a": ["seed=3"], "b": []}, [0], out)


def test_a_run_that_fails_is_named_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text('model = "nowhere"\n[data]\nprompts = "p"\n')
    overrides = ["name=a-seed0", f"run_dir={tmp_path}/out"]
    cfg = config.load(tmp_path / "run.toml", overrides)
    with pytest.raises(VimeError, match=r"(?s)out/a-seed0: vime train ended with exit code 1.*no model folder with config.json"):
        parity.run(str(tmp_path / "run.toml"), cfg, overrides)
