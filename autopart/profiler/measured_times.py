"""Measured times: what a profile says of the calls on one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from autopart.profiler.measurement import Measurement


@dataclass(frozen=True)
class MeasuredTimes:
    """Measurements by key (`keys.key_of`), on the device that a cluster calls `device`."""

    device: str
    calls: Mapping[str, Measurement]

    def on(self, device: str) -> Mapping[str, Measurement] | None:
        """The measurements if they are of that device."""
        return self.calls if device == self.device else None
