"""Exact plans of narrow graphs: the best chain among all down-sets, as far as a plan below a cap may use them.

Let F be all work at every item's fastest stage, f(I) the part of it in I, and c_s the least ratio of the seconds of
stage s to the fastest. Under a load of at most L, stage s takes at most L / c_s of it. So if a plan's cost is to stay
below a cap, L is the cap less the least filling, and

    F - sum over t > s of L / c_t  <=  f(I after stage s)  <=  sum over t <= s of L / c_t,       f(J) - f(I) <= L / c_s

keeps few of the down-sets for each boundary, and few pairs of them for each stage (`intervals` has the recursion).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autopart.solver.bounds import simple_bound
from autopart.solver.budget import OutOfTimeError, check
from autopart.solver.enumeration import down_sets_within
from autopart.solver.intervals import Extend, Intervals
from autopart.solver.problem import Floats, Problem, totals
from autopart.solver.recomputed_stages import best_recomputing
from autopart.solver.score import score
from autopart.solver.stage_costs import Members, StageCosts

# Down-sets, pairs looked at, and pairs kept, all stages together: some ten seconds, and a gigabyte.
MOST_SETS = 200_000
MOST_PAIRS = 300_000_000
MOST_KEPT = 15_000_000
Rows = NDArray[np.int64]

# Down-sets all pairs of which are tabulated, where blocks may be computed again.
MOST_TABULATED = 1200
# Pairs are looked at in blocks of this many sets before and after a stage.
BEFORE, AFTER = 256, 2048
# Room around the cap, so that nothing below it is lost; and the most by which sums of the same seconds differ.
ROUNDING, ROUNDING_OF_SUMS = 1e-9, 1e-12
# Without a cap, these are tried in turn, relative to a lower bound.
CAPS = (1.02, 1.1, 1.3, 2.0, 4.0, 16.0, math.inf)


def solve_down_sets(
    problem: Problem,
    tolerance: float,
    cap: float = math.inf,
    effort: float = 1.0,
    deadline: float = math.inf,
) -> tuple[list[int] | None, float] | None:
    """The best assignment that costs less than `cap`, and a lower bound.

    Args:
        effort: The share of the work above (down-sets, and pairs of them) that it may do.
        deadline: In seconds of `time.monotonic`; looked at between down-sets, and between blocks of pairs.

    Returns:
        An assignment that costs less than the cap, and a bound within `tolerance` of its cost: no assignment costs less
        than the bound. No assignment, if none costs less than the cap by more than the tolerance; then the bound is
        within `tolerance` of the cap, or infinite, where no cap was given and nothing fits. None if the graph has too
        many down-sets, or pairs of them for the work or the time, or if processes hold several stages: then a load is
        not of one interval.
    """
    if problem.processes != problem.stages:
        return None
    lowest = simple_bound(problem)
    caps = (cap,) if math.isfinite(cap) else tuple(lowest * c for c in CAPS) if lowest else (cap,)
    for limit in caps:
        try:
            family = _family(problem, limit, effort, deadline)
            found = None if family is None else _best(problem, family, tolerance, limit, effort, deadline)
        except OutOfTimeError:
            return None
        if found is None:
            return None
        assignment, bound = found
        if assignment is not None:
            break
    return assignment, min(bound, limit)


def _best(
    problem: Problem, family: _Family, tolerance: float, cap: float, effort: float, deadline: float
) -> tuple[list[int] | None, float] | None:
    """The best assignment below the cap along the family, and a bound; None if that is too much work."""
    if problem.blocks is not None:
        if len(family.inside) > effort * MOST_TABULATED:
            return None
        assignment, bound = best_recomputing(problem, family.inside, tolerance)
        return (assignment if assignment and score(problem, assignment).step_s < cap else None), bound
    table = _band(problem, family, cap, effort, deadline)
    if table is None:
        return None
    chain, bound = table.optimum(tolerance)
    below = chain is not None and table.worst(chain) + table.total_fill(chain) < cap
    return (table.assignment(chain) if chain and below else None), bound * (1 - ROUNDING_OF_SUMS)


@dataclass(frozen=True, eq=False)
class SparsePairs:
    """The pairs of a stage that may be in a plan below the cap: sets before and after it, by the one after, and loads.

    Attributes:
        first: Where the pairs of each set after the stage begin, (sets + 1,).
    """

    before: NDArray[np.int64]
    load: Floats
    first: NDArray[np.int64]

    def least(self, values: Floats, extend: Extend) -> Floats:
        least = np.full(len(values), np.inf)
        some = np.flatnonzero(np.diff(self.first))
        if len(some):
            least[some] = np.minimum.reduceat(extend(values[self.before], self.load), self.first[some])
        return least

    def into(self, after: int) -> tuple[NDArray[np.int64], Floats]:
        pairs = slice(self.first[after], self.first[after + 1])
        return self.before[pairs], self.load[pairs]


@dataclass(frozen=True, eq=False)
class _Family:
    """The down-sets that a plan of at most some cap may use.

    Attributes:
        inside: Which items each holds, by work, (sets, items); the first is empty, the last is everything.
        done: The work of each, every item at its fastest, (sets,).
        slowness: The least ratio of the seconds of each stage to the fastest, (stages,).
    """

    inside: Members
    done: Floats
    slowness: Floats


def _family(problem: Problem, cap: float, effort: float, deadline: float) -> _Family | None:
    """None if there are too many to look at."""
    share = problem.repeat * problem.work.min(axis=0)
    busy = share > 0
    slowness = (problem.repeat * problem.work[:, busy] / share[busy]).min(axis=1, initial=np.inf)
    slowness = np.where(np.isfinite(slowness), slowness, 1.0)
    sets = MOST_SETS if problem.blocks is None else MOST_TABULATED
    most = (cap - problem.least_fill) / slowness
    upto, rest = np.cumsum(most)[:-1], _after(most)[:-1]
    inside = down_sets_within(problem, share, upto, rest, int(effort * sets), deadline)
    if inside is None:
        return None
    done = totals(inside, share[None])[0]
    done[-1] = done.max()  # whatever the roundings
    order = np.lexsort((inside.sum(axis=1), done))
    inside, done = inside[order], done[order]
    some = np.flatnonzero(_windows(done, most).any(axis=0) | ~inside.any(axis=1) | inside.all(axis=1))
    return _Family(inside[some], done[some], slowness)


def _band(problem: Problem, family: _Family, cap: float, effort: float, deadline: float) -> Intervals | None:
    """The stages that a plan of at most `cap` may have, and no few others; None if there are too many to look at."""
    inside, done, slowness = family.inside, family.done, family.slowness
    costs = StageCosts(problem, inside, deadline)
    fill = costs.boundary_fill
    windows = _windows(done, (cap - problem.least_fill) / slowness)
    least = np.where(windows, fill, np.inf).min(axis=1)
    limit = cap - float(least.sum())
    spare = limit - float(done[-1]) / float((1 / slowness).sum())
    windows = _windows(done, limit / slowness) & (fill - least[:, None] <= spare + ROUNDING * abs(cap))
    room = ROUNDING * float(done[-1])
    pairs: list[SparsePairs] = []
    worst = np.full(len(inside), np.inf)
    worst[0] = 0.0
    looked, kept = 0, 0
    for s, window in enumerate(windows):
        blocks = []
        reached = np.flatnonzero(np.isfinite(worst))
        for before, after in _blocks(done, reached, np.flatnonzero(window), limit / slowness[s] + room):
            looked += len(before) * len(after)
            check(deadline)
            if looked > effort * MOST_PAIRS or kept > effort * MOST_KEPT:
                return None
            load = costs.load(s, before, after)
            within = load <= limit * (1 + ROUNDING)
            if not problem.fill_weight:  # only the worst load counts: the best set before each is enough
                best = np.maximum(worst[before, None], load).argmin(axis=0)
                within &= np.arange(len(before))[:, None] == best
            i, j = np.nonzero(within)
            blocks.append((before[i], after[j], load[i, j]))
            kept += len(i)
        pairs.append(_by_set_after(blocks, len(inside)))
        worst = pairs[-1].least(worst, np.maximum)
    return Intervals(inside, pairs, fill)


def _windows(done: Floats, most: Floats) -> NDArray[np.bool_]:
    """Which down-sets may end each stage (stages, sets), when stage s takes at most `most[s]` of the work."""
    room = ROUNDING * done[-1]
    return (done <= np.cumsum(most)[:, None] + room) & (done >= done[-1] - _after(most)[:, None] - room)


def _after(most: Floats) -> Floats:
    """The work of all stages behind each."""
    return np.append(np.cumsum(most[:0:-1])[::-1], 0.0)


def _blocks(done: Floats, before: Rows, after: Rows, most: float) -> Iterator[tuple[Rows, Rows]]:
    """Blocks with all pairs that have at most `most` work between them; both lists are in order of work."""
    for start in range(0, len(before), BEFORE):
        rows = before[start : start + BEFORE]
        first, end = np.searchsorted(done[after], [done[rows[0]], done[rows[-1]] + most])
        for column in range(int(first), int(end), AFTER):
            yield rows, after[column : min(column + AFTER, int(end))]


def _by_set_after(blocks: list[tuple[Rows, Rows, Floats]], sets: int) -> SparsePairs:
    none = np.zeros(0, dtype=np.int64)
    before, after, load = (np.concatenate(parts) for parts in zip((none, none, np.zeros(0)), *blocks, strict=True))
    order = np.argsort(after, kind="stable")
    first = np.concatenate([[0], np.bincount(after, minlength=sets).cumsum()])
    return SparsePairs(before[order], load[order], first)
