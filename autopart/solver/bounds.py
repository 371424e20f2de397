"""Lower bounds on the step time that need no search: shares of the work, and the largest item."""

from __future__ import annotations

import numpy as np

from autopart.solver.problem import Problem


def simple_bound(problem: Problem) -> float:
    """The larger of two: work spread evenly over the processes, and the slowest single item with the states it uses.

    With speeds that differ, process p can take at most L / c_p of the work when its load is L and c_p the least ratio
    of its time to the item's fastest; so L >= total / sum(1 / c_p).
    """
    if not problem.items:
        return 0.0
    fastest = problem.work.min(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(fastest > 0, problem.work / fastest, np.inf).min(axis=1)
    slowness = np.array([min(ratio[s] for s in own) for own in problem.stages_of_process])
    updates = float(problem.update.min(axis=0).sum()) if problem.users else 0.0
    shares = 1.0 / np.where(np.isfinite(slowness), slowness, 1.0)
    even = problem.repeat * float(fastest.sum()) / float(shares.sum())
    if problem.uniform:
        even += updates / problem.processes

    alone = problem.repeat * problem.work
    for r, users in enumerate(problem.users):
        alone[:, list(users)] += problem.update[:, r : r + 1]
    largest = float(alone.min(axis=0).max())
    return problem.fill_weight * float(problem.fill.min(axis=0).sum()) + max(even, largest)
