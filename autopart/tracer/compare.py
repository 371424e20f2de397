"""Equality of tensors up to rounding."""

from __future__ import annotations

from collections.abc import Iterable

import torch

# Relative to the largest value. Both sides run the same operators in the same order; a kernel may still choose its
# summation order by alignment.
TOLERANCES = {torch.float64: 1e-10, torch.complex128: 1e-10, torch.bfloat16: 5e-2, torch.float16: 1e-2}
SINGLE = 1e-4
# A gradient this much smaller than the largest one is rounding noise (the bias of a key projection).
NOISE = 1e-4


def largest(tensors: Iterable[torch.Tensor]) -> float:
    """The largest absolute finite value."""
    found = [t.detach().abs().nan_to_num(0.0, 0.0, 0.0).max() for t in tensors if t.numel()]
    return max((float(m) for m in found), default=0.0)


def close(one: torch.Tensor, other: torch.Tensor, least_scale: float = 0.0, coarse: bool = False) -> bool:
    """Equal shape, dtype and values, up to rounding relative to the largest value (or to `least_scale`).

    Args:
        coarse: Allow the rounding of bfloat16 whatever the dtype.
    """
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    one, other = one.detach(), other.detach()
    if not (one.is_floating_point() or one.is_complex()) or one.numel() == 0:
        return bool(torch.equal(one, other))
    finite = torch.isfinite(one)
    if not torch.equal(finite, torch.isfinite(other)):
        return False
    # Infinities must agree in sign; any NaN equals any other.
    if not finite.all() and not torch.equal(one[~finite].nan_to_num(), other[~finite].nan_to_num()):
        return False
    tolerance = TOLERANCES[torch.bfloat16] if coarse else TOLERANCES.get(one.dtype, SINGLE)
    one, other = one[finite], other[finite]
    return one.numel() == 0 or float((one - other).abs().max()) <= tolerance * max(largest([one]), least_scale)
