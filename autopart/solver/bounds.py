"""Lower bounds on the step time that need no search: shares of the work, the largest item, what an item pulls along."""

from __future__ import annotations

import numpy as np
from ortools.graph.python import max_flow

from autopart.solver.problem import Floats, Problem

# Items for which `containment_bound` is computed, heaviest first.
HEAVIEST = 6
# Seconds are counted in this share of the largest item for the maximum flow.
RESOLUTION = 1_000_000


def simple_bound(problem: Problem) -> float:
    """The larger of two: work spread evenly over the processes, and the slowest single item with the states it uses.

    With speeds that differ, process p can take at most L / c_p of the work when its load is L and c_p the least ratio
    of its time to the item's fastest; so L >= total / sum(1 / c_p).
    """
    if not problem.items:
        return 0.0
    fastest = problem.work.min(axis=0)
    with np.errstate(divide="ignore", invalid="ignore"):
        ratio = np.where(fastest > 0, problem.work / fastest, np.inf).min(axis=1)
    slowness = np.array([min(ratio[s] for s in own) for own in problem.stages_of_process])
    updates = float(problem.update.min(axis=0).sum()) if problem.users else 0.0
    shares = 1.0 / np.where(np.isfinite(slowness), slowness, 1.0)
    even = problem.repeat * float(fastest.sum()) / float(shares.sum())
    if problem.uniform:
        even += updates / problem.processes

    alone = problem.repeat * problem.work
    for r, users in enumerate(problem.users):
        alone[:, list(users)] += problem.update[:, r : r + 1]
    largest = float(alone.min(axis=0).max())
    return problem.least_fill + max(even, largest)


def containment_bound(problem: Problem) -> float:
    """The least load of any stage that holds one of the heaviest items.

    The stage S of an item v pays for what it holds and for every value that is made in it and read outside, or the
    other way round. Whatever S is, that is at least

        min over S with v in S of  sum_{u in S} work[u] + sum of transfer[n] over the nets with pins in S and outside

    which is one minimum cut: a language model's head pulls its loss along, for the logits are too many to send.
    """
    fill = problem.least_fill
    load = problem.repeat * problem.work.min(axis=0)
    heaviest = np.argsort(-load, kind="stable")[:HEAVIEST]
    return fill + max((_least_company(problem, load, int(v)) for v in heaviest if load[v] > 0), default=0.0)


def _least_company(problem: Problem, load: Floats, item: int) -> float:
    """The minimum cut of `containment_bound` for one item; capacities are rounded down."""
    unit = float(load[item]) / RESOLUTION
    source, sink, spare = problem.items, problem.items + 1, problem.items + 2
    flow = max_flow.SimpleMaxFlow()
    unbounded = 1000 * RESOLUTION
    flow.add_arc_with_capacity(source, item, unbounded)

    def pay(node: int, into: int, seconds: float) -> None:
        flow.add_arc_with_capacity(node, into, min(int(seconds / unit), unbounded))

    for u in range(problem.items):
        pay(u, sink, float(load[u]))
    torn = problem.repeat * problem.touch.min(axis=0)
    if not problem.hidden:
        torn = torn + (problem.repeat + problem.fill_weight) * _least(problem.transfer, problem)
    for n, net in enumerate(problem.nets):
        spare = _pay_if_torn(flow, (net.producer, *net.readers), int(torn[n] / unit), spare, unbounded)
    update, sync = problem.update.min(axis=0), problem.sync.min(axis=0)
    for r, users in enumerate(problem.users):
        pay_from = spare
        for user in users:
            flow.add_arc_with_capacity(user, pay_from, unbounded)
        pay(pay_from, sink, float(update[r]))
        spare = _pay_if_torn(flow, users, int(sync[r] / unit), spare + 1, unbounded)
    flow.solve(source, sink)
    return float(flow.optimal_flow()) * unit


def _least(transfer: Floats, problem: Problem) -> Floats:
    return transfer.min(axis=0) if problem.stages > 1 else np.zeros(len(problem.nets))


def _pay_if_torn(flow: max_flow.SimpleMaxFlow, pins: tuple[int, ...], units: int, spare: int, unbounded: int) -> int:
    """Arcs that cost `units` when some pins are inside and others are not; the next unused node number."""
    if units == 0 or len(pins) < 2:
        return spare
    inside, outside = spare, spare + 1
    flow.add_arc_with_capacity(inside, outside, units)
    for pin in pins:
        flow.add_arc_with_capacity(pin, inside, unbounded)
        flow.add_arc_with_capacity(outside, pin, unbounded)
    return spare + 2
