"""Prompts for "reverse the word": `abcd` -> `dcba`, four letters of a-j. Words of the held-out file never occur in the training file."""

import json
import random
import sys
from pathlib import Path

LETTERS, LENGTH, TRAIN, HELD_OUT = "abcdefghij", 4, 4096, 256


def main(folder: Path) -> None:
    rng = random.Random(0)
    words: set[str] = set()
    while len(words) < TRAIN + HELD_OUT:
        words.add("".join(rng.choice(LETTERS) for _ in range(LENGTH)))
    order = sorted(words)
    rng.shuffle(order)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in (("train.jsonl", order[HELD_OUT:]), ("eval.jsonl", order[:HELD_OUT])):
        (folder / name).write_text("".join(json.dumps({"prompt": w, "label": w[::-1]}) + "\n" for w in part))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "data"))
