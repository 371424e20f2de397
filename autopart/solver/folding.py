"""Items that may share a neighbour's stage in some best plan: moving them there never costs anything.

Move an item v from its stage a to the stage b of a neighbour u. Nobody else moves, so what changes is

    work       stage b gains v's
    touch      nets whose pins are just v and u are torn no longer; nets of v without u may be torn by b, or by a
    transfer   on every boundary between a and b: if b > a, v's own nets cross it no longer, and what v reads and u does
               not may now cross it; if b < a, nets that v alone reads cross it no longer, and v's own may now cross it

If on every stage and boundary the gain is at least the loss, no load, filling or memory grows; then in some best plan
v and u share a stage. The move keeps the order where u is the first of all that come after v, or the last of all that
come before it. It may leave a stage empty, so stages must be allowed to be; and it may part a block that was computed
again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from autopart.solver.problem import Floats, Net, Problem
from autopart.solver.reductions import condense
from autopart.solver.stage_costs import memory_never_binds


def fold(problem: Problem) -> tuple[Problem, list[int], list[int]]:
    """Unite items with neighbours while that keeps the optimum.

    Nothing changes where stages must not be empty, or blocks may be computed again.

    Returns:
        The smaller problem, for each old item the new one, and for each new item the old one whose stage it takes: a
        plan that moves there with all that is united costs no more.
    """
    new = list(range(problem.items))
    kept = list(range(problem.items))
    while problem.idle and problem.blocks is None and problem.stages > 1:
        pairs = _apart(_Folds(problem))
        if not pairs:
            break
        problem, united = condense(problem, pairs)
        new = [united[v] for v in new]
        moved = {item for item, _ in pairs}
        stays = {united[v]: old for v, old in enumerate(kept) if v not in moved}
        kept = [stays[v] for v in range(problem.items)]
    return problem, new, kept


def _apart(folds: _Folds) -> list[tuple[int, int]]:
    """Pairs without an item in common: each stays right when the others are united."""
    taken: set[int] = set()
    pairs = []
    for item in range(folds.problem.items):
        for neighbour, later in folds.neighbours(item):
            if not taken & {item, neighbour} and folds.free(item, neighbour, later):
                taken |= {item, neighbour}
                pairs.append((item, neighbour))
                break
    return pairs


@dataclass(frozen=True)
class _Gain:
    """What a move saves less what it costs, for each stage or boundary."""

    touch: Floats
    transfer: Floats
    send: Floats
    receive: Floats


class _Folds:
    """Which items may be folded into which neighbours, on the problem as it stands."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.nets_of: list[list[int]] = [[] for _ in range(problem.items)]
        self.pins = [frozenset((net.producer, *net.readers)) for net in problem.nets]
        for n, pins in enumerate(self.pins):
            for item in pins:
                self.nets_of[item].append(n)
        self.states: list[set[int]] = [set() for _ in range(problem.items)]
        for r, users in enumerate(problem.users):
            for item in users:
                self.states[item].add(r)
        self.roomy = all(memory_never_binds(problem, p) for p in range(problem.processes))

    def neighbours(self, item: int) -> Iterator[tuple[int, bool]]:
        """The first of all that come after it and the last of all that come before it, and whether it is later."""
        problem = self.problem
        after, before = problem.successors[item], problem.predecessors[item]
        if after and all(problem.descendants[after[0]] >> v & 1 for v in after):
            yield after[0], True
        if before and all(problem.ancestors[before[-1]] >> v & 1 for v in before):
            yield before[-1], False

    def free(self, item: int, neighbour: int, later: bool) -> bool:
        """Whether moving the item to the neighbour's stage costs nothing, whatever the plan."""
        problem = self.problem
        if not self.states[item] <= self.states[neighbour]:
            return False
        gain = self._gain(item, neighbour, later)
        if any((kind < 0).any() for kind in (gain.touch, gain.transfer)):
            return False
        # The boundary over which the item comes to a stage, and the stages it may come to.
        stages = slice(1, None) if later else slice(None, -1)
        spared = np.zeros(problem.stages) if problem.hidden else gain.touch.copy()
        if not problem.hidden:
            spared[stages] += gain.transfer
        work, fill = problem.work[:, item], problem.fill[:, item]
        if (problem.repeat * work > problem.repeat * spared)[stages].any():
            return False
        slower = np.diff(fill) if later else -np.diff(fill)
        if problem.fill_weight and (slower > gain.transfer).any():
            return False
        if self.roomy:
            return True
        arrives, leaves = (gain.receive, gain.send) if later else (gain.send, gain.receive)
        fits = not (leaves < 0).any() and not (problem.saved[stages, item] > arrives).any()
        return fits and problem.workspace[item] <= problem.workspace[neighbour]

    def _gain(self, item: int, neighbour: int, later: bool) -> _Gain:
        problem = self.problem
        touch = np.zeros(problem.stages)
        transfer, send, receive = (np.zeros(problem.stages - 1) for _ in range(3))
        for n in self.nets_of[item]:
            net = problem.nets[n]
            if len(self.pins[n]) == 2 and neighbour in self.pins[n]:
                touch += problem.touch[:, n]
            elif len(self.pins[n]) > 1 and neighbour not in self.pins[n]:
                touch -= problem.touch[:, n]
            crossing = self._crossings(net, item, neighbour, later)
            transfer += crossing * problem.transfer[:, n]
            send += crossing * problem.send[:, n]
            receive += crossing * problem.receive[:, n]
        return _Gain(touch, transfer, send, receive)

    def _crossings(self, net: Net, item: int, neighbour: int, later: bool) -> int:
        """1 if the net no longer crosses the boundaries that the item moves over, -1 if it may now, 0 if neither."""
        if net.backward:
            return 0
        if net.producer == item:
            return 1 if later else -1
        if later:
            return 0 if neighbour in net.readers or net.to_end else -1
        return 1 if not net.to_end and set(net.readers) <= {item, neighbour} else 0
