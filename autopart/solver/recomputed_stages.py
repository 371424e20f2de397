"""Best chains of down-sets where blocks may be computed again in backward: exact, by prices that become exact.

What a stage computes again depends on its two down-sets alone (see `intervals`), where a process has one stage. A
knapsack for every pair would take long, so all pairs begin with a lower bound of the seconds that are added: the
largest of

- the fractional knapsack (Dantzig, 1957), over classes of equal blocks by their ratio of seconds to bytes;
- for each class, how many of its blocks are needed where all others are computed again too.

A chain that is best at these prices gets its pairs priced exactly, until the best chain's pairs are exact already: then
no other chain is better, for its pairs cost at least what they are priced at.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from autopart.solver.chains import least_sum
from autopart.solver.problem import Floats, Problem
from autopart.solver.recomputation import ROUNDING, least_added
from autopart.solver.score import score
from autopart.solver.stage_costs import Members, StageCosts

# Rounds in which pairs become exact.
MOST_ROUNDS = 200


class RecomputingStages:
    """The stages between the down-sets of a family, with what each computes again to fit; see `chains.Chains`.

    Where a process holds several stages, each gets an equal share of its limits: enough for a first plan.

    Attributes:
        load: Seconds of each stage between two sets, infinite where none may be or none fits, (stages, sets, sets).
        fill: Weighted seconds of filling, (stages, sets, sets).
        boundary_fill: The same without what is computed again, for the set after each stage, (stages, sets).
    """

    def __init__(self, problem: Problem, inside: Members) -> None:
        assert problem.blocks is not None
        self.problem, self.inside, self.blocks = problem, inside, problem.blocks
        every, stages = slice(None), range(problem.stages)
        unlimited = replace(problem, blocks=None, limits=np.full(problem.processes, np.inf))
        costs = StageCosts(unlimited, inside)
        self._least = np.stack([costs.load(s, every, every) for s in stages])
        self._computing = self._least
        if problem.hidden:
            # What is computed again hides transfers too: only computing takes longer for it.
            alone = StageCosts(replace(unlimited, transfer=np.zeros_like(problem.transfer)), inside)
            self._computing = np.stack([alone.load(s, every, every) for s in stages])
        self.fill = np.stack([costs.fill(s, every, every) for s in stages])
        self.boundary_fill = costs.boundary_fill
        self._sharing = [len(problem.stages_of_process[p]) for p in problem.process]
        shares = [problem.limits[p] / count for p, count in zip(problem.process, self._sharing, strict=True)]
        workspace = self._workspace()
        self._excess = np.stack([costs.kept(s, every, every) + workspace - shares[s] for s in stages])
        member = np.zeros((problem.items, len(self.blocks.items)))
        for b, items in enumerate(self.blocks.items):
            member[list(items), b] = 1.0
        count = inside.astype(float) @ member
        self._begun, self._ended = count > 0, count == member.sum(axis=0)
        self._exact = ~(np.isfinite(self._least) & (self._excess > 0))
        self._added = np.stack([self._bound(s) for s in stages])
        possible = np.isfinite(self._added)
        added = np.where(possible, self._added, 0.0)
        repeats = problem.repeat * np.array(self._sharing)[:, None, None]
        self.load = np.maximum(self._least, self._computing + repeats * added)
        self.load[~possible] = np.inf
        self.fill += problem.fill_weight * added

    def _workspace(self) -> Floats:
        """The largest workspace between two sets, (sets, sets)."""
        largest = np.zeros((len(self.inside), len(self.inside)))
        for level in np.unique(self.problem.workspace[self.problem.workspace > 0]):
            count = self.inside[:, self.problem.workspace >= level].sum(axis=1)
            largest[count[None, :] > count[:, None]] = level
        return largest

    def _bound(self, s: int) -> Floats:
        """Seconds added at least, (sets, sets): nothing where the pair fits, infinite where it cannot."""
        again, spared, peak = self.blocks.again[s], self.blocks.spared[s], self.blocks.peak
        useful = spared > 0
        kinds, kind_of = np.unique(np.stack([again, spared]), axis=1, return_inverse=True)
        number = np.stack([self._between(useful & (kind_of == k)) for k in range(kinds.shape[1])])
        need = np.where(self._excess[s] > 0, self._excess[s] + peak[useful].min(initial=0.0), 0.0) * (1 - ROUNDING)
        ratio = np.divide(kinds[0], kinds[1], out=np.full(kinds.shape[1], np.inf), where=kinds[1] > 0)
        left, added = need.copy(), np.zeros_like(need)
        for k in np.argsort(ratio, kind="stable"):
            taken = np.minimum(left, number[k] * kinds[1, k])
            added += taken * (ratio[k] if np.isfinite(ratio[k]) else 0.0)
            left -= taken
        total = np.tensordot(kinds[1], number, axes=1)
        for k in np.flatnonzero(np.isfinite(ratio)):
            others = total - number[k] * kinds[1, k]
            least = np.ceil(np.maximum(0.0, need - others) / kinds[1, k] - ROUNDING)
            added = np.maximum(added, least * kinds[0, k])
        added[left > ROUNDING * np.abs(need)] = np.inf
        return added

    def _between(self, which: NDArray[np.bool_]) -> Floats:
        """How many of these blocks lie between two sets, (sets, sets)."""
        ended, begun = self._ended[:, which].astype(float), self._begun[:, which].astype(float)
        return np.maximum(0.0, ended.sum(axis=1) - begun @ ended.T)

    def least_load(self) -> list[int] | None:
        """The chain whose worst load is least."""
        return self._chain(lambda values, s: np.maximum(values[:, None], self.load[s]))

    def least_fill(self, limit: float) -> list[int] | None:
        """The chain with the least fill among those whose loads are at most `limit`."""
        return self._chain(lambda values, s: np.where(self.load[s] <= limit, values[:, None] + self.fill[s], np.inf))

    def _chain(self, extend: Callable[[Floats, int], Floats]) -> list[int] | None:
        last = len(self.inside) - 1
        least = np.full(last + 1, np.inf)
        least[0] = 0.0
        trail = []
        for s in range(self.problem.stages):
            reached = extend(least, s)
            trail.append(reached.argmin(axis=0))
            least = reached.min(axis=0)
        if not np.isfinite(least[last]):
            return None
        chain = [last]
        for before in reversed(trail):
            chain.append(int(before[chain[-1]]))
        return chain[::-1]

    def _along(self, table: Floats, chain: Sequence[int]) -> list[float]:
        return [float(table[s, chain[s], chain[s + 1]]) for s in range(self.problem.stages)]

    def worst(self, chain: list[int]) -> float:
        return max(self._along(self.load, chain))

    def total_fill(self, chain: list[int]) -> float:
        return sum(self._along(self.fill, chain))

    def assignment(self, chain: list[int]) -> list[int]:
        """The stage of each item."""
        return [int(s) for s in (~self.inside[chain[1:-1]]).sum(axis=0)]

    def make_exact(self, chain: list[int]) -> bool:
        """Price what the stages of a chain compute again exactly; whether any had only been bounded."""
        changed = False
        for s in range(self.problem.stages):
            at = (s, chain[s], chain[s + 1])
            if self._exact[at]:
                continue
            inside = self._ended[at[2]] & ~self._begun[at[1]] & (self.blocks.spared[s] > 0)
            again = self.blocks.again[s, inside]
            pick = least_added(again, self.blocks.spared[s, inside], self.blocks.peak[inside], self._excess[at])
            if pick is None:
                self.load[at] = np.inf
            else:
                added = float(again[pick].sum())
                computing = self._computing[at] + self.problem.repeat * self._sharing[s] * added
                self.load[at] = max(self._least[at], computing)
                self.fill[at] += self.problem.fill_weight * (added - self._added[at])
            self._exact[at] = changed = True
        return changed


def best_recomputing(problem: Problem, inside: Members, tolerance: float) -> tuple[list[int] | None, float]:
    """The best assignment along a family of down-sets, and a lower bound for all of them, within `tolerance` of it.

    Args:
        problem: It has one stage on each process.

    Returns:
        No assignment where none was found that fits; then the bound is infinite if it is proven that none does.
    """
    table = RecomputingStages(problem, inside)
    best, value, bound = None, np.inf, 0.0
    for _ in range(MOST_ROUNDS):
        chain, bound = least_sum(table, tolerance / 2)
        if chain is None:
            return best, np.inf if best is None else value
        assignment = table.assignment(chain)
        result = score(problem, assignment)
        if result.fits(problem) and result.step_s < value:
            best, value = assignment, result.step_s
        if value * (1 - tolerance) <= bound or not table.make_exact(chain):
            break
    return best, min(bound, value)
