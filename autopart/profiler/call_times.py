"""Call times: seconds of calls on one device, measured where a profile has them, else by formula.

Collectives always keep their formula: a profile is made in one process. For other rows than those measured, the
measured seconds grow as the formula's do.
"""

from __future__ import annotations

from dataclasses import dataclass

from autopart.cluster import Device, Link
from autopart.profiler.growth import grown
from autopart.profiler.isolated import Call, Step, TensorSpec, Work
from autopart.profiler.kernels import Kernel
from autopart.profiler.keys import key_of
from autopart.profiler.measurement import Measurement, addition_call
from autopart.profiler.profile_file import Profile
from autopart.profiler.ranks import Exchange
from autopart.profiler.roofline import seconds


@dataclass(frozen=True)
class Seconds:
    """Of one call; `backward_weight_s` is what the gradients of weights add to the rest of backward."""

    forward_s: float = 0.0
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0


class CallTimes:
    """Seconds on a device, with a link between the ranks that hold one model together."""

    def __init__(self, device: Device, link: Link, ranks: int = 1, measured: Profile | None = None) -> None:
        """Args: measured: Of any device; it is used if it is of this one."""
        self._device = device
        self._link = link
        self._ranks = ranks
        self.profile = measured if measured is not None and measured.device.name == device.name else None

    def measured(self, call: Call | None) -> Measurement | None:
        """What was measured of a call; None for what has no call, an opaque node say."""
        if self.profile is None or call is None:
            return None
        entry = self.profile.entries.get(key_of(call, self._ranks))
        return entry.time if entry is not None else None

    def call(self, call: Call | None, work: Work, rows: float, fixed: int) -> Seconds:
        """Seconds of a call that does `work`, for `rows` times as many rows.

        Args: fixed: Bytes of what it touches that stay as they are.
        """
        found = self.measured(call)
        if found is None:
            forward, backward, backward_input = (
                self._steps_s(steps, rows, fixed) for steps in (work.forward, work.backward, work.backward_input)
            )
            # A kernel that makes both gradients at once leaves little for the weight's.
            return Seconds(forward, backward_input, max(0.0, backward - backward_input))
        return Seconds(
            found.forward_s * self._growth(work.forward, rows, fixed) + self._exchanges_s(work.forward),
            found.backward_input_s * self._growth(work.backward_input, rows, fixed)
            + self._exchanges_s(work.backward_input),
            found.backward_weight_s * self._growth(work.backward, rows, fixed)
            + max(0.0, self._exchanges_s(work.backward) - self._exchanges_s(work.backward_input)),
        )

    def addition(self, spec: TensorSpec, rows: float) -> float:
        """Seconds of adding one gradient of a value to another."""
        kernels = (addition(spec),)
        found = self.measured(addition_call(spec))
        if found is None:
            return self._steps_s(kernels, rows, 0)
        return found.forward_s * self._growth(kernels, rows, 0)

    def _steps_s(self, steps: tuple[Step, ...], rows: float, fixed: int) -> float:
        return seconds(grown(steps, rows, fixed), self._device, self._link)

    def _growth(self, steps: tuple[Step, ...], rows: float, fixed: int) -> float:
        if rows == 1.0:
            return 1.0
        kernels = tuple(step for step in steps if isinstance(step, Kernel))
        before = self._steps_s(kernels, 1.0, fixed)
        return self._steps_s(kernels, rows, fixed) / before if before else 1.0

    def _exchanges_s(self, steps: tuple[Step, ...]) -> float:
        return sum(step.seconds(self._link) for step in steps if isinstance(step, Exchange))


def addition(spec: TensorSpec) -> Kernel:
    """`a += b`: two reads and a write."""
    return Kernel("add_", "pointwise", spec.dtype, 0.0, 3.0 * spec.bytes)
