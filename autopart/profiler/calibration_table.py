"""What a calibration found, as a table, and what it says of the device's peaks."""

from __future__ import annotations

from collections.abc import Iterator

from autopart.profiler.calibration import Calibration
from autopart.text import printable, table

PEAKS = (
    ("of_rate", "rate", "the peak in the device's entry is too low"),
    ("of_bandwidth", "bandwidth", "the peak in the device's entry is too low, or the data lay in the cache"),
)
"""A fraction of a curve, of which peak, and what it means where it is above 1."""


def format_calibration(calibration: Calibration) -> str:
    """The residuals of each family, before and after."""
    rows = [
        [
            before.family,
            str(before.parts),
            f"{before.median:.0%}",
            f"{after.median:.0%}",
            f"{before.ninety:.0%}",
            f"{after.ninety:.0%}",
            f"{before.total:.2f}",
            f"{after.total:.2f}",
        ]
        for before, after in zip(calibration.before, calibration.after, strict=True)
    ]
    headers = ["family", "parts", "median error\nbefore", "\nafter", "90 % below\nbefore", "\nafter"]
    headers += ["sum / measured\nbefore", "\nafter"]
    return "\n".join([table(rows, headers, (0,)), "", *map(printable, _remarks(calibration))])


def _remarks(calibration: Calibration) -> Iterator[str]:
    yield "parts: forward or backward of a call, under the family that takes longest in it."
    hidden = [row.family for row in calibration.after if not row.longest]
    if hidden:
        yield f"Nowhere longest, and so shown by every part that has it: {', '.join(hidden)}."
    fitted = {row.family for row in calibration.after}
    for name, peak, meaning in PEAKS:
        curves = calibration.device.efficiency.items()
        above = {family: getattr(curve, name) for family, curve in curves if family in fitted}
        shown = [f"{family} {share:.3g}" for family, share in sorted(above.items()) if share > 1]
        if shown:
            yield f"More than the peak {peak} ({', '.join(shown)} times as much): {meaning}."
