"""A run of stages between down-sets as a program for CP-SAT: what they cost, exactly, when some of the cuts are open.

Boundary j (0 <= j <= K) is the down-set J_j of the items in stages before j; stage s is J_{s+1} - J_s. A segment has
the boundaries first..last. Each item is known to be in a boundary, known not to be, or open there. Who uses it decides
what is open: one cut behind a fixed one (a plan is built stage by stage), two cuts around a stage (a bound), the cuts
between two fixed ones (a large neighbourhood). Costs are counted in `Units`.

Variables
    y[j,v]   1 if item v is in J_j;  x[s,v] = y[s+1,v] - y[s,v]: v is in stage s.
    t[j,n]   1 if J_j tears net n: a first pin is in it and a last pin is not. With one first and one last pin f and l
             it is y[j,f] - y[j,l]; a net that goes to the end has its last pin behind everything.
    q[s,n]   1 if n is torn at stage s. Where t[s,n] or t[s+1,n] is 0 it is the other; both are 1 when the net has pins
             on both sides of the stage, and then it is torn there only if a pin is in the stage.
    h[s,r]   1 if stage s holds state r;   e[s,l] = 1 if it holds an item whose workspace is at least level l.

Constraints
    (1) y[j,r] <= y[j,u] for a net from u to r;  y[j,v] <= y[j+1,v]                               `_add_order`
    (2) t[j,n] >= y[j,f] - y[j,l];  t[j,n] <= sum_f y[j,f];  t[j,n] <= sum_l (1 - y[j,l])         `torn_by`
    (3) q >= t[s] - t[s+1];  q >= t[s+1] - t[s];  q >= x[s,p] + t - 1 for its pins p              `torn_at`
    (4) h[s,r] >= x[s,v] for its users v;  e[s,l] >= x[s,v]                                       `held`, `memory`
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from autopart.solver.passing import Payer
from autopart.solver.units import Integers, Span, Units

Linear = cp_model.LinearExpr | int
Flags = NDArray[np.bool_]


NONE_PASS: Mapping[int, Payer] = {}


@dataclass(frozen=True, eq=False)
class Boundary:
    """What is known of a down-set: items that are in it in any case, and items that may be in it."""

    inside: Flags
    possible: Flags


def fixed(inside: Flags) -> Boundary:
    return Boundary(inside, inside)


class Segment:
    """The program; expressions are built when asked for."""

    def __init__(self, units: Units, first: int, boundaries: Sequence[Boundary]) -> None:
        self.units = units
        self.model = cp_model.CpModel()
        self.first = first
        self.y = [self._open(b) for b in boundaries]
        self._add_order(boundaries)
        self._torn_by: dict[tuple[int, tuple[int, ...], tuple[int, ...]], Linear] = {}
        self._held: dict[tuple[int, int], Linear] = {}

    def _open(self, boundary: Boundary) -> list[Linear]:
        row: list[Linear] = [int(v) for v in boundary.inside]
        for v in np.flatnonzero(boundary.possible & ~boundary.inside):
            row[int(v)] = self.model.new_bool_var(f"y{v}")
        return row

    def _add_order(self, boundaries: Sequence[Boundary]) -> None:
        for row, boundary in zip(self.y, boundaries, strict=True):
            for v in np.flatnonzero(boundary.possible & ~boundary.inside):
                for before in self.units.problem.predecessors[int(v)]:
                    self._imply(row[int(v)], row[before])
        for (row, boundary), (after, _) in pairwise(zip(self.y, boundaries, strict=True)):
            for v in np.flatnonzero(boundary.possible):
                self._imply(row[int(v)], after[int(v)])

    def _imply(self, a: Linear, b: Linear) -> None:
        if isinstance(a, cp_model.IntVar) and isinstance(b, cp_model.IntVar):
            self.model.add_implication(a, b)
        elif not isinstance(a, int) or not isinstance(b, int) or a > b:
            self.model.add(a <= b)

    def item(self, s: int, v: int) -> Linear:
        """x[s,v]."""
        return self.y[s + 1 - self.first][v] - self.y[s - self.first][v]

    def torn_by(self, j: int, pins: Span) -> Linear:
        """t[j,n]."""
        key = (j, pins.first, pins.last)
        if key not in self._torn_by:
            self._torn_by[key] = self._crossing(self.y[j - self.first], pins)
        return self._torn_by[key]

    def _crossing(self, row: list[Linear], pins: Span) -> Linear:
        ins, outs = [row[f] for f in pins.first], [row[v] for v in pins.last]
        known_in = any(isinstance(y, int) and y == 1 for y in ins)
        known_out = not outs or any(isinstance(y, int) and y == 0 for y in outs)
        ins, outs = _unknown(ins), _unknown(outs)
        if (not ins and not known_in) or (not outs and not known_out):
            return 0
        if known_in and known_out:
            return 1
        if len(ins) + known_in == 1 and len(outs) + known_out == 1:
            return (1 if known_in else ins[0]) - (0 if known_out else outs[0])
        torn = self.model.new_bool_var("t")
        for a in [1] if known_in else ins:
            for b in [0] if known_out else outs:
                self.model.add(torn >= a - b)
        if not known_in:
            self.model.add(torn <= sum(ins))
        if not known_out:
            self.model.add(torn <= len(outs) - sum(outs))
        return torn

    def torn_at(self, s: int, pins: Span) -> Linear:
        """q[s,n]."""
        before, after = self.torn_by(s, pins), self.torn_by(s + 1, pins)
        here = [self.item(s, v) for v in pins.pins]
        if _is(before, 0) or _is(after, 0):
            return before + after
        if _is(before, 1) and _is(after, 1) and (known := _any(here)) is not None:
            return known
        torn = self.model.new_bool_var("q")
        self.model.add(torn >= before - after)
        self.model.add(torn >= after - before)
        for x in here if len(here) > 2 else ():
            self.model.add(torn >= x + before - 1)
            self.model.add(torn >= x + after - 1)
        return torn

    def held(self, s: int, r: int) -> Linear:
        """h[s,r]."""
        here = [self.item(s, v) for v in self.units.users[r]]
        if (known := _any(here)) is not None:
            return known
        if (s, r) not in self._held:
            held = self.model.new_bool_var("h")
            for x in here:
                self.model.add(held >= x)
            self._held[s, r] = held
        return self._held[s, r]

    def loads(self, s: int) -> list[Linear]:
        """Each must be within the limit: one sum, or work and both transfers where these run beside it."""
        units, last = self.units, self.units.problem.stages - 1
        work = _weighted(units.work[s], (self.item(s, v) for v in range(units.problem.items)))
        once = _weighted(units.update[s], (self.held(s, r) for r in range(len(units.users))))
        once += _weighted(units.touch[s], (self.torn_at(s, n) for n in units.torn))
        into = _weighted(units.transfer[s - 1], (self.torn_by(s, n) for n in units.relays)) if s else []
        out = _weighted(units.transfer[s], (self.torn_by(s + 1, n) for n in units.relays)) if s < last else []
        if units.problem.hidden:
            return [_sum(part + once) for part in (work, into, out)]
        return [_sum(work + into + out + once)]

    def memory(self, s: int) -> Linear:
        """Bytes of the stage, in units."""
        units, last = self.units, self.units.problem.stages - 1
        terms = _weighted(units.saved[s], (self.item(s, v) for v in range(units.problem.items)))
        terms += _weighted(units.state_bytes, (self.held(s, r) for r in range(len(units.users))))
        if s:
            terms += _weighted(units.receive[s - 1], (self.torn_by(s, n) for n in units.relays))
        if s < last:
            terms += _weighted(units.send[s], (self.torn_by(s + 1, n) for n in units.relays))
        for items, rise in units.levels:
            here = [self.item(s, v) for v in items]
            present: Linear | None = _any(here)
            if present is None:
                present = self.model.new_bool_var("e")
                for x in here:
                    self.model.add(present >= x)
            terms.append((rise, present))
        return _sum(terms)

    def within(self, s: int, limit: int) -> None:
        """The stage has at most this load, and fits."""
        for load in self.loads(s):
            self.model.add(load <= limit)
        if self.units.limits[s] >= 0:
            self.model.add(self.memory(s) <= self.units.limits[s])

    def transfers(self, j: int) -> Linear:
        """Seconds of what is relayed over boundary j."""
        return _sum(_weighted(self.units.transfer[j - 1], (self.torn_by(j, n) for n in self.units.relays)))

    def filling(self, j: int) -> Linear:
        """What is relayed over boundary j adds to the filling of the pipeline."""
        return _sum(_weighted(self.units.fill_transfer[j - 1], (self.torn_by(j, n) for n in self.units.relays)))

    def seen_from(self, j: int, s: int, passing: Mapping[int, Payer] = NONE_PASS) -> Linear:
        """What J_j adds to the load of the stage s on one side of it: load_s >= seen_from(s + 1, s) - seen_from(s, s).

        Equal but for states with users in several stages, which count as their first user, and for nets with pins on
        both sides of the stage: those cost it nothing or once, and would be counted twice. So this holds if none has;
        or if all that have are `passing`. Of these, one of two pins pays: with c for each down-set between them, on
        both sides, a stage that holds the first is charged c, one with the last -c, one between them nothing; with -c
        the other way round. And c for the group where it is torn, on the one side where a stage with a pin of it pays.
        """
        units = self.units
        sign = 1 if s < j else -1
        row = self.y[j - self.first]
        terms = _weighted(units.due[s], row)
        costs = units.touch[s].tolist()
        for n, pins in enumerate(units.torn):
            if n in passing:
                payer = passing[n]
                terms.append((payer.sign * costs[n], row[payer.first] - row[payer.last]))
                if payer.group is not None and payer.sign != sign:
                    terms.append((sign * costs[n], self.torn_by(j, payer.group)))
            elif costs[n]:
                terms.append((sign * costs[n], self.torn_by(j, pins)))
        if not units.problem.hidden:
            terms += _weighted(sign * units.transfer[j - 1], (self.torn_by(j, n) for n in units.relays))
        return _sum(terms)

    def fill(self, s: int) -> Linear:
        """What the stage and the boundary behind it add to the filling of the pipeline."""
        items = _weighted(self.units.fill[s], (self.item(s, v) for v in range(self.units.problem.items)))
        return _sum(items) + (self.filling(s + 1) if s < self.units.problem.stages - 1 else 0)

    def work(self, j: int, s: int) -> Linear:
        """Work of J_j at the speed of stage s, with what is due once."""
        return _sum(_weighted(self.units.due[s], self.y[j - self.first]))

    def bytes_seen_from(self, j: int, s: int) -> Linear:
        """What J_j adds to the memory of the stage s at one side of it, likewise."""
        units = self.units
        table = units.send[j - 1] if s < j else -units.receive[j - 1]
        terms = _weighted(units.kept[s], self.y[j - self.first])
        terms += _weighted(table, (self.torn_by(j, n) for n in units.relays))
        return _sum(terms)

    def inside(self, solver: cp_model.CpSolver, j: int) -> Flags:
        return np.array([bool(solver.value(y)) for y in self.y[j - self.first]])


def _any(flags: list[Linear]) -> int | None:
    """Whether one of them is 1, if that is known."""
    if any(_is(x, 1) for x in flags):
        return 1
    return None if _unknown(flags) else 0


def _is(value: Linear, constant: int) -> bool:
    return isinstance(value, int) and value == constant


def _unknown(values: list[Linear]) -> list[Linear]:
    return [y for y in values if not isinstance(y, int)]


def _weighted(costs: Integers, variables: Iterable[Linear]) -> list[tuple[int, Linear]]:
    return [(c, x) for c, x in zip(costs.tolist(), variables, strict=True) if c]


def _sum(terms: list[tuple[int, Linear]]) -> Linear:
    constant = sum(c * x for c, x in terms if isinstance(x, int))
    open_terms = [(c, x) for c, x in terms if not isinstance(x, int)]
    return cp_model.LinearExpr.weighted_sum([x for _, x in open_terms], [c for c, _ in open_terms]) + constant


def quiet_solver(work_limit: float, deadline: float = math.inf) -> cp_model.CpSolver:
    """CP-SAT on one thread, stopped by its own count of work, so that it does the same everywhere.

    Args:
        deadline: In seconds of `time.monotonic`; it stops it too.
    """
    solver = cp_model.CpSolver()
    if math.isfinite(deadline):
        solver.parameters.max_time_in_seconds = max(0.0, deadline - time.monotonic())
    solver.parameters.num_workers = 1
    solver.parameters.random_seed = 0
    solver.parameters.max_deterministic_time = work_limit
    return solver


def largest(model: cp_model.CpModel) -> int:
    """The objective that is maximised if each of its variables, all of them flags, is free."""
    objective = model.proto.objective  # CP-SAT minimises its negative
    return sum(max(0, -c) for c in objective.coeffs) - int(objective.offset)
