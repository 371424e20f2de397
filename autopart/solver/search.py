"""The driver: from a problem to the best plan found, a proven bound, and why it stopped."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autopart.solver.bounds import simple_bound
from autopart.solver.integer_program import solve_program
from autopart.solver.orders import orders
from autopart.solver.prefixes import cut_order
from autopart.solver.problem import Problem
from autopart.solver.score import score

# Orders that the prefix heuristic tries; more have not improved a plan of the zoo.
ORDERS = 12
# CP-SAT's deterministic seconds: what makes two runs stop at the same place.
WORK_LIMIT = 10.0

Stop = Literal["proof", "time limit", "work limit"]


@dataclass(frozen=True)
class Answer:
    """What a search found.

    Attributes:
        assignment: Item -> stage, or None when no plan was found.
        value: Its step time (infinite without a plan).
        bound: No plan is faster than this; infinite when it is proven that none fits.
        stopped_by: "proof" (the gap is within the tolerance), "time limit" or "work limit".
        method: What proved the bound, for people.
    """

    assignment: tuple[int, ...] | None
    value: float
    bound: float
    stopped_by: Stop
    method: str

    @property
    def gap(self) -> float:
        """(value - bound) / value."""
        if self.assignment is None:
            return float("inf")
        return max(0.0, (self.value - self.bound) / self.value) if self.value > 0 else 0.0


def search(problem: Problem, tolerance: float, time_limit_s: float, start: Sequence[int] | None = None) -> Answer:
    """Find a plan within `tolerance` of the best and prove it, or say what ran out; `start` is a first plan."""
    deadline = time.monotonic() + time_limit_s
    if problem.stages == 1:
        return _single(problem)
    bound, method = simple_bound(problem), "even shares"
    best, value = first_plan(problem, bound * (1 + tolerance), deadline, start)
    work = WORK_LIMIT
    stopped: Stop = "proof"
    while value * (1 - tolerance) > bound:
        left = deadline - time.monotonic()
        if left <= 0:
            stopped = "time limit"
            break
        # A little above what has to be excluded, so that rounding cannot leave the gap a hair too wide.
        cap = value * (1 - 0.9 * tolerance) if best is not None else None
        result = solve_program(problem, cap, value if best is not None else bound or 1.0, left, work, tolerance / 2)
        if result.bound > bound:
            bound, method = result.bound, "the integer program"
        found = score(problem, result.assignment) if result.assignment is not None else None
        if found is not None and found.fits(problem) and found.step_s < value:
            best, value = result.assignment, found.step_s
        elif result.complete:
            # Solved, and what it found does not hold in floats: no better plan at this resolution.
            break
        if not result.complete:
            stopped = "time limit" if time.monotonic() >= deadline else "work limit"
            break
    return Answer(best, value, bound, stopped if value * (1 - tolerance) > bound else "proof", method)


def _single(problem: Problem) -> Answer:
    assignment = (0,) * problem.items
    result = score(problem, assignment)
    if not result.fits(problem):
        return Answer(None, float("inf"), float("inf"), "proof", "one stage")
    return Answer(assignment, result.step_s, result.step_s, "proof", "one stage")


def first_plan(
    problem: Problem, enough: float, deadline: float, start: Sequence[int] | None = None
) -> tuple[tuple[int, ...] | None, float]:
    """The best plan along the first orders, or `start` if none is better."""
    best: tuple[int, ...] | None = None
    value = float("inf")
    if start is not None:
        given = score(problem, start)
        if given.fits(problem):
            best, value = tuple(start), given.step_s
    for order in itertools.islice(orders(problem), ORDERS):
        for assignment in cut_order(problem, order):
            result = score(problem, assignment)
            if result.step_s < value and result.fits(problem):
                best, value = tuple(assignment), result.step_s
        if value <= enough or time.monotonic() > deadline:
            break
    return best, value
