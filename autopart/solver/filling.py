"""What the relays of a pipeline add to its filling at least, within a limit on the load."""

from __future__ import annotations

from autopart.solver.frontiers import Frontiers
from autopart.solver.passing import Payer
from autopart.solver.segment import Segment


def least_filling(frontiers: Frontiers, limit: int) -> int:
    """The sum over the boundaries of the least filling of a down-set that they can be, in units.

    Back from the last boundary there is a least that must be done before it, for the stages behind it do no more than
    `limit` each; and after `Frontiers.missing` with the same limit it is known what can be done at most. What is torn
    without being relayed is left out.
    """
    units, problem = frontiers.units, frontiers.problem
    last, total = problem.stages - 1, 0
    nothing = {n: Payer(0, 0, 0) for n in range(len(units.torn))}
    least = int(units.due[last].sum()) - limit
    for j in range(last, 0, -1):
        found = []
        for value in ("filling", "paid"):
            segment = Segment(units, j, [frontiers.boundary(j)])
            segment.model.add(segment.seen_from(j, j, nothing) >= least)
            paid = segment.seen_from(j, j - 1, nothing)
            if not units.torn:
                segment.model.add(paid <= frontiers.fronts[j - 1].done + limit)
            lowest = frontiers.maximum(segment, -1 * (segment.filling(j) if value == "filling" else paid))
            if lowest is None:
                return total
            found.append(-lowest)
        total += max(0, found[0])
        least = found[1] - limit
    return total
