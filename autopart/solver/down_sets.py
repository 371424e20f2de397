"""Exact plans of narrow graphs: the best chain among all down-sets (see `intervals`)."""

from __future__ import annotations

from autopart.solver.intervals import Members, tabulate
from autopart.solver.problem import Problem, membership

# Pairs of down-sets are tabulated, so this many take a few hundred megabytes and a second.
MOST_DOWN_SETS = 1200


def solve_down_sets(problem: Problem, tolerance: float) -> tuple[list[int] | None, float] | None:
    """The best assignment and a lower bound within `tolerance` of it; (None, infinity) if none fits.

    None if the graph has too many down-sets, or processes hold several stages: then a load is not of one interval.
    """
    if problem.processes != problem.stages:
        return None
    inside = down_sets(problem, MOST_DOWN_SETS)
    if inside is None:
        return None
    table = tabulate(problem, inside)
    chain, bound = table.optimum(tolerance)
    return (None, bound) if chain is None else (table.assignment(chain), bound)


def down_sets(problem: Problem, most: int) -> Members | None:
    """Every down-set, by number of items, (sets, items); None if there are more than `most`."""
    needed = [bits & ~(1 << v) for v, bits in enumerate(problem.ancestors)]
    level = {0: tuple(v for v in range(problem.items) if not needed[v])}
    found = [0]
    while level:
        larger: dict[int, tuple[int, ...]] = {}
        for bits, ready in level.items():
            for v in ready:
                grown = bits | 1 << v
                if grown not in larger:
                    freed = tuple(w for w in problem.successors[v] if not needed[w] & ~grown)
                    larger[grown] = tuple(w for w in ready if w != v) + freed
        found += larger
        if len(found) > most:
            return None
        level = larger
    return membership(found, problem.items)
