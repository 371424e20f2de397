"""First plans: the best cut of one topological order into K intervals (see `intervals`)."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np

from autopart.solver.intervals import Members, tabulate
from autopart.solver.problem import Problem

# Limits on the load to try, relative to the least that the order allows: a wider one may save transfers.
SLACK = (1.0, 1.001, 1.01)


def cut_order(problem: Problem, order: list[int], max_cuts: int = 400) -> Iterator[list[int]]:
    """Assignments (item -> stage) that cut `order` into intervals, the least worst load first; none if none fits."""
    table = tabulate(problem, _prefixes(problem, order, max_cuts))
    chain = table.least_load()
    if chain is None:
        return
    yield table.assignment(chain)
    lowest = table.worst(chain)
    for slack in SLACK:
        chain = table.least_fill(lowest * slack)
        if chain is not None:
            yield table.assignment(chain)


def _prefixes(problem: Problem, order: list[int], max_cuts: int) -> Members:
    position = np.empty(problem.items, dtype=np.int64)
    position[order] = np.arange(problem.items)
    return position[None, :] < np.asarray(_cuts(problem, order, position, max_cuts))[:, None]


def _cuts(problem: Problem, order: list[int], position: np.ndarray, max_cuts: int) -> list[int]:
    """All lengths, or of each of `max_cuts` equal shares of the work the one that the least time crosses."""
    if problem.items <= max_cuts:
        return list(range(problem.items + 1))
    change = np.zeros(problem.items + 1)
    for n, net in enumerate(problem.nets):
        seconds = problem.transfer[:, n].mean()
        change[position[net.producer] + 1] += seconds
        change[problem.items if net.to_end else max(position[r] for r in net.readers) + 1] -= seconds
    time = change.cumsum()
    done = np.cumsum(problem.work.mean(axis=0)[order])
    share = np.minimum((done / max(done[-1], 1e-300) * max_cuts).astype(np.int64), max_cuts - 1)
    starts = [0, *(np.flatnonzero(np.diff(share)) + 1).tolist(), problem.items]
    best = [a + int(time[a + 1 : b + 1].argmin()) + 1 for a, b in pairwise(starts)]
    return sorted({0, *best, problem.items})
