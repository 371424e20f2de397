"""How far two computations of the same tensors are apart, and how far they may be."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

Tensors = Mapping[str, torch.Tensor | None]

# Largest relative error that two orders of the same additions explain, by the dtype of the computation.
TOLERANCES: dict[torch.dtype, float] = {
    torch.float64: 1e-9,
    torch.float32: 2e-3,
    torch.bfloat16: 1e-1,
    torch.float16: 5e-2,
}
# Two orders of the same additions differ by a few roundings of the largest number among them, whatever is left of it.
ROUNDINGS = 4


@dataclass
class Comparison:
    """One kind of tensors ("gradient", "weight_after_steps", ...) of the package against those of the model.

    The relative error of a tensor is max |a - b| / max(max |b|, floor), b being the model's. Some tensors are zero but
    for rounding (the gradient of a key's bias in attention, of a bias before batch norm), and only their size against
    the others means something: the floor is sqrt(eps) times the largest |b| of the same kind, and at least so large
    that `ROUNDINGS` roundings of that are within the tolerance.

    Attributes:
        worst: The largest relative error; inf where something is missing, NaN, or of another shape.
        worst_name: Which tensor has it.
        compared: How many tensors were compared.
        failures: Sentences about tensors that cannot be compared at all.
    """

    kind: str
    worst: float = 0.0
    worst_name: str | None = None
    compared: int = 0
    failures: list[str] = field(default_factory=list)

    def add(self, actual: Tensors, expected: Tensors, least_scale: float = 0.0) -> None:
        """Compare two sets of tensors by name; both must have the same names.

        Args:
            least_scale: Size of what the tensors were computed from, where all of them may be zero but for rounding.
        """
        for name in [*(n for n in expected if n not in actual), *(n for n in actual if n not in expected)]:
            side = "package" if name in expected else "model"
            self.fail(name, f"the {side} has no {self.kind} {name}")
        scale = max((_largest(b) for b in expected.values() if b is not None and b.is_floating_point()), default=0.0)
        scale = max(scale, least_scale)
        for name, b in expected.items():
            if name in actual:
                self._one(name, actual[name], b, scale)

    def _one(self, name: str, a: torch.Tensor | None, b: torch.Tensor | None, scale: float) -> None:
        self.compared += 1
        if a is None or b is None:
            if a is not b:
                lacking, other = ("package", "model") if a is None else ("model", "package")
                self.fail(name, f"{self.kind} {name} is None in the {lacking}, not in the {other}")
            return
        if a.shape != b.shape or a.dtype != b.dtype:
            what = f"{list(a.shape)} {a.dtype} in the package, {list(b.shape)} {b.dtype} in the model"
            self.fail(name, f"{self.kind} {name} is {what}")
            return
        if not b.numel():
            return
        floor = _floor(b.dtype) * scale if b.is_floating_point() else 0.0
        a, b = _wide(a), _wide(b)
        infinite = torch.isinf(b)
        if torch.isnan(a).any() or torch.isnan(b).any():
            self.fail(name, f"{self.kind} {name} is NaN")
            return
        if not torch.equal(a[infinite], b[infinite]) or torch.isinf(a).ne(infinite).any():
            self.fail(name, f"{self.kind} {name} is infinite in other places than the model's")
            return
        difference = (a - b)[~infinite].abs()
        size = max(float(b[~infinite].abs().max()) if difference.numel() else 0.0, floor)
        largest = float(difference.max()) if difference.numel() else 0.0
        error = 0.0 if largest == 0.0 else (largest / size if size else math.inf)
        if error > self.worst or self.worst_name is None:
            self.worst, self.worst_name = error, name

    def fail(self, name: str, sentence: str) -> None:
        """A tensor that cannot be equal, and why."""
        self.worst, self.worst_name = math.inf, name
        self.failures.append(sentence)


def _floor(dtype: torch.dtype) -> float:
    eps = torch.finfo(dtype).eps
    return max(math.sqrt(eps), ROUNDINGS * eps / TOLERANCES[dtype] if dtype in TOLERANCES else 0.0)


def _largest(tensor: torch.Tensor) -> float:
    finite = tensor[torch.isfinite(tensor)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu().to(torch.complex128 if tensor.is_complex() else torch.float64)
