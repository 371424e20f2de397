"""The driver: from a problem to the best plan found, a proven bound, and why it stopped."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from autopart.solver.bounds import containment_bound, simple_bound
from autopart.solver.down_sets import solve_down_sets
from autopart.solver.integer_program import ceiling, solve_program
from autopart.solver.orders import orders, shuffled
from autopart.solver.prefixes import cut_order, even_out
from autopart.solver.problem import Problem
from autopart.solver.score import score

# First plans: orders that are tried, and rounds of the local search without a better plan after which it ends. Large
# problems get fewer, since each costs more and the program that follows finds what is missing.
ORDERS, FEWEST_ORDERS = 8, 4
IDLE_ROUNDS, FEWEST_IDLE_ROUNDS = 6, 2
ITEMS_FOR_ALL = 500
# Share of the time limit that first plans may take.
FIRST_SHARE = 0.4
# CP-SAT's deterministic seconds for each second of the time limit, few enough that work runs out before time does on
# any machine of today: then two runs stop at the same place.
WORK_PER_SECOND = 0.05

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

    def open(self, tolerance: float) -> bool:
        """Whether a plan better by more than the tolerance may exist."""
        return self.value * (1 - tolerance) > self.bound


def search(problem: Problem, tolerance: float, time_limit_s: float, start: Sequence[int] | None = None) -> Answer:
    """Find a plan within `tolerance` of the best and prove it, or say what ran out; `start` is a first plan."""
    deadline = time.monotonic() + time_limit_s
    if problem.stages == 1:
        return _single(problem)
    bounds = {"even shares": simple_bound(problem), "the heaviest item's company": containment_bound(problem)}
    method, bound = max(bounds.items(), key=lambda b: b[1])
    first_deadline = time.monotonic() + FIRST_SHARE * time_limit_s
    best, value = first_plan(problem, bound * (1 + tolerance), first_deadline, start)
    answer = Answer(best, value, bound, "proof", method)
    if answer.open(tolerance):
        answer = _by_down_sets(problem, answer, tolerance)
    if answer.open(tolerance):
        answer = _by_program(problem, answer, tolerance, deadline, WORK_PER_SECOND * time_limit_s)
    return _evened(problem, answer, tolerance)


def _evened(problem: Problem, answer: Answer, tolerance: float) -> Answer:
    """A more even plan where that costs nothing that the proof would notice."""
    if answer.assignment is None or problem.processes != problem.stages:
        return answer
    assignment = even_out(problem, answer.assignment)
    result = score(problem, assignment)
    allowed = max(answer.value, answer.bound / (1 - tolerance))  # the gap stays closed
    if not result.fits(problem) or result.step_s > min(allowed, answer.value * (1 + tolerance)):
        return answer
    return dataclasses.replace(answer, assignment=tuple(assignment), value=result.step_s)


def _by_down_sets(problem: Problem, answer: Answer, tolerance: float) -> Answer:
    exact = solve_down_sets(problem, tolerance)
    if exact is None:
        return answer
    assignment, bound = exact
    return dataclasses.replace(
        _better(problem, answer, assignment), bound=bound, method="dynamic programming over down-sets"
    )


def _by_program(problem: Problem, answer: Answer, tolerance: float, deadline: float, work: float) -> Answer:
    """Ask for plans better than the best by the tolerance, until it is proven that there are none."""
    while answer.open(tolerance):
        left = deadline - time.monotonic()
        if left <= 0:
            return dataclasses.replace(answer, stopped_by="time limit")
        none = answer.assignment is None
        # A little above what has to be excluded, so that rounding cannot leave the gap a hair too wide.
        cap = None if none else answer.value * (1 - 0.9 * tolerance)
        scale = ceiling(problem) / 100 if none else answer.value
        result = solve_program(problem, cap, scale, left, work, tolerance / 2)
        work -= result.work
        if result.bound > answer.bound:
            answer = dataclasses.replace(answer, bound=result.bound, method="the integer program")
        improved = _better(problem, answer, result.assignment)
        if not result.complete or (improved is answer and answer.open(tolerance)):
            # Out of time, or solved at the resolution of its integers with nothing that holds in floats.
            late = time.monotonic() >= deadline
            return dataclasses.replace(improved, stopped_by="time limit" if late else "work limit")
        answer = improved
    return answer


def _better(problem: Problem, answer: Answer, assignment: Sequence[int] | None) -> Answer:
    """The answer with this assignment, if it is valid and faster; else the answer itself."""
    if assignment is None:
        return answer
    result = score(problem, assignment)
    if result.step_s >= answer.value or not result.fits(problem):
        return answer
    return dataclasses.replace(answer, assignment=tuple(assignment), value=result.step_s)


def _single(problem: Problem) -> Answer:
    assignment = (0,) * problem.items
    result = score(problem, assignment)
    if not result.fits(problem):
        return Answer(None, float("inf"), float("inf"), "proof", "one stage")
    return Answer(assignment, result.step_s, result.step_s, "proof", "one stage")


def first_plan(
    problem: Problem, enough: float, deadline: float, start: Sequence[int] | None = None
) -> tuple[tuple[int, ...] | None, float]:
    """The best plan along a few orders, then along orders that keep its stages; stops at a value of `enough`."""
    answer = _better(problem, Answer(None, math.inf, 0.0, "proof", ""), start)

    def tried(order: list[int], answer: Answer) -> Answer:
        for assignment in cut_order(problem, order):
            answer = _better(problem, answer, assignment)
        return answer

    size = problem.items / ITEMS_FOR_ALL
    for order in itertools.islice(orders(problem), max(FEWEST_ORDERS, min(ORDERS, int(ORDERS / size)))):
        answer = tried(order, answer)
        if answer.value <= enough or time.monotonic() > deadline:
            return answer.assignment, answer.value
    generator = random.Random(0)
    idle, most = 0, max(FEWEST_IDLE_ROUNDS, min(IDLE_ROUNDS, int(IDLE_ROUNDS / size)))
    while answer.assignment is not None and idle < most:
        if answer.value <= enough or time.monotonic() > deadline:
            break
        improved = tried(shuffled(problem, answer.assignment, generator), answer)
        idle = idle + 1 if improved is answer else 0
        answer = improved
    return answer.assignment, answer.value
