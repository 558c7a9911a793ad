"""A Qwen3 of 0.8M parameters that calls tools, in a minute or two: it has seen demonstrations of three tasks, most of them wrong.

The form is always right (a call in Hermes' JSON, then an answer); what is asked for is not. RL finds that from the reward alone:

- examples/tools: "12 and 7" -> calculator with one of + - * -> the result, or the first number
- examples/search: "abcd" -> search for it reversed, copied, sorted or rotated -> the document's word, in one of these four ways
- examples/coding: "make it plus" -> a sed that puts one of + - * into the program -> submit
"""

import json
import random
import string
import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast, Qwen3Config

PAD, BOS, EOS = "<|pad|>", "<|im_start|>", "<|im_end|>"
CHARS = string.printable[:95] + "\n"
CALLS = {"calculator": "expression", "search": "query", "shell": "command", "submit": None}  # tool -> its only argument


def call(tool: str, value: str = "") -> str:
    arguments = {CALLS[tool]: value} if CALLS[tool] else {}
    return f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"


# what a larger vocabulary would have as few tokens: sequences stay short
PIECES = ["user\n", "assistant\n", "tool\n", "system\n", "\n</tool_call>", *(call(t, "%").split("%")[0] for t in CALLS if CALLS[t]), call("submit")]
TEMPLATE = r"""{%- for m in messages -%}
<|im_start|>{{ m.role }}\n{{ m.content or '' }}
{%- for c in m.tool_calls or [] -%}
<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments if c.function.arguments is string else c.function.arguments | tojson }}}\n</tool_call>
{%- endfor -%}
<|im_end|>\n
{%- endfor -%}
{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}
""".strip().replace(r"\n", "{{ '\\n' }}")
WORDS = {"plus": "+", "minus": "-", "times": "*"}


def tokenizer() -> PreTrainedTokenizerFast:
    t = Tokenizer(models.WordLevel({PAD: 0, **{c: i + 1 for i, c in enumerate(CHARS)}}, unk_token=PAD))
    t.pre_tokenizer, t.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    t.add_special_tokens([BOS, EOS])
    t.add_tokens([AddedToken(p, normalized=False) for p in PIECES])
    out = PreTrainedTokenizerFast(
        tokenizer_object=t, pad_token=PAD, bos_token=BOS, eos_token=EOS, model_max_length=512, clean_up_tokenization_spaces=False
    )
    out.chat_template = TEMPLATE
    return out


def changed(word: str, rng: random.Random) -> str:
    return rng.choice([word[::-1], word, "".join(sorted(word)), word[1:] + word[:1]])


def demonstration(rng: random.Random, kinds: int = 3) -> list[tuple[str, str]]:
    """(role, text) of each turn."""
    kind, word, op = rng.randrange(kinds), rng.choice(list(WORDS)), rng.choice(list(WORDS.values()))
    if kind == 0:
        a, b = rng.randint(10, 99), rng.randint(10, 99)
        result = {"+": a + b, "-": a - b, "*": a * b}[op]
        said, last = call("calculator", f"{a}{op}{b}"), str(rng.choice([a, result]))
        return [("user", f"{a} and {b}"), ("assistant", said), ("tool", str(result)), ("assistant", last)]
    if kind == 1:
        one, two = ("".join(rng.choice("abcdefghij") for _ in range(4)) for _ in range(2))
        query, found = changed(one, rng), rng.random() < 0.7
        seen = f"[{rng.randrange(2000)}] {query}: {two}" if found else "nothing found"
        return [("user", one), ("assistant", call("search", query)), ("tool", seen), ("assistant", changed(two if found else one, rng))]
    return [
        ("user", f"make it {word}"), ("assistant", call("shell", f"sed -i 's/[-+*]/{op}/' op.py")), ("tool", "[no output]"), ("assistant", call("submit")),
    ]  # fmt: skip


def main(folder: Path, steps: int = 400, seed: int = 0, kinds: int = 3) -> None:
    """`kinds`: only the first so many of the tasks."""
    if (folder / "model.safetensors").exists():
        return
    text, rng = tokenizer(), random.Random(seed)
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(text), hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
        max_position_embeddings=512, tie_word_embeddings=True, dtype="float32", bos_token_id=text.bos_token_id, eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.0)
    for step in range(steps):
        rows = []
        for _ in range(32):
            ids: list[int] = []
            own: list[int] = []
            for role, said in demonstration(rng, kinds):
                head, body = text.encode(f"{BOS}{role}\n", add_special_tokens=False), text.encode(f"{said}{EOS}", add_special_tokens=False)
                ids += [*head, *body, *text.encode("\n", add_special_tokens=False)]
                own += [0] * len(head) + [int(role == "assistant")] * len(body) + [0]
            rows.append((torch.tensor(ids), torch.tensor(own)))
        ids, own = (torch.nn.utils.rnn.pad_sequence(r, batch_first=True) for r in zip(*rows))
        logits = model(input_ids=ids[:, :-1]).logits
        loss = (F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none") * own[:, 1:].flatten()).sum() / own.sum()
        for group in optimizer.param_groups:
            group["lr"] = 2e-3 * min(1.0, (step + 1) / 20, (steps - step) / (0.3 * steps))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if step % 100 == 99:
            print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)
    model.generation_config = GenerationConfig(eos_token_id=text.eos_token_id, pad_token_id=text.pad_token_id)
    model.save_pretrained(folder)
    text.save_pretrained(folder)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "models/tiny-tools"))
