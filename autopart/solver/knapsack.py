"""One option for each item, in the least time that fits a room: the multiple-choice knapsack problem, exactly.

A price on every byte splits the problem into its items, and gives a lower bound: at price p >= 0, no choice that fits
takes less than sum_v min_l (seconds + p bytes) - p room. The best price is found on the lower convex hull. An option
costs (seconds + p bytes) more than its item's best one; an optimal choice can have no more than the gap between bound
and best choice known, in all. What may still be chosen is merged item by item, and dominated choices are dropped
(Nemhauser and Ullmann, 1969). Equal items give equal partial choices, of which one is kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopart.solver.problem import Floats

Choice = NDArray[np.int64]

# Room for roundings, relative to the sums compared.
ROUNDING = 1e-12


@dataclass(frozen=True, eq=False)
class Relaxed:
    """What a price on bytes tells: the best choice takes at least `bound` seconds, and at most what `choice` takes.

    Attributes:
        price: Seconds a byte, at which the bound is highest; zero where the fastest options fit.
        choice: The option of each item; it fits.
    """

    bound: float
    price: float
    choice: Choice


class _Point(NamedTuple):
    """A choice, and what it takes."""

    choice: Choice
    seconds: float
    size: float


def relax(seconds: Floats, size: Floats, room: float) -> Relaxed | None:
    """The bound by the best price, and a choice that fits; none if nothing fits.

    Args:
        seconds, size: Of each option, (items, options), infinite where an item has fewer.
        room: What the sizes may sum to.
    """
    rows = np.arange(len(seconds))

    def point(choice: Choice) -> _Point:
        return _Point(choice, float(seconds[rows, choice].sum()), float(size[rows, choice].sum()))

    large = point(np.lexsort((size, seconds), axis=1)[:, 0])
    if large.size <= room:
        return Relaxed(large.seconds, 0.0, large.choice)
    small = point(np.lexsort((seconds, size), axis=1)[:, 0])
    if small.size > room:
        return None
    while True:
        price = (small.seconds - large.seconds) / (large.size - small.size)
        line = large.seconds + price * large.size
        pick = point((seconds + price * size).argmin(axis=1))
        below = line - (pick.seconds + price * pick.size)
        if below <= ROUNDING * abs(line):
            return Relaxed(line - below - price * room, price, small.choice)
        if pick.size > room:
            large = pick
        else:
            small = pick


def choose(seconds: Floats, size: Floats, room: float) -> Choice | None:
    """The option of each item in the best choice, of those the fastest with the least sizes; none if nothing fits."""
    relaxed = relax(seconds, size, room)
    if relaxed is None or not relaxed.price:
        return None if relaxed is None else relaxed.choice
    return _merge(seconds, size, room, relaxed)


def total(table: Floats, choice: Choice) -> float:
    return float(table[np.arange(len(choice)), choice].sum())


def _merge(seconds: Floats, size: Floats, room: float, relaxed: Relaxed) -> Choice:
    """The best choice, merged from what is within the gap of the bound."""
    best = relaxed.choice
    excess = seconds + relaxed.price * size
    excess -= excess.min(axis=1, keepdims=True)
    gap = total(seconds, best) * (1 + ROUNDING) - relaxed.bound
    open_ = excess <= gap
    order = np.lexsort((*size.T, *seconds.T))
    to_come = np.where(open_, size, np.inf).min(axis=1)[order]
    later = to_come[::-1].cumsum()[::-1] - to_come
    time, used, over = np.zeros(1), np.zeros(1), np.zeros(1)
    trail: list[tuple[Choice, Choice]] = []
    for item, rest in zip(order, later, strict=True):
        options = np.flatnonzero(open_[item])
        parent = np.repeat(np.arange(len(time)), len(options))
        option = np.tile(options, len(time))
        next_time = time[parent] + seconds[item, option]
        next_used = used[parent] + size[item, option]
        next_over = over[parent] + excess[item, option]
        kept = np.flatnonzero((next_over <= gap) & (next_used + rest <= room * (1 + ROUNDING)))
        kept = kept[np.lexsort((next_used[kept], next_time[kept]))]
        least_before = np.concatenate([[np.inf], np.minimum.accumulate(next_used[kept])[:-1]])
        kept = kept[next_used[kept] < least_before]
        if not len(kept):
            return best
        time, used, over = next_time[kept], next_used[kept], next_over[kept]
        trail.append((parent[kept], option[kept]))
    fits = np.flatnonzero(used <= room)
    if not len(fits):
        return best
    state, found = int(fits[0]), best.copy()
    for item, (parents, options) in zip(order[::-1], reversed(trail), strict=True):
        found[item], state = options[state], int(parents[state])
    return found if total(seconds, found) < total(seconds, best) and total(size, found) <= room else best
