"""Plans and proofs for wide graphs, one boundary at a time: the proofs are `frontiers`, the plans are built alike.

A plan for a limit on the load is built stage by stage: behind the fixed boundary I the next one, J, is the one that
has done most as the stage behind sees it, a(J), with the exact load of J - I within the limit. Where that equals the
proof's number at every boundary, plan and bound meet. The last stage takes what is left; by how much it is overrun says
where to look next.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from autopart.solver.bounds import simple_bound
from autopart.solver.filling import least_filling
from autopart.solver.frontiers import Frontiers
from autopart.solver.neighbourhoods import improve
from autopart.solver.problem import Problem, membership
from autopart.solver.score import score
from autopart.solver.segment import Boundary, Segment, fixed, quiet_solver
from autopart.solver.units import RESOLUTION, in_units

# CP-SAT's deterministic seconds for one stage of a plan, and its accuracy as a share of the load.
WORK_OF_STAGE, ACCURACY = 0.2, 1e-4
# A load of less than this share of the filling does not matter.
FEWEST_SECONDS = 1e-6
# The first plan is sought at this multiple of the lower bound, and so many times, until its load is this multiple of
# one that failed.
START, ATTEMPTS, NEAR = 1.06, 12, 1.01
# The proof ends when it cannot gain more than this share of the tolerance, or has taken this share of the work.
FINE, PROOF_SHARE = 0.1, 0.4
# CP-SAT's deterministic seconds for the neighbourhoods of one plan.
WORK_OF_POLISH = 20.0
# How far above the proven bound plans are sought, as shares of it.
STEPS = (1e-4, 3e-4, 6e-4, 1e-3, 2e-3, 4e-3, 8e-3, 1.5e-2, 3e-2, 6e-2, 0.12, 0.25, 0.5)
# Where memory binds, its weight beside the load's in what a stage takes, tried one after the other.
WEIGHTS = (0.0, 0.1, 0.3, 1.0)


def solve_boundaries(
    problem: Problem,
    tolerance: float,
    assignment: Sequence[int] | None,
    bound: float,
    work_limit: float,
    deadline: float,
) -> tuple[tuple[int, ...] | None, float] | None:
    """A plan and a lower bound of the step time; None if processes hold several stages, or load is not what matters.

    Args:
        tolerance: Relative gap at which it may stop.
        assignment: A legal plan to begin with.
        bound: A lower bound of the step time.
        work_limit: In CP-SAT's deterministic seconds.
        deadline: In seconds of `time.monotonic`; looked at between programs.
    """
    if problem.processes != problem.stages or problem.stages < 2:
        return None
    fill = problem.least_fill
    load = simple_bound(problem) - fill
    if load <= FEWEST_SECONDS * fill:
        return None
    known = max(load, bound - fill)
    search = _Search(problem, tolerance, fill, fill, known, work_limit, deadline, Frontiers(problem, load, deadline))
    search.offer(assignment)
    search.first_plan()
    search.price_filling()
    search.prove()
    search.close()
    if search.best is not None and search.frontiers.units.torn:
        search.prove(exact=True)
    return search.best, min(search.value, search.fill + search.impossible)


@dataclass
class _Search:
    """The state of one search: its best plan, the highest limit on the load known to be impossible, what it may use.

    Attributes:
        least: What the items add to the filling of the pipeline at least.
        fill: The filling of a plan that is better than the best costs no less.
    """

    problem: Problem
    tolerance: float
    least: float
    fill: float
    impossible: float
    work: float
    deadline: float
    frontiers: Frontiers
    best: tuple[int, ...] | None = None
    value: float = math.inf
    load: float = math.inf

    def open(self) -> bool:
        """Whether there is something to do, and something left to do it with."""
        unproven = self.value * (1 - self.tolerance) > self.fill + self.impossible
        return unproven and self.work > 0 and time.monotonic() < self.deadline

    def offer(self, assignment: Sequence[int] | None) -> float:
        """Take the plan if it is the best; its largest load."""
        if assignment is None:
            return math.inf
        result = score(self.problem, assignment)
        if result.fits(self.problem) and result.step_s < self.value:
            self.best, self.value = tuple(int(s) for s in assignment), result.step_s
            self.load = float(result.loads_s.max())
        return float(result.loads_s.max())

    def first_plan(self) -> None:
        """Raise the limit by each stage's share of what the last stage has too much, then halve what is between."""
        failed, limit = self.impossible, START * self.impossible
        for _ in range(ATTEMPTS):
            if not self.open() or self.load <= NEAR * failed:
                break
            load = self.offer(self.built(limit))
            if load > limit:
                failed = max(failed, limit)
                limit += max((min(load, 2 * limit) - limit) / self.problem.stages, limit / 100)
            if self.load < math.inf:
                limit = (failed + self.load) / 2

    def prove(self, exact: bool = False) -> None:
        """Raise the limit that is proven to be impossible, until it nearly is one that is not.

        The exact proofs are slow: they begin with the limit that would be enough.
        """
        frontiers = self.frontiers
        frontiers.exact = exact
        frontiers.allowed = frontiers.spent + PROOF_SHARE * self.work
        second, stages = frontiers.units.second, self.problem.stages
        fine, most = max(1, round(FINE * self.tolerance * RESOLUTION)), frontiers.units.most()
        impossible = math.floor(self.impossible / second)
        possible, step, missed = math.inf, max(fine, impossible // 64), 0
        limit = impossible if self.load == math.inf else max(impossible, round(self.load / NEAR / second))
        if exact:
            limit = math.ceil((self.value * (1 - self.tolerance) - self.fill) / second)
        while self.open() and possible - impossible > fine:
            spent = frontiers.spent
            missing = frontiers.missing(limit)
            self.work -= frontiers.spent - spent
            if frontiers.late():
                break
            if missing is not None and missing <= 0:
                possible, missed = limit, 0
            else:
                slope = (missed - missing) / (limit - impossible) if missing and missed else stages
                impossible, missed = limit, missing or 0
                step = max(fine, round(missing / min(max(slope, 1.0), stages))) if missing else 2 * step
                self.impossible = math.inf if impossible >= most else max(self.impossible, impossible * second)
            limit = impossible + step if impossible + step < possible else (impossible + int(possible)) // 2

    def price_filling(self) -> None:
        """Add to `fill` what relays cost at least in any plan that is better than the best."""
        if not self.problem.fill_weight or self.value == math.inf:
            return
        self.polish()
        frontiers, spent = self.frontiers, self.frontiers.spent
        limit = math.ceil((self.value - self.fill) / frontiers.units.second)
        missing = frontiers.missing(limit)
        if missing is not None and missing <= 0 and not frontiers.late():
            self.fill = max(self.fill, self.least + least_filling(frontiers, limit) * frontiers.units.second)
        self.work -= frontiers.spent - spent

    def close(self) -> None:
        """Plans for limits a little above the impossible one, each made better by its neighbourhoods."""
        base = self.impossible
        weights = WEIGHTS if in_units(self.problem, base, up=True).bound_by_memory else WEIGHTS[:1]
        for step in STEPS:
            for weight in weights:
                if not self.open() or base * (1 + step) > self.value:
                    break
                before = self.value
                self.offer(self.built(base * (1 + step), weight))
                if self.value < before:
                    self.polish()
        self.polish()

    def polish(self) -> None:
        if self.best is not None and self.open():
            self.offer(improve(self.problem, self.best, min(self.work, WORK_OF_POLISH), self.deadline))

    def built(self, load: float, weight: float = 0.0) -> tuple[int, ...] | None:
        """A plan whose stages, all but the last, are within the load and take the most; None if one finds nothing."""
        problem, units, limit = self.problem, in_units(self.problem, load, up=True), RESOLUTION
        before = membership(problem.ancestors, problem.items)
        inside = np.zeros(problem.items, dtype=bool)
        stage = np.zeros(problem.items, dtype=np.int64)
        for s in range(problem.stages - 1):
            needed = (before & ~inside) @ units.work[s]
            segment = Segment(units, s, [fixed(inside), Boundary(inside, inside | (needed <= limit))])
            segment.within(s, limit)
            if not problem.idle:
                segment.model.add(sum(segment.y[1]) > int(inside.sum()))
                segment.model.add(sum(segment.y[1]) <= problem.items - (problem.stages - 1 - s))
            done = segment.seen_from(s + 1, s + 1)
            if weight:
                done = done + round(weight * 100) * segment.bytes_seen_from(s + 1, s + 1)
            segment.model.maximize(done)
            solver = quiet_solver(WORK_OF_STAGE, self.deadline)
            solver.parameters.absolute_gap_limit = ACCURACY * RESOLUTION
            status = solver.solve(segment.model)
            self.work -= solver.response_proto.deterministic_time
            if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
                return None
            inside = segment.inside(solver, s + 1)
            stage += ~inside
        return tuple(int(s) for s in stage)
