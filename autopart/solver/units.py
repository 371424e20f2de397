"""The tables of a partition problem in whole numbers, all rounded down or all up: what programs of stages count in.

Rounded down, every legal assignment stays legal and costs no more: what is proven impossible is impossible. Rounded up,
what is found holds in floats.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from autopart.solver.problem import Floats, Problem, totals
from autopart.solver.stage_costs import memory_never_binds

Integers = NDArray[np.int64]
Number = TypeVar("Number", np.int64, np.float64)

# Steps of a load, and of a memory limit.
RESOLUTION = 100_000_000
# Nothing counts as more: far above any limit, and sums of it are no overflow.
MOST = 10.0**13
WORKSPACE_LEVELS = 12
# Units are summed in two halves, each as floats and yet exactly.
HALF = 1 << 24


@dataclass(frozen=True, eq=False)
class Span:
    """Pins of a net or a state; the first ones have no other pin before them, the last ones none behind them."""

    pins: tuple[int, ...]
    first: tuple[int, ...]
    last: tuple[int, ...]


def span(problem: Problem, pins: tuple[int, ...], to_end: bool = False) -> Span:
    bits = sum(1 << v for v in pins)
    first = tuple(v for v in pins if not problem.ancestors[v] & bits & ~(1 << v))
    last = () if to_end else tuple(v for v in pins if not problem.descendants[v] & bits & ~(1 << v))
    return Span(pins, first, last)


@dataclass(frozen=True, eq=False)
class Units:
    """The tables of a problem in whole units; seconds that are paid `repeat` times are multiplied by it.

    Attributes:
        second, byte: Size of a unit of load and of memory.
        relays: Nets that are relayed (their spans) with `transfer`, `send`, `receive`, (stages - 1, relays).
        torn: Nets and states that cost something where they are torn, with `touch`, (stages, torn).
        states: Users of states, with `update` (stages, states) and `state_bytes` (states,).
        levels: Workspace that an item needs at least (or at most), by level: (its items, its rise above the one below).
        limits: By stage; -1 where memory never binds.
    """

    problem: Problem
    second: float
    byte: float
    work: Integers
    relays: tuple[Span, ...]
    transfer: Integers
    send: Integers
    receive: Integers
    torn: tuple[Span, ...]
    touch: Integers
    users: tuple[tuple[int, ...], ...]
    update: Integers
    state_bytes: Integers
    saved: Integers
    due: Integers
    kept: Integers
    fill: Integers
    fill_transfer: Integers
    levels: tuple[tuple[tuple[int, ...], int], ...]
    limits: tuple[int, ...]

    @property
    def bound_by_memory(self) -> bool:
        return any(limit >= 0 for limit in self.limits)

    def most(self) -> int:
        """No load is larger."""
        tables = (self.work, 2 * self.transfer, self.touch, self.update)
        return 1 + sum(int(table.max(axis=0).sum()) for table in tables if table.size)


def in_units(problem: Problem, load: float, up: bool) -> Units:
    """The problem in units of `load` / RESOLUTION seconds, everything rounded up, or everything down."""
    finite = problem.limits[np.isfinite(problem.limits)]
    second, byte = max(load, 1e-300) / RESOLUTION, max(float(finite.max(initial=0.0)), 1.0) / RESOLUTION
    rounded = np.ceil if up else np.floor

    def counted(table: Floats, unit: float) -> Integers:
        return np.minimum(rounded(table / unit), MOST).astype(np.int64)

    relays = [
        n
        for n, net in enumerate(problem.nets)
        if not net.backward and any(table[:, n].any() for table in (problem.transfer, problem.send, problem.receive))
    ]
    touched = [n for n in range(len(problem.nets)) if problem.touch[:, n].any()]
    shared = [r for r, users in enumerate(problem.users) if len(users) > 1]
    synced = [r for r in shared if problem.sync[:, r].any()]
    pins = [(problem.nets[n].producer, *problem.nets[n].readers) for n in touched]
    single = [r for r, users in enumerate(problem.users) if len(users) == 1]
    work = counted(_with_states(problem.repeat * problem.work, problem, single, problem.update), second)
    bytes_of_states = np.tile(problem.state_bytes, (problem.stages, 1))
    saved = counted(_with_states(problem.saved, problem, single, bytes_of_states), byte)
    update, state_bytes = counted(problem.update, second), counted(bytes_of_states, byte)
    return Units(
        problem=problem,
        second=second,
        byte=byte,
        work=work,
        relays=tuple(
            span(problem, (problem.nets[n].producer, *problem.nets[n].readers), problem.nets[n].to_end) for n in relays
        ),
        transfer=counted(problem.repeat * problem.transfer[:, relays], second),
        send=counted(problem.send[:, relays], byte),
        receive=counted(problem.receive[:, relays], byte),
        torn=tuple(span(problem, p) for p in [*pins, *(problem.users[r] for r in synced)]),
        touch=counted(
            np.concatenate([problem.repeat * problem.touch[:, touched], problem.sync[:, synced]], axis=1), second
        ),
        users=tuple(problem.users[r] for r in shared),
        update=update[:, shared],
        state_bytes=state_bytes[0, shared],
        saved=saved,
        due=_with_states(work, problem, shared, update),
        kept=_with_states(saved, problem, shared, state_bytes),
        fill=counted(problem.fill_weight * problem.fill, second),
        fill_transfer=counted(problem.fill_weight * problem.transfer[:, relays], second),
        levels=tuple(_levels(problem.workspace, byte, up)),
        limits=tuple(
            -1 if memory_never_binds(problem, p) else math.floor(problem.limits[p] / byte) for p in problem.process
        ),
    )


def units_in(inside: NDArray[np.bool_], table: Integers) -> Integers:
    """What each set (sets, items) has of each row of a table (rows, items), exactly: (rows, sets).

    Sums of floats are many times faster than those of whole numbers, and exact below 2^53, as sums of halves are.
    """
    high, low = (totals(inside, half.astype(float)).astype(np.int64) for half in np.divmod(table, HALF))
    return high * HALF + low


def _with_states(
    table: NDArray[Number], problem: Problem, states: list[int], costs: NDArray[Number]
) -> NDArray[Number]:
    """The table of items with what these states cost at the first of their users."""
    whole = table.copy()
    for r in states:
        whole[:, problem.users[r][0]] += costs[:, r]
    return whole


def _levels(workspace: Floats, byte: float, up: bool) -> Iterable[tuple[tuple[int, ...], int]]:
    """The largest distinct workspaces; what lies between two of them counts as the nearest in the direction asked."""
    distinct = sorted({float(w) for w in workspace if w > 0})
    if len(distinct) > WORKSPACE_LEVELS:
        picks = np.linspace(0, len(distinct) - 1, WORKSPACE_LEVELS).astype(int)
        distinct = [distinct[i] for i in picks]
    for below, level in pairwise([0.0, *distinct]):
        reach = workspace > below if up else workspace >= level
        steps = (math.ceil(level / byte) - math.ceil(below / byte)) if up else math.floor((level - below) / byte)
        if steps:
            yield tuple(int(v) for v in np.flatnonzero(reach)), min(steps, int(MOST))
