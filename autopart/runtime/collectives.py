"""Collectives of one tensor-parallel group that autograd can follow.

Every function takes a value from one layout to another, forward for the value and backward for its gradient. What a
rank holds of a value (or of its gradient) is one of three things: the whole value ("replicated"), a summand of it
("partial": the sum over ranks is the value), or a shard (see `shards`).

| function         | value forward          | gradient backward (with `partial_gradient=True`)  |
|------------------|------------------------|---------------------------------------------------|
| `copy_to`        | as it is               | all-reduce                                        |
| `all_reduce`     | all-reduce             | as it is (all-reduce)                             |
| `all_gather`     | all-gather             | own shard (reduce-scatter)                        |
| `split`          | own shard              | all-gather (own shard between zeros)              |
| `reduce_scatter` | reduce-scatter         | all-gather                                        |
| `all_to_all`     | shards of another dim  | and back                                          |
| `all_to_all_rows`| rows for other ranks   | and back                                          |
| `share`          | x / ranks              | as it is (gradient / ranks)                       |
| `share_gradient` | as it is               | gradient / ranks                                  |
| `place`          | own shard between zeros| own shard                                         |

The group is set once for a process by `use`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .gathered_again import remember
from .shards import cut, join, local_size

# torch 2.14 renamed it, and warns at every call of the old name.
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


class Ranks(Protocol):
    """The ranks that hold one model together, seen from one of them."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def all_reduce(self, x: torch.Tensor, maximum: bool = False) -> torch.Tensor:
        """A new tensor: the sum (or elementwise maximum) of all ranks' `x`."""
        ...

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """All ranks' `x`, in rank order."""
        ...

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        """The sum over ranks of the piece that each has for this rank."""
        ...

    def all_to_all(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The pieces that all ranks have for this one, in rank order."""
        ...

    def all_to_all_rows(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        """The rows that all ranks have for this one, in rank order; how many go to and come from each rank is given."""
        ...


class ProcessRanks:
    """A group of processes of `torch.distributed`; None means all of them."""

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self._group = group
        self._rank = dist.get_rank(group)
        self._size = dist.get_world_size(group)

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return self._size

    def all_reduce(self, x: torch.Tensor, maximum: bool = False) -> torch.Tensor:
        result = x.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(result, dist.ReduceOp.MAX if maximum else dist.ReduceOp.SUM, group=self._group)
        return result

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = x.contiguous()
        result = [torch.empty_like(x) for _ in range(self._size)]
        dist.all_gather(result, x, group=self._group)
        return result

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        result = pieces[0].new_empty(pieces[0].numel())
        reduce_scatter_single(result, torch.cat([p.reshape(-1) for p in pieces]), group=self._group)
        return result.view(pieces[0].shape)

    def all_to_all(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        sent = torch.stack([p.contiguous() for p in pieces])
        result = torch.empty_like(sent)
        dist.all_to_all_single(result, sent, group=self._group)
        return list(result.unbind(0))

    def all_to_all_rows(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        result = x.new_empty(sum(received), *x.shape[1:])
        dist.all_to_all_single(result, x.contiguous(), list(received), list(sent), group=self._group)
        return result


class ShapeRanks:
    """`size` ranks that exchange nothing: results have the right shape and no meaning. For shapes on fake tensors."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.rank = 0

    def all_reduce(self, x: torch.Tensor, maximum: bool = False) -> torch.Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return [x] * self.size

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        return pieces[0].clone(memory_format=torch.contiguous_format)

    def all_to_all(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        return list(pieces)

    def all_to_all_rows(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        return x.new_empty(sum(received), *x.shape[1:])


_current: list[Ranks] = []


def use(ranks: Ranks | None) -> Ranks | None:
    """Make `ranks` the group of this process; returns the one before."""
    before = _current[0] if _current else None
    _current[:] = [] if ranks is None else [ranks]
    return before


def group() -> Ranks:
    """The group of this process.

    Raises:
        RuntimeError: `use` was not called.
    """
    if not _current:
        raise RuntimeError("no tensor-parallel group is set: call collectives.use(ProcessRanks(group)) first")
    return _current[0]


def shapes_only() -> bool:
    """Whether results have a shape but no meaning: there are no other ranks, and values need not be known."""
    return bool(_current) and isinstance(_current[0], ShapeRanks)


Move = Callable[[Ranks, torch.Tensor], torch.Tensor]


class _Conversion(torch.autograd.Function):
    """One move for the value, another for its gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, ranks: Ranks, forward: Move, backward: Move) -> torch.Tensor:
        ctx.ranks, ctx.move = ranks, backward
        return forward(ranks, x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:  # type: ignore[override]
        return ctx.move(ctx.ranks, gradient), None, None, None


def _convert(x: torch.Tensor, forward: Move, backward: Move) -> torch.Tensor:
    return _Conversion.apply(x, group(), forward, backward)


def _same(ranks: Ranks, x: torch.Tensor) -> torch.Tensor:
    return x.view_as(x)


def _sum(ranks: Ranks, x: torch.Tensor) -> torch.Tensor:
    return ranks.all_reduce(x)


def _divide(ranks: Ranks, x: torch.Tensor) -> torch.Tensor:
    return x / ranks.size


def _gather(dim: int, parts: Sequence[int]) -> Move:
    return lambda ranks, x: join(ranks.all_gather(x.contiguous()), dim, parts)


def _own(dim: int, parts: Sequence[int]) -> Move:
    return lambda ranks, x: cut(x, dim, parts, ranks.rank, ranks.size)


def _sum_own(dim: int, parts: Sequence[int]) -> Move:
    return lambda ranks, x: ranks.reduce_scatter([cut(x, dim, parts, r, ranks.size) for r in range(ranks.size)])


def _between_zeros(dim: int, parts: Sequence[int]) -> Move:
    def move(ranks: Ranks, x: torch.Tensor) -> torch.Tensor:
        zeros = torch.zeros_like(x, memory_format=torch.contiguous_format)
        return join([x if r == ranks.rank else zeros for r in range(ranks.size)], dim, parts)

    return move


def _exchange(dim: int, parts: Sequence[int], new_dim: int, new_parts: Sequence[int]) -> Move:
    def move(ranks: Ranks, x: torch.Tensor) -> torch.Tensor:
        if dim == new_dim:  # shards of one dimension in another order overlap in no regular way
            return cut(join(ranks.all_gather(x.contiguous()), dim, parts), dim, new_parts, ranks.rank, ranks.size)
        pieces = [cut(x, new_dim, new_parts, r, ranks.size) for r in range(ranks.size)]
        return join(ranks.all_to_all(pieces), dim, parts)

    return move


def _even(x: torch.Tensor, dim: int, parts: Sequence[int] | None, factor: int) -> tuple[int, ...]:
    return (x.shape[dim] * factor,) if parts is None else tuple(parts)


def copy_to(x: torch.Tensor) -> torch.Tensor:
    """A replicated value for computations that split: their gradients are summed over ranks."""
    return _convert(x, _same, _sum)


def all_reduce(x: torch.Tensor, partial_gradient: bool = False) -> torch.Tensor:
    """The sum of all ranks' summands."""
    return _convert(x, _sum, _sum if partial_gradient else _same)


def all_gather(
    x: torch.Tensor,
    dim: int,
    parts: Sequence[int] | None = None,
    partial_gradient: bool = False,
    again: bool = False,
) -> torch.Tensor:
    """The whole value from its shards along `dim`; `parts` is None for one part that divides evenly.

    Args:
        again: Where backward needs the value, keep the shards and gather it again (see `gathered_again`).
    """
    ranks = group()
    parts = _even(x, dim, parts, ranks.size)
    gather = _gather(dim, parts)
    whole = _convert(x, gather, (_sum_own if partial_gradient else _own)(dim, parts))
    if again and whole.requires_grad:
        remember(whole, x, lambda shard: gather(ranks, shard))
    return whole


def split(
    x: torch.Tensor, dim: int, parts: Sequence[int] | None = None, partial_gradient: bool = False
) -> torch.Tensor:
    """This rank's shard along `dim` of a replicated value."""
    parts = _even(x, dim, parts, 1)
    return _convert(x, _own(dim, parts), (_between_zeros if partial_gradient else _gather)(dim, parts))


def reduce_scatter(x: torch.Tensor, dim: int, parts: Sequence[int] | None = None) -> torch.Tensor:
    """This rank's shard along `dim` of the sum of all ranks' summands."""
    parts = _even(x, dim, parts, 1)
    return _convert(x, _sum_own(dim, parts), _gather(dim, parts))


def all_to_all(
    x: torch.Tensor,
    dim: int,
    new_dim: int,
    parts: Sequence[int] | None = None,
    new_parts: Sequence[int] | None = None,
) -> torch.Tensor:
    """Shards along `new_dim` from shards along `dim`."""
    parts = _even(x, dim, parts, group().size)
    if new_parts is None:
        new_parts = (sum(parts),) if new_dim == dim else (x.shape[new_dim],)
    return _convert(x, _exchange(dim, parts, new_dim, new_parts), _exchange(new_dim, new_parts, dim, parts))


def all_to_all_rows(x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
    """Rows that all ranks have for this one, in rank order.

    Args:
        x: Rows for rank 0, then for rank 1, and so on.
        sent: How many of them are for each rank.
        received: How many each rank has for this one.
    """

    def move(ranks: Ranks, x: torch.Tensor) -> torch.Tensor:
        return ranks.all_to_all_rows(x, sent, received)

    def back(ranks: Ranks, x: torch.Tensor) -> torch.Tensor:
        return ranks.all_to_all_rows(x, received, sent)

    return _convert(x, move, back)


def share(x: torch.Tensor, partial_gradient: bool = False) -> torch.Tensor:
    """A replicated value as equal summands."""
    return _convert(x, _divide, _divide if partial_gradient else _same)


def share_gradient(x: torch.Tensor) -> torch.Tensor:
    """A replicated value whose gradient arrives replicated and leaves as equal summands."""
    return _convert(x, _same, _divide)


def place(x: torch.Tensor, dim: int, parts: Sequence[int] | None = None) -> torch.Tensor:
    """This rank's shard along `dim` as a summand of the whole: zeros everywhere else."""
    parts = _even(x, dim, parts, group().size)
    return _convert(x, _between_zeros(dim, parts), _own(dim, parts))


__all__ = [
    "ProcessRanks",
    "Ranks",
    "ShapeRanks",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "all_to_all_rows",
    "copy_to",
    "group",
    "local_size",
    "place",
    "reduce_scatter",
    "shapes_only",
    "share",
    "share_gradient",
    "split",
    "use",
]
