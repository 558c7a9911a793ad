"""What ring attention computes where: every pair of tokens of which one sees the other, once."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pytest import MonkeyPatch

from tests.unit.test_context import SIZES, micro_batch
from vime.trainer import ring


@settings(max_examples=50)
@given(sizes=SIZES, ranks=st.sampled_from([1, 2, 3, 5]), tile=st.sampled_from([1, 3, 1024]))
def test_tiles_are_what_the_buckets_attend_to(sizes: list[tuple[int, int]], ranks: int, tile: int) -> None:
    p = micro_batch(sizes)
    size = -(-p.ids.shape[1] // ranks)
    got = torch.zeros(ranks * size, ranks * size, dtype=torch.int)
    with MonkeyPatch.context() as m:
        m.setattr(ring, "TILE", tile)
        work = ring.tiles.__wrapped__(p.segments, ranks, size)
    for q, row in enumerate(work):
        for k, found in enumerate(row):
            for at, keys, causal in found:
                part = torch.ones(at.stop - at.start, keys.stop - keys.start, dtype=torch.int)
                assert max(part.shape) <= tile and min(at.start, keys.start) >= 0 and max(at.stop, keys.stop) <= size
                got[q * size : (q + 1) * size, k * size : (k + 1) * size][at, keys] += part.tril() if causal else part
        assert not any(row[q + 1 :]), "nothing is needed of later ranks"
    want = torch.zeros_like(got)
    for b in p.buckets:
        for queries, keys, mask in zip(b.queries, b.keys, b.mask[:, 0] if b.mask is not None else [None] * len(b.keys)):
            seen = torch.ones(len(queries), len(keys), dtype=torch.bool).tril() if mask is None else mask
            real = (queries != queries[0]) | (torch.arange(len(queries)) == 0)  # padding repeats the first
            at, key = torch.nonzero(seen & real[:, None], as_tuple=True)
            want[queries[at], keys[key]] = 1
    assert torch.equal(got, want)
