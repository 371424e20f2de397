"""Plans and bounds from the integer program (`integer_program` states it), within limits on time and work."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

from ortools.sat.python import cp_model

from autopart.solver.budget import OutOfTimeError
from autopart.solver.integer_program import Program
from autopart.solver.problem import Problem


@dataclass(frozen=True)
class ProgramResult:
    """What CP-SAT found.

    Attributes:
        assignment: The best assignment of the relaxation, or None.
        bound: No assignment has a lower step time than this; infinite if none exists below the cap and there is no cap.
        complete: Whether the program was solved: `assignment` is its optimum, or there is none below the cap.
        work: Deterministic seconds that it took.
    """

    assignment: tuple[int, ...] | None
    bound: float
    complete: bool
    work: float


def solve_program(
    problem: Problem, cap: float | None, scale: float, time_limit_s: float, work_limit: float, tolerance: float
) -> ProgramResult:
    """Find the best assignment with a step time of at most `cap` (any, if None).

    Args:
        scale: A step time near the answer, in seconds.
        time_limit_s: Wall time, building the program included.
        work_limit: In CP-SAT's deterministic seconds, so that the same input stops at the same place everywhere.
        tolerance: Relative gap at which CP-SAT may stop.
    """
    deadline = time.monotonic() + time_limit_s
    try:
        program = Program(problem, cap, scale, deadline)
    except OutOfTimeError:
        return ProgramResult(None, 0.0, False, 0.0)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = max(work_limit, 1e-3)
    solver.parameters.max_time_in_seconds = max(deadline - time.monotonic(), 0.01)
    solver.parameters.relative_gap_limit = tolerance
    solver.parameters.log_search_progress = False
    solver.parameters.linearization_level = 2
    status = solver.solve(program.model)
    work = solver.response_proto.deterministic_time
    if status == cp_model.INFEASIBLE:
        return ProgramResult(None, math.inf if cap is None else cap, True, work)
    found = status in (cp_model.OPTIMAL, cp_model.FEASIBLE)
    bound = max(0.0, solver.best_objective_bound) * program.unit if found or status == cp_model.UNKNOWN else 0.0
    if cap is not None:
        bound = min(bound, cap)
    assignment = program.assignment(solver) if found else None
    return ProgramResult(assignment, bound, status == cp_model.OPTIMAL, work)
