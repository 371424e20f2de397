"""Best chains in a family of down-sets: one recursion behind the prefix heuristic and the exact dynamic program.

A down-set is what lies in the stages before a boundary: with an item, all that its value is made from. The stage
between two down-sets I and J, I in J, has the items of J that are not in I, and all it costs depends on I and J alone:
relays, because a net that crosses both boundaries crosses them whatever else is decided; even direct transfers and the
synchronisation of a state, because another stage has a pin or a user exactly when there is one outside J - I. Filling
the pipeline even costs a sum over the boundaries. So for a limit L on the load

    least[s][J] = fill[s][J] + min over I of least[s - 1][I],   where load(s, I, J) <= L and it fits

is exact for the family, and with max for + it gives the least possible L.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autopart.solver.chains import least_sum
from autopart.solver.problem import Floats, Problem
from autopart.solver.recomputed_stages import RecomputingStages
from autopart.solver.stage_costs import Members, StageCosts

# From what is least up to I, and the load of the stage after it: what is least up to J by way of I.
Extend = Callable[[Floats, Floats], Floats]


class Pairs(Protocol):
    """The loads of one stage between the down-sets that may enclose it."""

    def least(self, values: Floats, extend: Extend) -> Floats:
        """For each J the least, over I, of `values` at I extended by the stage, (sets,); infinite where no I is."""

    def into(self, after: int) -> tuple[NDArray[np.int64], Floats]:
        """The sets I before `after`, and the loads between."""


@dataclass(frozen=True, eq=False)
class DensePairs:
    """All pairs of a small family: `load` (sets, sets), infinite where the pair is no stage or does not fit."""

    load: Floats

    def least(self, values: Floats, extend: Extend) -> Floats:
        return extend(values[:, None], self.load).min(axis=0)

    def into(self, after: int) -> tuple[NDArray[np.int64], Floats]:
        return np.arange(len(self.load)), self.load[:, after]


@dataclass(frozen=True, eq=False)
class Intervals:
    """The stages between the down-sets of a family.

    Attributes:
        inside: Which items each down-set holds, (sets, items); the first is empty, the last is everything.
        pairs: For each stage the loads between two sets.
        fill: Weighted seconds of filling for each stage and the set after it, (stages, sets).
    """

    inside: Members
    pairs: Sequence[Pairs]
    fill: Floats

    def assignment(self, chain: list[int]) -> list[int]:
        """The stage of each item, for the down-sets of all boundaries, first and last included."""
        stage = np.zeros(self.inside.shape[1], dtype=np.int64)
        for before in chain[1:-1]:
            stage += ~self.inside[before]
        return [int(s) for s in stage]

    def worst(self, chain: list[int]) -> float:
        """The largest load of a chain; infinite if it has a pair that is no stage."""
        loads = []
        for s, pairs in enumerate(self.pairs):
            before, load = pairs.into(chain[s + 1])
            loads.append(load[before == chain[s]].min(initial=np.inf))
        return float(max(loads))

    def total_fill(self, chain: list[int]) -> float:
        return float(sum(self.fill[s, after] for s, after in enumerate(chain[1:])))

    def least_load(self) -> list[int] | None:
        """The chain whose worst load is least."""
        return self._chain(np.maximum, np.zeros_like(self.fill))

    def least_fill(self, limit: float) -> list[int] | None:
        """The chain with the least fill among those whose loads are at most `limit`."""
        return self._chain(lambda values, load: np.where(load <= limit, values, np.inf), self.fill)

    def most_even(self, limit: float) -> list[int] | None:
        """The chain with the least sum of squared loads among those whose loads are at most `limit`."""
        return self._chain(
            lambda values, load: np.where(load <= limit, values + load**2, np.inf), np.zeros_like(self.fill)
        )

    def _chain(self, extend: Extend, fill: Floats) -> list[int] | None:
        last = len(self.inside) - 1
        least = [np.full(last + 1, np.inf)]
        least[0][0] = 0.0
        for pairs, own in zip(self.pairs, fill, strict=True):
            least.append(pairs.least(least[-1], extend) + own)
        if not np.isfinite(least[-1][last]):
            return None
        chain = [last]
        for s in reversed(range(len(self.pairs))):
            before, load = self.pairs[s].into(chain[-1])
            chain.append(int(before[extend(least[s][before], load).argmin()]))
        return chain[::-1]

    def optimum(self, tolerance: float) -> tuple[list[int] | None, float]:
        """The chain of least worst load plus fill, and a lower bound within `tolerance` of it; none if none fits."""
        return least_sum(self, tolerance)


def tabulate(problem: Problem, inside: Members) -> Intervals:
    """The stages between any two of a few down-sets."""
    if problem.blocks is not None:
        again = RecomputingStages(problem, inside)
        return Intervals(inside, [DensePairs(load) for load in again.load], again.boundary_fill)
    costs = StageCosts(problem, inside)
    return Intervals(inside, [DensePairs(load) for load in _loads(costs, problem.stages)], costs.boundary_fill)


def _loads(costs: StageCosts, stages: int) -> list[Floats]:
    """The loads of each stage. The first begins with nothing, the last ends with everything, and stages alike share."""
    every, nothing, everything = slice(None), slice(None, 1), slice(-1, None)
    loads: list[Floats] = []
    for s in range(stages):
        before, after = nothing if s == 0 else every, everything if s == stages - 1 else every
        twin = next((t for t in range(1, s) if before == after == every and costs.alike(s, t)), None)
        if twin is None:
            loads.append(np.full((len(costs.inside),) * 2, np.inf))
            loads[s][before, after] = costs.load(s, before, after)
        else:
            loads.append(loads[twin])
    return loads
