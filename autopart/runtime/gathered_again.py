"""Gathered values that backward needs are not kept whole: their shards are, and the value is gathered again.

Megatron-LM keeps the input of a column-split linear in this way where sequences are split (Korthikanti et al. 2022,
section 4.2.2). It costs one more all-gather in backward, and leaves each rank with 1/t of the value meanwhile.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

# Storage of a gathered value that is still alive -> how to gather it again.
_alive: dict[int, Gathered] = {}


class Gathered:
    """A value that was gathered from shards.

    Args:
        shard: This rank's part, which is kept.
        gather: Makes the whole value of it; called by every rank at the same point of backward.
    """

    def __init__(self, shard: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.shard, self._gather = shard.detach(), gather
        self._version = shard._version
        self._whole: torch.Tensor | None = None
        self._awaited = 0

    def kept(self) -> None:
        """Note that backward will ask for the value once more."""
        self._awaited += 1

    def whole(self) -> torch.Tensor:
        """The value, gathered when it is first asked for and let go with the last asking.

        Raises:
            RuntimeError: The shard was changed in place since.
        """
        if self.shard._version != self._version:
            raise RuntimeError("a shard that backward gathers again was changed in place")
        whole = self._gather(self.shard) if self._whole is None else self._whole
        self._awaited -= 1
        self._whole = whole if self._awaited > 0 else None
        return whole


def remember(whole: torch.Tensor, shard: torch.Tensor, gather: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let backward, where it needs `whole` or a view of it, keep `shard` instead (see `keeping_shards`)."""
    address = whole.untyped_storage()._cdata
    _alive[address] = Gathered(shard, gather)
    weakref.finalize(whole, _alive.pop, address, None)


@contextmanager
def keeping_shards() -> Iterator[None]:
    """While a stage runs forward: what was remembered is kept as shards."""
    with torch.autograd.graph.saved_tensors_hooks(keep, restore):
        yield


def keep(tensor: torch.Tensor) -> Any:
    """What is kept of a tensor that backward needs: itself, or (of which value, shape, strides, offset)."""
    gathered = _alive.get(tensor.untyped_storage()._cdata)
    if gathered is None or gathered.shard.dtype != tensor.dtype:
        return tensor
    gathered.kept()
    return gathered, tuple(tensor.shape), tensor.stride(), tensor.storage_offset()


def restore(kept: Any) -> torch.Tensor:
    """The tensor again of which `keep` kept something."""
    if isinstance(kept, torch.Tensor):
        return kept
    gathered, shape, stride, offset = kept
    return gathered.whole().as_strided(shape, stride, offset)
