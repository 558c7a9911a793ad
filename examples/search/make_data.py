"""Write train.jsonl, eval.jsonl (other words) and documents.jsonl: the reversed word finds a document,
the reversal of whose text is the answer."""

import json
import random
import sys
from pathlib import Path

LETTERS, LENGTH, WORDS, HELD_OUT = "abcdefghij", 4, 2000, 64


def main(folder: Path) -> None:
    rng = random.Random(0)

    def word() -> str:
        return "".join(rng.choice(LETTERS) for _ in range(LENGTH))

    index = {w[::-1]: word() for w in sorted({word() for _ in range(WORDS)})}
    rows = [{"prompt": query[::-1], "label": document[::-1]} for query, document in index.items()]
    rng.shuffle(rows)
    folder.mkdir(parents=True, exist_ok=True)
    documents = ({"id": str(i), "title": query, "text": text} for i, (query, text) in enumerate(index.items()))
    (folder / "documents.jsonl").write_text("".join(json.dumps(d) + "\n" for d in documents))
    for name, part in {"train": rows[HELD_OUT:], "eval": rows[:HELD_OUT]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in part))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "data"))
