"""Measurement: what running one call on a device told."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from autopart.profiler.isolated import Call, TensorSpec
from autopart.profiler.keys import contiguous_stride


@dataclass(frozen=True)
class Measurement:
    """One call, measured.

    Attributes:
        forward_s: Median seconds of the call.
        backward_input_s: Of the gradients of its activations.
        backward_weight_s: What the gradients of its weights add to that.
        spread: Interquartile range of the repeats over their median, the largest of the parts.
        repeats: The fewest times that a part was run.
        peak_bytes: Most bytes beyond its inputs, forward or backward; None where the device does not tell.
    """

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    spread: float
    repeats: int
    peak_bytes: int | None = None


def addition_call(spec: TensorSpec) -> Call:
    """What adds one gradient of a value to another: a kernel that belongs to no operator of the graph."""
    plain = TensorSpec(spec.shape, contiguous_stride(spec.shape), spec.dtype, requires_grad=False)
    return Call(torch.ops.aten.add_.Tensor, ((plain, plain), {}), False, ())
