"""Plug-ins for tests, of the kind that sees whole batches. Each notes that it ran in the file named by args.notes."""

import asyncio
import json

from vime.hooks import RolloutFnEvalOutput, RolloutFnTrainOutput
from vime.rollout.http import EngineClient
from vime.sample import Sample


def trace(args, **what):
    with open(args.notes, "a") as f:
        f.write(json.dumps(what) + "\n")


class Words:
    """A data source: words from an alphabet, position kept in a file of its own."""

    def __init__(self, args):
        self.args, self.at = args, 0

    def __len__(self):
        return 1000

    def get_samples(self, n):
        groups = []
        for i in range(self.at, self.at + n):
            word = "".join("abcdefghij"[(i * k) % 10] for k in (1, 3, 7, 9))
            groups.append([Sample(prompt=f"{word}>", tokens=[1, *("abcdefghij".index(c) + 3 for c in word), 41], label=word[::-1]) for _ in range(8)])
        self.at += n
        return groups

    def add_samples(self, groups):
        raise AssertionError("nobody adds samples in this run")

    def save(self, rollout_id):
        trace(self.args, saved=rollout_id, at=self.at)

    def load(self, rollout_id=None):
        self.at = rollout_id
        trace(self.args, loaded=rollout_id)


def youngest_first(args, rollout_id, buffer, num_samples):
    """A buffer filter: takes the youngest two out of the buffer to go on first, and drops the oldest where there are more than three."""
    buffer.sort(key=lambda g: g[0].group_index)
    gone = [buffer.pop(0)[0].group_index] if len(buffer) > 3 else []
    chosen = [buffer.pop() for _ in range(min(2, len(buffer)))]
    trace(args, dropped=gone, buffered=len(buffer) + len(chosen))
    return chosen


def drop_first(args, groups):
    """A sample filter: the first sample of each group is not trained, and stays in the baseline."""
    for g in groups:
        g[0].remove_sample = True


def look(args, groups, data_source):
    trace(args, looked=[g[0].group_index for g in groups], removed=sum(s.remove_sample for g in groups for s in g), prompts=len(data_source))


def mask_last(args, samples):
    for s in samples:
        s.loss_mask = [*s.loss_mask[:-1], 0]


def whole(args, rollout_id, data_source, evaluation=False):
    """A rollout function of its own, which talks to the router by itself."""

    async def go(groups):
        client = EngineClient(f"http://{args.vllm_router_ip}:{args.vllm_router_port}")
        try:
            for s in (s for g in groups for s in g):
                (c,) = await client.generate(s.tokens, {"temperature": 1.0, "max_tokens": 7})
                s.append_tokens(c.token_ids, c.log_probs, versions=c.versions)
                s.status = Sample.Status.COMPLETED
                s.reward = float(c.token_ids[0] == s.tokens[-2])  # begins with the word's last letter
        finally:
            await client.close()

    groups = data_source.get_samples(2 if evaluation else args.rollout_batch_size)
    asyncio.run(go(groups))
    if evaluation:
        data_source.add_samples([])
        return RolloutFnEvalOutput({"own": {"rewards": [s.reward for g in groups for s in g], "truncated": [False] * 16}})
    return RolloutFnTrainOutput(groups, {"rollout/own": rollout_id})
