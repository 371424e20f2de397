"""Links: latency and bandwidth of a class of links, fitted to measured times of messages and collectives.

    seconds = steps x latency + sent bytes / bandwidth

for messages (one step) and for each collective, with the steps of a ring or of a tree (`sharding/conversions.py`),
whichever fits better. Bandwidth and latency minimise the sum of the soft absolute values of log(predicted / measured),
so small and large messages count alike and a disturbed one moves little.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np
from scipy.optimize import least_squares

from autopart.cluster import CollectiveCost, Link
from autopart.errors import UsageError
from autopart.sharding.conversions import SHARES, STEPS, Collective

Algorithm = Literal["ring", "tree"]
What = Literal["send", "both_ways"] | Collective
COLLECTIVES: tuple[Collective, ...] = get_args(Collective)
TOLERANCE = 0.2


@dataclass(frozen=True)
class Timing:
    """One measurement.

    Attributes:
        what: "send": from one rank to another; "both_ways": at the same time back; or a collective.
        ranks: Size of the group.
        bytes: What a rank sends.
        seconds: Until it is there.
    """

    what: What
    ranks: int
    bytes: int
    seconds: float


@dataclass(frozen=True)
class Fit:
    """What was fitted to the timings of one kind; errors are |predicted / measured - 1|."""

    what: What
    algorithm: Algorithm
    latency_s: float
    bandwidth_bytes_per_s: float
    timings: int
    median: float
    ninety: float


def fit_link(name: str, timings: Sequence[Timing], ties: Algorithm) -> tuple[Link, list[Fit]]:
    """A link as cluster files describe it, and how well each of its figures fits.

    Args:
        ties: The algorithm to assume where the timings fit both alike (all groups of two ranks do).

    Raises:
        UsageError: No message was timed.
    """
    kinds: tuple[What, ...] = ("send", "both_ways", *COLLECTIVES)
    fits = {what: _fit(what, mine, ties) for what in kinds if (mine := [t for t in timings if t.what == what])}
    if "send" not in fits:
        raise UsageError("no message between two ranks was timed")
    send, back = fits["send"], fits.get("both_ways")
    costs = tuple(
        CollectiveCost(what, fit.algorithm, fit.latency_s, fit.bandwidth_bytes_per_s)
        for what, fit in fits.items()
        if what in COLLECTIVES
    )
    both_ways = None if back is None else min(back.bandwidth_bytes_per_s, send.bandwidth_bytes_per_s)
    return Link(name, send.latency_s, send.bandwidth_bytes_per_s, both_ways, costs), list(fits.values())


def _fit(what: What, timings: Sequence[Timing], ties: Algorithm) -> Fit:
    first, second = (ties, "tree" if ties == "ring" else "ring")
    found = [_solve(what, timings, algorithm) for algorithm in (first, second)]  # type: ignore[arg-type]
    (cost, fit), (other_cost, other) = found
    return other if other_cost < 0.999 * cost else fit


def _solve(what: What, timings: Sequence[Timing], algorithm: Algorithm) -> tuple[float, Fit]:
    seconds = np.array([timing.seconds for timing in timings])
    sent = np.array([timing.bytes for timing in timings], dtype=float)
    rounds = SHARES[what][1] if what in COLLECTIVES else 1  # type: ignore[index]
    steps = np.array([rounds * STEPS[algorithm](timing.ranks) for timing in timings], dtype=float)

    def errors(logs: np.ndarray) -> np.ndarray:
        latency, bandwidth = np.exp(logs)
        return np.log((steps * latency + sent / bandwidth) / seconds) / TOLERANCE

    start = np.log([(seconds / steps).min(), (sent / seconds).max()])
    result = least_squares(errors, start, loss="soft_l1")
    latency, bandwidth = (float(value) for value in np.exp(result.x))
    off = np.abs(np.exp(TOLERANCE * errors(result.x)) - 1)
    median, ninety = float(np.median(off)), float(np.quantile(off, 0.9))
    return float(result.cost), Fit(what, algorithm, latency, bandwidth, len(timings), median, ninety)
