"""The stage worth most within a limit on its load, when every label of every item is worth something: a knapsack.

A labelling of all items is a path through a `Sweep`; its worth and its seconds add up along the path, so the best one
is a resource-constrained shortest path, found by labelling (Desrochers and Soumis, 1988): of each state the pairs of
seconds and worth that no other pair of it dominates. A pair goes on only where it can still reach `least`: what the
rest of the path can add is bounded by Lagrangian relaxation of the limit, at several prices of a second.

A pair may stand for others of hardly more worth; it then carries the most that any of these has as its `worth`, so what
is returned as the most is never less than the truth.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numba
import numpy as np
from numpy.typing import NDArray

from autopart.solver.problem import Floats
from autopart.solver.sweep import Sweep

# Prices of a second at which the limit is relaxed, as multiples of what a second is worth about.
PRICES = np.array([0.0, 0.25, 0.4, 0.55, 0.7, 0.85, 1.0, 1.2, 1.5])
# Worth that no path has, and that of a label which is not to be taken.
NOTHING, FORBIDDEN = -1e30, -1e12
# Pairs of one search: 60 MB, and a tenth of a second.
MOST_PAIRS = 3_000_000
PAIRS_AT_FIRST = 1 << 18


@dataclass(frozen=True, eq=False)
class Richest:
    """What a search found.

    Attributes:
        most: No stage within the limit is worth more than this, or than `least` where that is more. With no stages
            found it is `least`, or, where there were too many pairs, what the relaxation says.
        stages: The best ones, the richest first: labels of all items, (found, items).
        seconds: Of each of them.
        work: Arcs and pairs that were looked at.
    """

    most: float
    stages: NDArray[np.int8]
    seconds: Floats
    work: int


def richest(
    sweep: Sweep, worth: Floats, limit: float, least: float, price: float, blur: float, most_stages: int
) -> Richest:
    """The stages within the limit that are worth at least `least`.

    Args:
        worth: Of each label of each item, (items, 3).
        limit: Seconds.
        price: What a second is worth, about.
        blur: Difference in worth that may be neglected at each state.
        most_stages: To return.
    """
    by_step, prices = worth[sweep.order], price * PRICES
    rest = _completions(*sweep.arrays, by_step, prices)
    return _worth_at_least(least, sweep, by_step, prices, rest, limit, blur, most_stages)


def any_rich(
    sweep: Sweep, worth: Floats, limit: float, price: float, blur: float, most_stages: int, below: Sequence[float]
) -> Richest:
    """The richest stages, whatever they are worth: none only where there is none, or it is too far down.

    Args:
        below: How far below what the relaxation says they are looked for, one after the other, until there are some,
            or more pairs than have room. The other arguments are those of `richest`.
    """
    by_step, prices = worth[sweep.order], price * PRICES
    rest = _completions(*sweep.arrays, by_step, prices)
    bound = _bound(rest, prices, limit)
    found = Richest(bound, *_no_stages(sweep), len(sweep.source))
    if bound <= FORBIDDEN / 2:
        return found
    work = 0
    for down in below:
        found = _worth_at_least(bound - down, sweep, by_step, prices, rest, limit, blur, most_stages)
        work += found.work
        if len(found.stages) or found.most > bound - down:
            break
    return replace(found, work=work)


def _worth_at_least(
    least: float,
    sweep: Sweep,
    by_step: Floats,
    prices: Floats,
    rest: Floats,
    limit: float,
    blur: float,
    most_stages: int,
) -> Richest:
    bound = _bound(rest, prices, limit)
    if bound < least:
        return Richest(least, *_no_stages(sweep), len(sweep.source))
    pairs, seconds, value, parent, label, begin = _search(
        *sweep.arrays, by_step, prices, rest, limit, least, blur, MOST_PAIRS
    )
    if pairs < 0:
        return Richest(bound, *_no_stages(sweep), len(sweep.source) + MOST_PAIRS)
    last = np.arange(begin[-2], begin[-1])
    last = last[value[last] >= least]
    if not len(last):
        return Richest(least, *_no_stages(sweep), len(sweep.source) + int(pairs))
    last = last[np.argsort(-value[last], kind="stable")]
    labels = _traced(last[:most_stages], parent, label, len(sweep.order))
    stages = np.empty_like(labels)
    stages[:, sweep.order] = labels
    return Richest(float(value[last[0]]), stages, seconds[last[:most_stages]], len(sweep.source) + int(pairs))


def _no_stages(sweep: Sweep) -> tuple[NDArray[np.int8], Floats]:
    return np.zeros((0, len(sweep.order)), np.int8), np.zeros(0)


def least_seconds(sweep: Sweep, allowed: NDArray[np.bool_]) -> float:
    """What the cheapest stage costs that has only allowed labels, (items, 3); -`FORBIDDEN` or more if there is none."""
    worth = np.where(allowed[sweep.order], 0.0, FORBIDDEN)
    return -float(_completions(*sweep.arrays, worth, np.ones(1))[0, 0])


def _bound(rest: Floats, prices: Floats, limit: float) -> float:
    """What the relaxation says of whole paths, the least over the prices: no stage within the limit is worth more."""
    return float((rest[0] + prices * limit).min())


@numba.njit(cache=True, nogil=True)
def _completions(begin, first, source, label, seconds, worth, prices):  # type: ignore[no-untyped-def]
    """The most that each state's paths to the end are worth less their seconds at each price, (states, prices)."""
    steps = len(begin) - 2
    rest = np.full((begin[-1], len(prices)), NOTHING)
    rest[begin[-2] :] = 0.0
    for step in range(steps - 1, -1, -1):
        for state in range(begin[step + 1], begin[step + 2]):
            for arc in range(first[state], first[state + 1]):
                gain = worth[step, label[arc]]
                for m in range(len(prices)):
                    value = rest[state, m] + gain - prices[m] * seconds[arc]
                    if value > rest[source[arc], m]:
                        rest[source[arc], m] = value
    return rest


@numba.njit(cache=True, nogil=True)
def _search(begin, first, source, label, seconds, worth, prices, rest, limit, least, blur, most):  # type: ignore[no-untyped-def]
    """Pairs of all states, those of a state in order of seconds; -1 of them if there would be too many."""
    steps, room = len(begin) - 2, PAIRS_AT_FIRST
    spent, value = np.empty(room), np.empty(room)
    parent, chosen = np.empty(room, np.int32), np.empty(room, np.int8)
    spent[0], value[0], parent[0] = 0.0, 0.0, -1
    start = np.empty(begin[-1] + 1, np.int64)
    start[0], start[1] = 0, 1
    pairs = 1
    wide = 1024
    new_spent, new_value = np.empty(wide), np.empty(wide)
    new_parent, new_chosen = np.empty(wide, np.int32), np.empty(wide, np.int8)
    order, other = np.empty(wide, np.int32), np.empty(wide, np.int32)
    starts = np.zeros(1 + np.diff(first).max(), np.int32)
    need = np.empty(len(prices))
    likely = 0  # the price that spoke against the last pair that was left out
    for step in range(steps):
        for state in range(begin[step + 1], begin[step + 2]):
            at_most = 0
            for arc in range(first[state], first[state + 1]):
                at_most += start[source[arc] + 1] - start[source[arc]]
            if at_most == 0:
                start[state + 1] = pairs
                continue
            if at_most > wide:
                wide = 2 * at_most
                new_spent, new_value = np.empty(wide), np.empty(wide)
                new_parent, new_chosen = np.empty(wide, np.int32), np.empty(wide, np.int8)
                order, other = np.empty(wide, np.int32), np.empty(wide, np.int32)
            for m in range(len(prices)):
                need[m] = least - rest[state, m] - prices[m] * limit
            found = runs = 0
            for arc in range(first[state], first[state + 1]):
                gain = worth[step, label[arc]]
                for pair in range(start[source[arc]], start[source[arc] + 1]):
                    sum_s = spent[pair] + seconds[arc]
                    if sum_s > limit:
                        break
                    sum_worth = value[pair] + gain
                    hopeful = sum_worth - prices[likely] * sum_s >= need[likely]
                    if hopeful:
                        for m in range(len(prices)):
                            if sum_worth - prices[m] * sum_s < need[m]:
                                hopeful, likely = False, m
                                break
                    if hopeful:
                        new_spent[found], new_value[found] = sum_s, sum_worth
                        new_parent[found], new_chosen[found] = pair, label[arc]
                        found += 1
                if found > starts[runs]:
                    runs += 1
                    starts[runs] = found
            if pairs + found > room:
                if room >= most:
                    return -1, spent, value, parent, chosen, start
                room = min(most, max(2 * room, pairs + found))
                if pairs + found > room:
                    return -1, spent, value, parent, chosen, start
                spent, value = _longer(spent, room), _longer(value, room)
                parent, chosen = _longer(parent, room), _longer(chosen, room)
            best = NOTHING
            for pair in _sorted(new_spent, starts[: runs + 1], order, other)[:found]:
                if new_value[pair] > best + blur:
                    best = new_value[pair]
                    spent[pairs], value[pairs] = new_spent[pair], best
                    parent[pairs], chosen[pairs] = new_parent[pair], new_chosen[pair]
                    pairs += 1
                elif new_value[pair] > value[pairs - 1]:
                    value[pairs - 1] = new_value[pair]
            start[state + 1] = pairs
    return pairs, spent, value, parent, chosen, start[begin[-2] :]


@numba.njit(cache=True, nogil=True)
def _sorted(keys, starts, order, other):  # type: ignore[no-untyped-def]
    """Numbers of the keys, in order; between two `starts` the keys ascend. Natural merge sort, stable.

    Args:
        starts: Is overwritten. The first one is 0, behind the last one comes the number of keys.
        order, other: Room for the numbers.
    """
    runs = len(starts) - 1
    for key in range(starts[runs]):
        order[key] = key
    while runs > 1:
        merged = 0
        for run in range(0, runs, 2):
            left, middle = starts[run], starts[run + 1]
            right, end = middle, starts[min(run + 2, runs)]
            for at in range(left, end):
                if right == end or (left < middle and keys[order[left]] <= keys[order[right]]):
                    other[at] = order[left]
                    left += 1
                else:
                    other[at] = order[right]
                    right += 1
            merged += 1
            starts[merged] = end
        runs = merged
        order, other = other, order
    return order


@numba.njit(cache=True, nogil=True)
def _longer(array, length):  # type: ignore[no-untyped-def]
    copy = np.empty(length, array.dtype)
    copy[: len(array)] = array
    return copy


@numba.njit(cache=True, nogil=True)
def _traced(last, parent, chosen, steps):  # type: ignore[no-untyped-def]
    """Labels along the paths that end in the pairs `last`, (paths, steps)."""
    labels = np.empty((len(last), steps), np.int8)
    for path in range(len(last)):
        pair = last[path]
        for step in range(steps - 1, -1, -1):
            labels[path, step] = chosen[pair]
            pair = parent[pair]
    return labels
