"""Branch and bound over potentials: where one program cannot exclude a limit, two with less freedom may.

An item that the program would have partly before a boundary and partly behind it is put before it, with all that comes
before the item, and then behind it, with all that comes after. Boundaries in the middle come first: what is left on
their two sides hardly depends on each other, and few stages are what potentials are best at.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from autopart.solver.beam import plan_along
from autopart.solver.potentials import Potentials, Windows, undecided
from autopart.solver.problem import Floats, membership

# When one program is given up: rounds, size of the potentials, work.
ROUNDS, FAR, WORK = 30, 8.0, 60_000_000
# Beginnings that the beam keeps.
WIDTH = 2
# A boundary is in doubt when both pieces of an item there decide at least this part of a stage's seconds.
LEAST_DOUBT = 0.02


@dataclass(frozen=True, eq=False)
class _Part:
    """Some of all plans, by their windows; the potentials that were last good there, and a bound of the plans' load."""

    window: Windows
    centre: Floats
    bound: float


class Branching:
    """Searches for a plan within a limit on the load; each ends with one, or with the proof that there is none.

    What parts one limit made of all plans is where the next one begins.

    Attributes:
        parts: Every plan within the potentials' windows is in one of them.
    """

    def __init__(self, potentials: Potentials, accept: Callable[[tuple[int, ...]], object]) -> None:
        """
        Args:
            accept: Takes a plan within the limit, with which the search ends.
        """
        problem = potentials.problem
        self.potentials, self.accept = potentials, accept
        self.parts = [_Part(potentials.window, potentials.centre, -np.inf)]
        self.before, self.behind = (
            membership(sets, problem.items) for sets in (problem.ancestors, problem.descendants)
        )
        self.seconds = problem.work.mean(axis=0).copy()
        for n, net in enumerate(problem.nets):
            self.seconds[net.producer] += problem.touch[:, n].mean()
            self.seconds[net.producer] += problem.transfer[:, n].mean() if problem.stages > 1 else 0.0

    def excluded(self, limit: float) -> bool:
        """Whether there is no plan within the limit, in seconds; False if one was found, or the work is spent."""
        potentials = self.potentials
        todo = [part for part in reversed(self.parts) if part.bound < limit]
        self.parts = [part for part in self.parts if part.bound >= limit]
        while todo:
            part = todo.pop()
            potentials.window, potentials.centre = part.window, part.centre
            if potentials.impossible(limit, WORK, ROUNDS, FAR):
                self.parts.append(_Part(part.window, potentials.centre, limit))
                continue
            pieces = None
            if not potentials.spent():
                plan = plan_along(potentials, limit, WIDTH)
                if plan is None:
                    pieces = self._pieces(part)
                else:  # where it is not accepted, loads are not what matters
                    self.accept(plan)
            if pieces is None:
                self.parts += [part, *reversed(todo)]
                return False
            todo += pieces
        return True

    def _pieces(self, part: _Part) -> list[_Part] | None:
        """The part in two, the likelier piece last, which is searched first; None where there is nothing to decide."""
        doubt = self._doubtful()
        if doubt is None:
            return None
        boundary, item = doubt
        earliest, latest = part.window
        put_before, put_behind = latest.copy(), earliest.copy()
        put_before[self.before[item]] = np.minimum(latest[self.before[item]], boundary - 1)
        put_behind[self.behind[item]] = np.maximum(earliest[self.behind[item]], boundary)
        windows = [(earliest, put_before), (put_behind, latest)]
        if self.potentials.shares[boundary, item] >= 0.5:
            windows.reverse()
        tried = self.potentials.tried
        return [_Part((first, last), tried, part.bound) for first, last in windows if (first <= last).all()]

    def _doubtful(self) -> tuple[int, int] | None:
        """The boundary nearest the middle that is in doubt, and the item whose two pieces both decide most there.

        What a piece decides are seconds of items: of what comes before the item the shares that the program would have
        behind the boundary, or of what comes after it those that it would have before.
        """
        stages, shares = self.potentials.problem.stages, self.potentials.shares
        free = undecided(self.potentials.window, stages)
        decided_before = (free * (1 - shares) * self.seconds) @ self.before.T
        decided_behind = (free * shares * self.seconds) @ self.behind.T
        decided = free * np.minimum(decided_before, decided_behind)
        open_at = np.flatnonzero(decided.max(axis=1) > LEAST_DOUBT * self.seconds.sum() / stages)
        if not len(open_at):
            decided, open_at = np.where(free, self.seconds, -1.0), np.flatnonzero(free.any(axis=1))
        if not len(open_at):
            return None
        boundary = min(open_at, key=lambda j: (abs(j - stages / 2), j))
        return int(boundary), int(decided[boundary].argmax())
