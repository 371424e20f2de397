"""Blocks of memory that live as long as something holds them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Heap:
    """Blocks that are held, each by a number of holders.

    Attributes:
        taken: How many blocks there have been.
    """

    live: int = 0
    peak: int = 0
    taken: int = 0
    sizes: dict[object, int] = field(default_factory=dict)
    holders: Counter[object] = field(default_factory=Counter)

    def take(self, block: object, size: int) -> None:
        """A new block, held by nothing yet."""
        self.leave(block, size)
        self.peak = max(self.peak, self.live)

    def leave(self, block: object, size: int) -> None:
        """A new block that a node leaves behind, of which `reach` has told when it was made."""
        self.taken += 1
        self.sizes[block] = size
        self.live += size

    def hold(self, block: object) -> None:
        self.holders[block] += 1

    def drop(self, block: object) -> None:
        """One holder less; a block without any is given back."""
        self.holders[block] -= 1
        if self.holders[block] <= 0 and block in self.sizes:
            self.live -= self.sizes.pop(block)

    def reach(self, extra: int) -> None:
        """For a moment there is more."""
        self.peak = max(self.peak, self.live + extra)
