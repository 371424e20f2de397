"""Wide graphs, one boundary at a time: how far a pipeline can have come at each boundary within a limit on the load.

Let I = J_s and J = J_{s+1} be the down-sets around stage s. With a_s(I) and b_s(J) from `Segment.seen_from` its load is
at least b_s(J) - a_s(I). So all that the stages before it decide for stage s is one number, and for a limit T

    A_0 = 0,   A_{s+1} = max { a_{s+1}(J) : b_s(J) <= A_s + T },   T is impossible if A_{K-1} + T < b_{K-1}(all)

Each maximum is a program over one down-set with no stages in it: a closure with one row for the load. Memory is a
second number of the same kind, and a second row.

Nets that are sent directly to their readers and have pins on both sides of a stage cost it less than b - a says. With
pins f in I and l not in J, the stage holds nothing that comes before f or after l. Where that leaves too little for it
to reach beyond A_{s+1}, by counting or by the exact program of that stage, nothing is lost. Otherwise the net becomes
one of the stage's `passing` nets, which `seen_from` prices so that the inequality holds whatever they do.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from ortools.sat.python import cp_model

from autopart.solver.passing import Payer, fewer, payer
from autopart.solver.problem import Problem, membership
from autopart.solver.segment import Boundary, Linear, Segment, fixed, largest, quiet_solver
from autopart.solver.units import RESOLUTION, Span, in_units, units_in
from autopart.solver.windows import windows

# A maximum may be off by this share of the load.
ACCURACY = 3e-5
# CP-SAT's deterministic seconds for one maximum, for one question whether a stage that nets pass is of use,
# and for one maximum over a whole stage.
WORK_OF_MAXIMUM, WORK_OF_QUESTION, WORK_OF_STAGE = 1.0, 0.5, 6.0
# A maximum is first sought this share of the load beyond the one before: that decides many items in advance.
LIKELY = 0.5
# Done at a boundary that no stage can reach.
NOTHING = -(1 << 60)


@dataclass
class Front:
    """The most there may be at one boundary.

    Attributes:
        done: a_j, the passing nets of the stage behind counted as such.
        worked: Work of the down-set.
        kept: Memory, as the stage behind sees it.
        plain, paid: a_j and b_{j-1} with no net counted as passing, where they are known.
    """

    done: int
    worked: int
    kept: int
    plain: int | None = None
    paid: int | None = None


class Frontiers:
    """Proofs that limits are impossible; which nets may pass a stage is kept from one limit to the next."""

    def __init__(self, problem: Problem, load: float, deadline: float = math.inf) -> None:
        """Limits are counted in `units.second`.

        Args:
            load: Seconds near the limits that will be asked for.
            deadline: Of `time.monotonic`; after it, and when more than `allowed` of CP-SAT's deterministic seconds is
                `spent`, every limit counts as possible.
        """
        self.problem = problem
        self.units = in_units(problem, load, up=False)
        self.passing: list[dict[int, Payer]] = [{} for _ in range(problem.stages)]
        self.before = membership(problem.ancestors, problem.items)
        self.behind = membership(problem.descendants, problem.items)
        self.work_before = units_in(self.before, self.units.due)
        self.work_behind = units_in(self.behind, self.units.due)
        self.total = [int(row.sum()) for row in self.units.due]
        self.spent, self.allowed = 0.0, math.inf
        self.deadline = deadline
        self.exact = False

    def late(self) -> bool:
        return self.spent > self.allowed or time.monotonic() > self.deadline

    def missing(self, limit: int) -> int | None:
        """By how much the last stage is overrun if no stage has more than `limit`: it is impossible if positive.

        None if it is impossible for another reason; 0, and the fronts are not complete, if it is `late`.
        """
        last = self.problem.stages - 1
        fill = self.problem.least_fill
        earliest, latest = windows(self.problem, (limit + 1) * self.units.second + fill)
        self.earliest, self.latest = np.array(earliest), np.array(latest)
        self.limit, self.fronts = limit, [Front(0, 0, 0)]
        while len(self.fronts) <= last:
            self.fronts.append(self._next())
            if self._let_pass():
                del self.fronts[-2:]
            elif self.late() or self.fronts[-1].done == NOTHING or not self._remember():
                return 0 if self.late() else None
            elif self.exact and self.units.torn and not self._sharpen():
                return None
        front = self.fronts[last]
        over = self.total[last] - (front.done if front.plain is None else min(front.done, front.plain)) - limit
        if self.units.limits[last] >= 0:
            units = self.units
            whole = int(units.kept[last].sum()) + self._workspace(last)
            if whole - self.fronts[last].kept > units.limits[last]:
                return None
        return over

    def boundary(self, j: int) -> Boundary:
        """What is known of the down-set before any program."""
        possible = self.earliest < j
        if not self.units.torn:
            possible &= self.work_before[j - 1] <= self.fronts[j - 1].done + self.limit
        return Boundary(self.latest < j, possible)

    def _next(self) -> Front:
        """What is known at the next boundary, if nothing passes the stage before it but the nets in `passing`."""
        j, before = len(self.fronts), self.fronts[-1]
        likely = before.done + int(LIKELY * self.limit)
        generous = sum(int(self.units.touch[j][n]) for n, payer in self.passing[j].items() if payer.sign > 0)

        def program(least: int | None) -> Segment:
            boundary = self.boundary(j)
            if least is not None:
                needed = self.total[j] + generous - self.work_behind[j] < least
                boundary = Boundary(boundary.inside | (needed & boundary.possible), boundary.possible)
            segment = Segment(self.units, j, [boundary])
            segment.model.add(segment.seen_from(j, j - 1, self.passing[j - 1]) <= before.done + self.limit)
            if self.problem.hidden:
                segment.model.add(segment.transfers(j) <= self.limit)
            self._fit(segment, j)
            return segment

        def most(value: str) -> int | None:
            for least in (likely, None):
                segment = program(least)
                known = segment.seen_from(j, j, self.passing[j]) if value == "done" else segment.work(j, j)
                if least is not None:
                    segment.model.add(known >= least)
                found = self.maximum(segment, known)
                if found is not None:
                    return found
            return None

        done = most("done")
        if done is None:
            return Front(NOTHING, 0, 0)
        worked = most("work") if self.units.torn else None
        return Front(done, self.total[j] if worked is None else worked, 0)

    def _remember(self) -> bool:
        """Add to the last front what is kept in memory at most; false if there is no such down-set."""
        j, front, before = len(self.fronts) - 1, self.fronts[-1], self.fronts[-2]
        if self.units.limits[j] < 0:
            return True
        segment = Segment(self.units, j, [self.boundary(j)])
        segment.model.add(segment.seen_from(j, j, self.passing[j]) <= front.done)
        segment.model.add(segment.work(j, j) <= front.worked)
        if not self.units.torn:
            segment.model.add(segment.seen_from(j, j - 1) <= before.done + self.limit)
        self._fit(segment, j)
        kept = self.maximum(segment, segment.bytes_seen_from(j, j))
        front.kept = kept or 0
        return kept is not None

    def _sharpen(self) -> bool:
        """Lower the last front by the exact programs of the stage before it; false if the stage is impossible.

        Slower than one boundary alone, but no net is counted twice, or as passing where it does not.
        """
        j = len(self.fronts) - 1
        s, front, before = j - 1, self.fronts[j], self.fronts[j - 1]
        nothing = np.zeros(self.problem.items, dtype=bool)
        values = ("plain", "done", "worked", "paid") if j < self.problem.stages - 1 else ("plain",)
        for value in values:
            if value == "done" and not self.passing[j]:
                front.done = min(front.done, front.plain or front.done)
                continue
            segment = Segment(self.units, s, [self.boundary(s) if s else fixed(nothing), self.boundary(j)])
            segment.within(s, self.limit)
            known = [
                (segment.seen_from(s, s, self.passing[s]), before.done),
                (segment.seen_from(s, s), before.plain),
                (segment.work(s, s), before.worked),
                (segment.seen_from(s, s - 1), before.paid),
            ]
            sought = {
                "done": segment.seen_from(j, j, self.passing[j]),
                "plain": segment.seen_from(j, j),
                "worked": segment.work(j, j),
                "paid": segment.seen_from(j, s),
            }
            for expression, most in [*(known if s else []), *((e, getattr(front, name)) for name, e in sought.items())]:
                if most is not None:
                    segment.model.add(expression <= most)
            found = self.maximum(segment, sought[value], WORK_OF_STAGE)
            if found is None:
                return False
            setattr(front, value, found)
        return True

    def _fit(self, segment: Segment, j: int) -> None:
        """The stage before boundary j has room for what is in it."""
        s = j - 1
        if self.units.limits[s] >= 0:
            room = self.units.limits[s] - self._workspace(s)
            segment.model.add(segment.bytes_seen_from(j, s) <= self.fronts[s].kept + room)

    def _workspace(self, s: int) -> int:
        """The largest workspace, as far as it is known, of the items that are in the stage in any case."""
        here = {int(v) for v in np.flatnonzero((self.earliest == s) & (self.latest == s))}
        return sum(rise for items, rise in self.units.levels if here & set(items))

    def maximum(self, segment: Segment, value: Linear, work: float = WORK_OF_MAXIMUM) -> int | None:
        """An upper bound on the value; None if the program has no solution."""
        segment.model.maximize(value)
        solver = quiet_solver(work, self.deadline)
        solver.parameters.absolute_gap_limit = ACCURACY * RESOLUTION
        status = solver.solve(segment.model)
        self.spent += solver.response_proto.deterministic_time
        if status == cp_model.INFEASIBLE:
            return None
        if status in (cp_model.OPTIMAL, cp_model.FEASIBLE):
            return int(np.floor(solver.best_objective_bound + 0.5))
        return largest(segment.model)  # stopped before it had a bound, where CP-SAT reports 0

    def _let_pass(self) -> bool:
        """Find the nets that may pass the last stage followed with profit; whether there are any."""
        j = len(self.fronts) - 1
        s, front, before = j - 1, self.fronts[j], self.fronts[j - 1]
        if s == 0:
            return False
        found = False
        generous = sum(int(self.units.touch[j][n]) for n, payer in self.passing[j].items() if payer.sign > 0)
        same_speed = bool((self.units.due[s] == self.units.due[j]).all())
        for n, whole in enumerate(self.units.torn):
            pins = self.passing[s][n].group if n in self.passing[s] else whole
            if pins is None or not self.units.touch[s][n] or self.late():
                continue
            for f, v in self._pairs(j, pins):
                between = int(self.units.due[j] @ ~(self.before[f] | self.behind[v]))
                reach = self.total[j] - int(self.work_behind[j][v])
                if same_speed:
                    reach = min(reach, before.worked + min(between, self.limit))
                front.worked = max(front.worked, reach)
                paid = int(self.units.touch[j][n]) if n not in self.passing[j] else 0
                if reach + generous - paid > front.done and self._useful(j, f, v, reach):
                    known = self.passing[s].get(n)
                    self.passing[s][n] = self._payer(s, whole) if known is None else fewer(self.problem, known, f, v)
                    found = True
                    break
        return found

    def _pairs(self, j: int, pins: Span) -> Iterator[tuple[int, int]]:
        """First and last pins that may lie on both sides of the stage before boundary j."""
        worked = self.fronts[j - 1].worked
        for f in pins.first:
            if self.earliest[f] < j - 1 and self.work_before[j - 1][f] <= worked:
                yield from ((f, v) for v in pins.last if self.latest[v] >= j)

    def _useful(self, j: int, f: int, v: int, reach: int) -> bool:
        """Whether, with f before it and v behind it, the stage can reach beyond what is known at boundary j.

        Asked of the boundary alone first, with no more work before it than `reach`; then of the whole stage.
        """
        s, front, before = j - 1, self.fronts[j], self.fronts[j - 1]
        left = Boundary(self.before[f] | (self.latest < s), self.earliest < s)
        right = Boundary(left.inside | (self.latest < j), (self.earliest < j) & ~self.behind[v])
        if (left.inside & ~left.possible).any() or (right.inside & ~right.possible).any():
            return False

        def possible(segment: Segment) -> bool:
            segment.model.add(segment.work(j, j) <= reach)
            if front.done != NOTHING:
                segment.model.add(segment.seen_from(j, j, self.passing[j]) > front.done)
            solver = quiet_solver(WORK_OF_QUESTION, self.deadline)
            status = solver.solve(segment.model)
            self.spent += solver.response_proto.deterministic_time
            return bool(status != cp_model.INFEASIBLE)

        if not possible(Segment(self.units, j, [right])):
            return False
        segment = Segment(self.units, s, [left, right])
        segment.within(s, self.limit)
        segment.model.add(segment.seen_from(s, s, self.passing[s]) <= before.done)
        segment.model.add(segment.work(s, s) <= before.worked)
        if s == 1:
            segment.model.add(segment.seen_from(s, 0) <= self.limit)
        return possible(segment)

    def _payer(self, s: int, pins: Span) -> Payer:
        """How to count a net that may pass stage s."""
        middle = (self.earliest + self.latest) / 2
        return payer(self.problem, pins, s, self.work_before[s], middle)
