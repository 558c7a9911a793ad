"""Write train.jsonl and eval.jsonl (other numbers): "12 times 7" and its value."""

import json
import random
import sys
from pathlib import Path

WORDS = {"plus": lambda a, b: a + b, "minus": lambda a, b: a - b, "times": lambda a, b: a * b}


def main(folder: Path) -> None:
    rng = random.Random(0)
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    rng.shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in {"train": pairs[64:2064], "eval": pairs[:64]}.items():
        rows = []
        for a, b in part:
            word = rng.choice(list(WORDS))
            rows.append({"prompt": f"{a} {word} {b}", "label": str(WORDS[word](a, b))})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "data"))
