"""Measured links, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopart.profiler.links import Fit
from autopart.text import table


def format_links(fits: Mapping[str, Sequence[Fit]]) -> str:
    """What was fitted for each class of links, and how far the fit is off."""
    rows = [
        [
            name,
            fit.what.replace("_", " "),
            "" if fit.what in ("send", "both_ways") else fit.algorithm,
            f"{fit.latency_s * 1e6:.4g}",
            f"{fit.bandwidth_bytes_per_s / 1e9:.4g}",
            str(fit.timings),
            f"{fit.median:.0%}",
            f"{fit.ninety:.0%}",
        ]
        for name, found in fits.items()
        for fit in found
    ]
    headers = ["link", "", "steps", "latency\nus", "bandwidth\nGB/s", "timings", "median error", "90 % below"]
    return table(rows, headers, (0, 1, 2))
