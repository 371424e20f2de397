"""Best chains in a family of down-sets: one recursion behind the prefix heuristic and the exact dynamic program.

A down-set is what lies in the stages before a boundary: with an item, all that its value is made from. The stage
between two down-sets I and J, I in J, has the items of J that are not in I, and all it costs depends on I and J alone:
relays, because a net that crosses both boundaries crosses them whatever else is decided; even direct transfers and the
synchronisation of a state, because another stage has a pin or a user exactly when there is one outside J - I. So for a
limit L on the load

    least[s][J] = min over I of least[s - 1][I] + fill of (I, J) at stage s,   where load(s, I, J) <= L and it fits

is exact for the family, and with max for + it gives the least possible L.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from autopart.solver.problem import Floats, Problem
from autopart.solver.stage_costs import Members, StageCosts
from autopart.solver.stage_costs import memory_never_binds as memory_never_binds


@dataclass(frozen=True, eq=False)
class Intervals:
    """Load and fill of every stage between two down-sets of a family.

    Attributes:
        inside: Which items each down-set holds, (sets, items); the first is empty, the last is everything.
        load: For each stage (sets, sets), infinite where the pair is no stage or does not fit.
        fill: For each stage (sets, sets).
    """

    inside: Members
    load: list[Floats]
    fill: list[Floats]

    def assignment(self, chain: list[int]) -> list[int]:
        """The stage of each item, for the down-sets of all boundaries, first and last included."""
        stage = np.zeros(self.inside.shape[1], dtype=np.int64)
        for before in chain[1:-1]:
            stage += ~self.inside[before]
        return [int(s) for s in stage]

    def worst(self, chain: list[int]) -> float:
        return float(max(self.load[s][i, j] for s, (i, j) in enumerate(pairwise(chain))))

    def total_fill(self, chain: list[int]) -> float:
        return float(sum(self.fill[s][i, j] for s, (i, j) in enumerate(pairwise(chain))))

    def least_load(self) -> list[int] | None:
        """The chain whose worst load is least."""
        return self._chain(lambda s, least: np.maximum(least[:, None], self.load[s]))

    def least_fill(self, limit: float) -> list[int] | None:
        """The chain with the least fill among those whose loads are at most `limit`."""
        return self._chain(lambda s, least: np.where(self.load[s] <= limit, least[:, None] + self.fill[s], np.inf))

    def most_even(self, limit: float) -> list[int] | None:
        """The chain with the least sum of squared loads among those whose loads are at most `limit`."""
        return self._chain(lambda s, least: np.where(self.load[s] <= limit, least[:, None] + self.load[s] ** 2, np.inf))

    def _chain(self, extend: Callable[[int, Floats], Floats]) -> list[int] | None:
        count = len(self.inside)
        least = np.full(count, np.inf)
        least[0] = 0.0
        choice = []
        for s in range(len(self.load)):
            value = extend(s, least)
            best = value.argmin(axis=0)
            least = value[best, np.arange(count)]
            choice.append(best)
        if not np.isfinite(least[-1]):
            return None
        chain = [count - 1]
        for best in reversed(choice):
            chain.append(int(best[chain[-1]]))
        return chain[::-1]

    def optimum(self, tolerance: float) -> tuple[list[int] | None, float]:
        """The chain of least worst load plus fill, and a lower bound within `tolerance` of it; none if none fits.

        If the chain of least fill under a limit L has load l and fill f, then every chain with a load from l to L costs
        at least l + f; so the next limit is below l, until even the least load with fill f could not be better.
        """
        chain = self.least_load()
        if chain is None:
            return None, np.inf
        lowest = self.worst(chain)
        best, value = chain, lowest + self.total_fill(chain)
        limit = np.inf
        while True:
            chain = self.least_fill(limit)
            if chain is None:
                return best, value
            load, fill = self.worst(chain), self.total_fill(chain)
            if load + fill < value:
                best, value = chain, load + fill
            if lowest + fill >= value * (1 - tolerance):
                return best, min(value, lowest + fill)
            limit = float(np.nextafter(min(load, value - fill), -np.inf))


def tabulate(problem: Problem, inside: Members) -> Intervals:
    """Load and fill of every stage between two of the down-sets."""
    costs, every = StageCosts(problem, inside), slice(None)
    load = [costs.load(s, every, every) for s in range(problem.stages)]
    fill = [costs.fill(s, every, every) for s in range(problem.stages)]
    return Intervals(inside, load, fill)
