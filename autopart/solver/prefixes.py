"""First plans: cut one topological order into K intervals, best by dynamic programming.

For a fixed order a stage is an interval [i, j) of positions, and its load, its transfers and its memory depend on i and
j alone: even a state's synchronisation does, for another stage holds the state exactly when it has a user outside the
interval. So for a limit L on the load

    least[s][j] = min over i of least[s - 1][i] + fill of [i, j) at stage s, where load(s, i, j) <= L and it fits

is exact for the order. L is first the least possible (the same recursion with max for +), then a little more, since a
wider limit may save transfers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from autopart.solver.problem import Floats, Problem

# Loads to try, relative to the least that the order allows.
SLACK = (1.0, 1.0003, 1.001, 1.003, 1.01, 1.03)


@dataclass(frozen=True, eq=False)
class Intervals:
    """Costs of every interval of one order between the allowed cuts; matrices are (cuts, cuts), infinite below."""

    cuts: list[int]
    load: list[Floats]
    fill: list[Floats]
    memory: list[Floats]


def cut_order(problem: Problem, order: list[int], max_cuts: int = 500) -> Iterator[list[int]]:
    """Assignments (item -> stage) that cut `order` into intervals, best bottleneck first; none if none fits.

    Where a process holds several stages, each stage gets an equal share of its limits: enough for a first plan.
    """
    table = tabulate(problem, order, max_cuts)
    bottleneck = _cut(problem, table, None)
    if bottleneck is None:
        return
    base = max(table.load[s][i, j] for s, (i, j) in enumerate(pairwise(bottleneck)))
    for slack in SLACK:
        found = _cut(problem, table, base * slack)
        if found is not None:
            yield _assignment(problem, order, [table.cuts[c] for c in found])


def _assignment(problem: Problem, order: list[int], positions: list[int]) -> list[int]:
    stage = [0] * problem.items
    for s in range(problem.stages):
        for item in order[positions[s] : positions[s + 1]]:
            stage[item] = s
    return stage


def _cut(problem: Problem, table: Intervals, limit: float | None) -> list[int] | None:
    """Indices of the K + 1 cuts: least fill within the limit on the load, or the least load if there is no limit."""
    count = len(table.cuts)
    least = np.full(count, np.inf)
    least[0] = 0.0
    choice = []
    for s in range(problem.stages):
        if limit is None:
            value = np.maximum(least[:, None], table.load[s])
        else:
            value = np.where(table.load[s] <= limit, least[:, None] + table.fill[s], np.inf)
        best = value.argmin(axis=0)
        least = value[best, np.arange(count)]
        choice.append(best)
    if not np.isfinite(least[-1]):
        return None
    cuts = [count - 1]
    for best in reversed(choice):
        cuts.append(int(best[cuts[-1]]))
    return cuts[::-1]


def tabulate(problem: Problem, order: list[int], max_cuts: int) -> Intervals:
    """Load, fill and memory of every interval at every stage; an interval that does not fit has infinite load."""
    stages, items = problem.stages, problem.items
    position = np.empty(items, dtype=np.int64)
    position[order] = np.arange(items)
    crossing = _crossings(problem, position)
    cuts = _allowed_cuts(problem, order, crossing, max_cuts)
    at = np.asarray(cuts)
    below = np.tril(np.full((len(cuts), len(cuts)), np.inf))  # an interval holds at least one item

    shared = [r for r, users in enumerate(problem.users) if len(users) > 1]
    single = [r for r, users in enumerate(problem.users) if len(users) == 1]
    owner = np.array([problem.users[r][0] for r in single], dtype=np.int64)
    workspace = _interval_maximum(problem.workspace[order], cuts)
    rows = [_user_positions(position, problem.users[r]) for r in shared]
    state_bytes = _held(rows, problem.state_bytes[shared], cuts)
    zero = np.zeros(len(cuts))

    load, fill, memory = [], [], []
    for s in range(stages):
        if not s or not problem.uniform:
            once = _held(rows, problem.update[s, shared], cuts) + _torn(rows, problem.sync[s, shared], cuts)
        update = np.bincount(owner, weights=problem.update[s, single], minlength=items)
        held = np.bincount(owner, weights=problem.state_bytes[single], minlength=items)
        into = (problem.transfer[s - 1] @ crossing)[at] if s else zero
        out = (problem.transfer[s] @ crossing)[at] if s < stages - 1 else zero
        received = (problem.receive[s - 1] @ crossing)[at] if s else zero
        sent = (problem.send[s] @ crossing)[at] if s < stages - 1 else zero
        busy = _between(problem.repeat * problem.work[s] + update, order, at)
        sharing = len(problem.stages_of_process[problem.process[s]])
        bytes_ = _between(problem.saved[s] + held, order, at) + state_bytes + received[:, None] + sent[None, :]
        bytes_ = bytes_ * sharing + workspace
        fits = bytes_ <= problem.limits[problem.process[s]]
        stage_load = busy + once + problem.repeat * (into[:, None] + out[None, :])
        load.append(np.where(fits, stage_load * sharing, np.inf) + below)
        fill.append(problem.fill_weight * (_between(problem.fill[s], order, at) + into[:, None]))
        memory.append(bytes_)
    return Intervals(cuts, load, fill, memory)


def _between(values: Floats, order: list[int], at: np.ndarray) -> Floats:
    total = np.concatenate([[0.0], np.cumsum(values[order])])[at]
    return total[None, :] - total[:, None]


def _crossings(problem: Problem, position: np.ndarray) -> NDArray[np.float32]:
    """Whether a net crosses a cut after the first i items, (nets, items + 1)."""
    crossing = np.zeros((len(problem.nets), problem.items + 1), dtype=np.float32)
    for n, net in enumerate(problem.nets):
        last = problem.items - 1 if net.to_end else max(position[r] for r in net.readers)
        crossing[n, position[net.producer] + 1 : last + 1] = 1.0
    return crossing


def _allowed_cuts(problem: Problem, order: list[int], crossing: NDArray[np.float32], max_cuts: int) -> list[int]:
    """All cuts, or of each of `max_cuts` equal shares of the work the one that the least time crosses."""
    if problem.items <= max_cuts or problem.stages == 1:
        return list(range(problem.items + 1))
    time = problem.transfer.mean(axis=0) @ crossing
    done = np.cumsum(problem.work.mean(axis=0)[order]) + 1e-15 * np.arange(problem.items)
    share = np.minimum((done / done[-1] * max_cuts).astype(np.int64), max_cuts - 1)
    starts = [0, *(np.flatnonzero(np.diff(share)) + 1).tolist(), problem.items]
    best = [a + int(time[a + 1 : b + 1].argmin()) + 1 for a, b in pairwise(starts)]
    return sorted({0, *best, problem.items})


def _user_positions(position: np.ndarray, users: tuple[int, ...]) -> np.ndarray:
    return np.sort(position[list(users)])


def _held(rows: list[np.ndarray], amounts: Floats, cuts: list[int]) -> Floats:
    """Sum of the amounts of the states that have a user in [i, j), for every pair of cuts."""
    size = len(cuts)
    corners = np.zeros((size + 1, size + 1))
    for users, amount in zip(rows, amounts, strict=True):
        # The first user at or after cut i is `users[t]` for the cuts in (users[t - 1], users[t]].
        edges = np.searchsorted(cuts, users, side="right")
        for low, high in zip(np.concatenate([[0], edges[:-1]]), edges, strict=True):
            corners[low, high] += amount
            corners[high, high] -= amount
    return corners.cumsum(axis=0).cumsum(axis=1)[:size, :size]


def _torn(rows: list[np.ndarray], amounts: Floats, cuts: list[int]) -> Floats:
    """The same for the states that also have a user outside [i, j)."""
    size = len(cuts)
    at = np.asarray(cuts)
    inside = np.zeros((size, size))
    for users, amount in zip(rows, amounts, strict=True):
        if amount:
            inside += amount * np.outer(at <= users[0], at > users[-1])
    return _held(rows, amounts, cuts) - inside


def _interval_maximum(values: Floats, cuts: list[int]) -> Floats:
    """Maximum over [i, j) for every pair of cuts; 0 for empty intervals."""
    pieces = np.array([values[a:b].max() for a, b in pairwise(cuts)])
    size = len(cuts)
    largest = np.zeros((size, size))
    for i in range(size - 1):
        largest[i, i + 1 :] = np.maximum.accumulate(pieces[i:])
    return largest
