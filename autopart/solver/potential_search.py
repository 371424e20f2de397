"""Plans and proofs for wide graphs by potentials.

A limit on the load that no plan can keep is a bound. The next one asked for is halfway between the last and the best
plan, as long as `potentials` alone show it quickly; then plans are built along these potentials. What is then left
between plan and bound `branching` can close; it finds better plans by the way.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

from autopart.solver.beam import plan_along
from autopart.solver.branching import Branching
from autopart.solver.potentials import Potentials
from autopart.solver.problem import Problem
from autopart.solver.score import score
from autopart.solver.sweep import TooWideError

# Work and rounds that one limit may take without branching.
WORK_OF_LIMIT, ROUNDS_OF_LIMIT = 30_000_000, 25
# How near the bound is brought to the limits that seem possible, as a share of the value: before the first plans along
# its potentials, and then.
FINENESS = (2.5e-2, 5e-3)
# Limits that the beam tries.
TRIES = 5
# Of the tolerance: what a limit asked for leaves open, so that rounding cannot leave the gap a hair too wide, and the
# least by which a new limit is above the bound.
MARGIN, LEAST_STEP = 0.1, 0.5


def solve_potentials(
    problem: Problem,
    tolerance: float,
    assignment: Sequence[int],
    bound: float,
    branch: bool,
    work: float,
    deadline: float,
) -> tuple[tuple[int, ...], float] | None:
    """A plan and a lower bound of the step time; None where it does not apply.

    That is where processes hold several stages, transfers are hidden, or nothing is paid again for every microbatch.
    Where the graph is too wide, nothing new is found.

    Args:
        tolerance: Relative gap at which it may stop.
        assignment: A legal plan to begin with.
        bound: A lower bound of the step time.
        branch: Whether to go on after what is quick.
        work: What may be done, in pairs and arcs looked at.
        deadline: In seconds of `time.monotonic`.
    """
    if problem.processes != problem.stages or problem.stages < 2 or problem.hidden or problem.repeat <= 0:
        return None
    fill = problem.least_fill
    value = score(problem, assignment).step_s
    search = _Search(problem, tolerance, fill, tuple(assignment), value, bound, work, deadline)
    with contextlib.suppress(TooWideError):  # what was found before it stays
        search.begin()
        if branch:
            search.close()
    return search.best, search.bound


@dataclass
class _Search:
    """The best plan and its value, and the bound of the step time; `fill` is what a load has to be added to.

    `work` is what is left of it.
    """

    problem: Problem
    tolerance: float
    fill: float
    best: tuple[int, ...]
    value: float
    bound: float
    work: float
    deadline: float
    potentials: Potentials | None = None

    def begin(self) -> None:
        """What is quick: a coarse bound, plans along its potentials; then a finer bound, and plans again."""
        start = None
        for fineness in FINENESS:
            if self.open():
                self.potentials = Potentials(self.problem, self.value, self.deadline, start, self.work)
                self.raise_bound(self.potentials, fineness)
                self.look_for_plans(self.potentials)
                start = self.potentials.centre
                self.work -= self.potentials.work

    def close(self) -> None:
        """Branch over the potentials that this began with until nothing is left open."""
        if self.potentials is None:
            return
        branching = Branching(self.potentials, self.offered)
        while self.open():
            limit, value = self.next_limit(), self.value
            if branching.excluded(limit - self.fill):
                self.bound = limit
            elif self.value == value:
                return

    def open(self) -> bool:
        unproven = self.value * (1 - self.tolerance) > self.bound
        return unproven and self.work > 0 and time.monotonic() < self.deadline

    def highest(self) -> float:
        """The limit that would close the gap."""
        return self.value * (1 - (1 - MARGIN) * self.tolerance)

    def next_limit(self) -> float:
        """Halfway to the highest limit, or that one where halfway is next to nothing."""
        middle = (self.bound + self.highest()) / 2
        return middle if middle - self.bound > LEAST_STEP * self.tolerance * self.value else self.highest()

    def raise_bound(self, potentials: Potentials, fineness: float) -> None:
        """Halve what is between the bound and the highest limit; when they are near, try that one at once."""
        high = self.highest()
        while self.open() and not potentials.spent():
            near = high - self.bound < fineness * self.value
            middle = high if near else (self.bound + high) / 2
            if near and high < self.highest():
                return
            if potentials.impossible(middle - self.fill, WORK_OF_LIMIT, ROUNDS_OF_LIMIT):
                self.bound = middle
            elif near:
                return
            else:
                high = middle

    def look_for_plans(self, potentials: Potentials) -> None:
        """Bisect between the bound and the value for the lowest limit that the beam can keep."""
        low = self.bound
        for _ in range(TRIES):
            if not self.open() or potentials.spent():
                return
            middle = (low + self.value) / 2
            plan = plan_along(potentials, middle - self.fill)
            if plan is None or not self.offered(plan):
                low = middle

    def offered(self, plan: tuple[int, ...]) -> bool:
        """Whether a plan is better than the best; then it is the best."""
        result = score(self.problem, plan)
        if result.step_s >= self.value or not result.fits(self.problem):
            return False
        self.best, self.value = plan, result.step_s
        return True
