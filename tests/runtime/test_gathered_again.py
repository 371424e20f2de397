"""Values that backward gathers again: the same gradients, with shards kept in place of whole values."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from autopart.runtime.collectives import all_gather, reduce_scatter
from autopart.runtime.gathered_again import keeping_shards
from tests.sharding.ranks import ThreadRanks

RANKS, ROWS, WIDTH = 2, 6, 8


def stage(x: torch.Tensor, weights: list[torch.Tensor], again: bool) -> torch.Tensor:
    """Two column-split products of one gathered value, one of a view of it; then summed by rows."""
    whole = all_gather(x, dim=0, partial_gradient=True, again=again)
    made = nn.functional.linear(whole, weights[0]) * nn.functional.linear(whole, weights[1]).tanh()
    made = made + whole.t().contiguous().t() @ weights[2] + whole.view(ROWS, 2, WIDTH // 2).transpose(0, 1)[0].sum()
    return reduce_scatter(made, dim=0)


def gradients(again: bool) -> tuple[list[list[torch.Tensor]], ThreadRanks, list[int]]:
    ranks = ThreadRanks(RANKS)
    kept: list[int] = []

    def run(rank: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(rank)
        x = torch.randn(ROWS // RANKS, WIDTH, dtype=torch.float64, generator=generator).requires_grad_()
        shapes = ((5, WIDTH), (5, WIDTH), (WIDTH, 5))
        weights = [torch.randn(*s, dtype=torch.float64, generator=generator).requires_grad_() for s in shapes]
        with keeping_shards():
            result = stage(x, weights, again)
        result.pow(2).sum().backward()
        kept.append(len([count for count in ranks.counts if count[0] == "all_gather"]))
        return [p.grad for p in (x, *weights) if p.grad is not None]

    return ranks.run(run), ranks, kept


def test_gradients_are_the_same_and_one_gather_serves_all_readers() -> None:
    plain, ranks, _ = gradients(again=False)
    again, again_ranks, _ = gradients(again=True)
    for one, other in zip(plain, again, strict=True):
        assert len(one) == 4
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    # Forward, and the backward of the reduce-scatter; then once more for the two products whose inputs backward needs.
    assert [name for name, _ in ranks.counts].count("all_gather") == 2
    assert [name for name, _ in again_ranks.counts].count("all_gather") in (3, 4)


@pytest.mark.parametrize("again", [False, True])
def test_the_whole_value_lives_on_only_where_it_is_not_gathered_again(again: bool) -> None:
    def run(rank: int) -> bool:
        x = torch.randn(ROWS // RANKS, WIDTH).requires_grad_()
        weight = torch.randn(5, WIDTH).requires_grad_()
        with keeping_shards():
            whole = all_gather(x, dim=0, partial_gradient=True, again=again)
            storage = StorageWeakRef(whole.untyped_storage())
            result = nn.functional.linear(whole, weight)
        del whole
        freed = storage.expired()
        result.sum().backward()
        return freed

    assert ThreadRanks(RANKS).run(run) == [again] * RANKS


def test_a_shard_that_was_changed_since_is_refused() -> None:
    ranks = ThreadRanks(RANKS)

    def run(rank: int) -> None:
        x = torch.randn(ROWS // RANKS, WIDTH).requires_grad_()
        weight = torch.randn(5, WIDTH).requires_grad_()
        shard = x * 1.0
        with keeping_shards():
            result = nn.functional.linear(all_gather(shard, dim=0, partial_gradient=True, again=True), weight)
        with torch.no_grad():
            shard.mul_(2)
        result.sum().backward()

    with pytest.raises(RuntimeError, match="changed in place"):
        ranks.run(run)
