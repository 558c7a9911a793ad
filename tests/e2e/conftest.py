"""Prompts of the task that the tiny model was warm-started on."""

import json
import random
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def reverse_prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """JSONL: four letters each, the label is the word reversed."""
    rng = random.Random(7)
    words = ["".join(rng.choices("abcdefghij", k=4)) for _ in range(2048)]
    path = tmp_path_factory.mktemp("prompts") / "reverse.jsonl"
    path.write_text("".join(json.dumps({"prompt": w, "label": w[::-1]}) + "\n" for w in words))
    return path
