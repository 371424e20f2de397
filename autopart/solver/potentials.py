"""Wide graphs, all boundaries at once: a limit on the load that no chain of stages can keep, by potentials of items.

Give every item v a potential at every boundary j: lambda_j(v), and the down-set J_j before boundary j the sum of its
items' potentials there. Along a chain of stages what each one gains,

    gain_s = lambda_{s+1}(J_{s+1}) - lambda_s(J_s),        lambda_0 = lambda_K = 0,

adds up to nothing. So if the most that any stage s within the limit could gain, M_s, adds up to less than nothing,
there is no plan within the limit, whatever the potentials. M_s is the worth of the richest stage (`richest_stage`)
when an item before the stage is worth lambda_{s+1} - lambda_s of it, one in the stage lambda_{s+1}, and one after it
nothing.

The potentials with the least sum of M_s are the dual of a linear program over the shares of all stages within the limit
(Dantzig and Wolfe, 1960). They are sought by projection: the stages found so far say where the sum may be below zero;
next comes the point nearest to the last good one where they say so (Lemarechal, Nemirovskii and Nesterov's level
method, 1995, with the level known), and the richest stages there are found. Unlike the corners of the program itself,
such points hardly jump: some tens of rounds are enough.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from autopart.solver.problem import Floats, Problem
from autopart.solver.richest_stage import FORBIDDEN, Richest, any_rich, least_seconds, richest
from autopart.solver.sweep import BEFORE, IN, Sweep, TooWideError, narrow_order, sweep
from autopart.solver.windows import windows

# States of a sweep between two items.
MOST_STATES = 40_000
# The sum that is aimed at, where a stage of the best plan is worth about 1; the one that proves, since floats err.
LEVEL, PROOF = -0.01, -1e-7
# Rounds of one limit, and how far, in the potentials' own size, they may have to move before that is hopeless.
ROUNDS, FAR = 60, 30.0
# Worth that may be neglected at a state, at first and at least; divided by so much when nothing else is to be found.
BLUR, SHARPEST, SHARPER = 3e-4, 1e-6, 3.0
# How far below what the relaxation says the first stages are looked for, and the worth that may be neglected there.
BELOW, COARSE = tuple(0.1 * 3.0**i for i in range(9)), 1e-2
# Stages that one search gives, and cuts that are kept: when there are more, the tightest ones.
STAGES_AT_A_TIME, MOST_CUTS, KEPT_CUTS = 8, 500, 280
# What one problem of least squares counts for in work, which is counted in pairs and arcs that are looked at.
WORK_OF_NEAREST = 300_000
# Loads are sums of floats: a stage counts as within the limit up to this share.
ROUNDING = 1e-9

Windows = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True, eq=False)
class Cut:
    """A stage that was found: its place, labels and seconds, and its gain as a row of numbers for the potentials."""

    stage: int
    labels: NDArray[np.int8]
    seconds: float
    gain: Floats


class Potentials:
    """Proofs that limits on the load are impossible; the potentials of one limit are a good start for the next.

    Attributes:
        window: Earliest and latest stage of each item, which may be made smaller from outside.
        centre: The potentials of the last proof.
        work: What was done so far: pairs and arcs looked at. After `most_work` of it, nothing more is shown.
        shares: After a limit that was not shown to be impossible: by boundary and item, the share of the stages that
            speak against it, by their weights, that has the item before the boundary, (stages + 1, items).
    """

    def __init__(
        self,
        problem: Problem,
        cap: float,
        deadline: float,
        start: Floats | None = None,
        most_work: float = np.inf,
    ) -> None:
        """
        Args:
            problem: Its transfers are not hidden; memory is not looked at.
            cap: Only plans of at most this step time are looked at; there is one.
            deadline: In seconds of `time.monotonic`; after it nothing more is shown.
            start: Potentials to begin with, (stages + 1, items); without them, the work of each item.

        Raises:
            TooWideError: A sweep has too many states, or the deadline passed before all were there.
        """
        self.problem, self.deadline, self.most_work = problem, deadline, most_work
        earliest, latest = windows(problem, cap)
        self.window: Windows = (np.array(earliest), np.array(latest))
        self.sweeps = _sweeps(problem, self.window, deadline)
        self.free = undecided(self.window, problem.stages)
        self.where, self.item = np.nonzero(self.free)
        work = problem.work.mean(axis=0)
        share = np.ones(problem.items) / problem.items if work.sum() <= 0 else work / work.sum()
        least = min(least_seconds(self.sweeps[s], labels_within(self.window, s)) for s in range(problem.stages))
        seconds = least + float(problem.repeat * work.sum())
        self.price = problem.stages / seconds if seconds > 0 else 1.0
        share = share * problem.stages
        self.size = np.maximum(share, 0.3 * share.mean())[self.item]
        self.centre: Floats = share[self.item] if start is None else start[self.where, self.item]
        self.cuts: list[Cut] = []
        self.known: set[tuple[int, bytes]] = set()
        self.shares: Floats = np.zeros(self.free.shape)
        self.work = 0

    def spent(self) -> bool:
        return self.work > self.most_work or time.monotonic() > self.deadline

    def table(self, point: Floats) -> Floats:
        """Potentials by boundary and item, (stages + 1, items)."""
        table = np.zeros(self.free.shape)
        table[self.where, self.item] = point
        return table

    def worth(self, table: Floats, stage: int) -> Floats:
        """What each label of each item is worth to a stage, (items, 3)."""
        worth = np.zeros((self.problem.items, 3))
        worth[:, BEFORE] = table[stage + 1] - table[stage]
        worth[:, IN] = table[stage + 1]
        worth[~labels_within(self.window, stage)] = FORBIDDEN
        return worth

    def impossible(self, limit: float, most_work: float, rounds: int = ROUNDS, far: float = FAR) -> bool:
        """Whether it can be shown that no plan within the windows keeps all loads within the limit, in seconds.

        Args:
            most_work, rounds, far: When to give up.
        """
        allowed = limit * (1 + ROUNDING)
        self.cuts, resting = self._usable(allowed)
        self.known = {(cut.stage, cut.labels.tobytes()) for cut in self.cuts}
        shown = self._shown(allowed, self.work + most_work, rounds, far)
        self.cuts += resting[-MOST_CUTS:]
        return shown

    def _shown(self, limit: float, most_work: float, rounds: int, far: float) -> bool:
        start, best, blur = self.centre, np.inf, BLUR
        for stage in sorted(set(range(self.problem.stages)) - {cut.stage for cut in self.cuts}):
            begun = self._begun(stage, limit)
            if begun is not True:
                return begun is False
        for _ in range(rounds):
            point = self._nearest(far)
            if point is None or self.work > most_work or self.spent():
                break
            claims = self._claims(point)
            found = self._richest(point, limit, claims, blur)
            total = sum(one.most for one in found)
            if total < PROOF:
                self.centre = point
                return True
            if not sum(self._learned(stage, one) for stage, one in enumerate(found)):
                blur /= SHARPER
                if blur < SHARPEST:
                    break
            if total < best:
                best, self.centre = total, point
            self._thin(point, claims)
        self.centre = start
        return False

    def _usable(self, limit: float) -> tuple[list[Cut], list[Cut]]:
        """The known stages that the limit and the windows allow, and the others."""
        usable: list[Cut] = []
        resting: list[Cut] = []
        allowed = [labels_within(self.window, stage) for stage in range(self.problem.stages)]
        items = np.arange(self.problem.items)
        for cut in self.cuts:
            legal = cut.seconds <= limit and bool(allowed[cut.stage][items, cut.labels].all())
            (usable if legal else resting).append(cut)
        return usable, resting

    def _richest(self, point: Floats, limit: float, least: Floats, blur: float) -> list[Richest]:
        """Of every stage; side by side, for they do not depend on each other."""
        table = self.table(point)

        def of(stage: int) -> Richest:
            worth = self.worth(table, stage)
            return richest(self.sweeps[stage], worth, limit, float(least[stage]), self.price, blur, STAGES_AT_A_TIME)

        with ThreadPoolExecutor() as threads:
            found = list(threads.map(of, range(self.problem.stages)))
        self.work += sum(one.work for one in found)
        return found

    def _begun(self, stage: int, limit: float) -> bool | None:
        """Find the first stages of one place; False if there is none within the limit, None if that is not known."""
        if least_seconds(self.sweeps[stage], labels_within(self.window, stage)) > limit:
            return False
        worth = self.worth(self.table(self.centre), stage)
        found = any_rich(self.sweeps[stage], worth, limit, self.price, COARSE, STAGES_AT_A_TIME, BELOW)
        self.work += found.work
        return True if self._learned(stage, found) else None

    def _learned(self, stage: int, found: Richest) -> int:
        """How many of the stages found are new."""
        new = 0
        before, after = self.where == stage, self.where == stage + 1
        for labels, seconds in zip(found.stages, found.seconds, strict=True):
            key = (stage, labels.tobytes())
            if key not in self.known:
                self.known.add(key)
                gain = np.zeros(len(self.item))
                gain[after] = labels[self.item[after]] <= IN
                gain[before] = -1.0 * (labels[self.item[before]] == BEFORE)
                self.cuts.append(Cut(stage, labels, float(seconds), gain))
                new += 1
        return new

    def _thin(self, point: Floats, claims: Floats) -> None:
        if len(self.cuts) > MOST_CUTS:
            slack = [claims[cut.stage] - float(cut.gain @ point) for cut in self.cuts]
            self.cuts = [self.cuts[i] for i in np.sort(np.argsort(slack, kind="stable")[:KEPT_CUTS])]
            self.known = {(cut.stage, cut.labels.tobytes()) for cut in self.cuts}

    def _claims(self, point: Floats) -> Floats:
        """The most that a known stage of each place gains."""
        claims = np.full(self.problem.stages, -np.inf)
        gains = np.array([cut.gain for cut in self.cuts]) @ point
        np.maximum.at(claims, [cut.stage for cut in self.cuts], gains)
        return claims

    def _nearest(self, far: float) -> Floats | None:
        """The point nearest to the centre where the known stages gain `LEVEL` in all; None if there is none nearby.

        With y the way from the centre and t the gains of the places, of no weight: t_s >= gain of each cut of s, sum t
        = LEVEL. The least of y under linear inequalities is a problem of non-negative least squares (Lawson and Hanson,
        1974, chapter 23); its solution has a weight for each cut.
        """
        self.work += WORK_OF_NEAREST
        places, light = self.problem.stages, 1e3
        rows = np.array([cut.gain for cut in self.cuts])
        of = np.array([cut.stage for cut in self.cuts])
        claims = self._claims(self.centre)
        program = np.zeros((len(rows) + 1, len(self.item) + places))
        program[:-1, : len(self.item)] = -rows * self.size
        program[np.arange(len(rows)), len(self.item) + of] = light
        program[-1, len(self.item) :] = -light
        least = np.append(rows @ self.centre - claims[of], claims.sum() - LEVEL)
        matrix, target = np.vstack([program.T, least]), np.zeros(len(self.item) + places + 1)
        target[-1] = 1.0
        try:
            weights, _ = nnls(matrix, target)
        except RuntimeError:  # it did not converge
            return None
        self._share(weights, of)
        rest = matrix @ weights - target
        if abs(rest[-1]) < 1e-9:
            return None
        way = -rest[: len(self.item)] / rest[-1]
        return None if float(np.linalg.norm(way)) > far else self.centre + self.size * way

    def _share(self, weights: Floats, of: NDArray[np.int64]) -> None:
        """Read off the cuts' weights where they have each item."""
        self.shares[:] = 0.5
        for stage in range(self.problem.stages - 1):
            own = [i for i in np.flatnonzero(of == stage) if weights[i] > 0]
            if own:
                inside = np.array([self.cuts[i].labels <= IN for i in own])
                self.shares[stage + 1] = weights[own] @ inside / weights[own].sum()


def labels_within(window: Windows, stage: int) -> NDArray[np.bool_]:
    """Which labels of a stage the windows leave to each item, (items, 3)."""
    earliest, latest = window
    return np.stack([earliest < stage, (earliest <= stage) & (stage <= latest), latest > stage], axis=1)


def undecided(window: Windows, stages: int) -> NDArray[np.bool_]:
    """Which items may be before a boundary and behind it, (stages + 1, items)."""
    earliest, latest = window
    boundaries = np.arange(stages + 1)[:, None]
    return (earliest < boundaries) & (boundaries <= latest)


def _sweeps(problem: Problem, window: Windows, deadline: float) -> list[Sweep]:
    """A sweep for each stage, along the one of two orders that has fewer states in the middle stage."""
    allowed = [labels_within(window, stage) for stage in range(problem.stages)]
    middle = problem.stages // 2
    best: tuple[int, Sequence[int]] | None = None
    for order in (range(problem.items), narrow_order(problem)):
        try:
            states = sweep(problem, middle, allowed[middle], order, MOST_STATES, deadline).states
        except TooWideError:
            continue
        if best is None or states < best[0]:
            best = states, order
    if best is None:
        raise TooWideError
    return [sweep(problem, stage, allowed[stage], best[1], MOST_STATES, deadline) for stage in range(problem.stages)]
