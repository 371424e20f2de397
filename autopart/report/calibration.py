"""What a calibration found, as a table."""

from __future__ import annotations

from autopart.profiler.calibration import Calibration
from autopart.text import table


def format_calibration(calibration: Calibration) -> str:
    """The residuals of each family, before and after."""
    rows = [
        [
            before.family,
            str(before.calls),
            f"{before.median:.0%}",
            f"{after.median:.0%}",
            f"{before.ninety:.0%}",
            f"{after.ninety:.0%}",
            f"{before.total:.2f}",
            f"{after.total:.2f}",
        ]
        for before, after in zip(calibration.before, calibration.after, strict=True)
    ]
    headers = ["family", "calls", "median error\nbefore", "\nafter", "90 % below\nbefore", "\nafter"]
    headers += ["sum / measured\nbefore", "\nafter"]
    return table(rows, headers, (0,))
