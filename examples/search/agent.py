"""Multi-turn search on the tiny model: ask the index for the reversed word, read the document, answer with its reversal.

The index is a JSON file {query: document}, [args] index; a query that finds nothing ends the rollout.
"""

import json
from functools import lru_cache
from pathlib import Path

from vime.data import tokenizer
from vime.rollout.generate import generate as turn
from vime.sample import Status


@lru_cache
def index(path):
    return json.loads(Path(path).read_text())


async def generate(args, sample, sampling_params):
    text = tokenizer.load(args.model)
    if "start" not in sample.metadata:  # the first turn; a sample that was interrupted in the second comes back with its metadata
        sample = await turn(args, sample, sampling_params | {"max_new_tokens": args.turn_len})
        found = index(args.index).get(sample.response)
        sample.metadata["found"] = found is not None
        if found is None or sample.status is not Status.COMPLETED:
            return sample
        sample.append_tokens(text.encode([f" {found}>"], special_tokens=False)[0], trainable=False)
        sample.metadata["start"] = len(sample.tokens)
    start = sample.metadata["start"]
    sample = await turn(args, sample, sampling_params | {"max_new_tokens": start - sample.prompt_length + args.turn_len})
    sample.metadata["answer"] = text.decode(sample.tokens[start:])
    return sample


def reward(args, sample):
    return 0.5 * sample.metadata["found"] + 0.5 * (sample.metadata.get("answer") == sample.label)
