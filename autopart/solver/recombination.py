"""Plans from parts of other plans: the boundaries of good plans are down-sets, and so is whatever lies between two.

Going from one plan to the orders that keep its stages soon ends, and where depends on where it began: on wide graphs
some percent apart. So it begins anew, from many orders. Unions and intersections of down-sets are down-sets; with
them, the boundaries of all plans seen make one family, and the best chain of it (`intervals`) begins like one plan and
ends like another, the boundaries between taken from both. It is never worse than the best of the plans.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopart.solver.intervals import tabulate
from autopart.solver.orders import orders, shuffled
from autopart.solver.prefixes import cut_order
from autopart.solver.problem import Problem
from autopart.solver.score import score
from autopart.solver.stage_costs import Members

# Orders that are cut in all, for as many items: fewer of more items. Without a better plan, so many are cut near one
# plan, and so many plans are begun anew.
TRIALS, ITEMS, FEWEST = 1000, 250, 100
IDLE_TRIALS, IDLE_BEGINNINGS = 20, 6
# Boundaries, the best plans' first, that make a family; those of them that are united and intersected; its size.
BOUNDARIES, PAIRED, FAMILY = 300, 80, 700
# Two boundaries are united and intersected if their work differs by at most this share of a stage's.
NEAR = 0.5
ACCURACY = 1e-5
LEAST_GAIN = 1e-6

Plan = tuple[float, tuple[int, ...]]


def recombined(problem: Problem, start: Sequence[int] | None, enough: float, deadline: float) -> tuple[int, ...] | None:
    """The best plan of many beginnings and of their recombinations; None if nothing fits.

    Args:
        start: A legal plan that fits.
        enough: A step time at which it ends.
        deadline: In seconds of `time.monotonic`; looked at between orders.
    """
    search = _Search(problem, max(FEWEST, TRIALS * ITEMS // max(problem.items, ITEMS)), deadline)
    if start is not None:
        search.offer(start)
        search.climb(search.best)
    supply, idle = orders(problem, seed=1), 0
    while search.open() and idle < IDLE_BEGINNINGS:
        if search.best is not None and search.best[0] <= enough:
            break
        known = search.best
        search.climb(search.cut(next(supply)))
        search.climb(search.recombine())
        idle = 0 if search.best != known else idle + 1
    return None if search.best is None else search.best[1]


@dataclass
class _Search:
    """The best plan; the boundaries kept, with the step time of the best plan that has them; what is left to do."""

    problem: Problem
    trials: int
    deadline: float
    best: Plan | None = None
    boundaries: dict[bytes, tuple[float, NDArray[np.bool_]]] = field(default_factory=dict)
    random: random.Random = field(default_factory=lambda: random.Random(0))

    def open(self) -> bool:
        return self.trials > 0 and time.monotonic() < self.deadline

    def offer(self, assignment: Sequence[int]) -> Plan | None:
        """Value a plan; None if it does not fit."""
        result = score(self.problem, assignment)
        if not result.fits(self.problem):
            return None
        plan = (result.step_s, tuple(int(s) for s in assignment))
        if self.best is None or plan[0] < self.best[0] * (1 - LEAST_GAIN):
            self.best = plan
        return plan

    def keep(self, plan: Plan) -> None:
        """Keep the boundaries of a plan, with its step time if none of a better one has them."""
        stage = np.asarray(plan[1])
        for j in range(1, self.problem.stages):
            inside = stage < j
            key = inside.tobytes()
            known = self.boundaries.get(key)
            if known is None or plan[0] < known[0]:
                self.boundaries[key] = (plan[0], inside)

    def cut(self, order: list[int]) -> Plan | None:
        """The best plan along an order."""
        self.trials -= 1
        plans = [self.offer(assignment) for assignment in cut_order(self.problem, order)]
        return min((plan for plan in plans if plan is not None), default=None, key=lambda plan: plan[0])

    def climb(self, plan: Plan | None) -> None:
        """Cut orders that keep the plan's stages, and go on from what is no worse, until nothing gets better."""
        if plan is not None:
            self.keep(plan)
        idle = 0
        while plan is not None and idle < IDLE_TRIALS and self.open():
            found = self.cut(shuffled(self.problem, plan[1], self.random))
            idle = 0 if found is not None and found[0] < plan[0] * (1 - LEAST_GAIN) else idle + 1
            if found is not None and found[0] <= plan[0]:
                plan = found
                self.keep(plan)

    def recombine(self) -> Plan | None:
        """The best chain of the family, if it is better than the best plan."""
        if self.best is None or self.problem.stages < 2:
            return None
        known, table = self.best, tabulate(self.problem, self._family())
        chain, _ = table.optimum(ACCURACY)
        if chain is not None:
            self.offer(table.assignment(chain))
        return self.best if self.best != known else None

    def _family(self) -> Members:
        """Nothing, the boundaries of the best plans, unions and intersections of the very best of them, everything."""
        rows = [inside for _, inside in sorted(self.boundaries.values(), key=lambda entry: entry[0])[:BOUNDARIES]]
        work = self.problem.work.mean(axis=0)
        done, near = [float(row @ work) for row in rows], NEAR * float(work.sum()) / self.problem.stages
        family = {row.tobytes(): row for row in rows}
        for a, b in itertools.combinations(range(min(PAIRED, len(rows))), 2):
            if len(family) >= FAMILY:
                break
            if abs(done[a] - done[b]) <= near:
                for row in (rows[a] & rows[b], rows[a] | rows[b]):
                    family.setdefault(row.tobytes(), row)
        nothing, everything = np.zeros(self.problem.items, dtype=bool), np.ones(self.problem.items, dtype=bool)
        inner = [row for row in family.values() if row.any() and not row.all()]
        return np.array([nothing, *inner, everything])
