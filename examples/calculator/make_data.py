"""Write train.jsonl and eval.jsonl: two-digit arithmetic in words, after two worked examples with the calculator."""

import json
import random
import sys
from pathlib import Path

WORDS = {"plus": "+", "minus": "-", "times": "*"}
SHOTS = """\
Q: What is 14 plus 52?
A: <calc>14+52=66</calc> The answer is 66.

Q: What is 31 times 12?
A: <calc>31*12=372</calc> The answer is 372.

"""


def main(folder: Path) -> None:
    rng = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    for name, n in {"train": 512, "eval": 32}.items():
        rows = []
        for _ in range(n):
            a, b, (word, sign) = rng.randint(10, 99), rng.randint(10, 99), rng.choice(list(WORDS.items()))
            answer = {"+": a + b, "-": a - b, "*": a * b}[sign]
            rows.append({"prompt": f"{SHOTS}Q: What is {a} {word} {b}?\nA:", "label": str(answer)})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "data"))
