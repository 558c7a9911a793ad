"""`vime plan`: what is impossible is refused by name, what it proposes fits, and every recipe fits the accelerators it is for."""

import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from vime import cli, plan
from vime.config import Config, load, validate
from vime.errors import VimeError

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.fixture(autouse=True)
def _in_the_tree(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)  # recipes name their shapes from there


def run(shape: str, **sections: Any) -> Config:
    tree: dict[str, Any] = {"model": f"recipes/shapes/{shape}", "data": {"prompts": "p"}, "train": {"dtype": "bfloat16"}}
    for name, values in sections.items():
        tree[name] = tree.get(name, {}) | values
    return validate(tree, "test")


GAE = {"advantage_estimator": "gae"}
LONG = {"max_context_len": 131072, "max_response_len": 65536}
FILES = {"weights": {"transport": "file"}, "data_plane": {"backend": "ray"}}
IMPOSSIBLE: list[tuple[str, dict[str, Any], str, int, str]] = [
    ("qwen3-8b", {"parallel": {"tp": 3}}, "h100", 8, "parallel.tp = 3 does not divide the model's 32 attention heads"),
    ("qwen3-8b", {"parallel": {"fsdp": 2, "ep": 2}}, "h100", 8, "parallel.ep: the model has no experts"),
    ("qwen3-30b-a3b", {"parallel": {"fsdp": 4, "ep": 3}}, "h100", 8, "parallel.ep = 3 does not divide the model's 128 experts"),
    ("llama-3.2-1b", {"parallel": {"pp": 32}}, "h100", 64, "32 stages for 16 layers"),
    ("glm-5.2", {"parallel": {"tp": 2, "ep": 2}}, "h200", 8, "'mla_kv_a_proj', which is not tested"),
    ("glm-5.2", {"parallel": {"fsdp": 8}}, "h200", 8, "chooses the tokens it attends to by an indexer"),
    ("qwen3-8b", {"parallel": {"fsdp": 8}}, "h100", 8, "9 accelerators are needed (8 of trainer ranks, 1 of servers), there are 8"),
    ("qwen3-8b", {"parallel": {"fsdp": 4}, "algo": GAE | {"critic_ranks": 4}}, "h100", 8, "9 accelerators are needed (8 of trainer ranks, 1 of servers)"),
    ("qwen3-8b", {"parallel": {"fsdp": 4}, "algo": GAE | {"critic_ranks": 1}, "train": {"gradient_checkpointing": True}}, "h100", 8, "a critic rank takes "),
    ("qwen3-8b", {"parallel": {"fsdp": 8}, "rollout": {"num_engines": 8}}, "h100", 16, 'weights.transport = "shm" is the memory of one host'),
    ("qwen3-8b", {}, "h100", 2, "of them optimizer"),
    ("qwen3-0.6b", {"train": {"dtype": "bfloat16", "max_tokens_per_gpu": 65536}}, "h100", 2, "of them activations"),
    ("llama-3.1-70b", {"parallel": {"fsdp": 16}, **FILES}, "h100", 17, "engine 0: of 70.0 GB for them on a h100 weights take 141.1"),
    ("qwen3-32b", {"parallel": {"fsdp": 16}, "rollout": LONG, **FILES}, "h100", 17, "one sample of rollout.max_context_len = 131072 34.4"),
    ("qwen3-8b", {"vllm": {"tensor_parallel_size": 3}}, "h200", 8, "tensor_parallel_size = 3 does not divide the model's 32"),
    ("qwen3-8b", {"vllm": {"tensor_parallel_size": 16}, **FILES}, "h200", 32, "engine 0 takes 16 accelerators, a node has 8"),
    ("deepseek-v3", {"parallel": {"fsdp": 8}, "rollout": {"engines": ["http://a:1"]}}, "h100", 8, "no layout on up to 8 h100 fits this model"),
]


@pytest.mark.parametrize(("shape", "sections", "kind", "gpus", "said"), IMPOSSIBLE, ids=[x[4][:40] for x in IMPOSSIBLE])
def test_what_is_impossible_is_refused_by_name(shape: str, sections: dict[str, Any], kind: str, gpus: int, said: str) -> None:
    wrong = plan.faults(run(shape, **sections), plan.gpu(kind), gpus)
    assert any(said in what or said in fix for what, fix in wrong), wrong
    assert all(fix for _, fix in wrong)


@pytest.mark.parametrize(("shape", "kind", "gpus"), [("qwen3-8b", "h100", 8), ("qwen3-30b-a3b", "h200", 8), ("llama-3.1-8b", "ascend910b", 8)])
def test_what_is_proposed_fits(shape: str, kind: str, gpus: int) -> None:
    cfg = run(shape)
    ((what, fix),) = [f for f in plan.faults(cfg, plan.gpu(kind), gpus) if "trainer rank takes" in f[0]]
    changes: dict[str, dict[str, Any]] = {}
    for key, value in re.findall(r"(\w+\.\w+)=(\S+)", fix):
        section, _, name = key.partition(".")
        changes.setdefault(section, {})[name] = {"true": True}.get(value, value)
    assert changes, (what, fix)
    other = run(shape, **changes)
    assert plan.faults(other, plan.gpu(kind), gpus) == []


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_fits(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = shlex.split(path.read_text().splitlines()[1].removeprefix("# vime "))
    assert command[:2] == ["plan", str(path.relative_to(ROOT))]
    assert cli.main(command) == 0, capsys.readouterr().err
    said = capsys.readouterr().out
    assert {"memory", "samples", "weights", "step", "assumed"} <= {line.split()[0] for line in said.splitlines()}


def test_recipes_cover_the_families() -> None:
    assert {p.stem.split("-")[0] for p in RECIPES} == {"qwen3", "glm", "deepseek", "llama"}


def test_the_published_layout_is_shown_and_what_is_not_ours_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["plan", "--example", "glm-5.2"]) == 1
    said = capsys.readouterr()
    assert "tp 8 x ep 16 x pp 4 x cp 2" in said.err and "by an indexer" in said.err and "mla_kv_a_proj" in said.err and "the nearest that fits: parallel." in said.err
    assert "8 of 8 gb300" in said.out
    held = float(re.search(r"on a rank: weights ([\d.]+)", said.out)[1])  # type: ignore[index]
    whole = sum(math.prod(shape) for _, shape in plan.tensors("recipes/shapes/glm-5.2")[1])
    assert whole == pytest.approx(744e9, rel=0.01)  # 744B parameters
    assert held == pytest.approx(4 * whole / 64 / 1e9, rel=0.15)


def test_weights_are_counted_to_the_last_one() -> None:
    for shape, billions in (("qwen3-8b", 8.19), ("qwen3-30b-a3b", 30.53), ("deepseek-v3", 671.03), ("llama-3.1-8b", 8.03), ("llama-3.2-1b", 1.236)):
        cfg = run(shape)
        bytes_ = plan.rank_bytes(cfg, cfg.parallel)
        assert bytes_["weights"] / 4e9 == pytest.approx(billions, abs=0.006)
        assert (bytes_["gradients"], bytes_["optimizer"]) == (bytes_["weights"], 2 * bytes_["weights"])


def test_unknown_accelerators_and_missing_runs_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(VimeError, match=r"--gpu-type h1000: not known .*h100"):
        plan.gpu("h1000")
    assert cli.main(["plan"]) == 1 and "--example glm-5.2" in capsys.readouterr().err
    assert cli.main(["plan", "--example", "nothing"]) == 1 and "no such configuration file" in capsys.readouterr().err
    assert load(RECIPES[0]).name
