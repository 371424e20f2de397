"""What it costs to send a value over a boundary of the pipeline, and how: whole, or in slices.

A value that all t ranks of a group hold alike may be sent as 1/t of it by each, and gathered behind the boundary: the
slow link between groups then carries 1/t, the fast one inside them the rest ("scatter/gather", Narayanan et al. 2021,
section 4.1). Its gradient comes back in the same way.
"""

from __future__ import annotations

import numpy as np

from autopart.cluster import Link
from autopart.sharding.conversions import collective_seconds
from autopart.solver.problem import Floats


def whole_s(link: Link, forward: Floats, backward: Floats) -> Floats:
    """Seconds of each value: its bytes forward, and those of its gradient back, if it has one."""
    return _messages(backward) * link.latency_s + (forward + backward) / link.bandwidth_bytes_per_s


def sliced_s(link: Link, inside: Link, t: int, forward: Floats, backward: Floats) -> Floats:
    """The same in slices: 1/t over `link`, then an all-gather of t ranks over the link inside a group."""
    gather = collective_seconds("all_gather", forward * (t - 1) / t, t, inside)
    back = collective_seconds("all_gather", backward * (t - 1) / t, t, inside)
    return whole_s(link, forward / t, backward / t) + gather + np.where(backward > 0, back, 0.0)


def _messages(backward: Floats) -> Floats:
    return 1.0 + (backward > 0).astype(np.float64)
