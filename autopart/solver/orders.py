"""Topological orders of the items: the lines along which the prefix heuristic may cut."""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from autopart.solver.problem import Floats, Problem


def orders(problem: Problem, seed: int = 0) -> Iterator[list[int]]:
    """An endless supply of topological orders, the likely ones first; the same for the same problem and seed."""
    yield list(range(problem.items))
    yield depth_first(problem)
    yield latest(problem)
    yield least_cut(problem)
    generator = random.Random(seed)
    while True:
        weights = [generator.random() for _ in range(problem.items)]
        yield by_priority(problem, weights.__getitem__)
        yield depth_first(problem, weights)


def by_priority(problem: Problem, priority: Callable[[int], float]) -> list[int]:
    """Always the ready item of least priority (then least number)."""
    missing = [len(p) for p in problem.predecessors]
    ready = [(priority(v), v) for v in range(problem.items) if not missing[v]]
    heapq.heapify(ready)
    order = []
    while ready:
        _, item = heapq.heappop(ready)
        order.append(item)
        for after in problem.successors[item]:
            missing[after] -= 1
            if not missing[after]:
                heapq.heappush(ready, (priority(after), after))
    return order


def shuffled(problem: Problem, stage: Sequence[int], generator: random.Random) -> list[int]:
    """An order that goes through the stages of a plan one after the other, at random within each."""
    weights = [generator.random() for _ in range(problem.items)]
    return by_priority(problem, lambda v: stage[v] + weights[v])


def depth_first(problem: Problem, weights: list[float] | None = None) -> list[int]:
    """Finish a branch before its sibling is begun: the post-order of a walk back from the last items."""
    rank = weights if weights is not None else [float(v) for v in range(problem.items)]
    seen = [False] * problem.items
    order: list[int] = []
    for root in range(problem.items):
        if problem.successors[root] or seen[root]:
            continue
        stack = [(root, iter(sorted(problem.predecessors[root], key=lambda v: rank[v])))]
        seen[root] = True
        while stack:
            item, remaining = stack[-1]
            for before in remaining:
                if not seen[before]:
                    seen[before] = True
                    stack.append((before, iter(sorted(problem.predecessors[before], key=lambda v: rank[v]))))
                    break
            else:
                order.append(item)
                stack.pop()
    return order


def latest(problem: Problem) -> list[int]:
    """Every item just before its first reader: what only the end needs is made at the end."""
    position = {item: -i for i, item in enumerate(_reverse_by_number(problem))}
    return by_priority(problem, lambda v: position[v])


def _reverse_by_number(problem: Problem) -> list[int]:
    missing = [len(s) for s in problem.successors]
    ready = [-v for v in range(problem.items) if not missing[v]]
    heapq.heapify(ready)
    order = []
    while ready:
        item = -heapq.heappop(ready)
        order.append(item)
        for before in problem.predecessors[item]:
            missing[before] -= 1
            if not missing[before]:
                heapq.heappush(ready, -before)
    return order


def seconds_of_nets(problem: Problem) -> Floats:
    """What crossing one boundary costs each net, in the mean over boundaries and stages, (nets,)."""
    relayed = problem.transfer.mean(axis=0) if problem.stages > 1 else np.zeros(len(problem.nets))
    return relayed + problem.touch.mean(axis=0)


def least_cut(problem: Problem) -> list[int]:
    """Always the ready item after which the nets that cross the cut take the least time."""
    weight = seconds_of_nets(problem)
    pins = [{net.producer, *net.readers} for net in problem.nets]
    placed = [0] * len(pins)
    nets_of: list[list[int]] = [[] for _ in range(problem.items)]
    for n, items in enumerate(pins):
        for item in items:
            nets_of[item].append(n)

    def growth(item: int) -> float:
        opened = sum(weight[n] for n in nets_of[item] if not placed[n])
        closed = sum(weight[n] for n in nets_of[item] if placed[n] == len(pins[n]) - 1 and not problem.nets[n].to_end)
        return float(opened - closed)

    missing = [len(p) for p in problem.predecessors]
    ready = {v for v in range(problem.items) if not missing[v]}
    order = []
    while ready:
        item = min(ready, key=lambda v: (growth(v), v))
        ready.remove(item)
        order.append(item)
        for n in nets_of[item]:
            placed[n] += 1
        for after in problem.successors[item]:
            missing[after] -= 1
            if not missing[after]:
                ready.add(after)
    return order
