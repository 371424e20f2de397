"""The stage partition as an integer program for CP-SAT, in the order encoding.

Sets
    v in V items; s in 0..K-1 stages; b in 0..K-2 boundaries; p in P processes; n in N nets (producer u(n), readers
    R(n)); r in R states with users U(r). R*(n) are the readers from which no other reader of n can be reached: a net
    whose R*(n) is one item needs no variable of its own, for that reader is the last in every assignment.

Variables
    y[v,b]   1 if the stage of v is at most b; y[v,-1] = 0 and y[v,K-1] = 1; x[v,s] = y[v,s] - y[v,s-1]: v is in s.
    z[n,b]   1 if net n crosses boundary b; y[u,b] - y[r,b] where R*(n) = {r}, and y[u,b] where n goes to the end.
    c[n,s]   1 if net n, which costs a touch, is torn at stage s.
    h[r,s]   1 if stage s holds state r; x[v,s] where U(r) = {v}.
    t[r]     1 if several stages hold state r;   q[r,s] = 1 if stage s holds it and another does too.
    e[s,l]   1 if stage s holds an item whose workspace is at least level l.
    a[k,s]   1 if stage s computes block k again.
    M        the largest load; A[p] the largest workspace of process p.

Objective
    minimise  M + fill_weight * (sum_v,s fill[s,v] x[v,s] + sum_n,b transfer[b,n] z[n,b] + sum_k,s again[s,k] a[k,s])

Constraints
    (1) y[v,b] <= y[v,b+1]                                                         `_add_order`
    (2) y[r,b] <= y[u,b]                    for every net and reader               `_add_order`
    (3) y[v,b] fixed where the loads of the items before or after v leave no room  `_windowed`
    (4) sum_v x[v,s] >= 1                   no stage is empty, unless it may       `_add_order`
    (5) z[n,b] >= y[u,b] - y[r,b]           for r in R*(n), where it is not one    `_crossing`
        c[n,s] >= x[p,s] - x[q,s]           for pins p, q next to each other on a circle through all     `_torn`
    (6) h[r,s] >= x[v,s]  for v in U(r);  h[r,s] + h[r,s'] <= 1 + t[r];  q[r,s] >= h[r,s] + t[r] - 1   `_add_states`
    (7) load_p <= M, as in `problem`; where transfers are hidden, work and each transfer by themselves   `_add_loads`
    (8) memory_p <= limit_p, with the workspace by levels                          `_add_memory`
    (9) a[k,s] <= x[v,s]                    for the items v of block k             `_add_blocks`
   (10) objective <= cap                    only plans better than the best known  `Program`

Integers: times are counted in cap / 10^7, bytes in limit / 10^7 (coarser where that would overflow), every coefficient
rounded down and every right side up. So the program is a relaxation, by about one part in 10^4 for a thousand items:
its bound is a bound of the problem, and its assignments are valued and checked in floats by `score`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from itertools import chain

import numpy as np
from ortools.sat.python import cp_model

from autopart.solver.budget import check
from autopart.solver.magnitudes import LEAST_SHARE, ceiling, most_bytes, workspace_levels
from autopart.solver.problem import Floats, Problem
from autopart.solver.stage_costs import memory_never_binds
from autopart.solver.units import span
from autopart.solver.windows import windows

Linear = cp_model.LinearExpr | int

RESOLUTION = 10_000_000


class Program:
    """The model; one method for each group of constraints."""

    def __init__(self, problem: Problem, cap: float | None, scale: float, deadline: float = math.inf) -> None:
        """For step times near `scale` seconds, the unit of the integers being `scale / RESOLUTION`.

        Raises OutOfTimeError if the deadline (of `time.monotonic`) passes before the model is built.
        """
        self.problem, self.deadline = problem, deadline
        self.model = cp_model.CpModel()
        # A step of no time at all still needs a unit.
        self.unit = max(scale, LEAST_SHARE * ceiling(problem), 1e-12) / RESOLUTION
        self.last = problem.stages - 1
        self.y = self._windowed(cap)
        self._add_order()
        self.last_readers = [span(problem, net.readers).last for net in problem.nets]
        self.z = [[self._crossing(n, b) for n in range(len(problem.nets))] for b in range(self.last)]
        self.held, self.torn = self._add_states()
        self.again = self._add_blocks()
        self.most = self.model.new_int_var(0, math.ceil((ceiling(problem) if cap is None else cap) / self.unit), "M")
        self._add_loads()
        self._add_memory()
        objective = self.most + self._fill()
        if cap is not None:
            self.model.add(objective <= math.ceil(cap / self.unit))
        self.model.minimize(objective)

    def x(self, v: int, s: int) -> Linear:
        """1 if item v is in stage s."""
        upper = self.y[v][s] if s < self.last else 1
        return upper - self.y[v][s - 1] if s else upper

    def stage(self, s: int) -> list[Linear]:
        """x[v,s] of every item."""
        check(self.deadline)
        return [self.x(v, s) for v in range(self.problem.items)]

    def assignment(self, solver: cp_model.CpSolver) -> tuple[int, ...]:
        return tuple(self.last - sum(solver.value(y) for y in row) for row in self.y)

    def seconds(self, value: float) -> int:
        return math.floor(value / self.unit)

    def _add_order(self) -> None:
        problem, model = self.problem, self.model
        for v in range(problem.items):
            check(self.deadline)
            for b in range(self.last - 1):
                self._imply(self.y[v][b], self.y[v][b + 1])
            for u in problem.predecessors[v]:
                for b in range(self.last):
                    self._imply(self.y[v][b], self.y[u][b])
        for s in range(problem.stages) if not problem.idle else ():
            check(self.deadline)
            model.add(sum(self.x(v, s) for v in range(problem.items)) >= 1)

    def _windowed(self, cap: float | None) -> list[list[Linear]]:
        """y, as a constant wherever the cap leaves the item no choice: most of it, when the cap is close."""
        if cap is None:
            earliest, latest = [0] * self.problem.items, [self.last] * self.problem.items
        else:
            earliest, latest = windows(self.problem, cap)
        if any(a > b for a, b in zip(earliest, latest, strict=True)):
            self.model.add_bool_or([])  # an item fits nowhere

        def entry(v: int, b: int) -> Linear:
            check(self.deadline)
            if b < earliest[v] or b >= latest[v]:
                return int(b >= latest[v])
            return self.model.new_bool_var(f"y[{v},{b}]")

        return [[entry(v, b) for b in range(self.last)] for v in range(self.problem.items)]

    def _imply(self, a: Linear, b: Linear) -> None:
        if isinstance(a, cp_model.IntVar) and isinstance(b, cp_model.IntVar):
            self.model.add_implication(a, b)
        elif not isinstance(a, int) or not isinstance(b, int) or a > b:
            self.model.add(a <= b)

    def _crossing(self, n: int, b: int) -> Linear:
        check(self.deadline)
        net = self.problem.nets[n]
        if net.backward:
            return 0
        producer = self.y[net.producer][b]
        if net.to_end:
            return producer
        if isinstance(producer, int) and producer == 0:
            return 0
        readers = self.last_readers[n]
        if len(readers) == 1:
            return producer - self.y[readers[0]][b]
        if isinstance(producer, int) and all(isinstance(self.y[r][b], int) for r in readers):
            return max(producer - self.y[r][b] for r in readers)
        crosses = self.model.new_bool_var(f"z[{n},{b}]")
        for r in readers:
            self.model.add(crosses >= producer - self.y[r][b])
        return crosses

    def _add_states(self) -> tuple[list[list[Linear]], dict[tuple[int, int], Linear]]:
        problem, model = self.problem, self.model
        stages = range(problem.stages)
        held: list[list[Linear]] = []
        torn: dict[tuple[int, int], Linear] = {}
        for r, users in enumerate(problem.users):
            check(self.deadline)
            if len(users) == 1:
                held.append([self.x(users[0], s) for s in stages])
                continue
            row = [model.new_bool_var(f"h[{r},{s}]") for s in stages]
            held.append(list(row))
            for s in stages:
                for v in users:
                    model.add(row[s] >= self.x(v, s))
            if not problem.sync[:, r].any():
                continue
            several = model.new_bool_var(f"t[{r}]")
            for s in stages:
                for other in range(s):
                    model.add(row[s] + row[other] <= 1 + several)
                torn[r, s] = model.new_bool_var(f"q[{r},{s}]")
                model.add(torn[r, s] >= row[s] + several - 1)
        return held, torn

    def _add_blocks(self) -> list[list[Linear]]:
        """What each stage computes again; nothing is where memory never binds."""
        problem, model = self.problem, self.model
        again: list[list[Linear]] = []
        for s in range(problem.stages):
            row: list[Linear] = []
            check(self.deadline)
            for k, items in enumerate(problem.blocks.items if problem.blocks is not None else ()):
                if memory_never_binds(problem, problem.process[s]):
                    row.append(0)
                    continue
                row.append(model.new_bool_var(f"a[{k},{s}]"))
                for v in items:
                    model.add(row[-1] <= self.x(v, s))
            again.append(row)
        return again

    def _add_loads(self) -> None:
        problem = self.problem
        for own in problem.stages_of_process:
            work: list[Linear] = []
            once: list[Linear] = []
            sent: list[list[Linear]] = []
            for s in own:
                work += self._weighted(problem.repeat * problem.work[s], self.stage(s))
                if problem.blocks is not None:
                    work += self._weighted(problem.repeat * problem.blocks.again[s], self.again[s])
                work += self._torn(s)
                for b in (s - 1, s):
                    if 0 <= b < self.last:
                        sent.append(self._weighted(problem.repeat * problem.transfer[b], self.z[b]))
                once += self._weighted(problem.update[s], [row[s] for row in self.held])
                once += [self.seconds(problem.sync[s, r]) * q for (r, t), q in self.torn.items() if t == s]
            busy = [work, *sent] if problem.hidden else [list(chain(work, *sent))]
            for terms in busy:
                self.model.add(sum(terms) + sum(once) <= self.most)

    def _torn(self, s: int) -> list[Linear]:
        """What nets that are torn at stage s cost there."""
        terms: list[Linear] = []
        for n, net in enumerate(self.problem.nets):
            seconds = self.seconds(self.problem.repeat * self.problem.touch[s, n])
            pins = (net.producer, *net.readers)
            if not seconds or len(pins) == 1:
                continue
            inside = [self.x(p, s) for p in pins]
            if all(isinstance(x, int) for x in inside):
                terms.append(seconds * (len({*inside}) > 1))
                continue
            torn = self.model.new_bool_var(f"c[{n},{s}]")
            for here, there in zip(inside, [*inside[1:], inside[0]], strict=True):
                self.model.add(torn >= here - there)
            terms.append(seconds * torn)
        return terms

    def _weighted(self, seconds: Floats, variables: Iterable[Linear]) -> list[Linear]:
        return [self.seconds(c) * x for c, x in zip(seconds, variables, strict=True) if self.seconds(c)]

    def _fill(self) -> Linear:
        problem = self.problem
        terms: list[Linear] = []
        if problem.uniform:
            terms.append(self.seconds(problem.fill_weight * float(problem.fill[0].sum())))
        else:
            for s in range(problem.stages):
                terms += self._weighted(problem.fill_weight * problem.fill[s], self.stage(s))
        for b in range(self.last):
            terms += self._weighted(problem.fill_weight * problem.transfer[b], self.z[b])
        if problem.blocks is not None:
            for seconds, row in zip(problem.blocks.again, self.again, strict=True):
                terms += self._weighted(problem.fill_weight * seconds, row)
        return sum(terms)

    def _add_memory(self) -> None:
        problem, model = self.problem, self.model
        for p, own in enumerate(problem.stages_of_process):
            if memory_never_binds(problem, p):
                continue
            limit = float(problem.limits[p])
            unit = max(limit, LEAST_SHARE * most_bytes(problem), 1.0) / RESOLUTION

            def units(values: Floats, variables: Iterable[Linear], unit: float = unit) -> list[Linear]:
                return [math.floor(c / unit) * x for c, x in zip(values, variables, strict=True) if c >= unit]

            terms: list[Linear] = []
            for s in own:
                terms += units(problem.saved[s], self.stage(s))
                terms += units(problem.state_bytes, [row[s] for row in self.held])
                if s < self.last:
                    terms += units(problem.send[s], self.z[s])
                if s:
                    terms += units(problem.receive[s - 1], self.z[s - 1])
            inside = [[self.x(v, s) for s in own] for v in range(problem.items)]
            terms += self._largest(problem.workspace, inside, unit)
            if problem.blocks is not None:
                for s in own:
                    spared = zip(problem.blocks.spared[s], self.again[s], strict=True)
                    terms += [-math.ceil(size / unit) * a for size, a in spared]
                again = [[self.again[s][k] for s in own] for k in range(len(problem.blocks.items))]
                terms += self._largest(problem.blocks.peak, again, unit)
            model.add(sum(terms) <= math.ceil(limit / unit) + 1)

    def _largest(self, size: Floats, chosen: list[list[Linear]], unit: float) -> list[Linear]:
        """The largest size, in units, of the entries of which any variable is 1, by levels."""
        terms: list[Linear] = []
        for level, step in workspace_levels(size):
            if step < unit:
                continue
            present = self.model.new_bool_var("e")
            for v in np.flatnonzero(size >= level):
                check(self.deadline)
                for x in chosen[int(v)]:
                    self.model.add(present >= x)
            terms.append(math.floor(step / unit) * present)
        return terms
