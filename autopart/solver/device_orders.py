"""Orders of a cluster's devices along the pipeline, where they are not all alike.

Which device comes first matters when speeds, memories or links differ: early stages keep more microbatches, and only
some boundaries have to cross between machines. Machines stay together, since every return to one costs a crossing more.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice, permutations, product

from autopart.cluster import Cluster

Order = tuple[int, ...]

# More orders than this are not tried; the first of them are those of the cluster and its reverse.
MOST_ORDERS = 24
# And no more are drawn to find them.
MOST_DRAWN = 5000


def device_orders(cluster: Cluster, used: int | None = None) -> list[Order]:
    """Orders that differ in more than the names of equal devices, the cluster's own first.

    Args:
        used: So many devices are used, the first of an order: orders that differ behind them are one. All, by default.
    """
    own = tuple(range(len(cluster)))
    used = len(own) if used is None else used
    found: dict[tuple[tuple[str, int], ...], Order] = {}
    for order in (own, own[::-1], *islice(_by_machine(cluster, used), MOST_DRAWN)):
        found.setdefault(_seen(cluster, order[:used]), order)
        if len(found) == MOST_ORDERS:
            break
    return list(found.values())


def _by_machine(cluster: Cluster, used: int) -> Iterator[Order]:
    machines: dict[int, list[int]] = {}
    for device, machine in enumerate(cluster.nodes):
        machines.setdefault(machine, []).append(device)
    for sequence in permutations(machines.values()):
        for inside in product(*(_distinct(cluster, machine, used) for machine in sequence)):
            yield tuple(device for machine in inside for device in machine)


def _distinct(cluster: Cluster, machine: list[int], used: int) -> list[Order]:
    """Orders of one machine's devices; equal ones stay in theirs, and so do those behind the first `used`."""
    if len({cluster.devices[d].name for d in machine}) == 1:
        return [tuple(machine)]
    orders: dict[tuple[str, ...], Order] = {}
    for first in islice(permutations(machine, min(used, len(machine))), MOST_DRAWN):
        order = (*first, *(d for d in machine if d not in first))
        orders.setdefault(tuple(cluster.devices[d].name for d in first), order)
    return list(orders.values())


def _seen(cluster: Cluster, order: Order) -> tuple[tuple[str, int], ...]:
    """What the pipeline sees of an order: kinds of devices, and machines by when they first come."""
    machines: dict[int, int] = {}
    return tuple((cluster.devices[d].name, machines.setdefault(cluster.nodes[d], len(machines))) for d in order)
