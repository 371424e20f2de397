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

import numpy as np
from numpy.typing import NDArray

from autopart.solver.cuts import Cuts, Nearest, Stages
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
STAGES_AT_A_TIME, MOST_CUTS, KEPT_CUTS = 16, 800, 450
# Loads are sums of floats: a stage counts as within the limit up to this share.
ROUNDING = 1e-9

Windows = tuple[NDArray[np.int64], NDArray[np.int64]]


class Potentials:
    """Proofs that limits on the load are impossible; the potentials of one limit are a good start for the next.

    Attributes:
        window: Earliest and latest stage of each item, which may be made smaller from outside.
        centre: The potentials of the last proof, by boundary and item, (stages + 1, items).
        tried: After a limit that was not shown to be impossible, the best potentials that were tried for it.
        stages: Those found so far, also for other limits and windows; `cuts` are those of the last limit.
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
        work = problem.work.mean(axis=0)
        share = np.ones(problem.items) / problem.items if work.sum() <= 0 else work / work.sum()
        least = min(least_seconds(self.sweeps[s], labels_within(self.window, s)) for s in range(problem.stages))
        seconds = least + float(problem.repeat * work.sum())
        self.price = problem.stages / seconds if seconds > 0 else 1.0
        share = share * problem.stages
        self.scale = self.free * np.maximum(share, 0.3 * share.mean())
        self.centre: Floats = self.free * (share if start is None else start)
        self.tried = self.centre
        self.stages = Stages.none(problem.items)
        self.cuts = Cuts(self.stages, self.scale)
        self.shares: Floats = np.zeros(self.free.shape)
        self.work = 0

    def spent(self) -> bool:
        return self.work > self.most_work or time.monotonic() > self.deadline

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
        legal = (self.stages.seconds <= allowed) & _within(self.stages, self.window, self.problem.stages)
        self.cuts, resting = Cuts(self.stages.of(legal), self.scale), self.stages.of(~legal)
        shown = self._shown(allowed, self.work + most_work, rounds, far)
        self.stages = self.cuts.stages.and_also(resting.of(slice(-MOST_CUTS, None)))
        return shown

    def _shown(self, limit: float, most_work: float, rounds: int, far: float) -> bool:
        start, best, blur = self.centre, np.inf, BLUR
        for stage in sorted(set(range(self.problem.stages)) - set(self.cuts.stages.place)):
            begun = self._begun(stage, limit)
            if begun is not True:
                return begun is False
        for _ in range(rounds):
            cuts = self.cuts
            nearest = cuts.nearest(self.centre, LEVEL)
            if nearest is None:
                break
            self.work += nearest.work
            self._share(nearest)
            if nearest.far > far or self.work > most_work or self.spent():
                break
            point = nearest.table
            claims = cuts.claims(point)
            found = self._richest(point, limit, claims, blur)
            total = sum(one.most for one in found)
            if total < PROOF:
                self.centre = point
                return True
            if not cuts.learn(_placed(found, range(len(found)))):
                blur /= SHARPER
                if blur < SHARPEST:
                    break
            if total < best:
                best, self.centre = total, point
            if len(cuts.stages) > MOST_CUTS:
                slack = claims[cuts.stages.place] - cuts.gains(point)  # below zero for those that are new
                self.cuts = cuts.of(np.sort(np.argsort(slack, kind="stable")[:KEPT_CUTS]))
        self.tried, self.centre = self.centre, start
        return False

    def _richest(self, point: Floats, limit: float, least: Floats, blur: float) -> list[Richest]:
        """Of every stage; side by side, for they do not depend on each other."""

        def of(stage: int) -> Richest:
            worth = self.worth(point, stage)
            return richest(self.sweeps[stage], worth, limit, float(least[stage]), self.price, blur, STAGES_AT_A_TIME)

        with ThreadPoolExecutor() as threads:
            found = list(threads.map(of, range(self.problem.stages)))
        self.work += sum(one.work for one in found)
        return found

    def _begun(self, stage: int, limit: float) -> bool | None:
        """Find the first stages of one place; False if there is none within the limit, None if that is not known."""
        if least_seconds(self.sweeps[stage], labels_within(self.window, stage)) > limit:
            return False
        worth = self.worth(self.centre, stage)
        found = any_rich(self.sweeps[stage], worth, limit, self.price, COARSE, STAGES_AT_A_TIME, BELOW)
        self.work += found.work
        return True if self.cuts.learn(_placed([found], [stage])) else None

    def _share(self, nearest: Nearest) -> None:
        """Read off the stages' weights where they have each item."""
        self.shares[:] = 0.5
        for stage in range(self.problem.stages - 1):
            own = np.flatnonzero((self.cuts.stages.place == stage) & (nearest.weights > 0))
            if len(own):
                weights = nearest.weights[own]
                self.shares[stage + 1] = weights @ self.cuts.inside[own] / weights.sum()


def _placed(found: Sequence[Richest], places: Sequence[int]) -> Stages:
    """The stages that searches at these places found."""
    return Stages(
        np.repeat(places, [len(one.stages) for one in found]),
        np.concatenate([one.stages for one in found]),
        np.concatenate([one.seconds for one in found]),
    )


def _within(stages: Stages, window: Windows, places: int) -> NDArray[np.bool_]:
    """Which of the stages have only labels that the windows leave."""
    allowed = np.array([labels_within(window, place) for place in range(places)])
    items = np.arange(stages.labels.shape[1])
    return np.asarray(allowed[stages.place[:, None], items, stages.labels].all(axis=1))


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
