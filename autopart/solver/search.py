"""The driver: from a problem to the best plan found, a proven bound, and why it stopped.

A search is a row of layers, each of which takes the answer so far and returns one that is no worse: a faster plan, a
higher bound, or both. `FIRST` have a first plan; under the cap that this is, `NARROWINGS` make the problem smaller, and
`DEEP` work on what is left. The search ends as soon as the gap is within the tolerance. Layers count their work, not
seconds, wherever they can, so that the same input gives the same plan in every process; the time limit stops it too.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from autopart.solver.boundaries import solve_boundaries
from autopart.solver.bounds import containment_bound, simple_bound
from autopart.solver.budget import Budget, fair
from autopart.solver.down_sets import solve_down_sets
from autopart.solver.folding import fold
from autopart.solver.magnitudes import ceiling
from autopart.solver.neighbourhoods import improve
from autopart.solver.orders import orders, shuffled
from autopart.solver.prefixes import coarsened, cut_order, even_out
from autopart.solver.problem import Problem
from autopart.solver.program_search import solve_program
from autopart.solver.recombination import recombined
from autopart.solver.score import score
from autopart.solver.windows import passing, unite_fixed

# First plans: orders that are tried, and rounds of the local search without a better plan after which it ends. Large
# problems get fewer, since each costs more and the program that follows finds what is missing.
ORDERS, FEWEST_ORDERS = 8, 4
IDLE_ROUNDS, FEWEST_IDLE_ROUNDS = 6, 2
ITEMS_FOR_ALL = 500
# Larger problems than this get their first plan in so many runs of their order, each as one item.
ITEMS_AS_THEY_ARE, RUNS = 2000, 400
# Share of the time limit that first plans may take.
FIRST_SHARE = 0.4
# And what dynamic programming over down-sets, and the same problem without memory limits, may take.
DOWN_SHARE, FREE_SHARE = 0.5, 0.3
# And what plans from parts of others may take.
RECOMBINED_SHARE = 0.15
# And what potentials may take before other methods are asked.
POTENTIAL_SHARE = 0.06
# Where these shares of the nets may pass a stage, branching says more than what can come before single boundaries, and
# the integer program says nothing.
CROWDED, FULL = 0.9, 0.96
# The time limit for which that may do all the work it is ever allowed.
SECONDS_OF_ALL_DOWN_SETS = 120.0
# CP-SAT's deterministic seconds for each second of the time limit, few enough that work runs out before time does on
# any machine of today: then two runs stop at the same place.
WORK_PER_SECOND, LAST_WORK_PER_SECOND = 0.05, 0.12
# The same for the programs of one boundary, and of adjacent stages.
BOUNDARY_WORK_PER_SECOND, NEIGHBOUR_WORK_PER_SECOND = 0.5, 0.1
# And what potentials may look at.
LOOKED_AT_PER_SECOND = 40_000_000
# The gap that the integer program is asked to close once there are better plans and bounds than its own.
LITTLE = 0.06
ROUNDING = 1e-9
# The method of its bounds.
PROGRAM = "the integer program"

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


Layer = Callable[[Problem, Answer, Budget], Answer]


def search(
    problem: Problem,
    tolerance: float,
    time_limit_s: float,
    start: Sequence[int] | None = None,
    cap: float = math.inf,
    without: Collection[str] = (),
    enough: float = math.inf,
    deadline: float = math.inf,
) -> Answer:
    """Find a plan within `tolerance` of the best and prove it, or say what ran out.

    Args:
        time_limit_s: Wall time; limits in work follow from it.
        start: A first plan.
        cap: Only plans faster than this are looked for; without one, the answer has no assignment.
        without: Layers and narrowings to leave out, by name.
        enough: A bound at which the search ends with the plan it has: better ones are known elsewhere.
        deadline: In seconds of `time.monotonic`, where the clock may end the search before the time limit does. One
            first plan is tried in any case.
    """
    answer = _better(problem, Answer(None, cap, 0.0, "proof", "nothing"), start)
    budget = Budget.of(tolerance, time_limit_s, deadline)
    answer = _through(FIRST, problem, answer, budget, without)
    small, united, narrowed_at = problem, list(range(problem.items)), math.inf
    for name, layer in DEEP.items():
        known_elsewhere = answer.assignment is not None and answer.bound >= enough
        if not answer.open(tolerance) or known_elsewhere or budget.left <= 0:
            break
        if name in without:
            continue
        if answer.value < narrowed_at:
            narrowed_at = answer.value
            small, united, answer = _narrowed(small, united, answer, without)
        if layer is _first_plans and small.items == problem.items:
            continue  # they would be the same again
        answer = layer(small, answer, budget)
    if answer.open(tolerance):
        answer = dataclasses.replace(answer, stopped_by="time limit" if budget.left <= 0 else "work limit")
    if budget.left > 0:
        answer = _evened(small, answer, tolerance)
    if answer.assignment is None:
        return answer
    return dataclasses.replace(answer, assignment=tuple(answer.assignment[item] for item in united))


def search_any(
    problems: Sequence[Problem],
    tolerance: float,
    time_limit_s: float,
    start: tuple[int, Sequence[int]] | None = None,
    without: Collection[str] = (),
    enough: float = math.inf,
    deadline: float = math.inf,
) -> tuple[int, Answer]:
    """The best plan of several problems, of which any may be solved; the bound holds for all of them.

    The problems are alternative shapes: orders of unequal devices, numbers of stages or of microbatches. First plans of
    all of them come first, for the best of these is the cap under which most of the others close at once.

    Args:
        start: A first plan, and which problem it is one of.
        enough: As in `search`, where there is one problem.
        deadline: As in `search`; all problems share what is left until then.

    Returns:
        Which problem has the plan, and the answer.
    """
    budget = Budget.of(tolerance, time_limit_s, deadline)
    starts = {} if start is None else dict([start])
    if len(problems) == 1:
        known = starts.get(0)
        return 0, search(problems[0], tolerance, time_limit_s, known, math.inf, without, enough, deadline)
    first = _first_of_each(problems, starts, budget, without)
    order = sorted(range(len(problems)), key=lambda i: (first[i].value, first[i].bound, i))
    best, answer = order[0], first[order[0]]
    bounds, reasons, seconds = [], set(), time_limit_s
    for rank, i in enumerate(order):
        found, rest = first[i], len(problems) - rank
        if answer.value * (1 - tolerance) > found.bound:
            known = found.assignment if found.value <= answer.value else None
            own, until = seconds / rest, fair(budget.deadline, rest)
            others = {"first plans", *without}
            found = search(problems[i], tolerance, own, known, answer.value, others, deadline=until)
            if found.assignment is not None and found.value <= answer.value:
                best, answer = i, found
            reasons.add(found.stopped_by)
            if found.stopped_by != "proof":  # what closes at once leaves its share to the others
                seconds -= own
        bounds.append(found.bound)
    bound = min(answer.value, *bounds)
    unproven = answer.value * (1 - tolerance) > bound
    stopped: Stop = "proof" if not unproven else "time limit" if "time limit" in reasons else "work limit"
    return best, dataclasses.replace(answer, bound=bound, stopped_by=stopped)


def _first_of_each(
    problems: Sequence[Problem], starts: Mapping[int, Sequence[int]], budget: Budget, without: Collection[str]
) -> list[Answer]:
    """Bounds and first plans; no more plans when their share of the time is over and there is one."""
    shallow, end = {*DEEP, *NARROWINGS, *without}, budget.until(FIRST_SHARE)
    found: list[Answer] = []
    for i, problem in enumerate(problems):
        late = time.monotonic() > end and any(answer.assignment is not None for answer in found)
        left_out = {"first plans", *shallow} if late else shallow
        own = fair(end, len(problems) - i)
        found.append(search(problem, budget.tolerance, budget.seconds, starts.get(i), without=left_out, deadline=own))
    return found


def _through(
    layers: Mapping[str, Layer], problem: Problem, answer: Answer, budget: Budget, without: Collection[str]
) -> Answer:
    """The answer after layers, as far as it stays open."""
    for name, layer in layers.items():
        if answer.open(budget.tolerance) and name not in without:
            answer = layer(problem, answer, budget)
    return answer


def _narrowed(
    problem: Problem, united: Sequence[int], answer: Answer, without: Collection[str]
) -> tuple[Problem, list[int], Answer]:
    """The problem after all narrowings under the answer's value, what each original item is united to, and the answer.

    Folding may move items of the known plan, so that is valued anew.
    """
    for name, narrow in NARROWINGS.items():
        if name not in without:
            problem, new, kept = narrow(problem, answer.value)
            united = [new[item] for item in united]
            if answer.assignment is not None:
                assignment = tuple(answer.assignment[item] for item in kept)
                answer = dataclasses.replace(answer, assignment=assignment, value=score(problem, assignment).step_s)
    return problem, list(united), answer


def _even_shares(problem: Problem, answer: Answer, budget: Budget) -> Answer:
    """The bounds of shares and of the largest item."""
    if problem.stages == 1:
        return _single(problem)
    return _raised(answer, simple_bound(problem), "an even share of the work")


def _company(problem: Problem, answer: Answer, budget: Budget) -> Answer:
    """What the heaviest items pull along."""
    return _raised(answer, containment_bound(problem), "what must share a stage with the heaviest operator")


def _raised(answer: Answer, bound: float, method: str) -> Answer:
    return dataclasses.replace(answer, bound=bound, method=method) if bound > answer.bound else answer


def _first_plans(problem: Problem, answer: Answer, budget: Budget) -> Answer:
    """The best plan along a few orders, then along orders that keep its stages; of a large problem, of its runs."""
    deadline = budget.until(FIRST_SHARE)
    small, united = coarsened(problem, RUNS) if problem.items > ITEMS_AS_THEY_ARE else (problem, range(problem.items))
    start = answer.assignment if small is problem else None
    assignment, _ = first_plan(small, answer.bound * (1 + budget.tolerance), deadline, start)
    return _better(problem, answer, None if assignment is None else [assignment[item] for item in united])


def _down_sets(problem: Problem, answer: Answer, budget: Budget) -> Answer:
    """Exact dynamic programming, where the down-sets are few."""
    # Plans as good as the best known are let through, so that rounding cannot leave the gap a hair too wide.
    cap, effort = answer.value * (1 + ROUNDING), min(1.0, budget.seconds / SECONDS_OF_ALL_DOWN_SETS)
    exact = solve_down_sets(problem, budget.tolerance, cap, effort, budget.until(DOWN_SHARE))
    if exact is None:
        return answer
    assignment, bound = exact
    return _raised(_better(problem, answer, assignment), bound, "dynamic programming over all legal cuts")


def _without_limits(problem: Problem, answer: Answer, budget: Budget) -> Answer:
    """Where blocks may be computed again: a problem without limits need not, and its bound is one with them, too.

    Often its plan fits as it is, or with few blocks computed again.
    """
    if problem.blocks is None:
        return answer
    free = dataclasses.replace(problem, blocks=None, limits=np.full(problem.processes, np.inf))
    limit, until = FREE_SHARE * budget.seconds, budget.deadline
    found = search(free, budget.tolerance / 2, limit, answer.assignment, deadline=until)
    return _raised(_better(problem, answer, found.assignment), found.bound, found.method)


def _recombination(problem: Problem, answer: Answer, budget: Budget) -> Answer:
    """Plans from parts of others; not where blocks may be computed again (`_without_limits` does it there)."""
    if problem.blocks is not None:
        return answer
    enough = answer.bound / (1 - budget.tolerance)
    return _better(problem, answer, recombined(problem, answer.assignment, enough, budget.until(RECOMBINED_SHARE)))


def _potentials(problem: Problem, answer: Answer, budget: Budget) -> Answer:
    """Wide graphs, all boundaries at once, as far as that is quick; not where branching comes next, which begins so."""
    if _crowded(problem, answer, FULL):
        return answer
    return _by_potentials(problem, answer, budget, False, POTENTIAL_SHARE)


def _branching_first(problem: Problem, answer: Answer, budget: Budget) -> Answer:
    """The same until nothing is left open, where single boundaries say less."""
    return _branching(problem, answer, budget) if _crowded(problem, answer, CROWDED) else answer


def _branching(problem: Problem, answer: Answer, budget: Budget) -> Answer:
    """The same until nothing is left open."""
    return _by_potentials(problem, answer, budget, True, 1.0)


def _by_potentials(problem: Problem, answer: Answer, budget: Budget, branch: bool, share: float) -> Answer:
    """Not where blocks may be computed again (`_without_limits` does it there)."""
    if answer.assignment is None or problem.blocks is not None:
        return answer
    # Its kernels are compiled when they are first called, and loaded with a compiler: only where they are needed.
    from autopart.solver.potential_search import solve_potentials

    work, until = share * LOOKED_AT_PER_SECOND * budget.seconds, budget.until(min(1.0, 2 * share))
    found = solve_potentials(problem, budget.tolerance, answer.assignment, answer.bound, branch, work, until)
    if found is None:
        return answer
    assignment, bound = found
    return _raised(_better(problem, answer, assignment), bound, "what each stage can hold at most")


def _crowded(problem: Problem, answer: Answer, share: float) -> bool:
    """Not where there is no cap yet: then any net may pass, which says nothing."""
    return math.isfinite(answer.value) and passing(problem, answer.value) > share


def _boundaries(problem: Problem, answer: Answer, budget: Budget) -> Answer:
    """Wide graphs, one boundary at a time; not where blocks may be computed again (`_without_limits` does it there)."""
    if problem.blocks is not None:
        return answer
    work = BOUNDARY_WORK_PER_SECOND * budget.seconds
    found = solve_boundaries(problem, budget.tolerance, answer.assignment, answer.bound, work, budget.deadline)
    if found is None:
        return answer
    assignment, bound = found
    return _raised(_better(problem, answer, assignment), bound, "how much can come before each cut")


def _neighbourhoods(problem: Problem, answer: Answer, budget: Budget) -> Answer:
    """Adjacent stages assigned anew, where nothing may be computed again."""
    if answer.assignment is None or problem.blocks is not None:
        return answer
    work = NEIGHBOUR_WORK_PER_SECOND * budget.seconds
    return _better(problem, answer, improve(problem, answer.assignment, work, budget.deadline))


def _last_of_gap(problem: Problem, answer: Answer, budget: Budget) -> Answer:
    """The integer program again, under a better cap: what is little it often closes at once, if the bound is its."""
    little = answer.value * (1 - LITTLE) <= answer.bound
    if not little or answer.method != PROGRAM:
        return answer
    return _asked(problem, answer, budget, LAST_WORK_PER_SECOND * budget.seconds)


def _program(problem: Problem, answer: Answer, budget: Budget) -> Answer:
    """The integer program, at once where it says something."""
    return answer if _crowded(problem, answer, FULL) else _program_at_last(problem, answer, budget)


def _program_at_last(problem: Problem, answer: Answer, budget: Budget) -> Answer:
    """The integer program, whatever it says: where nothing else closed the gap."""
    return _asked(problem, answer, budget, WORK_PER_SECOND * budget.seconds)


def _asked(problem: Problem, answer: Answer, budget: Budget, work: float) -> Answer:
    """Ask for plans better than the best by the tolerance, until it is proven that there are none."""
    while answer.open(budget.tolerance) and budget.left > 0:
        none = math.isinf(answer.value)
        # A little above what has to be excluded, so that rounding cannot leave the gap a hair too wide.
        cap = None if none else answer.value * (1 - 0.9 * budget.tolerance)
        scale = ceiling(problem) / 100 if none else answer.value
        result = solve_program(problem, cap, scale, budget.left, work, budget.tolerance / 2)
        work -= result.work
        answer = _raised(answer, result.bound, PROGRAM)
        improved = _better(problem, answer, result.assignment)
        if not result.complete or (improved is answer and answer.open(budget.tolerance)):
            # Out of time, or solved at the resolution of its integers with nothing that holds in floats.
            return improved
        answer = improved
    return answer


# What every search begins with, on the problem as it is; and what follows on the problem that narrowing leaves.
FIRST: dict[str, Layer] = {
    "even shares": _even_shares,
    "first plans": _first_plans,
}
NARROWINGS: dict[str, Callable[[Problem, float], tuple[Problem, list[int], list[int]]]] = {
    "fixed stages": unite_fixed,
    "folding": lambda problem, cap: fold(problem),
}
DEEP: dict[str, Layer] = {
    "more plans": _first_plans,
    "company": _company,
    "without limits": _without_limits,
    "down-sets": _down_sets,
    "integer program": _program,
    "potentials": _potentials,
    "last of the gap": _last_of_gap,
    "branching first": _branching_first,
    "boundaries": _boundaries,
    "recombination": _recombination,
    "neighbourhoods": _neighbourhoods,
    "branching": _branching,
    "integer program at last": _program_at_last,
}


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
        return Answer(None, float("inf"), float("inf"), "proof", "a single stage")
    return Answer(assignment, result.step_s, result.step_s, "proof", "a single stage")


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
