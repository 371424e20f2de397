"""Ranks as threads of one process that run the same program and exchange tensors at a barrier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopart.runtime import collectives


class ThreadRanks:
    """The group that all threads share; each sees its own rank. Counts collectives and the bytes that a rank sends."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._local = threading.local()
        self._barrier = threading.Barrier(size, timeout=60)
        self._slots: list[Any] = [None] * size
        self.counts: list[tuple[str, int]] = []

    @property
    def rank(self) -> int:
        return self._local.rank

    def exchange(self, value: Any) -> list[Any]:
        self._slots[self.rank] = value
        self._barrier.wait()
        found = list(self._slots)
        self._barrier.wait()
        return found

    def _count(self, name: str, size_bytes: float) -> None:
        if self.rank == 0:
            self.counts.append((name, int(size_bytes)))

    def all_reduce(self, x: torch.Tensor, maximum: bool = False) -> torch.Tensor:
        self._count("all_reduce", 2 * _bytes(x) * (self.size - 1) / self.size)
        stacked = torch.stack(self.exchange(x.detach().clone()))
        return stacked.amax(0) if maximum else stacked.sum(0).to(x.dtype)

    def all_gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._count("all_gather", _bytes(x) * (self.size - 1))
        return self.exchange(x.detach().clone())

    def reduce_scatter(self, pieces: Sequence[torch.Tensor]) -> torch.Tensor:
        self._count("reduce_scatter", sum(map(_bytes, pieces)) * (self.size - 1) / self.size)
        found = self.exchange([p.detach().clone() for p in pieces])
        return torch.stack([other[self.rank] for other in found]).sum(0)

    def all_to_all(self, pieces: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        self._count("all_to_all", sum(map(_bytes, pieces)) * (self.size - 1) / self.size)
        found = self.exchange([p.detach().clone() for p in pieces])
        return [other[self.rank] for other in found]

    def all_to_all_rows(self, x: torch.Tensor, sent: Sequence[int], received: Sequence[int]) -> torch.Tensor:
        self._count("all_to_all", _bytes(x) * (self.size - 1) / self.size)
        found = self.exchange([piece.detach().clone() for piece in x.split(list(sent))])
        assert [other[self.rank].shape[0] for other in found] == list(received)
        return torch.cat([other[self.rank] for other in found])

    def run(self, program: Callable[[int], Any]) -> list[Any]:
        """program(rank) on every rank; their results in rank order."""
        results: list[Any] = [None] * self.size
        errors: list[BaseException] = []

        def body(rank: int) -> None:
            self._local.rank = rank
            try:
                results[rank] = program(rank)
            except BaseException as error:
                errors.append(error)
                self._barrier.abort()

        before = collectives.use(self)
        try:
            threads = [threading.Thread(target=body, args=(rank,)) for rank in range(self.size)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            collectives.use(before)
        for error in errors:
            if not isinstance(error, threading.BrokenBarrierError):
                raise error
        if errors:
            raise errors[0]
        return results


def _bytes(x: torch.Tensor) -> int:
    return x.numel() * x.element_size()
