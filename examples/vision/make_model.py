"""An Idefics3 of 0.4M random parameters that reads characters and images: made 16 x 16 pixels, 4 tokens each and 3 around them.

A message's content is a text, or a list of texts and images. The prompt ends with `>`.
"""

import json
import sys
from pathlib import Path

import torch
from transformers import Idefics3Config, Idefics3ForConditionalGeneration

from vime.model import BOS, CHARS, EOS, PAD, TEXTS, _char_tokenizer

IMAGE = "<image>"
PARTS = TEXTS.replace(
    "{{ m.content }}",
    "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{{ p.text if p.type == 'text' else '<image>' }}{% endfor %}{% endif %}",
)


def main(folder: Path) -> None:
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
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).save_pretrained(folder)
    _char_tokenizer(more, PARTS).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(pixels | {"image_processor_type": "Idefics3ImageProcessor"}))
    (folder / "processor_config.json").write_text(json.dumps({"processor_class": "Idefics3Processor", "image_seq_len": 4}))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "models/tiny-vision"))
