"""Large-neighbourhood search: the items of adjacent stages are assigned anew, exactly, with all others where they are.

One window is a `Segment` whose outer boundaries stay. It minimises the step time; and below that, so that slack can
wander towards the slowest stage, the largest load in the window. Every accepted change makes the step time, or with the
same step time the sorted loads, smaller; the search ends when no window has one, or its work is used up.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np
from ortools.sat.python import cp_model

from autopart.solver.problem import Problem
from autopart.solver.score import Score, score
from autopart.solver.segment import Boundary, Segment, fixed, quiet_solver
from autopart.solver.units import RESOLUTION, Units, in_units

# CP-SAT's deterministic seconds for one window.
WORK_OF_WINDOW = 1.0
# Stages in a window; all windows of the first size are exhausted before one of the second is tried.
WIDTHS = (2, 3)
# How much more a unit of step time counts than a unit of load within the window.
PRIORITY = 1000
# A change counts if it gains this share of the step time.
LEAST_GAIN = 1e-6


def improve(problem: Problem, assignment: Sequence[int], work: float, deadline: float = math.inf) -> tuple[int, ...]:
    """A plan at least as good, with no better one in any window unless the work ran out.

    Args:
        assignment: A legal plan that fits (one that does not fit comes back as it is).
        work: In CP-SAT's deterministic seconds.
        deadline: In seconds of `time.monotonic`; looked at between windows.
    """
    best = tuple(int(s) for s in assignment)
    value = score(problem, best)
    if problem.stages < 2 or not value.fits(problem):
        return best
    units = in_units(problem, max(value.step_s, 1e-300), up=True)
    widths = [width for width in WIDTHS if width <= problem.stages]
    settled: set[tuple[int, int]] = set()
    while work > 0 and time.monotonic() < deadline:
        open_windows = [
            (s, width) for width in widths for s in range(problem.stages - width + 1) if (s, width) not in settled
        ]
        if not open_windows:
            break
        slowest = value.loads_s[list(problem.process)]
        first, width = min(open_windows, key=lambda w: (w[1], -max(slowest[w[0] : w[0] + w[1]]), w))
        settled.add((first, width))
        found, spent = _window(units, best, value, first, width, min(work, WORK_OF_WINDOW), deadline)
        work -= max(spent, 1e-4)
        if found is None:
            continue
        result = score(problem, found)
        if result.fits(problem) and _better(result, value):
            best, value = found, result
            changed = range(first, first + width)
            settled = {w for w in settled if w == (first, width) or not set(changed) & set(range(w[0], w[0] + w[1]))}
    return best


def _better(new: Score, old: Score) -> bool:
    least = LEAST_GAIN * old.step_s
    if abs(new.step_s - old.step_s) > least:
        return new.step_s < old.step_s
    rows = zip(sorted(new.loads_s, reverse=True), sorted(old.loads_s, reverse=True), strict=True)
    differences = [a - b for a, b in rows if abs(a - b) > least]
    return new.step_s <= old.step_s and bool(differences) and differences[0] < 0


def _window(
    units: Units, assignment: tuple[int, ...], value: Score, first: int, width: int, work: float, deadline: float
) -> tuple[tuple[int, ...] | None, float]:
    """The best assignment of the items in these stages, if one better than the present is found; the work it took."""
    problem, stage = units.problem, np.array(assignment)
    inside = [stage < j for j in range(problem.stages + 1)]
    middle = Boundary(inside[first], inside[first + width])
    segment = Segment(units, first, [fixed(inside[first]), *[middle] * (width - 1), fixed(inside[first + width])])
    present = Segment(units, 0, [fixed(flags) for flags in inside])
    window, model = range(first, first + width), segment.model
    slowest, largest = (model.new_int_var(0, 100 * RESOLUTION, name) for name in ("slowest", "largest"))
    for own in problem.stages_of_process:
        parts = [(segment if s in window else present) for s in own]
        for loads in zip(*(part.loads(s) for part, s in zip(parts, own, strict=True)), strict=True):
            model.add(slowest >= sum(loads))
            if segment in parts:
                model.add(largest >= sum(loads))
        if units.limits[own[0]] >= 0 and segment in parts:
            model.add(sum(part.memory(s) for part, s in zip(parts, own, strict=True)) <= units.limits[own[0]])
    for j in range(first + 1, first + width):
        row, after = segment.y[j - first], segment.y[j - first + 1]
        if not problem.idle:
            model.add(sum(row) < sum(after))
        for y, known in zip(row, inside[j], strict=True):
            if isinstance(y, cp_model.IntVar):
                model.add_hint(y, bool(known))
    if not problem.idle:
        model.add(sum(segment.y[1]) > int(inside[first].sum()))
    model.minimize(PRIORITY * (slowest + sum(segment.fill(s) for s in window)) + largest)
    solver = quiet_solver(work, deadline)
    solver.parameters.relative_gap_limit = LEAST_GAIN
    status = solver.solve(model)
    spent = solver.response_proto.deterministic_time
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return None, spent
    for j in range(first + 1, first + width):
        inside[j] = segment.inside(solver, j)
    return tuple(int(problem.stages - n) for n in np.sum(inside[1:], axis=0)), spent
