"""Tiny vision-language models of several families, and images to show them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from PIL import Image, ImageDraw

from examples.vision.make_model import IMAGE, PARTS
from vime.model import CHARS, _char_tokenizer

TEXT: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 32,
    "max_position_embeddings": 512, "initializer_range": 0.15, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
QWEN = {
    "qwen2_vl": {"depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "mlp_ratio": 2},
    "qwen2_5_vl": {"depth": 2, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48, "fullatt_block_indexes": [1],
                   "window_size": 56},
    "qwen3_vl": {"depth": 3, "hidden_size": 32, "out_hidden_size": 64, "num_heads": 2, "intermediate_size": 48, "num_position_embeddings": 64,
                 "deepstack_visual_indexes": [0, 1], "patch_size": 16},
}  # fmt: skip


def make_vlm(folder: Path, family: str, seed: int = 0) -> Path:
    """A random model of a family under `folder`: idefics3, qwen2_vl, qwen2_5_vl or qwen3_vl."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    out, base = folder / family, 3 + len(CHARS)
    if family == "idefics3":
        rows = [f"<row_{i + 1}_col_{j + 1}>" for i in range(6) for j in range(6)]
        special = [IMAGE, "<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *rows]
        tree: dict[str, Any] = {
            "image_token_id": base, "scale_factor": 2, "tie_word_embeddings": False, "pad_token_id": 0,
            "text_config": TEXT | {"model_type": "llama", "vocab_size": base + len(special)},
            "vision_config": {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32,
                              "patch_size": 8},
        }  # fmt: skip
        pixels = {"size": {"longest_edge": 64}, "max_image_size": {"longest_edge": 32}, "image_processor_type": "Idefics3ImageProcessor"}
        files = {"preprocessor_config.json": pixels, "processor_config.json": {"processor_class": "Idefics3Processor", "image_seq_len": 4}}
        template = PARTS
    else:
        special = ["<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
        ids = {f"{k}_token_id": base + i for i, k in enumerate(("vision_start", "vision_end", "image", "video"))}
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
        rope |= {"mrope_interleaved": True} if family == "qwen3_vl" else {}
        text = TEXT | {"vocab_size": base + 4, "rope_parameters": rope}
        tree = ids | {"text_config": text, "vision_config": QWEN[family], "tie_word_embeddings": False}
        patch = QWEN[family].get("patch_size", 14)
        limits = {"shortest_edge": (2 * patch) ** 2, "longest_edge": 16 * (2 * patch) ** 2}
        # as in real checkpoints: vLLM, which normalizes on the device, reads mean and std here and takes no defaults
        norm = {"do_rescale": True, "do_normalize": True, "image_mean": [0.48, 0.46, 0.41], "image_std": [0.27, 0.26, 0.28]}
        pixels = {"size": limits, "patch_size": patch, "image_processor_type": "Qwen2VLImageProcessor"} | norm
        kind = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL"}[family]
        files = {"preprocessor_config.json": pixels | {"processor_class": f"{kind}Processor"}}
        template = PARTS.replace(IMAGE, "<|vision_start|><|image_pad|><|vision_end|>")
    torch.manual_seed(seed)
    config = AutoConfig.for_model(family, **tree)
    model = AutoModelForImageTextToText.from_config(config)
    with torch.no_grad():
        for p in model.parameters():  # images must matter, and biases of the vision tower be there
            p.add_(torch.randn_like(p) * 0.05)
    model.save_pretrained(out)
    _char_tokenizer(special, template).save_pretrained(out)
    for name, content in files.items():
        (out / name).write_text(json.dumps(content))
    return out


def draw(path: Path, size: tuple[int, int], seed: int, mode: str = "RGB") -> Path:
    """A noise of coloured boxes, written as `path`."""
    r = torch.Generator().manual_seed(seed)
    image = Image.new(mode, size)
    pen = ImageDraw.Draw(image)
    for _ in range(12):
        x, y, w, h = (int(torch.randint(0, s, (), generator=r)) for s in (*size, *size))
        colour = tuple(torch.randint(0, 256, (len(image.getbands()),), generator=r).tolist())
        pen.rectangle((x, y, x + w // 2, y + h // 2), fill=colour)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path)
    return path
