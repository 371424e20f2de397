"""What a stage between two down-sets costs: one formula for every term of the objective, by blocks of pairs.

The stage between I and J, I in J, holds the items of J that are not in I. Of the P pins of a net, or users of a state,
c(I) lie in I; it is open at I when 0 < c(I) < P. With conditions as numbers, a relayed net costs a number of I and a
number of J (it crosses the one, or the other), and

    a state is held in between:           [c(J) > 0] - [c(I) = P] - [open at I and J, c(I) = c(J)]
    a net, or a state, is torn by it:     [open at I] + [open at J] - [open at I and J] - [open at I and J, c(I) = c(J)]

So load and bytes are a number of I, plus a number of J, less a product of flags of I with flags of J, of which few are
set at both ends: only what passes over the stage, or begins before it and ends after it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from math import inf

import numpy as np
from numpy.typing import NDArray

from autopart.solver.budget import check
from autopart.solver.problem import FLAGS_AT_A_TIME, Floats, Net, Problem

Members = NDArray[np.bool_]
Rows = slice | NDArray[np.int64]

# Sums of bytes are differences of sums here, so they are compared with limits this much wider.
ROUNDING = 1e-12


class StageCosts:
    """Load and fill of every stage between two down-sets of a family.

    Where a process holds several stages, each gets an equal share of its limits: enough for a first plan.

    Args:
        inside: Which items each down-set holds, (sets, items).
        deadline: In seconds of `time.monotonic`; looked at while down-sets are described.

    Raises:
        OutOfTimeError: The deadline passed.
    """

    def __init__(self, problem: Problem, inside: Members, deadline: float = inf) -> None:
        self.problem, self.inside = problem, inside
        sets, stages = len(inside), problem.stages
        self._words = _words(inside)
        self._binds = [not memory_never_binds(problem, p) for p in problem.process]
        self._sharing = [len(problem.stages_of_process[p]) for p in problem.process]
        pinned = _pinned(problem)
        self._columns = columns = _columns(pinned)
        self._flags = np.zeros((sets, len(columns.group)), dtype=bool)
        # Numbers of I and numbers of J, for each stage (stages, sets).
        shape = (stages, sets)
        self._work, self._into, self._out = np.zeros(shape), np.zeros(shape), np.zeros(shape)
        self._once_before, self._once_after = np.zeros(shape), np.zeros(shape)
        self._bytes_before, self._bytes_after = np.zeros(shape), np.zeros(shape)
        self._fill_before, self._fill_after = np.zeros(shape), np.zeros(shape)
        relayed = np.flatnonzero(np.concatenate([problem.transfer, problem.send, problem.receive]).any(axis=0))
        chunk = max(1, FLAGS_AT_A_TIME // max(problem.items, 1))
        for start in range(0, sets, chunk):
            check(deadline)
            self._describe(slice(start, start + chunk), pinned, relayed)

    def _describe(self, rows: slice, pinned: _Pinned, relayed: NDArray[np.int64]) -> None:
        """Fill in the rows of some down-sets."""
        problem, inside = self.problem, self.inside[rows].astype(float)
        crossing = _crossing([problem.nets[n] for n in relayed], self.inside[rows])
        self._work[:, rows] = problem.repeat * _sums(problem.work, inside)
        transfer = _sums(problem.transfer[:, relayed], crossing)
        self._into[1:, rows] = problem.repeat * transfer
        self._out[:-1, rows] = problem.repeat * transfer
        done = problem.fill_weight * _sums(problem.fill, inside)
        self._fill_after[:, rows] = done
        self._fill_before[:, rows] = -done
        self._fill_before[1:, rows] += problem.fill_weight * transfer

        count = pinned.pins.count(self.inside[rows])
        opened = (count > 0) & (count < pinned.size)
        begun, ended = (count > 0).astype(float), (count == pinned.size).astype(float)
        torn = _sums(pinned.torn, opened.astype(float))
        self._once_before[:, rows] = torn - _sums(pinned.held, ended)
        self._once_after[:, rows] = torn + _sums(pinned.held, begun)
        level = self._columns.level
        self._flags[rows] = opened[:, self._columns.group] & ((level == 0) | (count[:, self._columns.group] == level))
        kept = _sums(problem.saved, inside)
        self._bytes_after[:, rows] = kept + _sums(pinned.held_bytes[None], begun)
        self._bytes_after[:-1, rows] += _sums(problem.send[:, relayed], crossing)
        self._bytes_before[:, rows] = -kept - _sums(pinned.held_bytes[None], ended)
        self._bytes_before[1:, rows] += _sums(problem.receive[:, relayed], crossing)

    def load(self, s: int, before: Rows, after: Rows) -> Floats:
        """Seconds of the process of stage s for each I in `before` and J in `after`; infinite where none may be."""
        work = self._work[s, after] - self._work[s, before, None]
        into, out = self._into[s, before, None], self._out[s, after]
        busy = np.maximum(np.maximum(work, into), out) if self.problem.hidden else work + into + out
        once = self._once_before[s, before, None] + self._once_after[s, after]
        load = busy + once - self._overlap(self._columns.load[s], before, after)
        load *= self._sharing[s]
        load[self._barred(before, after)] = np.inf
        if self._binds[s]:
            limit = self.problem.limits[self.problem.process[s]] * (1 + ROUNDING)
            self._forbid(load, self.kept(s, before, after) * self._sharing[s], limit, before, after)
        return load

    def alike(self, s: int, t: int) -> bool:
        """Whether both stages cost the same between any two sets, and have the same room."""
        tables = [self._work, self._into, self._out, self._once_before, self._once_after, self._columns.load]
        if self._binds[s]:
            tables += [self._bytes_before, self._bytes_after]
        rooms = [(self._binds[u], self._sharing[u], self.problem.limits[self.problem.process[u]]) for u in (s, t)]
        return rooms[0] == rooms[1] and all(np.array_equal(table[s], table[t]) for table in tables)

    def kept(self, s: int, before: Rows, after: Rows) -> Floats:
        """Bytes that the stage keeps, its workspace not among them."""
        size = self._bytes_before[s, before, None] + self._bytes_after[s, after]
        return size - self._overlap(self._columns.bytes, before, after)

    def fill(self, s: int, before: Rows, after: Rows) -> Floats:
        """Weighted seconds of filling that the stage and the boundary before it add."""
        return self._fill_before[s, before, None] + self._fill_after[s, after]

    @property
    def boundary_fill(self) -> Floats:
        """The same as a number of the set after each stage, (stages, sets): its sum over a chain is the chain's."""
        fill = self._fill_after.copy()
        fill[:-1] += self._fill_before[1:]
        return fill

    def _overlap(self, weight: Floats, before: Rows, after: Rows) -> Floats | float:
        """The sum of the weights of the flags that are set at both ends, for each I and J."""
        left, right = self._flags[before], self._flags[after]
        column = np.flatnonzero(left.any(axis=0) & right.any(axis=0) & (weight != 0))
        if not len(column):
            return 0.0
        return (left[:, column] * weight[column]) @ right[:, column].T.astype(float)

    def _barred(self, before: Rows, after: Rows) -> Members:
        """Where I is not in J, or the stage would be empty and must not be."""
        left, right = self._words[before], self._words[after]
        barred = np.zeros((len(left), len(right)), dtype=bool)
        undecided = np.bitwise_or.reduce(left, axis=0) & ~np.bitwise_and.reduce(right, axis=0)
        for word in np.flatnonzero(undecided):
            barred |= (left[:, word, None] & ~right[:, word]) != 0
        if not self.problem.idle:
            barred |= np.arange(len(self.inside))[before][:, None] == np.arange(len(self.inside))[after]
        return barred

    def _forbid(self, load: Floats, size: Floats, limit: float, before: Rows, after: Rows) -> None:
        """Infinite loads where the bytes with the largest workspace are above the limit."""
        load[size > limit] = np.inf
        workspace = self.problem.workspace
        left, right = np.nonzero(np.isfinite(load) & (size + workspace.max(initial=0.0) > limit))
        size = size[left, right]
        largest = np.zeros(len(left))
        for level in np.unique(workspace[workspace > 0]) if len(left) else ():
            count = self.inside[:, workspace >= level].sum(axis=1)
            largest[count[after][right] > count[before][left]] = level
        load[left, right] = np.where(size + largest > limit, np.inf, load[left, right])


@dataclass(frozen=True)
class _Groups:
    """Groups of items, none of them empty: all their items in a row, and where each group begins."""

    items: NDArray[np.int64]
    first: NDArray[np.int64]

    @classmethod
    def of(cls, groups: Sequence[Sequence[int]]) -> _Groups:
        sizes = [len(group) for group in groups]
        return cls(np.array(list(chain(*groups)), dtype=np.int64), np.cumsum([0, *sizes])[:-1])

    def count(self, inside: Members) -> NDArray[np.int32]:
        """How many items of each group each set holds, (sets, groups)."""
        if not len(self.first):
            return np.zeros((len(inside), 0), dtype=np.int32)
        counted: NDArray[np.int32] = np.add.reduceat(inside[:, self.items], self.first, axis=1, dtype=np.int32)
        return counted


@dataclass(frozen=True)
class _Pinned:
    """Nets that are sent directly and states alike: what has pins, and is torn or held by a stage.

    Attributes:
        pins: The items of each; `size` their number.
        torn: Seconds where it is torn, `held` where a pin is in, (stages, groups); `held_bytes` (groups,).
    """

    pins: _Groups
    size: NDArray[np.int64]
    torn: Floats
    held: Floats
    held_bytes: Floats


def _pinned(problem: Problem) -> _Pinned:
    sent = np.flatnonzero(problem.touch.any(axis=0))
    pins = [pins_of(problem.nets[n]) for n in sent] + list(problem.users)
    touch = problem.repeat * problem.touch[:, sent]
    return _Pinned(
        pins=_Groups.of(pins),
        size=np.array([len(items) for items in pins], dtype=np.int64),
        torn=np.concatenate([touch, problem.sync], axis=1),
        held=np.concatenate([np.zeros_like(touch), problem.update], axis=1),
        held_bytes=np.concatenate([np.zeros(len(sent)), problem.state_bytes]),
    )


def pins_of(net: Net) -> tuple[int, ...]:
    return (net.producer, *net.readers)


@dataclass(frozen=True)
class _Columns:
    """The flags of a down-set: a group is open there, and (where `level` is not 0) so many of its pins are inside.

    Attributes:
        load: What a flag at both ends takes off the load, (stages, columns); `bytes` off the bytes, (columns,).
    """

    group: NDArray[np.int64]
    level: NDArray[np.int64]
    load: Floats
    bytes: Floats


def _columns(pinned: _Pinned) -> _Columns:
    """Of two pins, one is inside exactly where a group is open: one column serves for both."""
    found: list[tuple[int, int]] = []
    for g, size in enumerate(pinned.size.astype(int)):
        lowest = 0 if size > 2 and pinned.torn[:, g].any() else 1
        found += [(g, level) for level in range(lowest, size)]
    groups, levels = np.array(found, dtype=np.int64).reshape(-1, 2).T
    times_torn = np.where(pinned.size[groups] == 2, 2.0, 1.0)
    load = pinned.torn[:, groups] * times_torn + pinned.held[:, groups] * (levels > 0)
    return _Columns(groups, levels, load, pinned.held_bytes[groups] * (levels > 0))


def _sums(table: Floats, flags: Floats) -> Floats:
    """Of each row of the table (stages, things) the sum over what each set has (sets, things): (stages, sets)."""
    return table @ flags.T if table.any() else np.zeros((len(table), len(flags)))


def _crossing(nets: Sequence[Net], inside: Members) -> Floats:
    """Whether each net leaves each down-set, (sets, nets)."""
    readers = _Groups.of([net.readers or (net.producer,) for net in nets])
    size = np.array([len(net.readers) or 1 for net in nets])
    to_end = np.array([net.to_end for net in nets], dtype=bool)
    forward = np.array([not net.backward for net in nets], dtype=bool)
    made = inside[:, np.array([net.producer for net in nets], dtype=np.int64)]
    return (made & forward & (to_end | (readers.count(inside) < size))).astype(float)


def _words(inside: Members) -> NDArray[np.uint64]:
    """The rows as bit sets, 64 items a word."""
    packed = np.packbits(inside, axis=1, bitorder="little")
    padded = np.zeros((len(inside), -(-packed.shape[1] // 8) * 8), dtype=np.uint8)
    padded[:, : packed.shape[1]] = packed
    return padded.view(np.uint64)


def memory_never_binds(problem: Problem, p: int) -> bool:
    """Whether process p has room for everything at once."""
    if not np.isfinite(problem.limits[p]):
        return True
    most = float(problem.workspace.max())
    for s in problem.stages_of_process[p]:
        most += float(problem.saved[s].sum() + problem.state_bytes.sum())
        most += float(problem.send[s].sum()) if s < problem.stages - 1 else 0.0
        most += float(problem.receive[s - 1].sum()) if s else 0.0
    return most <= problem.limits[p]
