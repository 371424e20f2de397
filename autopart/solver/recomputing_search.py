"""Search where blocks may be computed again: bounds without memory limits, chains, and the integer program.

Without its memory limits a problem needs to compute nothing again, and what is proven of it bounds the problem with
them. Often its plan fits as it is, or with few blocks computed again; then the search ends there.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Sequence

import numpy as np

from autopart.solver.down_sets import down_sets
from autopart.solver.integer_program import ceiling, solve_program
from autopart.solver.problem import Problem
from autopart.solver.recomputed_stages import best_recomputing
from autopart.solver.score import score
from autopart.solver.search import WORK_PER_SECOND, Answer, first_plan, search

# All pairs of so many down-sets are tabulated for every stage.
MOST_DOWN_SETS = 400
# Of the time limit, what the problem without limits, and first plans, may take.
SIDE_SHARE = 0.3


def search_recomputing(
    problem: Problem, tolerance: float, time_limit_s: float, start: Sequence[int] | None = None
) -> Answer:
    """The counterpart of `search.search` for problems with blocks."""
    begin = time.monotonic()
    deadline = begin + time_limit_s
    unlimited = dataclasses.replace(problem, blocks=None, limits=np.full(problem.processes, np.inf))
    answer = search(unlimited, tolerance / 2, SIDE_SHARE * time_limit_s, start)
    bound, free = answer.bound, answer.assignment
    answer = _better(problem, dataclasses.replace(answer, assignment=None, value=math.inf), start)
    answer = _better(problem, answer, free)
    if answer.open(tolerance):
        side = time.monotonic() + SIDE_SHARE * time_limit_s
        found, _ = first_plan(problem, bound * (1 + tolerance), side, answer.assignment)
        answer = _better(problem, answer, found)
    if answer.open(tolerance):
        answer = _by_chains(problem, answer, tolerance)
    while answer.open(tolerance):
        left = deadline - time.monotonic()
        if left <= 0:
            return dataclasses.replace(answer, stopped_by="time limit")
        cap = None if math.isinf(answer.value) else answer.value * (1 - 0.9 * tolerance)
        scale = ceiling(problem) / 100 if cap is None else answer.value
        result = solve_program(problem, cap, scale, left, WORK_PER_SECOND * time_limit_s, tolerance / 2)
        if result.bound > answer.bound:
            answer = dataclasses.replace(answer, bound=result.bound, method="the integer program")
        improved = _better(problem, answer, result.assignment)
        if not result.complete or (improved is answer and answer.open(tolerance)):
            return dataclasses.replace(improved, stopped_by="work limit")
        answer = improved
    return dataclasses.replace(answer, stopped_by="proof")


def _by_chains(problem: Problem, answer: Answer, tolerance: float) -> Answer:
    """Exact where the down-sets are few, and every process has one stage."""
    if problem.processes != problem.stages:
        return answer
    inside = down_sets(problem, MOST_DOWN_SETS)
    if inside is None:
        return answer
    assignment, bound = best_recomputing(problem, inside, tolerance)
    answer = _better(problem, answer, assignment)
    if bound <= answer.bound:
        return answer
    method = "dynamic programming over down-sets, with what is computed again"
    return dataclasses.replace(answer, bound=min(bound, answer.value), method=method)


def _better(problem: Problem, answer: Answer, assignment: Sequence[int] | None) -> Answer:
    if assignment is None:
        return answer
    result = score(problem, assignment)
    if result.step_s >= answer.value or not result.fits(problem):
        return answer
    return dataclasses.replace(answer, assignment=tuple(assignment), value=result.step_s)
