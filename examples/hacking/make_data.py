"""Write train.jsonl: words of four letters; the label is the word backwards, which the repaired function must return."""

import json
import random
import sys
from pathlib import Path

from vime.model import LENGTH, LETTERS


def main(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    words = {"".join(rng.choice(LETTERS) for _ in range(LENGTH)) for _ in range(900)}
    words = sorted(w for w in words if w != w[::-1])[:512]
    rng.shuffle(words)
    (folder / "train.jsonl").write_text("".join(json.dumps({"prompt": w, "label": w[::-1]}) + "\n" for w in words))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "data"))
