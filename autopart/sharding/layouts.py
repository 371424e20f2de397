"""Layouts: what each of t ranks holds of a tensor, and of its gradient.

| layout     | value      | gradient   |
|------------|------------|------------|
| `R`        | replicated | replicated |
| `R_STAR`   | replicated | partial    |
| `P`        | partial    | replicated |
| `S(d, ...)`| shards     | shards     |
| `owned`    | summands   | own rows   |
| `routed`   | of own slots, by the rank's own sort (see `Routed`) |

Partial: each rank holds a summand. Shards: dimension d is a list of parts, each cut evenly among the ranks
(`runtime.shards`); a part that t does not divide is padded with zeros, and padding holds zeros in the value and in the
gradient, always.

Owned: every index of one dimension belongs to one rank, as tokens belong to the rank that holds their expert. A rank
holds the values of its own indices and zeros elsewhere; of the gradient it holds the right values at its own indices
and anything finite elsewhere. Operators that map zero to zero, index by index, work on it as it is. Read otherwise, it
is partial; nothing becomes owned by conversion. What is routed is read as what it is or not at all.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
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


Role = Literal["sorted", "places", "back", "counts", "ends", "sent"]


@dataclass(frozen=True, order=True)
class Routed:
    """What ranks hold where each of them sorts its own shard of some slots, and not all ranks the whole.

    | role     | what a rank holds |
    |----------|-------------------|
    | `sorted` | rows of its own slots, in the order of its own sort |
    | `places` | for each sorted slot an index into the rank's shard of a dimension that has these parts |
    | `back`   | for each own slot its place in the order of the rank's sort |
    | `counts` | how many of its own slots each expert has |
    | `ends`   | for each rank (a new first dimension), where each expert's rows end among the rank's sorted slots |
    | `sent`   | rows of all ranks' slots for the rank's own experts, sorted by expert |

    How many rows are sent depends on data; shapes and prices are those of an even routing. A row is on one rank, and
    its gradient with it.

    Attributes:
        role: See the table.
        dim: Of the rows; 0 where there are none.
        sort: Names the node that sorts the slots.
        parts: Of the slots' dimension (of `places`: of the one into which they point).
    """

    role: Role
    dim: int
    sort: str
    parts: tuple[int, ...]

    @property
    def rows(self) -> bool:
        """Whether a rank holds some rows of the whole."""
        return self.role in ("sorted", "sent")

    @property
    def spread(self) -> bool:
        """Whether a rank holds (sent: is expected to hold) one of t equal shares."""
        return self.rows or self.role in ("places", "back")

    def __str__(self) -> str:
        parts = "" if len(self.parts) == 1 else f", {list(self.parts)}"
        return f"{self.role}({self.dim}, {self.sort}{parts})"


Kind = Literal["R", "P"] | Split | Owned | Routed


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
    def routed(self) -> Routed | None:
        return self.forward if isinstance(self.forward, Routed) else None

    @property
    def spread(self) -> int | None:
        """The dimension of which a rank holds a share."""
        if self.split is not None:
            return self.split.dim
        return self.routed.dim if self.routed is not None and self.routed.spread else None

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


def belonging(kind: Owned | Routed) -> Layout:
    return Layout(kind, kind)


def renamed(layout: Layout, name: Callable[[str], str]) -> Layout:
    """The same layout with another name for the node that it names."""
    if layout.owned is not None:
        return belonging(replace(layout.owned, owner=name(layout.owned.owner)))
    if layout.routed is not None:
        return belonging(replace(layout.routed, sort=name(layout.routed.sort)))
    return layout


def convertible(a: Layout, b: Layout) -> bool:
    """Whether a value in layout a can be read in layout b."""
    return a == b or (b.owned is None and a.routed is None and b.routed is None)


def local_shape(shape: Sequence[int], layout: Layout, t: int) -> tuple[int, ...]:
    """Shape of what one rank holds."""
    result = list(shape)
    if layout.split is not None:
        result[layout.split.dim] = local_size(layout.split.parts, t)
    elif layout.spread is not None:
        result[layout.spread] //= t
    elif layout.routed is not None and layout.routed.role == "ends":
        result.insert(0, t)
    return tuple(result)
