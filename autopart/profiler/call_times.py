"""Call times: seconds of calls on one device, measured where that is known, else by formula, corrected if known how.

Collectives always keep their formula: a profile is made in one process. For other rows than those measured, the
measured seconds grow as the formula's do.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field

from autopart.cluster import Device, Link
from autopart.profiler.growth import grown
from autopart.profiler.isolated import Call, Step, TensorSpec, Work
from autopart.profiler.kernels import Kernel
from autopart.profiler.keys import key_of
from autopart.profiler.known import Known
from autopart.profiler.measurement import Measurement, addition_call
from autopart.profiler.ranks import Exchange
from autopart.profiler.roofline import kernel_seconds


@dataclass(frozen=True)
class Seconds:
    """Of one call; `backward_weight_s` is what the gradients of weights add to the rest of backward.

    Attributes:
        forward, backward: The same by kernel and collective.
    """

    forward_s: float = 0.0
    backward_input_s: float = 0.0
    backward_weight_s: float = 0.0
    forward: Mapping[str, float] = field(default_factory=dict)
    backward: Mapping[str, float] = field(default_factory=dict)


class CallTimes:
    """Seconds on a device, with a link between the ranks that hold one model together."""

    def __init__(self, device: Device, link: Link, ranks: int = 1, known: Known | None = None) -> None:
        known = known or Known()
        self._device = device
        self._link = link
        self._ranks = ranks
        self._calls = known.calls.get(device.name)
        self._corrections = known.corrections.get(device.name)

    @property
    def has_measurements(self) -> bool:
        """Whether there are measured calls of this device."""
        return self._calls is not None

    def measured(self, call: Call | None) -> Measurement | None:
        """What was measured of a call; None for what has no call, an opaque node say."""
        if self._calls is None or call is None:
            return None
        entry = self._calls.get(key_of(call, self._ranks))
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
            backward_weight = max(0.0, backward - backward_input)
        else:
            forward = found.forward_s * self._growth(work.forward, rows, fixed) + self._exchanges_s(work.forward)
            exchanged_s = self._exchanges_s(work.backward_input)
            backward_input = found.backward_input_s * self._growth(work.backward_input, rows, fixed) + exchanged_s
            backward_weight = found.backward_weight_s * self._growth(work.backward, rows, fixed)
            backward_weight += max(0.0, self._exchanges_s(work.backward) - exchanged_s)
        return Seconds(
            forward,
            backward_input,
            backward_weight,
            self._shared_out(forward, work.forward, rows, fixed),
            self._shared_out(backward_input + backward_weight, work.backward, rows, fixed),
        )

    def addition(self, spec: TensorSpec, rows: float) -> float:
        """Seconds of adding one gradient of a value to another."""
        kernels = (addition(spec),)
        found = self.measured(addition_call(spec))
        if found is None:
            return self._steps_s(kernels, rows, 0)
        return found.seconds * self._growth(kernels, rows, 0)

    def kernel(self, kernel: Kernel) -> float:
        """Seconds of a kernel by formula, corrected."""
        correction = 1.0 if self._corrections is None else self._corrections.factor(kernel.name)
        return correction * kernel_seconds(kernel, self._device)

    def _step_s(self, step: Step) -> float:
        return step.seconds(self._link) if isinstance(step, Exchange) else self.kernel(step)

    def _steps_s(self, steps: tuple[Step, ...], rows: float, fixed: int) -> float:
        return sum(map(self._step_s, grown(steps, rows, fixed)))

    def _shared_out(self, whole_s: float, steps: tuple[Step, ...], rows: float, fixed: int) -> dict[str, float]:
        """Seconds by kernel and collective, in the proportions of the formula."""
        found: dict[str, float] = defaultdict(float)
        for step in grown(steps, rows, fixed):
            found[step.collective if isinstance(step, Exchange) else step.name] += self._step_s(step)
        formula_s = sum(found.values())
        return {name: time * whole_s / formula_s for name, time in found.items()} if formula_s else {}

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
