"""VerifyReport: what was compared, the worst of each, and the verdict."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from typing import Any

KINDS = ("output", "loss", "gradient", "buffer", "weight_after_steps")


@dataclass(frozen=True)
class VerifyReport:
    """A package against the model it was made from.

    Attributes:
        passed: Nothing is missing and every relative error is at most the tolerance.
        processes, tensor, schedule, dtype: How the package ran; the tensor degree is part of the processes.
        worst_relative_error: Kind ("output", "loss", "gradient", "buffer", "weight_after_steps") -> largest
            max |a - b| / max |b| of a tensor; inf for what is missing or NaN, None where there was nothing to compare.
        worst_name: Kind -> the tensor that has it.
        compared: Kind -> how many tensors were compared, over all steps.
        parameters: Parameters of the model; each was compared in every step, as were all copies of tied ones.
        tolerance: Limit of the relative errors, by dtype.
        failures: Sentences about what differs beyond numbers.
        refused: Why the package was not run, or None.
        notes: Sentences for the reader.
    """

    passed: bool
    processes: int
    schedule: str
    dtype: str
    worst_relative_error: dict[str, float | None]
    worst_name: dict[str, str | None] = field(default_factory=dict)
    compared: dict[str, int] = field(default_factory=dict)
    parameters: int = 0
    steps: int = 0
    tolerance: float = 0.0
    failures: tuple[str, ...] = ()
    refused: str | None = None
    notes: tuple[str, ...] = ()
    seconds: float = 0.0
    tensor: int = 1

    def to_json(self) -> str:
        """One JSON object; an infinite error is the string "inf"."""

        def plain(value: Any) -> Any:
            if isinstance(value, dict):
                return {key: plain(item) for key, item in value.items()}
            return str(value) if isinstance(value, float) and not math.isfinite(value) else value

        return json.dumps({name: plain(value) for name, value in vars(self).items()}, indent=2)

    def __str__(self) -> str:
        """A table for people: the worst of each kind, then the verdict."""
        ranks = f" ({self.tensor} tensor ranks in each place)" if self.tensor > 1 else ""
        lines = [f"{self.processes} processes{ranks}, schedule {self.schedule}, {self.dtype}, {self.steps} steps"]
        for kind in KINDS:
            error = self.worst_relative_error.get(kind)
            if error is not None:
                name = self.worst_name.get(kind)
                lines.append(f"  {kind.replace('_', ' '):20} {error:9.2e}  of {self.compared[kind]:5}  {name}")
        lines += [f"  {sentence}" for sentence in self.failures[:5]]
        if len(self.failures) > 5:
            lines.append(f"  and {len(self.failures) - 5} more")
        lines += [f"  note: {sentence}" for sentence in self.notes]
        verdict = "equal" if self.passed else "NOT equal"
        lines.append(f"{verdict} to the model (tolerance {self.tolerance:g})")
        return "\n".join(lines)
