"""Listing down-sets: all of a graph, or those that may lie before one of the boundaries."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import reduce
from math import inf
from operator import or_

import numpy as np

from autopart.solver.budget import check
from autopart.solver.problem import Floats, Problem, membership, totals
from autopart.solver.stage_costs import Members

# Room for the roundings of sums of work.
ROUNDING = 1e-9


def down_sets(problem: Problem, most: int, deadline: float = inf) -> Members | None:
    """Every down-set, by number of items, (sets, items); None if there are more than `most`.

    Raises:
        OutOfTimeError: The deadline passed (of `time.monotonic`).
    """
    everything = (1 << problem.items) - 1
    growth = _Growth(problem.ancestors, problem.successors, [0.0] * problem.items)
    found = []
    for bits, _ in growth.sets(0, everything, 1.0):
        check(deadline)
        found.append(bits)
        if len(found) > most:
            return None
    return membership(found, problem.items)


def down_sets_within(
    problem: Problem, work: Floats, upto: Floats, rest: Floats, most: int, deadline: float = inf
) -> Members | None:
    """The down-sets that may lie before a boundary, with nothing first and everything last, (sets, items).

    Before boundary b at most `upto[b]` work can be done, and behind it at most `rest[b]`. So an item comes before it if
    what cannot be earlier than the item is more than `rest[b]`, and behind it if what cannot be later is more than
    `upto[b]`; between these, sets grow from below, or from above, whichever is nearer to what may be. If that is too
    much, because boundaries have many sets in common, the answer is all down-sets.

    Args:
        work: Of each item, (items,).
        upto, rest: Work for each boundary, (stages - 1,).
        most: Down-sets to look at, for each of the two ways.
        deadline: In seconds of `time.monotonic`.

    Returns:
        Those sets, and maybe others; None if there are too many.

    Raises:
        OutOfTimeError: The deadline passed.
    """
    room = ROUNDING * float(work.sum())
    before = totals(membership(problem.ancestors, problem.items), work[None])[0]
    behind = totals(membership(problem.descendants, problem.items), work[None])[0]
    everything, total = (1 << problem.items) - 1, float(work.sum())
    seconds = work.tolist()
    upwards = _Growth(problem.ancestors, problem.successors, seconds)
    downwards = _Growth(problem.descendants, problem.predecessors, seconds)
    found, looked = {0, everything}, 0
    for most_before, most_behind in zip(upto + room, rest + room, strict=True):
        check(deadline)
        first = _union(problem.ancestors, behind > most_behind)
        last = _union(problem.descendants, before > most_before)
        free = everything & ~first & ~last
        if first & last:
            continue
        short = total - most_behind - float(work[behind > most_behind].sum())
        over = total - most_before - float(work[before > most_before].sum())
        if short <= over:
            sets = upwards.sets(first, free, most_before)
        else:
            sets = ((everything & ~bits, total - sum_) for bits, sum_ in downwards.sets(last, free, most_behind))
        for bits, sum_ in sets:
            check(deadline)
            looked += 1
            if looked > most:
                return down_sets(problem, most, deadline)
            if total - most_behind <= sum_ <= most_before:
                found.add(bits)
    return membership(sorted(found, key=lambda bits: (bits.bit_count(), bits)), problem.items)


def _union(sets: Sequence[int], flags: Members) -> int:
    return reduce(or_, (sets[int(v)] for v in np.flatnonzero(flags)), 0)


@dataclass(frozen=True)
class _Growth:
    """Sets that have, with an item, all its `needed` ones.

    Attributes:
        needed: For each item, as a bit set, itself included.
        freed: For each item those of which it is needed, directly.
    """

    needed: Sequence[int]
    freed: Sequence[Sequence[int]]
    work: Sequence[float]

    def sets(self, start: int, free: int, most: float) -> Iterator[tuple[int, float]]:
        """Every set of `start` and some of the `free` items with at most `most` work, by size, and its work.

        Each as soon as it is found: who has enough of them stops before a wide graph's next size fills the memory.
        """
        needed = [bits & ~(1 << v) for v, bits in enumerate(self.needed)]
        ready = sum(1 << v for v in members(free) if not needed[v] & ~start)
        level = {start: (sum(self.work[v] for v in members(start)), ready)}
        yield start, level[start][0]
        while level:
            larger: dict[int, tuple[float, int]] = {}
            for bits, (work, ready) in level.items():
                for v in members(ready):
                    grown = bits | 1 << v
                    if grown not in larger and work + self.work[v] <= most:
                        freed = sum(1 << w for w in self.freed[v] if free >> w & 1 and not needed[w] & ~grown)
                        larger[grown] = work + self.work[v], ready & ~(1 << v) | freed
                        yield grown, work + self.work[v]
            level = larger


def members(bits: int) -> Iterator[int]:
    """The items of a bit set."""
    while bits:
        lowest = bits & -bits
        yield lowest.bit_length() - 1
        bits ^= lowest
