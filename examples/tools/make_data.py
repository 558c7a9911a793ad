"""Write train.jsonl and eval.jsonl (other numbers): "12 and 7", and their product, which only the label says is asked for."""

import json
import random
import sys
from pathlib import Path


def main(folder: Path) -> None:
    pairs = [(a, b) for a in range(10, 100) for b in range(10, 100)]
    random.Random(0).shuffle(pairs)
    folder.mkdir(parents=True, exist_ok=True)
    for name, part in {"train": pairs[64:2064], "eval": pairs[:64]}.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"{a} and {b}", "label": str(a * b)}) + "\n" for a, b in part))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "data"))
