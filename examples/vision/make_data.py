"""Prompts for "which colour?": an image of one main colour with specks of others, answered by its first letter: r, g, b or y."""

import json
import random
import sys
from pathlib import Path

from PIL import Image, ImageDraw

COLOURS = {"r": (220, 40, 40), "g": (40, 180, 60), "b": (50, 70, 220), "y": (230, 210, 50)}
TRAIN, HELD_OUT = 256, 64


def picture(rng: random.Random, letter: str) -> Image.Image:
    size = (rng.randrange(24, 64), rng.randrange(24, 64))
    image = Image.new("RGB", size, tuple(min(255, max(0, c + rng.randrange(-30, 31))) for c in COLOURS[letter]))
    pen = ImageDraw.Draw(image)
    for _ in range(4):
        x, y = rng.randrange(size[0]), rng.randrange(size[1])
        pen.ellipse((x, y, x + size[0] // 8, y + size[1] // 8), fill=tuple(rng.randrange(256) for _ in range(3)))
    return image


def main(folder: Path) -> None:
    rng = random.Random(0)
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for name, count in (("train", TRAIN), ("eval", HELD_OUT)):
        rows = []
        for i in range(count):
            letter = "rgby"[i % 4]
            file = f"images/{name}-{i:04d}.png"
            picture(rng, letter).save(folder / file)
            content = [{"type": "image", "image": file}, {"type": "text", "text": "which colour?"}]
            rows.append({"prompt": [{"role": "user", "content": content}], "label": letter})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parent / "data"))
