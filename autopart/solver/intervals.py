"""Best chains in a family of down-sets: one recursion behind the prefix heuristic and the exact dynamic program.

A down-set is what lies in the stages before a boundary: with an item, all that its value is made from. The stage
between two down-sets I and J, I in J, has the items of J that are not in I, and all it costs depends on I and J alone:
relays, because a net that crosses both boundaries crosses them whatever else is decided; even the synchronisation of a
state, because another stage holds the state exactly when it has a user outside J - I. So for a limit L on the load

    least[s][J] = min over I of least[s - 1][I] + fill of (I, J) at stage s,   where load(s, I, J) <= L and it fits

is exact for the family, and with max for + it gives the least possible L.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopart.solver.problem import Floats, Problem

Members = NDArray[np.bool_]


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
    """Load and fill of every stage between two of the down-sets.

    Where a process holds several stages, each gets an equal share of its limits: enough for a first plan.
    """
    stages = problem.stages
    outside_of = inside.astype(np.float32) @ (~inside).astype(np.float32).T
    stage_like = (outside_of == 0) & ~np.eye(len(inside), dtype=bool)
    barred = np.where(stage_like, 0.0, np.inf)
    crossing = _crossing(problem, inside)
    binding = [s for s in range(stages) if not memory_never_binds(problem, problem.process[s])]

    shared = [r for r, users in enumerate(problem.users) if len(users) > 1]
    single = [r for r, users in enumerate(problem.users) if len(users) == 1]
    owner = [problem.users[r][0] for r in single]
    used = [inside[:, list(problem.users[r])].sum(axis=1) for r in shared]
    gained = [count[None, :] - count[:, None] for count in used]
    held = [gain > 0 for gain in gained]
    torn = [(gain > 0) & (gain < len(problem.users[r])) for gain, r in zip(gained, shared, strict=True)]
    workspace = _largest(problem, inside) if binding else 0.0

    load, fill = [], []
    for s in range(stages):
        sharing = len(problem.stages_of_process[problem.process[s]])
        item = problem.repeat * problem.work[s]
        np.add.at(item, owner, problem.update[s, single])
        into = crossing @ problem.transfer[s - 1] if s else np.zeros(len(inside))
        out = crossing @ problem.transfer[s] if s < stages - 1 else np.zeros(len(inside))
        total = inside @ item
        cost = (total + problem.repeat * out)[None, :] - (total - problem.repeat * into)[:, None]
        for r, is_held, is_torn in zip(shared, held, torn, strict=True):
            if problem.update[s, r] or problem.sync[s, r]:
                cost = cost + problem.update[s, r] * is_held + problem.sync[s, r] * is_torn
        cost = cost * sharing + barred
        if s in binding:
            kept = problem.saved[s].copy()
            np.add.at(kept, owner, problem.state_bytes[single])
            total = inside @ kept
            received = crossing @ problem.receive[s - 1] if s else np.zeros(len(inside))
            sent = crossing @ problem.send[s] if s < stages - 1 else np.zeros(len(inside))
            size = (total + sent)[None, :] - (total - received)[:, None]
            for r, is_held in zip(shared, held, strict=True):
                size = size + problem.state_bytes[r] * is_held
            cost[size * sharing + workspace > problem.limits[problem.process[s]] * (1 + 1e-12)] = np.inf
        load.append(cost)
        done = inside @ problem.fill[s]
        fill.append(problem.fill_weight * (done[None, :] - (done - into)[:, None]))
    return Intervals(inside, load, fill)


def _crossing(problem: Problem, inside: Members) -> Floats:
    """Whether each net leaves each down-set, (sets, nets)."""
    crossing = np.zeros((len(inside), len(problem.nets)))
    for n, net in enumerate(problem.nets):
        made = inside[:, net.producer]
        if net.to_end:
            crossing[:, n] = made
        elif len(net.readers) == 1:
            crossing[:, n] = made & ~inside[:, net.readers[0]]
        else:
            crossing[:, n] = made & ~inside[:, list(net.readers)].all(axis=1)
    return crossing


def _largest(problem: Problem, inside: Members) -> Floats:
    """The largest workspace of the items between two down-sets: one pass for each distinct size, smallest first."""
    largest = np.zeros((len(inside), len(inside)))
    for level in np.unique(problem.workspace[problem.workspace > 0]):
        count = inside[:, problem.workspace >= level].sum(axis=1)
        largest[count[None, :] > count[:, None]] = level
    return largest


def memory_never_binds(problem: Problem, p: int) -> bool:
    """Whether process p has room for everything at once."""
    if not np.isfinite(problem.limits[p]):
        return True
    most = float(problem.workspace.max())
    for s in problem.stages_of_process[p]:
        most += float(problem.saved[s].sum() + problem.state_bytes.sum())
        most += float(problem.send[s].sum()) if s < problem.stages - 1 else 0.0
        most += float(problem.receive[s - 1].sum()) if s else 0.0
    return most <= problem.limits[p]
