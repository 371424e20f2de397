"""Branch and bound over potentials: where one program cannot exclude a limit, two with less freedom may.

An item that the program would have half before a boundary and half behind it is put before it, with all that comes
before the item, and then behind it, with all that comes after. Boundaries in the middle come first: what is left on
their two sides hardly depends on each other, and few stages are what potentials are best at.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autopart.solver.beam import plan_along
from autopart.solver.potentials import FAR, ROUNDS, Potentials, undecided
from autopart.solver.problem import membership

# When a program below the first one is given up.
ROUNDS_BELOW, FAR_BELOW = 18, 12.0
# The work of one program, and beginnings that the beam keeps.
WORK, WIDTH = 60_000_000, 6
# An item is worth a decision when its share, weighed by its seconds, is at least this part of an item's in the mean.
LEAST_DOUBT = 0.02


class Branching:
    """A search for a plan within a limit that ends with the plan, or with the proof that there is none."""

    def __init__(self, potentials: Potentials, limit: float, accept: Callable[[tuple[int, ...]], object]) -> None:
        """
        Args:
            limit: On the load, in seconds.
            accept: Takes a plan within the limit, with which the search ends.
        """
        problem = potentials.problem
        self.potentials, self.limit, self.accept = potentials, limit, accept
        self.before, self.behind = (
            membership(sets, problem.items) for sets in (problem.ancestors, problem.descendants)
        )
        self.seconds = problem.work.mean(axis=0).copy()
        for n, net in enumerate(problem.nets):
            self.seconds[net.producer] += problem.touch[:, n].mean()
            self.seconds[net.producer] += problem.transfer[:, n].mean() if problem.stages > 1 else 0.0

    def excluded(self) -> bool:
        """Whether there is no plan within the limit; False if one was found, or the work is spent."""
        window, centre = self.potentials.window, self.potentials.centre
        excluded = self._closed(ROUNDS, FAR)
        self.potentials.window, self.potentials.centre = window, centre
        return excluded

    def _closed(self, rounds: int, far: float) -> bool:
        potentials = self.potentials
        if potentials.impossible(self.limit, WORK, rounds, far):
            return True
        if potentials.spent():
            return False
        plan = plan_along(potentials, self.limit, WIDTH)
        if plan is not None:  # where it is not accepted, loads are not what matters
            self.accept(plan)
            return False
        doubt = self._doubtful()
        if doubt is None:
            return False
        boundary, item = doubt
        (earliest, latest), centre = potentials.window, potentials.centre
        share = potentials.shares[boundary, item]
        for side in ("before", "behind") if share < 0.5 else ("behind", "before"):
            first, last = earliest.copy(), latest.copy()
            if side == "before":
                last[self.before[item]] = np.minimum(last[self.before[item]], boundary - 1)
            else:
                first[self.behind[item]] = np.maximum(first[self.behind[item]], boundary)
            if (first > last).any():
                continue
            potentials.window, potentials.centre = (first, last), centre
            if not self._closed(ROUNDS_BELOW, FAR_BELOW):
                return False
        return True

    def _doubtful(self) -> tuple[int, int] | None:
        """The boundary and item to decide: the most in doubt where the boundary nearest the middle has any doubt."""
        free, shares = undecided(self.potentials.window, self.potentials.problem.stages), self.potentials.shares
        doubt = free * np.minimum(shares, 1 - shares) * self.seconds
        open_at = np.flatnonzero(doubt.max(axis=1) > LEAST_DOUBT * self.seconds.mean())
        if not len(open_at):
            doubt, open_at = np.where(free, self.seconds, -1.0), np.flatnonzero(free.any(axis=1))
        if not len(open_at):
            return None
        middle = self.potentials.problem.stages / 2
        boundary = min(open_at, key=lambda j: (abs(j - middle), j))
        return int(boundary), int(doubt[boundary].argmax())
