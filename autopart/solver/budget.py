"""What a search may spend: a time limit, from which limits in work follow, and the moment when the clock ends it.

Limits in work follow from the time limit alone, never from the clock, so that the same input gives the same plan. The
deadline is one for all parts of a search: who shares it out gives each part what is left over those still to come.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass


@dataclass(frozen=True)
class Budget:
    """What a search, or a part of one, may spend.

    Attributes:
        tolerance: The gap at which it ends.
        seconds: The time limit; limits in work follow from it.
        clock_s: What there was until the deadline when it began: the time limit, or less.
        deadline: When it ends in any case, on the clock of `time.monotonic`.
    """

    tolerance: float
    seconds: float
    clock_s: float
    deadline: float

    @classmethod
    def of(cls, tolerance: float, seconds: float, deadline: float = math.inf) -> Budget:
        """One that begins now, and ends no later than the deadline."""
        now = time.monotonic()
        clock_s = min(seconds, max(0.0, deadline - now))
        return cls(tolerance, seconds, clock_s, now + clock_s)

    @property
    def left(self) -> float:
        return self.deadline - time.monotonic()

    def until(self, share: float) -> float:
        """The deadline of what may take such a share of the clock's time, from now on."""
        return min(self.deadline, time.monotonic() + share * self.clock_s)

    def part(self, share: float) -> Budget:
        """A share of the time limit, from now on."""
        return Budget.of(self.tolerance, share * self.seconds, self.until(share))

    def leaving(self, share: float) -> Budget:
        """All but a share of the time limit, which is kept for what comes after."""
        return Budget.of(self.tolerance, (1 - share) * self.seconds, self.deadline - share * self.clock_s)


def fair(deadline: float, parts: int) -> float:
    """The deadline of the first of so many parts that share what is left."""
    now = time.monotonic()
    return now + max(0.0, deadline - now) / parts


class OutOfTimeError(Exception):
    """A deadline passed before there was anything to return."""


def check(deadline: float) -> None:
    """Raises OutOfTimeError once the deadline has passed."""
    if time.monotonic() > deadline:
        raise OutOfTimeError
