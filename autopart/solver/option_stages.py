"""What a stage between two down-sets can cost with the options of its nodes (see `options`).

All pairs of down-sets at once, for a tensor degree: the time with every node's least seconds, exact where the options
of a node exchange the same bytes; and how many microbatches may be in flight with the fastest options, or with any.
What those leave open is a knapsack, asked for one stage at a time.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopart.solver.knapsack import ROUNDING, Choice, choose, relax, total
from autopart.solver.options import OptionProblem
from autopart.solver.problem import Floats
from autopart.solver.stage_costs import Members

Integers = NDArray[np.int64]


class Split(NamedTuple):
    """Tensor ranks in each of some data replicas."""

    tensor: int
    data: int


@dataclass(frozen=True, eq=False)
class Pairs:
    """Stages between all pairs of down-sets, at one split, (sets, sets).

    Attributes:
        least_s: No choice of options is faster; infinite where the pair is no stage, or a node has no option.
        surely: Choices that may do: seconds, and the microbatches in flight up to which they fit.
        possibly: Microbatches in flight up to which some choice fits.
    """

    least_s: Floats
    surely: tuple[tuple[Floats, Integers], ...]
    possibly: Integers


class Degree:
    """The stages on `tensor` ranks in each replica."""

    def __init__(self, problem: OptionProblem, inside: Members, tensor: int) -> None:
        self._problem, self._inside = problem, inside
        lacks = np.array([not options.get(tensor) for options in problem.options])
        table = [options.get(tensor) or () for options in problem.options]
        width = max(map(len, table), default=0)

        def fill(rows: list[list[float]], missing: float) -> Floats:
            return np.array([row + [missing] * (width - len(row)) for row in rows]).reshape(len(rows), width)

        self._seconds = fill([[o.seconds for o in options] for options in table], np.inf)
        self._parameters = fill([[o.parameter_bytes for o in options] for options in table], 0.0)
        self._in_flight = fill([[o.in_flight_bytes for o in options] for options in table], np.inf)
        self._fixed = fill([[o.fixed_bytes for o in options] for options in table], np.inf)
        edges = problem.edges
        self._producer = np.array([e.producer for e in edges], dtype=np.int64)
        self._reader = np.array([e.reader for e in edges], dtype=np.int64)
        self._received = fill([[e.bytes + o.receive_bytes[e.producer] for o in table[e.reader]] for e in edges], np.inf)
        self._sent = fill([[e.bytes + o.send_bytes[e.reader] for o in table[e.producer]] for e in edges], np.inf)

        self._stage = (inside.astype(float) @ (~inside).T.astype(float) == 0) & ~np.eye(len(inside), dtype=bool)
        count = inside @ lacks.astype(float)
        self._stage &= count[None, :] == count[:, None]
        self._lacks = lacks
        self._crossing = self._least_crossing()
        self._same = all(len({*row[np.isfinite(row)]}) <= 1 for table in (self._received, self._sent) for row in table)
        self._most = min(problem.microbatches, problem.devices)
        self._possibly = self._in_flight_that_fit()

    def _least_crossing(self) -> Floats:
        """Twice the bytes over a stage's edges, with the least that options add, (sets, sets)."""
        inside = self._inside.astype(float)
        made, read = inside[:, self._producer], inside[:, self._reader]
        received = np.where(np.isfinite(least := self._received.min(axis=1, initial=np.inf)), least, 0.0)
        sent = np.where(np.isfinite(least := self._sent.min(axis=1, initial=np.inf)), least, 0.0)
        into = (made * received) @ read.T - (read @ received)[:, None]
        out = ((made - read) @ sent)[None, :] - (made * sent) @ (1 - read).T
        return 2 * (into + out)

    def _between(self, numbers: Floats) -> Floats:
        """Sums of a number of each node over all stages, (sets, sets)."""
        sums = self._inside @ np.where(self._lacks, 0.0, numbers)
        return sums[None, :] - sums[:, None]

    def _in_flight_that_fit(self) -> Integers:
        most = np.zeros(self._stage.shape, dtype=np.int64)
        for y in range(1, self._most + 1):
            fits = self._between((self._in_flight * y + self._fixed).min(axis=1, initial=np.inf)) <= self._room
            if not fits.any():
                break
            most[fits] = y
        return most

    @property
    def _room(self) -> float:
        # Sums between two down-sets are differences of sums.
        return self._problem.limit_bytes * (1 + ROUNDING)

    def _alone(self, data: int) -> Floats:
        """Seconds of each node's options, without edges, (nodes, options)."""
        problem = self._problem
        share = 4 * (data - 1) / data / problem.microbatches / problem.bandwidth_bytes_per_s
        return self._seconds / data + share * self._parameters

    def pairs(self, data: int) -> Pairs:
        """All stages with so many data replicas."""
        alone = self._alone(data)
        crossing = self._crossing / data / self._problem.bandwidth_bytes_per_s
        least = self._between(alone.min(axis=1, initial=np.inf)) + crossing
        least[~self._stage] = np.inf
        surely = []
        if self._same:
            for first, second in ((alone, self._in_flight + self._fixed), (self._in_flight, alone)):
                choice = np.lexsort((second, first), axis=1)[:, 0]
                surely.append((self._between(_pick(alone, choice)) + crossing, self._fits(choice)))
        return Pairs(least, tuple(surely), self._possibly)

    def _fits(self, choice: Choice) -> Integers:
        """Microbatches in flight up to which a choice for all nodes fits, (sets, sets)."""
        flying, fixed = self._between(_pick(self._in_flight, choice)), self._between(_pick(self._fixed, choice))
        most = np.zeros(self._stage.shape, dtype=np.int64)
        for y in range(1, self._most + 1):
            most[flying * y + fixed <= self._problem.limit_bytes * (1 - ROUNDING)] = y
        return most

    def _options(self, before: int, after: int, data: int, in_flight: int) -> tuple[Floats, Floats]:
        """Seconds and bytes of the options of each node of a stage."""
        seconds = self._alone(data)
        stage = self._inside[after] & ~self._inside[before]
        made, read = stage[self._producer], stage[self._reader]
        scale = 2 / data / self._problem.bandwidth_bytes_per_s
        np.add.at(seconds, self._reader[read & ~made], scale * self._received[read & ~made])
        np.add.at(seconds, self._producer[made & ~read], scale * self._sent[made & ~read])
        return seconds[stage], self._in_flight[stage] * in_flight + self._fixed[stage]

    def bounds(self, before: int, after: int, data: int, in_flight: int) -> tuple[float, float]:
        """Seconds that one stage takes at least, and at most, with the best options that fit; infinite if none do."""
        seconds, size = self._options(before, after, data, in_flight)
        relaxed = relax(seconds, size, self._problem.limit_bytes)
        return (np.inf, np.inf) if relaxed is None else (relaxed.bound, total(seconds, relaxed.choice))

    def choose(self, before: int, after: int, data: int, in_flight: int) -> tuple[float, Choice]:
        """Least seconds of one stage that fits, and the option of each of its nodes."""
        seconds, size = self._options(before, after, data, in_flight)
        choice = choose(seconds, size, self._problem.limit_bytes)
        assert choice is not None, "asked for only where something fits"
        return total(seconds, choice), choice


def _pick(table: Floats, choice: Choice) -> Floats:
    return table[np.arange(len(choice)), choice]
