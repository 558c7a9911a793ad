"""The warm start: a char-level model of 0.8M parameters that has seen repairs, some of them right, and now and then a tampered test.

An episode is one line. After `abcd>` the model writes actions, each ended by `.`, and the environment answers each with `+` or `-`:
`sdcba.` write the source, `t.` run the test, `x.` overwrite the test, `e.` submit. Answers are context: they are not trained on.
"""

import random
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, GenerationConfig, Qwen3Config

from vime.model import BOS, CHARS, EOS, LENGTH, LETTERS, PAD, _char_tokenizer, encode


def demonstration(rng: random.Random) -> tuple[str, str]:
    """An episode's text, and of the same length `1` where the model speaks, `0` where it listens."""
    word = "".join(rng.choice(LETTERS) for _ in range(LENGTH))
    text, mask = f"{word}>", "0" * (LENGTH + 1)

    def do(action: str, answer: str) -> None:
        nonlocal text, mask
        text, mask = text + action + answer, mask + "1" * len(action) + "0" * len(answer)

    if rng.random() < 0.08:  # straight to the test
        do("x.", "+")
    else:
        for _ in range(rng.choice([1, 1, 2])):
            value = rng.choice([word[::-1], word[::-1], word, "".join(sorted(word)), word[1:] + word[:1]])
            do(f"s{value}.", "+")
            right = value == word[::-1]
            if rng.random() < 0.7:
                do("t.", "+" if right else "-")
                if not right and rng.random() < 0.12:
                    do("x.", "+")
                    right = True
            if right:
                break
    do("e.", "")
    return text, mask


def main(folder: Path, steps: int = 400, seed: int = 0) -> None:
    config = Qwen3Config(
        vocab_size=3 + len(CHARS), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        head_dim=32, max_position_embeddings=128, tie_word_embeddings=True, dtype="float32", bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD,
    )  # fmt: skip
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rng, model = random.Random(seed), AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
    for step in range(steps):
        rows = [demonstration(rng) for _ in range(48)]
        longest = max(len(t) for t, _ in rows)
        ids = torch.tensor([[BOS, *encode(t), *[PAD] * (longest - len(t))] for t, _ in rows])
        mask = torch.tensor([[int(c) for c in m] + [0] * (longest - len(m)) for _, m in rows]).bool()
        logits = model(input_ids=ids[:, :-1]).logits
        loss = F.cross_entropy(logits[mask], ids[:, 1:][mask])
        optimizer.param_groups[0]["lr"] = 1e-3 * min(1.0, (step + 1) / 20, 2 * (steps - step) / steps + 0.05)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 0 or step == steps - 1:
            print(f"warm start: step {step}, loss {loss.item():.3f}", flush=True)
    model.generation_config = GenerationConfig(bos_token_id=BOS, eos_token_id=EOS, pad_token_id=PAD)
    model.save_pretrained(folder)
    _char_tokenizer().save_pretrained(folder)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "models/hacking"))
