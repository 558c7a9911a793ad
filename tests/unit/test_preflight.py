"""What --dry-run must see of the model folder and the machine, before anything starts and without importing torch or transformers."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from vime import config, model
from vime.data.tokenizer import load
from vime.errors import VimeError
from vime.model import _char_tokenizer
from vime.train import preflight

TOKENIZER = Path(tempfile.mkdtemp())
_char_tokenizer().save_pretrained(TOKENIZER)
GOOD = {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"]}


def weights(tensors: int = 2, header: bytes | None = None, cut: int = 0) -> bytes:
    """A safetensors file of float32 vectors of 4."""
    entries = {f"t{i}": {"dtype": "F32", "shape": [4], "data_offsets": [16 * i, 16 * i + 16]} for i in range(tensors)}
    head = json.dumps(entries | {"__metadata__": {"format": "pt"}}).encode() if header is None else header
    whole = len(head).to_bytes(8, "little") + head + bytes(16 * tensors)
    return whole[: len(whole) - cut]


def folder(root: Path, cfg: Any = GOOD, **files: bytes) -> Path:
    """A model folder; files by name, __ for a dot."""
    shutil.copytree(TOKENIZER, root)
    (root / "config.json").write_bytes(cfg if isinstance(cfg, bytes) else json.dumps(cfg).encode())
    for name, content in (files or {"model__safetensors": weights()}).items():
        (root / name.replace("__", ".")).write_bytes(content)
    return root


def tree(root: Path, **changes: Any) -> dict[str, Any]:
    (root / "p.jsonl").write_text('{"prompt": "abc"}\n')
    return {"model": str(root / "m"), "data": {"prompts": str(root / "p.jsonl")}, "reward": {"function": "exact"}, **changes}


def faults(root: Path, **changes: Any) -> list[str]:
    try:
        preflight(config.validate(tree(root, **changes), "t"))
        return []
    except VimeError as e:
        assert all(len(line) < 600 for line in str(e).splitlines())
        return str(e).splitlines()[1:]


def test_a_tokenizer_larger_than_the_vocabulary_is_refused(tmp_path: Path) -> None:
    size = load(str(TOKENIZER)).size
    folder(tmp_path / "m", GOOD | {"vocab_size": size})
    assert faults(tmp_path) == []
    (tmp_path / "m" / "config.json").write_text(json.dumps(GOOD | {"text_config": {"vocab_size": size - 1}}))
    assert f"its tokenizer has {size} tokens, the model a vocabulary of {size - 1}" in faults(tmp_path)[0]


def test_folders_that_load(tmp_path: Path) -> None:
    folder(tmp_path / "m")
    assert faults(tmp_path) == []
    index = json.dumps({"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}).encode()
    parts = {"model-1__safetensors": weights(1), "model-2__safetensors": weights(3), "model__safetensors__index__json": index}
    assert model.faults(str(folder(tmp_path / "sharded", **parts))) == []
    (tmp_path / "sharded" / "model-2.safetensors").unlink()
    assert model.faults(str(tmp_path / "sharded"))[0].startswith("model-2.safetensors: damaged, or cut short: FileNotFoundError")


CONFIGS = {
    b"[]": "config.json holds list, not an object", b"3": "config.json holds int", b"{": "config.json: JSONDecodeError",
    b"\xff": "config.json: UnicodeDecodeError", b"": "config.json: JSONDecodeError",
    json.dumps({"model_type": "qwen3"}).encode(): "architectures is None, not a list",
    json.dumps(GOOD | {"architectures": []}).encode(): "architectures is [], not a list",
    json.dumps(GOOD | {"architectures": "Qwen3ForCausalLM"}).encode(): "architectures is 'Qwen3ForCausalLM', not a list",
}  # fmt: skip


@pytest.mark.parametrize("content", CONFIGS, ids=lambda c: str(c)[:40])
def test_configs_that_do_not_load(tmp_path: Path, content: bytes) -> None:
    folder(tmp_path / "m", content)
    (line,) = faults(tmp_path)
    assert line.startswith(f"  model = '{tmp_path}/m': config.json") and CONFIGS[content] in line


FILES = {
    "git-lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "damaged, or cut short: SafetensorError"),
    "empty": (b"", "damaged, or cut short"),
    "no header": (weights()[:40], "damaged, or cut short"),
    "cut": (weights(cut=5), "damaged, or cut short"),
    "longer": (weights() + b"x", "damaged, or cut short"),
    "not JSON": (weights(0, b"{nonsense"), "damaged, or cut short"),
    "list": (weights(0, b"[]"), "damaged, or cut short"),
    "no tensors": (weights(0, b"{}"), "it holds no tensor"),
    "no offsets": (weights(0, b'{"t": {"dtype": "F32"}}'), "damaged, or cut short"),
    "not a dict": (weights(0, b'{"t": 3}'), "damaged, or cut short"),
    "not UTF-8": (weights(0, b'{"\xff": 3}'), "damaged, or cut short"),
}


@pytest.mark.parametrize("case", FILES)
def test_weights_that_do_not_load(tmp_path: Path, case: str) -> None:
    content, said = FILES[case]
    folder(tmp_path / "m", model__safetensors=content)
    (line,) = faults(tmp_path)
    assert f"model = '{tmp_path}/m': model.safetensors: {said}" in line


@pytest.mark.parametrize("index", [b"[]", b"{", b"{}", b'{"weight_map": [[]]}', b'{"weight_map": {"a": 3}}', None])
def test_an_index_that_is_none(tmp_path: Path, index: bytes | None) -> None:
    files = {"adapter__safetensors": weights()} | ({} if index is None else {"model__safetensors__index__json": index})
    folder(tmp_path / "m", **files)
    (line,) = faults(tmp_path)
    assert "model.safetensors.index.json" in line and (index is not None or "only adapter.safetensors" in line)


def test_every_fault_of_everything_at_once(tmp_path: Path) -> None:
    folder(tmp_path / "m", b"[]", model__safetensors=b"")
    (tmp_path / "m" / "tokenizer.json").write_text("{")
    changes = {"algo": {"ref_model": "no/such"}, "rollout": {"custom_generate": "no.such:f"}, "eval": {"datasets": [{"name": "e", "prompts": "x" * 299}]}}
    lines = faults(tmp_path, **changes)
    assert len(lines) == 6, lines
    for word in ("config.json holds list", "model.safetensors: damaged", "tokenizer.json", "algo.ref_model = 'no/such': no model folder", "no.such", "xxx"):
        assert sum(word in line for line in lines) == 1, word


def test_shared_memory_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "m")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: path != "/dev/shm" and access(path, mode))
    (line,) = faults(tmp_path)
    assert 'weights.transport, data_plane.backend = "shm": /dev/shm is missing or read-only' in line
    (line,) = faults(tmp_path, weights={"transport": "file"})
    assert 'data_plane.backend = "shm": /dev/shm' in line and "weights.transport, " not in line
    assert faults(tmp_path, weights={"transport": "file"}, data_plane={"backend": "ray"}) == []


@pytest.mark.parametrize("path", ["no/such", "", "a\0b", "x" * 299, "/dev/null", "/proc/1/mem"])
def test_model_paths_of_all_kinds(tmp_path: Path, path: str) -> None:
    (line,) = faults(tmp_path, model=path)
    assert "no model folder" in line and "vime model get" in line


def test_ports_that_are_taken(tmp_path: Path) -> None:
    folder(tmp_path / "m")
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        assert [f"{key}.port: port {port} is taken" in line for key in ("vllm", "router") for line in faults(tmp_path, **{key: {"port": port}})] == [True] * 2
        assert faults(tmp_path, vllm={"port": port}, rollout={"engines": ["http://h:1"]}) == []


def test_the_check_imports_neither_torch_nor_transformers(tmp_path: Path) -> None:
    folder(tmp_path / "m")
    code = "import sys; from vime import model; print(model.faults(sys.argv[1]), {'torch', 'transformers'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[] set()\n", done.stderr


def test_nccl_is_refused_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder(tmp_path / "m")
    for cpu, said in ((True, "the vLLM here is built for the CPU"), (False, "there is no CUDA device here")):
        monkeypatch.setattr("vime.train.on_cpu", lambda cpu=cpu: cpu)
        assert faults(tmp_path, weights={"transport": "nccl"}) == [f'  weights.transport = "nccl": {said}; set it to "shm" or "file"']
    assert faults(tmp_path, weights={"transport": "nccl"}, ray={"address": "head:6379"}) == [], "the GPUs are elsewhere"
