"""The run's folder: whose it is, what a resume finds in it, and what --overwrite may delete."""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.unit.test_preflight import folder as model_folder
from vime import config
from vime.cli import main
from vime.config import Config
from vime.data.records import read_groups, write_groups
from vime.errors import VimeError
from vime.folder import opened, summary
from vime.observe.metrics import read
from vime.sample import Sample, Status
from vime.trainer.checkpoint import read_state

STATE = {
    "step": 3, "prompts": {"given": 24, "rows": 9}, "counts": {"retries": 1}, "fresh": [23], "ledger": {"step": 3, "settled": [0, 22], "counts": {}},
    "groups": [{"group_index": 7, "oldest": 3, "ready": True}, {"group_index": 9, "oldest": 2, "ready": False}],
}  # fmt: skip


def cfg(folder: Path, **changes: Any) -> Config:
    return config.validate({"model": "m", "data": {"prompts": "p"}, "run_dir": str(folder.parent), "name": folder.name, **changes}, "t")


def run(folder: Path, resume: bool = False, overwrite: bool = False) -> str:
    """What happens to a run there: the error, or which step it begins after."""
    try:
        with opened(cfg(folder), resume, overwrite) as start:
            assert config.load(folder / "config.toml") == cfg(folder)
            return f"after step {start.step}"
    except VimeError as e:
        assert "\n" not in str(e)
        return str(e)


def checkpoint(folder: Path, state: Any) -> Path:
    ckpt = folder / "checkpoints" / "step_000003"
    (ckpt / "trainer").mkdir(parents=True, exist_ok=True)
    (ckpt / "groups.jsonl").write_text("")
    (ckpt / "state.json").write_text(state if isinstance(state, str) else json.dumps(state))
    return ckpt


# ---------------------------------------------------------------- whose it is


def test_new_again_overwritten_resumed(tmp_path: Path) -> None:
    assert run(tmp_path / "r", resume=True).endswith("(start without --resume)") and not (tmp_path / "r").exists()
    assert run(tmp_path / "r") == "after step 0"
    assert "exists already" in run(tmp_path / "r") and "no complete checkpoint" in run(tmp_path / "r", resume=True)
    (tmp_path / "r" / "metrics.jsonl").write_text("x")
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "kept").write_text("x")
    (tmp_path / "r" / "link").symlink_to(tmp_path / "outside")
    assert run(tmp_path / "r", overwrite=True) == "after step 0"
    assert {p.name for p in (tmp_path / "r").iterdir()} == {".lock", "config.toml", "samples", "checkpoints", "logs"}
    assert (tmp_path / "outside" / "kept").exists()
    checkpoint(tmp_path / "r", STATE)
    assert run(tmp_path / "r", resume=True) == "after step 3"


def test_a_place_without_permission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever runs the tests may be root, who may write anywhere: the kernel's answer is put in its mouth."""
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    assert "cannot be written: PermissionError: no permission to write into" in run(tmp_path / "a" / "b")
    assert not (tmp_path / "a").exists()


def test_overwrite_deletes_runs_only(tmp_path: Path) -> None:
    """A folder that is there for something else stays as it is, whatever its name."""
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.tex").write_text("years of work")
    assert "does not look like a run" in run(tmp_path / "thesis", overwrite=True)
    assert [p.name for p in (tmp_path / "thesis").iterdir()] == ["chapter1.tex"]
    for name in (".", "..", ".git", "a/b", "", "/etc", "../x", "a\n"):
        with pytest.raises(VimeError, match="name: String should match pattern"):
            config.validate({"model": "m", "data": {"prompts": "p"}, "name": name}, "t")


@pytest.mark.parametrize("odd", ["file", "file as run_dir", "/proc", "too long", "file as checkpoints"])
@pytest.mark.parametrize("overwrite", [False, True])
def test_places_that_cannot_be_used(tmp_path: Path, odd: str, overwrite: bool) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / ".lock").mkdir()
    folder = {
        "file": tmp_path / "file", "file as run_dir": tmp_path / "file" / "r", "/proc": Path("/proc/self/mem/r"), "too long": tmp_path / ("x" * 300),
        "file as checkpoints": tmp_path / "half",
    }[odd]  # fmt: skip
    said = run(folder, overwrite=overwrite)
    if odd != "file as checkpoints":
        with pytest.raises(VimeError):
            summary(cfg(folder), False, overwrite)
    assert "is not a folder" in said or "cannot be written" in said or "cannot be read" in said, said
    assert (tmp_path / "file").read_text() == "mine"


def test_two_runs_at_once_are_refused_and_a_killed_one_holds_nothing(tmp_path: Path) -> None:
    """The other run is a process of its own: it is named, and its end by SIGKILL frees the folder. Nothing of its folder changes meanwhile."""
    folder = tmp_path / "r"
    code = (
        "import sys, time; from pathlib import Path; from tests.unit.test_folder import cfg; from vime.folder import opened\n"
        "with opened(cfg(Path(sys.argv[1])), False, False): print('in', flush=True); time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) as other:
        try:
            assert other.stdout and other.stdout.readline() == "in\n"
            checkpoint(folder, STATE)
            for how in ({"resume": True}, {"overwrite": True}):
                assert f"process {other.pid} on " in run(folder, **how) and (folder / "config.toml").exists()
        finally:
            other.kill()
    assert run(folder, resume=True) == "after step 3"
    with opened(cfg(folder), True, False):
        assert f"process {os.getpid()} on " in run(folder, resume=True)
    with pytest.raises(RuntimeError), opened(cfg(folder), True, False):
        raise RuntimeError
    assert run(folder, resume=True) == "after step 3"


def test_a_check_that_fails_leaves_the_folder_as_it_was(tmp_path: Path) -> None:
    def refuse(start: Any) -> None:
        raise VimeError("other prompts")

    assert run(tmp_path / "r") == "after step 0"
    checkpoint(tmp_path / "r", STATE)
    before = (tmp_path / "r" / "config.toml").read_text()
    for resume in (True, False):
        with pytest.raises(VimeError, match="other prompts"), opened(cfg(tmp_path / "r", seed=7), resume, not resume, refuse):
            pass
        assert (tmp_path / "r" / "config.toml").read_text() == before and (tmp_path / "r" / "checkpoints" / "step_000003").exists()


# ---------------------------------------------------------------- what a resume finds


def damaged() -> dict[str, Any]:
    """Every way to leave one value out, or to put one of another type in its place."""
    out: dict[str, Any] = {
        "empty": "", "cut": json.dumps(STATE)[:40], "list": "[]", "number": "3", "null": "null", "deep": "[" * 100_000, "nul bytes": "\0" * 50,
    }  # fmt: skip
    for path in [("step",), ("prompts",), ("prompts", "given"), ("groups",), ("groups", 0, "oldest"), ("groups", 1, "ready"), ("counts",), ("fresh",), ("ledger", "settled")]:
        for value in (None, "x", 1.5, []) if path != ("groups",) else (None, 1.5, [3], {"a": 1}):
            if (path, value) not in [(("groups",), []), (("fresh",), []), (("ledger", "settled"), [])]:
                state: Any = copy.deepcopy(STATE)
                node = state
                for k in path[:-1]:
                    node = node[k]
                node[path[-1]] = value
                out[f"{path}={value}"] = json.dumps(state)
        state = node = copy.deepcopy(STATE)
        for k in path[:-1]:
            node = node[k]  # type: ignore[index]
        del node[path[-1]]  # type: ignore[attr-defined]
        out[f"no {path}"] = json.dumps(state)
    return out


@pytest.mark.parametrize("case", damaged())
def test_a_damaged_state_is_named(tmp_path: Path, case: str) -> None:
    assert run(tmp_path / "r") == "after step 0"
    checkpoint(tmp_path / "r", damaged()[case])
    said = run(tmp_path / "r", resume=True)
    assert "step_000003/state.json is damaged" in said and "remove" in said, said


def test_a_state_with_parts_missing_or_not_text(tmp_path: Path) -> None:
    ckpt = checkpoint(tmp_path, STATE)
    assert read_state(ckpt) == STATE
    (ckpt / "groups.jsonl").unlink()
    (ckpt / "trainer").rmdir()
    with pytest.raises(VimeError, match=r"no trainer and no groups\.jsonl beside it"):
        read_state(ckpt)
    (ckpt / "state.json").write_bytes(b"\xff{}")
    with pytest.raises(VimeError, match="damaged: UnicodeDecodeError"):
        read_state(ckpt)


@pytest.mark.parametrize("text", ["", "{}\n", "[]\n[{}]\n", "[3]\n", "[", '[{"status": "pending"}]\n', "\udcff"])
def test_damaged_groups_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "groups.jsonl").write_text(text, "utf-8", "surrogateescape")
    with pytest.raises(VimeError, match=r"groups\.jsonl is damaged"):
        read_groups(str(tmp_path / "groups.jsonl"), [False], None)


def test_groups_go_to_disk_and_back_or_name_what_cannot(tmp_path: Path) -> None:
    """A filter may have put anything there after the sample was checked."""
    path = str(tmp_path / "groups.jsonl")
    odd = Sample(index=4, label=np.float32(0.5), metadata={"a": np.arange(2), "half": "\ud800"}, status="aborted")  # type: ignore[arg-type]
    write_groups(path, [odd], [Sample(index=5), Sample(index=6)])
    metas, first, second = read_groups(path, [False, False], None)
    assert metas == [[], []] and [s.index for s in second] == [5, 6]
    assert (first[0].label, first[0].metadata, first[0].status) == (0.5, {"a": [0, 1], "half": "\ud800"}, Status.ABORTED)
    with pytest.raises(VimeError, match=r"a checkpoint cannot hold sample 7: metadata\['x'\] is of type set"):
        write_groups(path, [odd], [Sample(index=7, metadata={"x": {1}})])


ROW = '{"step": 1, "a": 0.5}\n'


@pytest.mark.parametrize("bad", ["{", "3", "[]", "null", '{"a": 1}', '{"step": "1"}', '{"step": 1, "a": "x"}', "", "\0\0", "[" * 100_000, "\udcff"])
def test_damaged_metrics_are_named_but_a_last_line_that_was_cut_short(tmp_path: Path, bad: str) -> None:
    file = tmp_path / "metrics.jsonl"
    for end in ("", "\n"):
        file.write_text(ROW + bad + end, "utf-8", "surrogateescape")
        assert len(read(tmp_path)) == 1
    file.write_text(ROW + bad + "\n" + ROW, "utf-8", "surrogateescape")
    with pytest.raises(VimeError, match=r"metrics\.jsonl:2 is damaged"):
        read(tmp_path)


def test_metrics_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(VimeError, match="cannot be read"):
        read(tmp_path)


# ---------------------------------------------------------------- --dry-run


def test_dry_run_says_what_would_become_of_the_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, folder = tmp_path / "m", tmp_path / "r"
    model_folder(model)
    (tmp_path / "p.jsonl").write_text('{"prompt": "abc"}\n{"prompt": "abd"}\n')
    (tmp_path / "r.toml").write_text(
        f'model = "{model}"\nrun_dir = "{tmp_path}"\nname = "r"\ndata.prompts = "{tmp_path}/p.jsonl"\nreward.function = "exact"\n'
    )

    def dry(*options: str) -> str:
        code = main(["train", str(tmp_path / "r.toml"), "--dry-run", *options])
        said = capsys.readouterr()
        return f"{code} {said.out}{said.err}"

    assert "0 run" in (said := dry()) and f"folder     {folder}, new" in said
    assert dry("--resume").startswith("1 ") and not folder.exists()
    run(folder)
    assert dry().startswith("0 ") and "exists already" in dry() and "emptied first" in dry("--overwrite")
    ckpt = checkpoint(folder, STATE)
    (ckpt / "hf").mkdir()
    text = (model / "config.json").read_text()
    (ckpt / "hf" / "config.json").write_text(json.dumps(json.loads(text) | {"vocab_size": 7}))
    assert "vocab_size is 7 there, None here (give the model it was made from)" in dry("--resume")
    (ckpt / "hf" / "config.json").write_text(json.dumps(json.loads(text) | {"dtype": "float32"}))
    assert "not the prompts this run began with" in dry("--resume")
    prompts = {"given": 24, "rows": 2, "n": 8, "seed": 42, "shuffle": True, "content": "?"}
    (ckpt / "state.json").write_text(json.dumps(STATE | {"prompts": prompts}))
    prompts["content"] = dry("--resume").partition("is '")[2][:16]
    (ckpt / "state.json").write_text(json.dumps(STATE | {"prompts": prompts}))
    said = dry("--resume")
    assert said.startswith("0 ") and f"resume after step 3 of 100 from {ckpt}, 2 groups under way, 1 of them from their prompts" in said
    assert "would do nothing" in dry("--resume", "train.steps=3")
    (ckpt / "state.json").write_text("{")
    assert dry("--resume").startswith("1 ") and "is damaged" in dry("--resume")
