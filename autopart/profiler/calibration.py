"""Calibration: efficiency curves of a device, fitted to measured times of calls.

A call starts kernels of one or several families; its predicted time is the sum of theirs on the roofline (`roofline`).
Over all families F at once the fit minimises

    sum over calls of  w rho(log(predicted / measured) / 0.2)  +  sum over parameters of  (log(p / p0) / 2)^2

in the logarithms of each family's parameters p (of_rate, of_bandwidth, ramp, and of_cache on a CPU with a cache), where

- rho is the soft absolute value: a call that no roofline explains (another algorithm, a disturbed measurement) moves
  the curve little;
- w grows with the root of the time that the model spends in the call, within a factor of 10 either way;
- the second sum keeps what the calls do not tell (the bandwidth of a family that always computes) at p0, its value
  before the fit.

The size of a CPU's cache is the best of a few powers of two.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from autopart.cluster import Device, Efficiency
from autopart.errors import UsageError
from autopart.profiler.kernels import Kernel
from autopart.profiler.profile_file import KernelRecord, Profile, ProfiledDevice
from autopart.profiler.roofline import efficiency, kernel_seconds, peak_rate

TOLERANCE = 0.2
"""Of the logarithm: calls that are further off than this count by their distance, not by its square."""
PULL = 0.5
"""Towards the value before, on the logarithm: a factor of ten there weighs like one call that is off by a quarter."""
CACHES_BYTES = [0, *(2**power for power in range(20, 27))]
SMALLEST_SHARE, LARGEST_SHARE = 1e-3, 1e3
SHORTEST_RAMP_S, LONGEST_RAMP_S = 1e-8, 1e-2

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Sample:
    """One part (forward, or backward) of a call that was measured.

    Attributes:
        count: How often a model makes the call.
    """

    kernels: tuple[Kernel, ...]
    seconds: float
    count: int

    def predicted(self, device: Device) -> float:
        """Seconds by the device's curves."""
        return sum(kernel_seconds(kernel, device) for kernel in self.kernels)

    def family(self, device: Device) -> str:
        """That of its longest kernel."""
        return max(self.kernels, key=lambda kernel: kernel_seconds(kernel, device)).family


@dataclass(frozen=True)
class Residual:
    """How far predictions of one family's calls are off; errors are |predicted / measured - 1|.

    Attributes:
        parts: How many: the forward of a call, or its backward.
        total: Predicted over measured seconds, of all parts together.
        longest: Whether the parts are those in which the family takes longest; else it does in none, and they are all
            in which it runs.
    """

    family: str
    parts: int
    median: float
    ninety: float
    total: float
    longest: bool = True


@dataclass(frozen=True)
class Calibration:
    """A fitted device, and the residuals before and after by family; the last row is that of all calls."""

    device: Device
    before: tuple[Residual, ...]
    after: tuple[Residual, ...]


def same_device(profiles: Sequence[Profile]) -> ProfiledDevice:
    """The device on which all profiles were measured.

    Raises:
        UsageError: They are of several.
    """
    devices = {profile.device for profile in profiles}
    if len(devices) > 1:
        raise UsageError(f"the profiles are of {len(devices)} devices; fit those of one device at a time")
    return devices.pop()


def samples_of(profiles: Iterable[Profile]) -> list[Sample]:
    """Every part of every call in measured profiles that starts a kernel known to the roofline.

    Raises:
        UsageError: A profile is not measured.
    """
    found: list[Sample] = []
    for profile in profiles:
        if profile.source != "measured":
            raise UsageError(f"the profile of '{profile.model}' holds formulas, not measured times")
        for entry in profile.entries.values():
            time = entry.time
            parts = [(entry.forward, time.forward_s), (entry.backward_input, time.backward_input_s)]
            if entry.backward != entry.backward_input:
                parts.append((entry.backward, time.backward_input_s + time.backward_weight_s))
            found += [Sample(_kernels(records), seconds, entry.count) for records, seconds in parts if records]
    return [sample for sample in found if sample.seconds > 0 and sample.count]


def calibrate(samples: Sequence[Sample], device: Device, name: str, source: str) -> Calibration:
    """Fit the device's curves; families that no sample has stay as they are.

    Args:
        device: Whose peaks hold, and whose curves are the start.
        name, source: Of the fitted device.

    Raises:
        UsageError: There is nothing to fit.
    """
    if not samples:
        raise UsageError("the profiles hold no measured call with a kernel that could be fitted")
    caches = CACHES_BYTES if device.kind == "cpu" else [0]
    fits = [_Fit(samples, replace(device, cache_bytes=size)).solve() for size in caches]
    _, fitted = min(fits, key=lambda fit: fit[0])
    fitted = replace(fitted, name=name, source=source)
    return Calibration(fitted, residuals(samples, device, device), residuals(samples, fitted, device))


def residuals(samples: Sequence[Sample], device: Device, grouped_by: Device) -> tuple[Residual, ...]:
    """How far the device's predictions are off, by family as `grouped_by` sees it; every family that runs has a row."""
    groups: dict[str, list[Sample]] = {}
    for sample in samples:
        groups.setdefault(sample.family(grouped_by), []).append(sample)
    rows = []
    for family in sorted({kernel.family for sample in samples for kernel in sample.kernels}):
        held = [sample for sample in samples if any(kernel.family == family for kernel in sample.kernels)]
        rows.append(_residual(family, groups.get(family, held), device, family in groups))
    return (*rows, _residual("all", samples, device))


def _residual(family: str, samples: Sequence[Sample], device: Device, longest: bool = True) -> Residual:
    measured = np.array([sample.seconds for sample in samples])
    predicted = np.array([sample.predicted(device) for sample in samples])
    counts = np.array([sample.count for sample in samples])
    errors = np.abs(predicted / measured - 1)
    return Residual(
        family,
        len(samples),
        float(np.median(errors)),
        float(np.quantile(errors, 0.9)),
        float((predicted * counts).sum() / (measured * counts).sum()),
        longest,
    )


def _kernels(records: Iterable[KernelRecord]) -> tuple[Kernel, ...]:
    return tuple(record.kernel() for record in records)


class _Fit:
    """The program for one size of the cache."""

    def __init__(self, samples: Sequence[Sample], device: Device) -> None:
        kernels = [kernel for sample in samples for kernel in sample.kernels]
        self._families = sorted({kernel.family for kernel in kernels})
        self._device = device
        number = {family: i for i, family in enumerate(self._families)}
        self._family = np.array([number[kernel.family] for kernel in kernels])
        self._sample = np.repeat(np.arange(len(samples)), [len(sample.kernels) for sample in samples])
        bandwidth = device.memory_bandwidth_bytes_per_s
        self._compute = np.array([kernel.flops / peak_rate(device, kernel.dtype) for kernel in kernels])
        self._cached = np.array([min(kernel.bytes, device.cache_bytes) for kernel in kernels]) / bandwidth
        self._memory = np.array([kernel.bytes for kernel in kernels]) / bandwidth - self._cached
        self._measured = np.array([sample.seconds for sample in samples])
        spent = self._measured * np.array([sample.count for sample in samples])
        self._weight = np.sqrt(np.clip(np.sqrt(spent / spent.mean()), 0.1, 10))
        self._start = np.log([self._parameters(efficiency(device, family)) for family in self._families]).T

    def solve(self) -> tuple[float, Device]:
        """The objective's least value, and the device that has it."""
        lowest = np.log([SMALLEST_SHARE, SMALLEST_SHARE, SHORTEST_RAMP_S, SMALLEST_SHARE])[:, None]
        highest = np.log([LARGEST_SHARE, LARGEST_SHARE, LONGEST_RAMP_S, LARGEST_SHARE])[:, None]
        shape = self._start.shape
        result = least_squares(
            lambda logs: self._residuals(logs.reshape(shape)),
            np.clip(self._start, lowest, highest).ravel(),
            bounds=(np.broadcast_to(lowest, shape).ravel(), np.broadcast_to(highest, shape).ravel()),
            loss=self._loss,
        )
        fitted = np.exp(result.x.reshape(shape))
        curves = dict(self._device.efficiency)
        for family, (of_rate, of_bandwidth, ramp_s, of_cache) in zip(self._families, fitted.T, strict=True):
            kept = float(of_cache) if self._device.cache_bytes else None
            curves[family] = Efficiency(float(of_rate), float(of_bandwidth), float(ramp_s), kept)
        return float(result.cost), replace(self._device, efficiency=curves)

    def _residuals(self, logs: Floats) -> Floats:
        of_rate, of_bandwidth, ramp_s, of_cache = np.exp(logs)[:, self._family]
        memory = self._memory / of_bandwidth + self._cached / of_cache
        execution = np.maximum(self._compute / of_rate, memory) + ramp_s
        launch = self._device.launch_s
        seconds = np.maximum(launch, execution) if self._device.kind == "cuda" else launch + execution
        predicted = np.bincount(self._sample, seconds, len(self._measured))
        errors = np.log(predicted / self._measured) / TOLERANCE
        return np.concatenate([errors, (PULL * (logs - self._start)).ravel()])

    def _loss(self, squares: Floats) -> Floats:
        """The soft absolute value of the calls' residuals and the squares of the others, with two derivatives."""
        calls = len(self._measured)
        root = np.sqrt(1 + squares[:calls])
        weight = self._weight
        ones = np.ones(len(squares) - calls)
        return np.stack(
            [
                np.concatenate([2 * weight * (root - 1), squares[calls:]]),
                np.concatenate([weight / root, ones]),
                np.concatenate([-0.5 * weight / root**3, 0 * ones]),
            ]
        )

    @staticmethod
    def _parameters(curve: Efficiency) -> list[float]:
        return [curve.of_rate, curve.of_bandwidth, curve.ramp_s, curve.of_cache or curve.of_bandwidth]
