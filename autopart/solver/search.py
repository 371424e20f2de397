"""The driver: from a problem to the best plan found, a proven bound, and why it stopped.

A search is a row of layers (`LAYERS`), each of which takes the answer so far and returns one that is no worse: a faster
plan, a higher bound, or both. It ends as soon as the gap is within the tolerance. Layers count their work, not seconds,
wherever they can, so that the same input gives the same plan in every process; the time limit is a second stop.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
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
        value: Its step time. Without a plan: that of a plan known elsewhere, which has to be beaten, or infinite.
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


@dataclass(frozen=True)
class Budget:
    """What a layer may spend.

    Attributes:
        tolerance: The gap at which the search ends.
        seconds: The whole time limit; layers derive their limits in work from it.
        deadline: When it ends, on the clock of `time.monotonic`.
    """

    tolerance: float
    seconds: float
    deadline: float

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()


Layer = Callable[[Problem, Answer, Budget], Answer]


def search(
    problem: Problem,
    tolerance: float,
    time_limit_s: float,
    start: Sequence[int] | None = None,
    cap: float = math.inf,
    layers: Mapping[str, Layer] | None = None,
) -> Answer:
    """Find a plan within `tolerance` of the best and prove it, or say what ran out.

    Args:
        start: A first plan.
        cap: Only plans faster than this are looked for; without one, the answer has no assignment.
        layers: A selection of `LAYERS`; all by default.
    """
    answer = _better(problem, Answer(None, cap, 0.0, "proof", "nothing"), start)
    budget = Budget(tolerance, time_limit_s, time.monotonic() + time_limit_s)
    for layer in (LAYERS if layers is None else layers).values():
        if not answer.open(tolerance):
            break
        answer = layer(problem, answer, budget)
    if answer.open(tolerance) and answer.stopped_by == "proof":
        answer = dataclasses.replace(answer, stopped_by="time limit" if budget.left <= 0 else "work limit")
    return _evened(problem, answer, tolerance)


def search_any(
    problems: Sequence[Problem],
    tolerance: float,
    time_limit_s: float,
    layers: Mapping[str, Layer] | None = None,
) -> tuple[int, Answer]:
    """The best plan of several problems, of which any may be solved; the bound holds for all of them.

    The problems are alternative shapes: orders of unequal devices, numbers of stages or of microbatches. First plans of
    all of them come first, for the best of these is the cap under which most of the others close at once.

    Returns:
        Which problem has the plan, and the answer.
    """
    start = time.monotonic()
    layers = LAYERS if layers is None else layers
    cheap = {name: layer for name, layer in layers.items() if name in CHEAP}
    first = [search(problem, tolerance, time_limit_s / 4, layers=cheap) for problem in problems]
    best = min(range(len(problems)), key=lambda i: (first[i].value, first[i].bound))
    answer, bounds, reasons = first[best], [], set()
    for rank, i in enumerate(sorted(range(len(problems)), key=lambda i: (first[i].value, first[i].bound, i))):
        found = first[i]
        if answer.value * (1 - tolerance) > found.bound:
            left = max(0.0, time_limit_s - (time.monotonic() - start)) / (len(problems) - rank)
            known = found.assignment if found.value <= answer.value else None
            found = search(problems[i], tolerance, left, known, answer.value, layers)
            if found.assignment is not None and found.value <= answer.value:
                best, answer = i, found
            reasons.add(found.stopped_by)
        bounds.append(found.bound)
    bound = min(answer.value, *bounds)
    open_ = answer.value * (1 - tolerance) > bound
    stopped: Stop = "proof" if not open_ else "time limit" if "time limit" in reasons else "work limit"
    return best, dataclasses.replace(answer, bound=bound, stopped_by=stopped)


def _bounded(problem: Problem, answer: Answer, budget: Budget) -> Answer:
    """The bounds that need no search."""
    if problem.stages == 1:
        return _single(problem)
    bounds = {"even shares": simple_bound(problem), "the heaviest item's company": containment_bound(problem)}
    method, bound = max(bounds.items(), key=lambda b: b[1])
    return dataclasses.replace(answer, bound=bound, method=method) if bound > answer.bound else answer


def _first_plans(problem: Problem, answer: Answer, budget: Budget) -> Answer:
    """The best plan along a few orders, then along orders that keep its stages."""
    deadline = min(budget.deadline, time.monotonic() + FIRST_SHARE * budget.seconds)
    assignment, _ = first_plan(problem, answer.bound * (1 + budget.tolerance), deadline, answer.assignment)
    return _better(problem, answer, assignment)


def _down_sets(problem: Problem, answer: Answer, budget: Budget) -> Answer:
    """Exact dynamic programming, where the down-sets are few."""
    exact = solve_down_sets(problem, budget.tolerance)
    if exact is None:
        return answer
    assignment, bound = exact
    method = "dynamic programming over down-sets"
    return dataclasses.replace(_better(problem, answer, assignment), bound=bound, method=method)


def _program(problem: Problem, answer: Answer, budget: Budget) -> Answer:
    """Ask for plans better than the best by the tolerance, until it is proven that there are none."""
    work = WORK_PER_SECOND * budget.seconds
    while answer.open(budget.tolerance):
        if budget.left <= 0:
            return dataclasses.replace(answer, stopped_by="time limit")
        none = math.isinf(answer.value)
        # A little above what has to be excluded, so that rounding cannot leave the gap a hair too wide.
        cap = None if none else answer.value * (1 - 0.9 * budget.tolerance)
        scale = ceiling(problem) / 100 if none else answer.value
        result = solve_program(problem, cap, scale, budget.left, work, budget.tolerance / 2)
        work -= result.work
        if result.bound > answer.bound:
            answer = dataclasses.replace(answer, bound=result.bound, method="the integer program")
        improved = _better(problem, answer, result.assignment)
        if not result.complete or (improved is answer and answer.open(budget.tolerance)):
            # Out of time, or solved at the resolution of its integers with nothing that holds in floats.
            return dataclasses.replace(improved, stopped_by="time limit" if budget.left <= 0 else "work limit")
        answer = improved
    return answer


LAYERS: dict[str, Layer] = {
    "bounds": _bounded,
    "first plans": _first_plans,
    "down-sets": _down_sets,
    "integer program": _program,
}
# Those that every alternative of `search_any` goes through before any goes further.
CHEAP = ("bounds", "first plans")


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
