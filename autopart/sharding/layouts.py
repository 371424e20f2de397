"""Layouts: what each of t ranks holds of a tensor, and of its gradient.

| layout     | value      | gradient   |
|------------|------------|------------|
| `R`        | replicated | replicated |
| `R_STAR`   | replicated | partial    |
| `P`        | partial    | replicated |
| `S(d, ...)`| shards     | shards     |
| `owned`    | summands   | own rows   |

Partial: each rank holds a summand. Shards: dimension d is a list of parts, each cut evenly among the ranks
(`runtime.shards`); a part that t does not divide is padded with zeros, and padding holds zeros in the value and in the
gradient, always.

Owned: every index of one dimension belongs to one rank, as tokens belong to the rank that holds their expert. A rank
holds the values of its own indices and zeros elsewhere; of the gradient it holds the right values at its own indices
and anything finite elsewhere. Operators that map zero to zero, index by index, work on it as it is. Read otherwise, it
is partial; nothing becomes owned by conversion.
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


@dataclass(frozen=True, order=True)
class Owned:
    """Indices of a dimension that belong to one rank each; `owner` names the node that says whose they are."""

    dim: int
    owner: str

    def __str__(self) -> str:
        return f"owned({self.dim}, {self.owner})"


Kind = Literal["R", "P"] | Split | Owned


@dataclass(frozen=True)
class Layout:
    """What a rank holds of a value and of its gradient."""

    forward: Kind
    gradient: Kind

    @property
    def split(self) -> Split | None:
        return self.forward if isinstance(self.forward, Split) else None

    @property
    def owned(self) -> Owned | None:
        return self.forward if isinstance(self.forward, Owned) else None

    @property
    def partial(self) -> bool:
        """Whether ranks hold summands."""
        return self.forward == "P" or isinstance(self.forward, Owned)

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


def belonging(owned: Owned) -> Layout:
    return Layout(owned, owned)


def convertible(a: Layout, b: Layout) -> bool:
    """Whether a value in layout a can be read in layout b."""
    return a == b or b.owned is None


def local_shape(shape: Sequence[int], layout: Layout, t: int) -> tuple[int, ...]:
    """Shape of what one rank holds."""
    result = list(shape)
    if layout.split is not None:
        result[layout.split.dim] = local_size(layout.split.parts, t)
    return tuple(result)
