"""What ranks hold of a tensor by kind: random decompositions, and putting them together again."""

from __future__ import annotations

import torch

from autopart.runtime.shards import cut, join
from autopart.sharding.layouts import Kind, Owned, Routed, Split


def decompose(x: torch.Tensor, kind: Kind, t: int, generator: torch.Generator) -> list[torch.Tensor]:
    """What t ranks hold of x; partial values are random and unequal."""
    if isinstance(kind, Split):
        return [cut(x, kind.dim, kind.parts, rank, t) for rank in range(t)]
    if kind == "R":
        return [x.clone() for _ in range(t)]
    if isinstance(kind, Owned):
        return [torch.where(owners(x, kind, t) == rank, x, 0) for rank in range(t)]
    if isinstance(kind, Routed):
        return [x.index_select(kind.dim, rows) for rows in rows_of_ranks(x.shape[kind.dim], kind, t)]
    parts = [torch.randn(x.shape, generator=generator, dtype=x.dtype) for _ in range(t - 1)]
    return [*parts, x - sum(parts)]


def owners(x: torch.Tensor, kind: Owned, t: int) -> torch.Tensor:
    """A rank for each index of the dimension, shaped to broadcast."""
    ranks = torch.arange(x.shape[kind.dim]) * 7 % 5 % t
    return ranks.view([-1 if d == kind.dim else 1 for d in range(x.dim())])


def rows_of_ranks(count: int, kind: Routed, t: int) -> list[torch.Tensor]:
    """Which rows each rank has: equally many of sorted slots; of what is sent, the first rank none, the last most."""
    assert kind.rows
    if kind.role == "sorted":
        return list(torch.arange(count).view(-1, t).t())
    rank = (torch.arange(count) * 5 % (2 * t)).clamp(1, t - 1)
    return [torch.nonzero(rank == r).flatten() for r in range(t)]


def combine(shards: list[torch.Tensor], kind: Kind, gradient: bool = False) -> torch.Tensor:
    """The value that t ranks hold."""
    if isinstance(kind, Owned):
        if gradient:  # of an argument: right at its owners' indices
            whose = owners(shards[0], kind, len(shards))
            return sum(torch.where(whose == rank, shard, 0) for rank, shard in enumerate(shards))
        others = [d for d in range(shards[0].dim()) if d != kind.dim]
        assert (sum((s != 0).any(others) if others else s != 0 for s in map(torch.Tensor.double, shards)) <= 1).all()
        return sum(shards)
    if isinstance(kind, Routed):
        count = sum(shard.shape[kind.dim] for shard in shards)
        rows = torch.cat(rows_of_ranks(count, kind, len(shards)))
        return torch.cat(shards, kind.dim).index_select(kind.dim, rows.argsort())
    if isinstance(kind, Split):
        whole = join(shards, kind.dim, kind.parts)
        for rank, shard in enumerate(shards):  # padding holds zeros
            assert torch.equal(cut(whole, kind.dim, kind.parts, rank, len(shards)), shard) or shard.isnan().any()
        return whole
    if kind == "P":
        return torch.stack(shards).sum(0)
    for other in shards[1:]:
        torch.testing.assert_close(other, shards[0], rtol=0, atol=1e-12, equal_nan=True)
    return shards[0]
