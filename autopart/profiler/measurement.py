"""Measurement: what running one call on a device told."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar

import torch
from pydantic import ConfigDict, Field

from autopart.profiler.isolated import Call, TensorSpec
from autopart.profiler.keys import contiguous_stride
from autopart.strict_json import STRICT

Amount = Annotated[float, Field(ge=0, le=1e30)]
Count = Annotated[int, Field(ge=0, lt=2**63)]

STANDARD_ERROR = 0.01
"""A median is known when the interquartile range over the root of the number of runs is this share of it."""


@dataclass(frozen=True)
class Measurement:
    """Times of one call.

    Attributes:
        forward_s: Median seconds of the call.
        backward_input_s: Of the gradients of its activations.
        backward_weight_s: What the gradients of its weights add to that.
        spread: Interquartile range of the repeats over their median, the largest of the parts.
        repeats: The fewest times that a part was run; 0: nothing was, the seconds are a formula's.
        peak_bytes: Most bytes beyond its inputs, forward or backward; None where the device does not tell.
        error: Interquartile range over the root of the number of runs, over the median, the largest of the parts: how
            far the seconds are known; None where nothing was run.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    forward_s: Amount
    backward_input_s: Amount
    backward_weight_s: Amount
    spread: Amount
    repeats: Count
    peak_bytes: Count | None = None
    error: Amount | None = None

    @property
    def known(self) -> bool:
        """Whether every part's median is known to `STANDARD_ERROR`, or is a formula's."""
        return self.error is None or self.error <= STANDARD_ERROR

    def as_backward(self, of_weights: bool) -> Measurement:
        """The same of a call that is made in backward, for gradients of weights or of activations."""
        shares = (0.0, self.seconds) if of_weights else (self.seconds, 0.0)
        return replace(self, forward_s=0.0, backward_input_s=shares[0], backward_weight_s=shares[1])

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_input_s + self.backward_weight_s


def addition_call(spec: TensorSpec) -> Call:
    """What adds one gradient of a value to another: a kernel that belongs to no operator of the graph."""
    plain = TensorSpec(spec.shape, contiguous_stride(spec.shape), spec.dtype, requires_grad=False)
    return Call(torch.ops.aten.add_.Tensor, ((plain, plain), {}), False, ())
