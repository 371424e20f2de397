"""The ranks of a tensor-parallel group, to a node that runs by itself on fake tensors: nothing moves, all is noted."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from autopart.cluster import Link
from autopart.runtime import collectives
from autopart.sharding.conversions import Collective, collective_seconds, sent_bytes


@dataclass(frozen=True)
class Exchange:
    """One collective.

    Attributes:
        bytes: What a rank sends.
        ranks: Size of the group.
    """

    collective: Collective
    bytes: int
    ranks: int

    def seconds(self, link: Link) -> float:
        """Predicted time on the link between the ranks."""
        return collective_seconds(self.collective, self.bytes, self.ranks, link)


class RecordingRanks(collectives.ShapeRanks):
    """`size` ranks that note what they would exchange, and copy and allocate what `ProcessRanks` does.

    Attributes:
        exchanges: What was exchanged, in order.
    """

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.exchanges: list[Exchange] = []

    def all_reduce(self, x: torch.Tensor, maximum: bool = False) -> torch.Tensor:
        self._note("all_reduce", _bytes(x))
        return super().all_reduce(x, maximum)

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._note("all_gather", self.size * _bytes(x))
        return [torch.empty_like(x) for _ in range(self.size)]

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        self._note("reduce_scatter", sum(map(_bytes, pieces)))
        return torch.cat([piece.reshape(-1) for piece in pieces]).new_empty(pieces[0].shape)

    def all_to_all(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._note("all_to_all", self.size * sum(map(_bytes, pieces)))
        return list(torch.empty_like(torch.stack(list(pieces))).unbind(0))

    def all_to_all_rows(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        self._note("all_to_all", self.size * _bytes(x))
        return super().all_to_all_rows(x.contiguous(), sent, received)

    def _note(self, collective: Collective, whole_bytes: int) -> None:
        self.exchanges.append(Exchange(collective, sent_bytes(collective, whole_bytes, self.size), self.size))


@contextmanager
def recording(size: int) -> Iterator[RecordingRanks]:
    """A group of recording ranks, in use inside."""
    ranks = RecordingRanks(size)
    before = collectives.use(ranks)
    try:
        yield ranks
    finally:
        collectives.use(before)


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()
