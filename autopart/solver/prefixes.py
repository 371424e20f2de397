"""First plans: the best cut of one topological order into K intervals (see `intervals`)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopart.solver.intervals import Members, tabulate
from autopart.solver.orders import by_priority, seconds_of_nets
from autopart.solver.problem import Problem
from autopart.solver.reductions import condense
from autopart.solver.stage_costs import pins_of

# Limits on the load to try, relative to the least that the order allows: a wider one may save transfers.
SLACK = (1.0, 1.001, 1.01)


def cut_order(problem: Problem, order: list[int], max_cuts: int = 400) -> Iterator[list[int]]:
    """Assignments (item -> stage) that cut `order` into intervals, the least worst load first; none if none fits.

    An order longer than `max_cuts` is cut coarsely first, then anew with every place near the cuts found.
    """
    position = np.empty(problem.items, dtype=np.int64)
    position[order] = np.arange(problem.items)
    cuts = _coarse_cuts(problem, order, position, max_cuts)
    table = tabulate(problem, _prefixes(position, cuts))
    chain = table.least_load()
    if chain is None:
        return
    if len(cuts) <= problem.items:
        yield table.assignment(chain)
        table = tabulate(problem, _prefixes(position, _near([cuts[c] for c in chain], cuts, max_cuts)))
        chain = table.least_load()
        if chain is None:
            return
    yield table.assignment(chain)
    lowest = table.worst(chain)
    for slack in SLACK:
        chain = table.least_fill(lowest * slack)
        if chain is not None:
            yield table.assignment(chain)


def coarsened(problem: Problem, runs: int) -> tuple[Problem, list[int]]:
    """The problem with its items united in about `runs` runs of their order, cut where little is sent.

    Returns:
        The smaller problem, and for each old item the new one.
    """
    order = np.arange(problem.items)
    cuts = _coarse_cuts(problem, order.tolist(), order, runs)
    return condense(problem, [range(first, last) for first, last in pairwise(cuts)])


def even_out(problem: Problem, assignment: Sequence[int], max_cuts: int = 400) -> list[int]:
    """The same plan, or one no slower at its worst stage whose other stages share the rest of the work more evenly.

    Where one item alone decides the step time, many plans are optimal, and some leave devices idle. Cuts move along the
    order of the plan's stages and, within a stage, of the model.
    """
    order = by_priority(problem, lambda v: float(assignment[v]))
    position = np.empty(problem.items, dtype=np.int64)
    position[order] = np.arange(problem.items)
    lengths = np.bincount(assignment, minlength=problem.stages).cumsum()
    cuts = sorted({*_coarse_cuts(problem, order, position, max_cuts), *(int(n) for n in lengths)})
    table = tabulate(problem, _prefixes(position, cuts))
    given = [0, *(cuts.index(int(n)) for n in lengths)]
    chain = table.most_even(table.worst(given))
    return list(assignment) if chain is None else table.assignment(chain)


def _prefixes(position: NDArray[np.int64], cuts: list[int]) -> Members:
    return position[None, :] < np.asarray(cuts)[:, None]


def _near(chosen: list[int], cuts: list[int], max_cuts: int) -> list[int]:
    """The chosen cuts, all places near them, and a thin choice of the others."""
    reach = max_cuts // (2 * len(chosen))
    last = chosen[-1]
    places = {p for c in chosen[1:-1] for p in range(max(1, c - reach), min(last, c + reach + 1))}
    return sorted({*chosen, *places, *cuts[:: max(1, 4 * len(cuts) // max_cuts)], last})


def _coarse_cuts(problem: Problem, order: list[int], position: NDArray[np.int64], max_cuts: int) -> list[int]:
    """All lengths, or of each of `max_cuts` equal shares of the work the one that the least time crosses."""
    if problem.items <= max_cuts:
        return list(range(problem.items + 1))
    change = np.zeros(problem.items + 1)
    seconds = seconds_of_nets(problem)
    for n, net in enumerate(problem.nets):
        places = position[list(pins_of(net))]
        change[places.min() + 1] += seconds[n]
        change[problem.items if net.to_end else places.max() + 1] -= seconds[n]
    time = change.cumsum()
    done = np.cumsum(problem.work.mean(axis=0)[order])
    share = np.minimum((done / max(done[-1], 1e-300) * max_cuts).astype(np.int64), max_cuts - 1)
    starts = [0, *(np.flatnonzero(np.diff(share)) + 1).tolist(), problem.items]
    best = [a + int(time[a + 1 : b + 1].argmin()) + 1 for a, b in pairwise(starts)]
    return sorted({0, *best, problem.items})
