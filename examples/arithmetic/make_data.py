"""Prompts for one-digit sums: "Calculate: 3 + 8 = ?" for every x and y in 2..9.

There are only 64 such prompts. Eight pairs of different numbers are held out in both orders (16 prompts), so no held-out prompt and
none with its numbers the other way round is ever trained on; the sums themselves occur in both files.
"""

import json
import random
import sys
from pathlib import Path

HELD_OUT = 8  # pairs, each in both orders


def main(folder: Path) -> None:
    rng = random.Random(0)
    held_out = set(rng.sample([(x, y) for x in range(2, 10) for y in range(x + 1, 10)], HELD_OUT))
    pairs = [(x, y) for x in range(2, 10) for y in range(2, 10)]
    rng.shuffle(pairs)
    files: dict[str, list[tuple[int, int]]] = {"train.jsonl": [], "eval.jsonl": []}
    for x, y in pairs:
        files["eval.jsonl" if (min(x, y), max(x, y)) in held_out else "train.jsonl"].append((x, y))
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in files.items():
        rows = [{"prompt": f"Calculate: {x} + {y} = ?", "label": str(x + y)} for x, y in part]
        (folder / name).write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "data"))
