"""Every way to lay one stage between what comes before it and what comes after, as paths through a graph of few states.

A stage s of a plan labels each item: before it, in it, or after it. Items are taken one after the other in a fixed
order; what has been decided matters to the rest only through the nets that have items on both sides of the order. Of
such an open net it is enough to know its producer's label, and which charges its readers have caused so far. Labellings
that agree in that are one state, so a sweep has as many states as the graph is wide, not as it is long: its open nets
are the separators of a path decomposition (Robertson and Seymour, 1983).

What a labelling costs stage s, in the load of `problem`, with every net that only flows forward:

    sum_{v in} work[s, v]  +  touch[s, n] for nets torn at s  +  transfer[s - 1, n], transfer[s, n] for nets that cross

A state that several items use is charged for the first of them alone, nets that flow backward and the sync of shared
states not at all: a sweep's loads are never above the problem's.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autopart.solver.problem import Floats, Problem

Arrays = tuple[NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any], NDArray[Any]]

BEFORE, IN, AFTER, UNSEEN = range(4)
# Readers seen in the stage and after it, as bits. A code of an open net is 4 * producer's label + these.
READ_IN, READ_AFTER = 1, 2
# Arcs of one sweep: 60 MB, and about half a second.
MOST_ARCS = 2_000_000


class TooWideError(Exception):
    """A sweep would have too many states, or take too long."""


@dataclass(frozen=True, eq=False)
class Sweep:
    """States by step, and the arcs that lead to them.

    Attributes:
        order: The item of each step.
        begin: Number of the first state before each step, and behind the last one, (steps + 2,); there is one state at
            the start and one at the end.
        first: Number of the first arc into each state, (states + 1,).
        source: State that each arc comes from; `label` what it says of the step's item; `seconds` what that costs.
    """

    order: NDArray[np.int64]
    begin: NDArray[np.int64]
    first: NDArray[np.int64]
    source: NDArray[np.int32]
    label: NDArray[np.int8]
    seconds: Floats

    @property
    def states(self) -> int:
        return int(self.begin[-1])

    @property
    def arrays(self) -> Arrays:
        """The graph as compiled functions take it."""
        return self.begin, self.first, self.source, self.label, self.seconds


@dataclass(frozen=True)
class _Charges:
    """Seconds of a net at one stage: torn, relayed into it, relayed out of it; and at the producer's label at once."""

    touch: float
    enter: float
    leave: float
    at_once: tuple[float, float, float]

    def due(self, code: int) -> float:
        producer, read = divmod(code, 4)
        outside = self.touch + self.leave
        if producer == BEFORE:
            return self.touch * bool(read & READ_IN) + self.enter * bool(read) + self.leave * bool(read & READ_AFTER)
        return outside if producer == IN and read & READ_AFTER else 0.0

    def plain(self, code: int) -> int:
        """One code for all that cost the same now and later."""
        producer, read = divmod(code, 4)
        if producer == BEFORE:
            if not self.enter and not self.leave:
                read &= READ_IN if self.touch else 0
            elif not self.touch and read & READ_AFTER:
                read = READ_AFTER
        elif producer == IN:
            read &= READ_AFTER if self.touch or self.leave else 0
        elif producer == AFTER:
            read = 0
        return 4 * producer + read


def sweep(
    problem: Problem,
    stage: int,
    allowed: NDArray[np.bool_],
    order: Sequence[int],
    most: int,
    deadline: float = math.inf,
) -> Sweep:
    """The sweep of one stage.

    Args:
        allowed: Labels that each item may have, (items, 3).
        order: Of the items; any order will do, but the number of states depends on it.
        most: States between two steps.
        deadline: In seconds of `time.monotonic`.

    Raises:
        TooWideError: There would be more, or more arcs than `MOST_ARCS`, or the deadline has passed.
    """
    return _Builder(problem, stage, allowed, order, most, deadline).build()


class _Builder:
    def __init__(
        self,
        problem: Problem,
        stage: int,
        allowed: NDArray[np.bool_],
        order: Sequence[int],
        most: int,
        deadline: float,
    ) -> None:
        self.allowed, self.order, self.most, self.deadline = allowed, order, most, deadline
        nets = list(problem.forward_nets)
        tables = [_charges(problem, stage, n) for n, net in enumerate(problem.nets) if not net.backward]
        self.after_label = [_after_label(charges) for charges in tables]
        position = {item: i for i, item in enumerate(order)}
        self.made: list[list[int]] = [[] for _ in order]
        self.read: list[list[int]] = [[] for _ in order]
        self.last: list[int] = []
        for n, net in enumerate(nets):
            self.made[net.producer].append(n)
            for reader in net.readers:
                self.read[reader].append(n)
            self.last.append(max(position[item] for item in (net.producer, *net.readers)))
        self.seconds = np.zeros((problem.items, 3))
        self.seconds[:, IN] = problem.repeat * problem.work[stage]
        for r, users in enumerate(problem.users):
            self.seconds[users[0], IN] += problem.update[stage, r]
        for net, charges in zip(nets, tables, strict=True):
            self.seconds[net.producer] += charges.at_once

    def build(self) -> Sweep:
        open_nets: list[int] = []
        codes = np.zeros((1, 0), np.uint8)
        begin, first, sources, labels, seconds = [0, 1], [np.zeros(2, np.int64)], [], [], []
        arcs = 0
        for step, item in enumerate(self.order):
            parts, where = [], []
            fresh = [n for n in (*self.made[item], *self.read[item]) if n not in open_nets]
            unseen = np.full((len(codes), len(fresh)), 4 * UNSEEN, np.uint8)
            wide = np.concatenate([codes, unseen], axis=1)
            columns = {n: c for c, n in enumerate([*open_nets, *fresh])}
            keep = [c for n, c in columns.items() if self.last[n] > step]
            for label in np.flatnonzero(self.allowed[item]):
                source, after, cost = self._labelled(wide, columns, item, int(label))
                parts.append(after[:, keep])
                where.append((source, np.full(len(source), label, np.int8), cost + self.seconds[item, label]))
            codes, state = _distinct(np.concatenate(parts))
            if len(codes) > self.most or arcs + len(state) > MOST_ARCS or time.monotonic() > self.deadline:
                raise TooWideError
            source, label_of, cost = (np.concatenate(column) for column in zip(*where, strict=True))
            by_state = np.argsort(state, kind="stable")
            ends = arcs + np.searchsorted(state[by_state], np.arange(1, len(codes) + 1))
            arcs += len(state)
            first.append(ends)
            sources.append((source[by_state] + begin[-2]).astype(np.int32))
            labels.append(label_of[by_state])
            seconds.append(cost[by_state])
            begin.append(begin[-1] + len(codes))
            open_nets = [n for n in columns if self.last[n] > step]
        return Sweep(
            np.array(self.order, dtype=np.int64),
            np.array(begin, dtype=np.int64),
            np.concatenate(first),
            np.concatenate(sources),
            np.concatenate(labels),
            np.concatenate(seconds),
        )

    def _labelled(
        self, codes: NDArray[np.uint8], columns: dict[int, int], item: int, label: int
    ) -> tuple[NDArray[np.int64], NDArray[np.uint8], Floats]:
        """States in which the item may have the label, the codes after it, and what the nets then cost more."""
        legal = np.ones(len(codes), dtype=bool)
        for nets, role in ((self.read[item], 0), (self.made[item], 1)):
            for n in nets:
                legal &= LEGAL[role, label, codes[:, columns[n]]]
        source = np.flatnonzero(legal)
        after, cost = codes[source], np.zeros(len(source))
        for nets, role in ((self.read[item], 0), (self.made[item], 1)):
            for n in nets:
                code, more = self.after_label[n]
                old = after[:, columns[n]]
                cost += more[role, label, old]
                after[:, columns[n]] = code[role, label, old]
        return source, after, cost


def _charges(problem: Problem, stage: int, n: int) -> _Charges:
    net, repeat = problem.nets[n], problem.repeat
    enter = repeat * problem.transfer[stage - 1, n] if stage else 0.0
    leave = repeat * problem.transfer[stage, n] if stage < problem.stages - 1 else 0.0
    touch = repeat * problem.touch[stage, n]
    if net.to_end:  # it goes to the last stage whoever reads it
        return _Charges(touch, 0.0, 0.0, (enter + leave, leave, 0.0))
    return _Charges(touch, enter, leave, (0.0, 0.0, 0.0))


def _next_code(role: int, label: int, code: int) -> int | None:
    """The code after a reader (role 0) or the producer (role 1) has the label; None where no order allows it."""
    producer, read = divmod(code, 4)
    if role == 0:
        if producer != UNSEEN:
            return None if label < producer else 4 * producer + (read | (0, READ_IN, READ_AFTER)[label])
        # A reader before the stage has its producer there, too: that is as good as seen.
        return read if label == BEFORE else 4 * UNSEEN + (read | (0, READ_IN, READ_AFTER)[label])
    if producer != UNSEEN:
        return code if label == BEFORE else None
    return None if (label == AFTER and read & READ_IN) else 4 * label + read


LEGAL = np.array(
    [[[_next_code(role, label, code) is not None for code in range(16)] for label in range(3)] for role in range(2)]
)


def _after_label(charges: _Charges) -> tuple[NDArray[np.uint8], Floats]:
    """For each role, label and code the next code, and what the net costs more there."""
    code, more = np.zeros((2, 3, 16), np.uint8), np.zeros((2, 3, 16))
    for role, label, old in np.argwhere(LEGAL):
        new = _next_code(role, label, old)
        assert new is not None
        code[role, label, old] = charges.plain(new)
        more[role, label, old] = charges.due(new) - charges.due(old)
    return code, more


def _distinct(codes: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The distinct rows, and which of them each row is."""
    if codes.shape[1] == 0:
        return codes[:1], np.zeros(len(codes), np.int64)
    rows = np.ascontiguousarray(codes).view(np.dtype((np.void, codes.shape[1]))).ravel()
    _, first, which = np.unique(rows, return_index=True, return_inverse=True)
    return codes[first], which


def narrow_order(problem: Problem) -> list[int]:
    """An order of the items, not always topological, along which few of them matter to the rest at a time.

    An item matters while a net of its own has readers to come, or one that it reads has its producer to come. Next is
    always an item beside those, the one that leaves the fewest.
    """
    links = [{*before, *after} for before, after in zip(problem.predecessors, problem.successors, strict=True)]
    to_come = [len(found) for found in links]
    taken = [False] * problem.items
    order: list[int] = []
    beside: set[int] = set()
    left = set(range(problem.items))

    def growth(item: int) -> tuple[int, int]:
        closed = sum(taken[other] and to_come[other] == 1 for other in links[item])
        return (to_come[item] > 0) - closed, item

    while left:
        item = min(beside or left, key=growth)
        left.discard(item)
        beside.discard(item)
        taken[item] = True
        order.append(item)
        for other in links[item]:
            to_come[other] -= 1
            if not taken[other]:
                beside.add(other)
    return order
