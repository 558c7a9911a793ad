"""Write train.jsonl: "make it minus", "make it times"."""

import json
import sys
from pathlib import Path


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"prompt": f"make it {word}", "label": word} for word in ("minus", "times")]
    (folder / "train.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "data"))
