"""The best layouts and the best cut into two stages, chosen at once: exact dynamic programming over a graph's nodes.

What is minimised is what a user is given: `rewrite` -> `profile` -> `lower` -> `score`. That value is a sum over the
items of the local graph (operators, conversions), its nets and its held tensors, and of each there is a local rule:

- an item costs what the profiler makes of its call's signature: target, arguments, and shape, strides and flags of its
  tensors (`Pricing` asks the profiler's own `Runner`, once for each signature);
- a net is paid once if it crosses, a held tensor once in each stage that uses it (and both pay if both do);
- a value's second reader, and each after it, costs one addition of gradients;
- a storage is kept once, by its owner's stage, if anybody saves it.

So when the nodes up to v are decided, what they do to the rest is in the values that are still to be read: layout,
signature, stage, whether they have crossed, been read and been saved, and which conversions of them exist. That is the
state of the program. A step decides, for one node, the layouts of the tensors that it is the first to read, its
strategy, and the stages of itself and of each new conversion; every legal combination is tried. With f the fill and l_p
the load of stage p, the step time is max(f + l_0, f + l_1): both terms are sums, so of the ways to reach one state only
those are kept that no other beats in both (and in the bytes of each stage: what is kept, and the largest workspace).
Nothing else is left out. `value` walks one given choice by the same rules; `truth` values it as the planner does.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from math import inf
from typing import Any

import numpy as np
from torch import fx

from autopart.graph import Graph
from autopart.profiler import profile
from autopart.runtime import collectives
from autopart.sharding import Choice, Program, rewrite
from autopart.solver import lower
from autopart.solver.score import Score, score
from benchmarks.joint_draft import Cell, Draft, Fixed, Storage
from benchmarks.joint_rules import Rules

# Ways that differ by less than this share of the time to beat are taken to be equal.
EQUAL = 1e-11


@dataclass(frozen=True)
class Optimum:
    """The best of all.

    Attributes:
        step_s: Its step time; infinite if nothing fits.
        fixed: The layouts and the stages; None if nothing fits.
        bytes: Of each stage, if memory was counted.
        states: How many states were met.
        ways: How many ways were kept.
    """

    step_s: float
    fixed: Fixed | None
    bytes: tuple[float, float] | None
    states: int
    ways: int


@dataclass
class Oracle(Rules):
    """The search over all steps; see the module's docstring."""

    _options: dict[Hashable, list[Any]] = field(init=False, default_factory=dict)
    _cells: list[tuple[Hashable, Any]] = field(init=False, default_factory=list)
    _number: dict[tuple[Hashable, Any], int] = field(init=False, default_factory=dict)

    def optimum(self, to_beat_s: float = inf) -> Optimum:
        """The best layouts and stages.

        Args:
            to_beat_s: A step time that is known to be reached.
        """
        width = 6 if self.memory else 2
        ways = {(frozenset(), (False, False)): (np.zeros((1, width)), np.zeros(1, dtype=np.int64))}
        trail: list[tuple[list[Any], np.ndarray, np.ndarray]] = []
        states = kept = 0
        for step in range(len(self.steps)):
            options: list[Any] = []
            reached: dict[Hashable, list[tuple[np.ndarray, np.ndarray, int]]] = defaultdict(list)
            for (slots, used), (costs, labels) in ways.items():
                near, changes = self._changes(step, slots)
                rest = slots - near
                for cost, new, touched, decided in changes:
                    total = costs + cost
                    if self.memory:
                        np.maximum(costs[:, 4:], cost[4:], out=total[:, 4:])
                    key = rest | new, (used[0] or touched[0], used[1] or touched[1])
                    reached[key].append((total, labels, len(options)))
                    options.append(decided)
            ways, parents, chosen, label = {}, [], [], 0
            for key, found in reached.items():
                total = np.concatenate([f[0] for f in found])
                parent = np.concatenate([f[1] for f in found])
                option = np.concatenate([np.full(len(f[1]), f[2]) for f in found])
                alive = np.flatnonzero(self._alive(total, to_beat_s))
                alive = alive[_unbeaten(total[alive], EQUAL * (to_beat_s if to_beat_s < inf else 0.0))]
                if len(alive):
                    ways[key] = total[alive], np.arange(label, label + len(alive))
                    parents.append(parent[alive])
                    chosen.append(option[alive])
                    label += len(alive)
            if not ways:
                return Optimum(inf, None, None, states, kept)
            trail.append((options, np.concatenate(parents), np.concatenate(chosen)))
            states, kept = states + len(ways), kept + label
        ends = [way for (_, used), (c, i) in ways.items() if self._full(used) for way in zip(c, i, strict=True)]
        if not ends:
            return Optimum(inf, None, None, states, kept)
        cost, label = min(ends, key=lambda end: end[0][:2].max())
        size = (cost[2] + cost[4], cost[3] + cost[5]) if self.memory else None
        return Optimum(float(cost[:2].max()), self._traced(trail, int(label)), size, states, kept)

    def _full(self, used: tuple[bool, bool]) -> bool:
        """Whether no stage is empty that should not be."""
        return all(used[: self.stages])

    def _alive(self, total: np.ndarray, to_beat_s: float) -> np.ndarray:
        alive = total[:, :2].max(axis=1) <= to_beat_s * (1 + 1e-9)
        if self.memory and self.fixed is None:
            alive &= (total[:, 2:4] + total[:, 4:] <= self.limit).all(axis=1)
        return alive

    def _traced(self, trail: list[Any], label: int) -> Fixed:
        decided: dict[Hashable, Any] = {}
        for options, parents, chosen in reversed(trail):
            decided.update(options[chosen[label]])
            label = int(parents[label])
        held = {key[1]: x for key, x in decided.items() if isinstance(key, tuple) and key[0] == "held"}
        strategies = {key[1]: x for key, x in decided.items() if isinstance(key, tuple) and key[0] == "strategy"}
        stages = {key[1]: x for key, x in decided.items() if isinstance(key, tuple) and key[0] == "stage"}
        return Fixed(Choice(held, strategies), stages)

    def _changes(self, step: int, slots: frozenset[int]) -> tuple[frozenset[int], list[Any]]:
        """What a step may do to a state: the cells near it, and every (cost, new cells, stages used, decisions)."""
        node, cells = self.steps[step], dict(self._cells[number] for number in slots)
        sources = node.all_input_nodes if node.op == "output" else self.program.operations[node].operands
        near = {source: cells[source] for source in sources if source in cells}
        if node.name in self.group and ("group", self.group[node.name]) in cells:
            near["group", self.group[node.name]] = cells["group", self.group[node.name]]
        for cell in [*near.values()]:
            for value in [cell.base, *(v for _, v in cell.converted)] if isinstance(cell, Cell) else ():
                if value.storage is not None:
                    near[value.storage] = cells[value.storage]
        elsewhere = {
            value.storage
            for slot, cell in cells.items()
            if isinstance(cell, Cell) and slot not in near
            for value in (cell.base, *(v for _, v in cell.converted))
        }
        needed = frozenset(near.keys() & elsewhere)
        items = self._numbered(near)
        key = step, items, needed
        if key not in self._options:
            self._options[key] = list(self._tried(step, near, needed))
        return items, self._options[key]

    def _numbered(self, cells: Mapping[Hashable, Any]) -> frozenset[int]:
        """Cells as numbers, which are quickly compared."""
        numbers = []
        for pair in cells.items():
            number = self._number.setdefault(pair, len(self._cells))
            if number == len(self._cells):
                self._cells.append(pair)
            numbers.append(number)
        return frozenset(numbers)

    def _tried(self, step: int, near: dict[Hashable, Any], needed: frozenset[Hashable]) -> Iterator[Any]:
        """Every way to decide a step, without those that another beats in everything."""
        node = self.steps[step]
        start = Draft(near, [0.0] * (6 if self.memory else 2))
        drafts = self._outputs(start, node) if node.op == "output" else self._operator(start, node)
        found: dict[Hashable, list[Draft]] = defaultdict(list)
        for draft in drafts:
            touched = [False, False]
            for (kind, _), decision in draft.decided:
                if kind == "stage":
                    touched[decision] = True
            self._forget(draft, step, needed)
            found[self._numbered(draft.slots), tuple(touched)].append(draft)
        for (slots, touched), same in found.items():
            costs = np.array([draft.cost for draft in same])
            for i in _unbeaten(costs, 0.0):
                yield costs[i], slots, touched, same[i].decided

    def _forget(self, draft: Draft, step: int, needed: frozenset[Hashable]) -> None:
        """Drop what nobody will read any more."""
        for slot in [*draft.slots]:
            if self._over(slot, step):
                del draft.slots[slot]
        values = [v for c in draft.slots.values() if isinstance(c, Cell) for v in (c.base, *dict(c.converted).values())]
        used = {value.storage for value in values} | needed
        for slot, cell in [*draft.slots.items()]:
            if isinstance(cell, Storage) and slot not in used:
                del draft.slots[slot]

    def _over(self, slot: Any, step: int) -> bool:
        if isinstance(slot, fx.Node):
            return self.last_reader.get(slot, -1) <= step
        return slot[0] == "local" or (slot[0] == "group" and self.last_member[slot[1]] <= step)


def value(oracle: Oracle, fixed: Fixed) -> Optimum:
    """One choice and assignment, by the program's rules; memory included."""
    names = ("graph", "program", "cluster", "workload", "pricing")
    return Oracle(**{name: getattr(oracle, name) for name in names}, memory=True, fixed=fixed).optimum()


def truth(oracle: Oracle, fixed: Fixed) -> tuple[Score, bool]:
    """One choice and assignment, by the functions that plan; and whether it fits."""
    t = oracle.program.t
    places = oracle.cluster.grouped(t)
    local = rewrite(oracle.graph, fixed.choice, t)
    costs = profile(local, places, oracle.cluster.group_link(t))
    lowered = lower(local, costs, places, oracle.workload, 2)
    keys = item_keys(oracle.program, local)
    found = score(lowered.problem, [fixed.stages[keys[node]] for node in lowered.calls])
    return found, found.fits(lowered.problem)


def item_keys(program: Program, local: Graph) -> dict[fx.Node, Hashable]:
    """Call node of a local graph -> key of the item in the oracle."""
    known = {node.name for node in program.capture.calls}
    keys: dict[fx.Node, Hashable] = {}
    inner = 0
    for node in local.primary.calls:
        if node.name in known:
            keys[node], inner = node.name, 0
        elif getattr(node.target, "__module__", "") == collectives.__name__:
            keys[node] = node.args[0].name, node.target.__name__, repr(tuple(node.args[1:])), repr(dict(node.kwargs))
        else:
            keys[node], inner = (node.name.partition("_local")[0], inner), inner + 1
    assert len(set(keys.values())) == len(keys)
    return keys


def _unbeaten(costs: np.ndarray, equal: float) -> np.ndarray:
    """Rows that no other row beats, or equals and comes before, in every column.

    Args:
        equal: Times (the first two columns) that differ by less are equal.
    """
    order = np.lexsort(costs.T[::-1])
    if costs.shape[1] == 2:
        second = costs[order, 1]
        best = np.minimum.accumulate(second)
        return order[np.concatenate([[True], second[1:] < best[:-1] - equal])] if len(order) else order
    slack = np.zeros(costs.shape[1])
    slack[:2] = equal
    alive: list[int] = []
    for row in order:
        if not alive or not (costs[alive] <= costs[row] + slack).all(axis=1).any():
            alive.append(int(row))
    return np.array(alive, dtype=np.int64)
