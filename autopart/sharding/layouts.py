"""Layouts: what each of t ranks holds of a tensor, and of its gradient.

| layout     | value      | gradient   |
|------------|------------|------------|
| `R`        | replicated | replicated |
| `R_STAR`   | replicated | partial    |
| `P`        | partial    | replicated |
| `S(d, ...)`| shards     | shards     |

Partial: each rank holds a summand. Shards: dimension d is a list of parts, each cut evenly among the ranks
(`runtime.shards`); a part that t does not divide is padded with zeros, and padding holds zeros in the value and in the
gradient, always.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autopart.runtime.shards import local_size


@dataclass(frozen=True, order=True)
class Split:
    """One dimension cut among the ranks, part by part."""

    dim: int
    parts: tuple[int, ...]

    @property
    def size(self) -> int:
        return sum(self.parts)

    def padded(self, t: int) -> bool:
        """Whether some part is not a multiple of t."""
        return any(part % t for part in self.parts)

    @property
    def equal_parts(self) -> int | None:
        """The number of parts if all are of one size, else None."""
        return len(self.parts) if len(set(self.parts)) == 1 else None

    def __str__(self) -> str:
        parts = "" if len(self.parts) == 1 else f", {list(self.parts)}"
        return f"S({self.dim}{parts})"


Kind = Literal["R", "P"] | Split


@dataclass(frozen=True)
class Layout:
    """What a rank holds of a value and of its gradient."""

    forward: Kind
    gradient: Kind

    @property
    def split(self) -> Split | None:
        return self.forward if isinstance(self.forward, Split) else None

    @property
    def partial(self) -> bool:
        return self.forward == "P"

    @property
    def replicated(self) -> bool:
        return self.forward == "R"

    def without_gradient(self) -> Layout:
        """The layout that stands for all that hold the value this way, where no gradient flows."""
        return R if self == R_STAR else self

    def __str__(self) -> str:
        return "R*" if self == R_STAR else str(self.forward)


R = Layout("R", "R")
R_STAR = Layout("R", "P")
P = Layout("P", "R")


def S(dim: int, *parts: int) -> Layout:
    """Shards along `dim`, whose parts are given."""
    return shards(Split(dim, tuple(parts)))


def shards(split: Split) -> Layout:
    return Layout(split, split)


def local_shape(shape: Sequence[int], layout: Layout, t: int) -> tuple[int, ...]:
    """Shape of what one rank holds."""
    result = list(shape)
    if layout.split is not None:
        result[layout.split.dim] = local_size(layout.split.parts, t)
    return tuple(result)
