"""The down-sets that boundaries between stages may be chosen from: all, while they are few, or prefixes of orders."""

from __future__ import annotations

from itertools import islice

import numpy as np

from autopart.solver.enumeration import down_sets
from autopart.solver.orders import orders
from autopart.solver.problem import Problem
from autopart.solver.stage_costs import Members

# Every pair of down-sets is tabulated, for several numbers of devices: this many take half a gigabyte.
MOST_DOWN_SETS = 1200
# Topological orders whose prefixes stand for all down-sets where those are too many.
ORDERS = 6


def family(problem: Problem, most: int = MOST_DOWN_SETS) -> tuple[Members, bool]:
    """Down-sets, (sets, items), by number of items, from nothing to everything; and whether they are all there are.

    Args:
        most: How many may be listed; at least two for each of the orders.
    """
    inside = down_sets(problem, most)
    if inside is not None:
        return inside, True
    lengths = np.unique(np.linspace(0, problem.items, most // ORDERS).astype(np.int64))
    prefixes = []
    for order in islice(orders(problem), ORDERS):
        position = np.empty(problem.items, dtype=np.int64)
        position[order] = np.arange(problem.items)
        prefixes.append(position[None, :] < lengths[:, None])
    found = np.unique(np.concatenate(prefixes), axis=0)
    return found[np.argsort(found.sum(axis=1), kind="stable")], False
