"""The best stages with tensor degrees, data degrees and options: exact dynamic programming (the rule is in `options`).

For a limit T on the time of a stage, fewer data replicas behind are always better. So, from the end, with k devices
left,

    least[I][k] = min over J, t, d of  d + least[J][k - t d],
                  where the best options of J - I for t, d and ceil(that / d) microbatches in flight take at most T

decides whether T can be kept; T is halved in between what can be kept and what cannot. It is exact over the down-sets
given (Piper's own table has the sum of data degrees as a third index).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopart.solver.families import family
from autopart.solver.option_stages import Degree, Integers, Split
from autopart.solver.options import OptionProblem, OptionStage, seconds_per_microbatch
from autopart.solver.stage_costs import Members

# How near to each other the bounds are brought that need no knapsack.
FIRST_TOLERANCE = 0.01
NO_LIMIT = float(np.finfo(np.float64).max)


@dataclass(frozen=True)
class OptionPlan:
    """A plan, what it takes for a microbatch, and a bound no plan is below."""

    stages: tuple[OptionStage, ...]
    seconds: float
    bound: float


def solve_options(problem: OptionProblem, tolerance: float = 1e-9) -> OptionPlan | None:
    """The best plan; none if nothing fits.

    Over prefixes of some orders, where there are too many down-sets; then the bound is the work in even shares.
    """
    inside, complete = family(problem.order)
    search = _Search(problem, inside)
    best = search.plan(NO_LIMIT)
    if best is None:
        return None
    work = _even_shares(problem)
    bound, value = work, seconds_per_microbatch(problem, best)
    # If every choice of options that fits were as fast as the fastest: a bound without a knapsack.
    optimistic = value
    while bound < optimistic * (1 - FIRST_TOLERANCE):
        limit = _between(bound, optimistic)
        if search.plan(limit, exactly=False) is None:
            bound = limit
        else:
            optimistic = limit
    step = FIRST_TOLERANCE
    while bound < value * (1 - tolerance):
        limit = min(_between(bound, value), bound * (1 + step) if bound else np.inf)
        found = search.plan(limit)
        if found is None:
            bound, step = limit, 2 * step
        else:
            best, value = found, min(limit, seconds_per_microbatch(problem, found))
    return OptionPlan(tuple(best), seconds_per_microbatch(problem, best), bound if complete else work)


def _between(low: float, high: float) -> float:
    return float(np.sqrt(low * high)) if low > 0 else high / 2


def _even_shares(problem: OptionProblem) -> float:
    """Every device busy all the time with each node's cheapest option."""
    return (
        sum(
            min(tensor * option.seconds for tensor, options in node.items() for option in options)
            for node in problem.options
        )
        / problem.devices
    )


class _Search:
    """Plans within a limit on the time of a stage."""

    def __init__(self, problem: OptionProblem, inside: Members) -> None:
        self._problem, self._inside = problem, inside
        self._most = min(problem.microbatches, problem.devices)
        tensors = sorted({t for node in problem.options for t in node if t <= problem.devices})
        self._degrees = {t: Degree(problem, inside, t) for t in tensors}
        data = [d for d in range(1, self._most + 1) if problem.microbatches % d == 0]
        self._pairs = {
            Split(t, d): degree.pairs(d)
            for t, degree in self._degrees.items()
            for d in data
            if t * d <= problem.devices
        }
        self._known: dict[tuple[int, int, Split, int], tuple[float, float]] = {}

    def plan(self, limit: float, exactly: bool = True) -> list[OptionStage] | None:
        """A plan whose stages take at most `limit`, if there is one.

        Args:
            exactly: Else all options that fit count as fast as the fastest.
        """
        sets, devices = len(self._inside), self._problem.devices
        never = self._most + 1
        least = np.full((sets, devices + 1), never, dtype=np.int64)
        least[-1] = 0
        after = np.zeros(least.shape, dtype=np.int64)
        chosen = np.zeros(least.shape, dtype=np.int64)
        for before in range(sets - 2, -1, -1):
            for number, (split, pairs) in enumerate(self._pairs.items()):
                used = split.tensor * split.data
                reach = np.flatnonzero((pairs.least_s[before] <= limit) & (pairs.possibly[before] > 0))
                reach = reach[least[reach, devices - used] < never]
                if not len(reach):
                    continue
                replicas = least[reach, : devices + 1 - used] + split.data
                replicas[replicas >= least[before, used:]] = never
                if exactly:
                    allowed = self._allowed(before, reach, split, replicas, limit)
                else:
                    allowed = pairs.possibly[before, reach]
                replicas[-(-replicas // split.data) > allowed[:, None]] = never
                best = replicas.argmin(axis=0)
                found = replicas[best, np.arange(len(best))]
                better = np.flatnonzero(found < least[before, used:])
                least[before, used + better] = found[better]
                after[before, used + better] = reach[best[better]]
                chosen[before, used + better] = number
        if least[0, devices] == never:
            return None
        return self._stages(after, chosen)

    def _allowed(self, before: int, reach: Integers, split: Split, replicas: Integers, limit: float) -> Integers:
        """For each stage from `before` the microbatches in flight with which it takes at most the limit.

        Args:
            reach: Where the stages end.
            replicas: Data replicas from `before`, for each of them and each number of devices left; those that matter
                are at most `self._most`, and only what may lower the least of them is looked into.
        """
        pairs, in_flight = self._pairs[split], -(-replicas // split.data)
        possibly = pairs.possibly[before, reach]
        allowed = np.zeros_like(possibly)
        for seconds, fits in pairs.surely:
            allowed = np.maximum(allowed, np.where(seconds[before, reach] <= limit, fits[before, reach], 0))
        known = np.where(in_flight <= allowed[:, None], replicas, self._most + 1).min(axis=0)
        unknown = (in_flight > allowed[:, None]) & (in_flight <= possibly[:, None]) & (replicas < known)
        for row in np.flatnonzero(unknown.any(axis=1)):
            asked = sorted(set(in_flight[row, unknown[row]].tolist()))
            low, high = 0, len(asked)
            while low < high:
                middle = (low + high) // 2
                if self._within(limit, (before, int(reach[row]), split, asked[middle])):
                    low = middle + 1
                else:
                    high = middle
            if low:
                allowed[row] = asked[low - 1]
        return allowed

    def _within(self, limit: float, stage: tuple[int, int, Split, int]) -> bool:
        """Whether a stage takes at most the limit, with so many microbatches in flight."""
        before, after, split, in_flight = stage
        degree = self._degrees[split.tensor]
        if stage not in self._known:
            self._known[stage] = degree.bounds(before, after, split.data, in_flight)
        least, most = self._known[stage]
        if least <= limit < most:
            exact, _ = degree.choose(before, after, split.data, in_flight)
            self._known[stage] = exact, exact
            return exact <= limit
        return most <= limit

    def _stages(self, after: Integers, chosen: Integers) -> list[OptionStage]:
        splits, left = list(self._pairs), self._problem.devices
        chain: list[tuple[int, int, Split]] = []
        before = 0
        while before != len(self._inside) - 1:
            split, end = splits[chosen[before, left]], int(after[before, left])
            chain.append((before, end, split))
            before, left = end, left - split.tensor * split.data
        stages: list[OptionStage] = []
        replicas = 0
        for before, end, split in reversed(chain):
            replicas += split.data
            _, choice = self._degrees[split.tensor].choose(before, end, split.data, -(-replicas // split.data))
            nodes = np.flatnonzero(self._inside[end] & ~self._inside[before])
            stages.append(OptionStage(tuple(nodes.tolist()), split.tensor, split.data, tuple(choice.tolist())))
        return stages[::-1]
