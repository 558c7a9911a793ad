"""How one micro-batch is dealt out to the ranks of a replica: each sample once, whatever the axes."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vime.config import ParallelConfig
from vime.sample import Sample
from vime.trainer.batch import Item
from vime.trainer.context import lay_out
from vime.trainer.packing import Pack, pack


def micro_batch(sizes: list[tuple[int, int]], first: int = 0) -> Pack:
    """One sample for each (prompt, response) length, its tokens told apart by value."""
    samples = {}
    for i, (prompt, response) in enumerate(sizes):
        s = Sample(group_index=i // 2, index=i, tokens=[7] * prompt)
        s.append_tokens([first + 100 * i + k for k in range(response)], [-float(i)] * response, versions=0)
        samples[i] = s
    return pack([Item(i, s.group_index, float(i), 1.0) for i, s in samples.items()], samples)


def place(p: ParallelConfig, cp: int, tp: int, pp: int = 0) -> Any:
    return SimpleNamespace(p=p, cp=cp, tp=tp, last=pp == p.pp - 1, cp_groups={}, device=torch.device("cpu"))


SIZES = st.lists(st.tuples(st.integers(1, 5), st.integers(1, 9)), max_size=6)


@given(sizes=SIZES, cp=st.sampled_from([1, 2, 3]), tp=st.sampled_from([1, 2]))
def test_every_trained_token_is_one_ranks_and_every_position_one_piece(sizes: list[tuple[int, int]], cp: int, tp: int) -> None:
    whole, p = micro_batch(sizes), ParallelConfig(cp=cp, tp=tp)
    views = {(c, t): lay_out([whole], place(p, c, t))[0] for c in range(cp) for t in range(tp)}
    in_order = [views[c, t] for c in range(cp) for t in range(tp)]
    assert [s.index for v in in_order for s in v.samples] == [s.index for s in whole.samples]
    for name in ("labels", "rows", "advantages", "rollout_log_probs"):
        assert torch.equal(torch.cat([getattr(v, name) for v in in_order]), getattr(whole, name))
    for t in range(tp):
        ids = torch.cat([views[c, t].ids for c in range(cp)], 1)
        n = whole.ids.shape[1]
        assert torch.equal(ids[:, :n], whole.ids) and not ids[:, n:].any() and ids.shape[1] - n < cp
        for c in range(cp):  # all ranks agree on who wants which position
            assert all(torch.equal(views[c, t].trained[o], views[o, t].rows) for o in range(cp))
            assert all(torch.equal(views[c, t].everything[o], torch.cat([whole.rows[:0], *views[o, t].where])) for o in range(cp))


@given(sizes=SIZES, cp=st.sampled_from([1, 2, 3]), tp=st.sampled_from([1, 2]))
def test_pairs_go_to_one_rank(sizes: list[tuple[int, int]], cp: int, tp: int) -> None:
    pairs, p = micro_batch([(3, response) for _, response in sizes for _ in range(2)]), ParallelConfig(cp=cp, tp=tp)
    views = [lay_out([pairs], place(p, c, t), pairs=True)[0] for c in range(cp) for t in range(tp)]
    assert [s.index for v in views for s in v.samples] == [s.index for s in pairs.samples]
    assert all([s.group_index for s in v.samples[::2]] == [s.group_index for s in v.samples[1::2]] for v in views)


@pytest.mark.parametrize("cp", [1, 2])
def test_a_pipelines_micro_batches_have_one_length_and_one_loss_stage(cp: int) -> None:
    packs, p = [micro_batch([(3, 5), (3, 2)]), micro_batch([(4, 9)]), micro_batch([])], ParallelConfig(pp=2, cp=cp)
    early, late = (lay_out(packs, place(p, 0, 0, pp)) for pp in (0, 1))
    assert len({v.ids.shape for v in [*early, *late]}) == 1
    assert not any(v.samples or len(v.labels) for v in early) and any(v.samples for v in late)
    assert all(torch.equal(a.ids, b.ids) and torch.equal(a.scatter, b.scatter) for a, b in zip(early, late))
