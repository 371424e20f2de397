"""Stages on several devices each: exact dynamic programming over down-sets and devices.

A stage on r replicas has the r-th part of the work and of what crosses its boundaries, and must sum the gradients of
its states over the replicas. Between two down-sets I in J it costs load(I, J, r) and fill(I, J, r), whatever else is
decided; what it keeps in memory depends on r and on the devices k from its own to the end of the pipeline. So, from
the end,

    least[k][I] = min over J, r of  fill(I, J, r) + least[k - r][J],   where load(I, J, r) <= L and it fits

is exact over the down-sets given, and with max for + it gives the least possible L. Devices may be left idle.

What a replica is, is data. `PIPEDREAM` (Narayanan et al., SOSP 2019, section 3.1): replicas take turns with whole
microbatches, and each microbatch is an optimizer step, so its gradients are summed. `DAPPLE` (Fan et al., PPoPP 2021,
section 4): each microbatch is split over the replicas, and gradients are summed once, at the end of a step.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from autopart.solver.chains import least_sum
from autopart.solver.families import family
from autopart.solver.problem import Floats, Problem
from autopart.solver.score import score
from autopart.solver.stage_costs import Members, StageCosts

# A stage in a chain, from the first: the down-set before it (a row of the table), and its replicas.
Chain = list[tuple[int, int]]


@dataclass(frozen=True)
class Rule:
    """What r replicas make of a stage.

    Attributes:
        each: Of the seconds to sum a gradient over many replicas, what r replicas pay with each microbatch.
        once: What they pay at the end of the step.
        in_flight: Microbatches whose activations a replica keeps, of (microbatches, devices to the end, replicas).
    """

    each: Callable[[int], float]
    once: Callable[[int], float]
    in_flight: Callable[[int, int, int], float]


PIPEDREAM = Rule(
    each=lambda r: (r - 1) / r**2,
    once=lambda r: 0.0,
    in_flight=lambda m, devices, r: min(m, -(-devices // r)),
)
DAPPLE = Rule(
    each=lambda r: 0.0,
    once=lambda r: (r - 1) / r,
    # No more stages follow than devices: never too few.
    in_flight=lambda m, devices, r: min(m, devices - r + 1) / r,
)


@dataclass(frozen=True, eq=False)
class Replication:
    """A problem whose stages may be replicated.

    Attributes:
        problem: Tables of one replica; its first rows hold for every stage, so it has two stages or more, all alike.
            `saved` is of one microbatch in flight, and `limits` the bytes of each device. A boundary is filled at the
            rate of the stage that receives.
        devices: How many there are, all alike.
        gradient: Seconds to sum a state's gradient over many replicas: those over two take half as long, (states,).
            Where they are paid with each microbatch, the first user of a state pays.
        microbatches: Of a step.
        degrees: Numbers of replicas that a stage may have.
        rule: What replicas are.
        boundary: Seconds that a stage is busy at least, on one replica, for each of the down-sets (sets, items) at its
            ends: for rules whose count of what crosses is not of nets.
    """

    problem: Problem
    devices: int
    gradient: Floats
    microbatches: int
    degrees: tuple[int, ...]
    rule: Rule
    boundary: Callable[[Members], Floats] | None = None

    def on(self, replicas: int, in_flight: Sequence[float]) -> Problem:
        """The problem of stages with so many replicas each, and so many microbatches in flight at each of them."""
        problem, stages = self.problem, len(in_flight)
        work = problem.work[:1] / replicas
        first = [users[0] for users in problem.users]
        np.add.at(work[0], first, self.rule.each(replicas) * self.gradient)

        def of_stages(row: Floats, count: int) -> Floats:
            return np.repeat(row, count, axis=0)

        return dataclasses.replace(
            problem,
            work=of_stages(work, stages),
            fill=of_stages(problem.fill[:1] / replicas, stages),
            saved=problem.saved[:1] * np.asarray(in_flight)[:, None],
            transfer=of_stages(problem.transfer[:1] / replicas, stages - 1),
            send=of_stages(problem.send[:1] / replicas, stages - 1),
            receive=of_stages(problem.receive[:1] / replicas, stages - 1),
            touch=of_stages(problem.touch[:1] / replicas, stages),
            update=of_stages(problem.update[:1] + self.rule.once(replicas) * self.gradient, stages),
            sync=of_stages(problem.sync[:1], stages),
            process=tuple(range(stages)),
            limits=np.full(stages, problem.limits[0]),
            idle=False,
        )


@dataclass(frozen=True)
class ReplicatedPlan:
    """A plan: the stage of each item, the replicas of each stage; its value, and a bound no plan is below.

    Attributes:
        bound: Zero where too many down-sets were left out to prove anything.
    """

    assignment: list[int]
    replicas: list[int]
    value: float
    bound: float


def solve_replicas(replication: Replication, tolerance: float = 1e-9) -> ReplicatedPlan | None:
    """The best plan over all down-sets, or over prefixes of some orders where there are too many; none if none fits."""
    inside, complete = family(replication.problem)
    chain, bound = least_sum(Table(replication, inside), tolerance)
    if chain is None:
        return None
    starts = [inside[i] for i, _ in chain[1:]]
    assignment = [int(s) for s in sum((~start for start in starts), np.zeros(inside.shape[1], dtype=np.int64))]
    replicas = [r for _, r in chain]
    return ReplicatedPlan(assignment, replicas, value(replication, assignment, replicas), bound if complete else 0.0)


def value(replication: Replication, assignment: Sequence[int], replicas: Sequence[int]) -> float:
    """The objective, from the plan alone; infinite where it does not fit."""
    problem, stages = replication.problem, len(replicas)
    to_end = list(accumulate(reversed(replicas)))[::-1]
    stage = np.asarray(assignment)
    loads, fill = np.zeros(stages), 0.0
    for s, r in enumerate(replicas):
        of_stage = replication.on(r, [replication.rule.in_flight(replication.microbatches, k, r) for k in to_end])
        result = score(of_stage, assignment)
        if result.memory[s] > of_stage.limits[s]:
            return np.inf
        loads[s] = result.loads_s[s]
        fill += of_stage.fill[s, stage == s].sum() + (result.transfer_s[s - 1] if s else 0.0)
        if replication.boundary is not None:
            ends = replication.boundary(np.stack([stage < s, stage <= s]))
            loads[s] = max(loads[s], float(ends.max()) / r)
    return float(problem.fill_weight * fill + loads.max())


def relayed(problem: Problem, inside: Members) -> Members:
    """Whether each net leaves each down-set, (sets, nets)."""
    kept = [
        ~inside[:, net.producer] | (inside[:, list(net.readers)].all(axis=1) & (not net.to_end)) for net in problem.nets
    ]
    return ~np.stack(kept, axis=1) if kept else np.zeros((len(inside), 0), dtype=bool)


class Table:
    """Stages between any two of some down-sets, on any number of replicas (`chains.Chains`)."""

    def __init__(self, replication: Replication, inside: Members) -> None:
        self._replication, self._inside = replication, inside
        self._end = len(inside) - 1
        self._limited = bool(np.isfinite(replication.problem.limits[0]))
        boundary = replication.boundary
        ends = boundary(inside) if boundary is not None else np.zeros(len(inside))
        self._ends = np.maximum(ends[:, None], ends[None, :])
        done = inside @ replication.problem.fill[0]
        received = relayed(replication.problem, inside) @ replication.problem.transfer[0]
        self._fill = replication.problem.fill_weight * (done[None, :] - (done - received)[:, None])
        self._known: dict[tuple[int, float], tuple[Floats, Floats]] = {}

    def least_load(self) -> Chain | None:
        return self._chain(lambda load, fill, rest: np.maximum(load, rest))

    def least_fill(self, limit: float) -> Chain | None:
        return self._chain(lambda load, fill, rest: np.where(load <= limit, fill + rest, np.inf))

    def worst(self, chain: Chain) -> float:
        return max(load for load, _ in self._costs(chain))

    def total_fill(self, chain: Chain) -> float:
        return sum(fill for _, fill in self._costs(chain))

    def _costs(self, chain: Chain) -> list[tuple[float, float]]:
        ends = [i for i, _ in chain[1:]] + [self._end]
        to_end = list(accumulate(r for _, r in reversed(chain)))[::-1]
        found = []
        for (i, r), j, devices in zip(chain, ends, to_end, strict=True):
            load, fill = self._stages(devices, r)
            found.append((float(load[i, j]), float(fill[i, j])))
        return found

    def _stages(self, devices: int, replicas: int) -> tuple[Floats, Floats]:
        """Load and fill of the stages that have so many devices to the end and so many replicas, (sets, sets)."""
        rule, microbatches = self._replication.rule, self._replication.microbatches
        in_flight = rule.in_flight(microbatches, devices, replicas) if self._limited else 0.0
        if (replicas, in_flight) not in self._known:
            # Three stages stand for all: one in the middle, and the last, which sends nothing.
            costs = StageCosts(self._replication.on(replicas, [in_flight] * 3), self._inside)
            every, last = slice(None), slice(self._end, None)
            load = costs.load(1, every, every)
            load[:, last] = costs.load(2, every, last)
            self._known[replicas, in_flight] = np.maximum(load, self._ends / replicas), self._fill / replicas
        return self._known[replicas, in_flight]

    def _chain(self, extend: Callable[[Floats, Floats, Floats], Floats]) -> Chain | None:
        devices, sets = self._replication.devices, len(self._inside)
        least = np.full((devices + 1, sets), np.inf)
        least[0, self._end] = 0.0
        after, replicas = np.zeros(least.shape, dtype=np.int64), np.zeros(least.shape, dtype=np.int64)
        for k in range(1, devices + 1):
            for r in (r for r in self._replication.degrees if r <= k and np.isfinite(least[k - r]).any()):
                value = extend(*self._stages(k, r), least[k - r])
                best = value.argmin(axis=1)
                found = value[np.arange(sets), best]
                better = found < least[k]
                least[k, better], after[k, better], replicas[k, better] = found[better], best[better], r
        k, i = int(least[:, 0].argmin()), 0
        if not np.isfinite(least[k, 0]):
            return None
        chain = []
        while i != self._end:
            chain.append((i, int(replicas[k, i])))
            k, i = k - int(replicas[k, i]), int(after[k, i])
        return chain
