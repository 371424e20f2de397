"""What kernels of a CPU take for themselves through torch's allocator, where the dispatcher does not see it.

Convolutions, that is. oneDNN computes them in blocked layouts: operands are copied into them, and the result out of
them. torch gives it only those that `ConvParams::use_mkldnn` names (aten/src/ATen/native/Convolution.cpp; as with one
thread); the others unfold the image into columns. The copies are those seen in the memory events of torch's profiler
(torch 2.14, x86-64). Nothing of this is counted for a GPU, where workspaces are part of the stated reserve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten

PLAIN_CHANNELS = 3
"""An image of so few channels is read as it is."""

SMALL_IMAGE = 20480
"""Elements of one image up to which its columns are made, unless the kernel is large."""

SMALL_BATCH = 16
"""Rows below which a kernel of one point is a plain product."""


def _convolution(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
) -> int:
    """The copies of input and weight and the blocked result; then the result beside the blocked one."""
    result = aten.convolution.default(
        input, weight, bias, stride, padding, dilation, transposed, output_padding, groups
    )
    output, point = _size(result), _single_point(weight)
    if not _by_onednn(input, weight, stride, dilation, groups):
        return output + _columns(input, weight, result)
    scratch = output if point and _half(input) else 0
    # A transposed one adds its bias in a third place.
    after = (3 if transposed and bias is not None else 2) * output
    return max(_copied(input) + _size(weight) + output + scratch, after)


def _convolution_backward(
    gradient: torch.Tensor,
    input: torch.Tensor,
    weight: torch.Tensor,
    bias_sizes: Sequence[int] | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    transposed: bool,
    output_padding: Sequence[int],
    groups: int,
    output_mask: Sequence[bool],
) -> int:
    """First the gradient of the input, then, beside it, that of the weight; each as in the forward pass.

    Half precision adds the weight's gradient up in float32, and needs the input's a second time at a single point.
    """
    wanted, rest = output_mask[0], output_mask[1]
    g, x, w = _size(gradient), _size(input), _size(weight)
    if not _by_onednn(input, weight, stride, dilation, groups):
        return x * wanted + w * rest + _columns(input, weight, gradient)
    scratch = x if _single_point(weight) and _half(input) else 0
    sums = weight.numel() * torch.float32.itemsize if _half(input) else 0
    first = max(g + w + x + scratch, 2 * x) if wanted else 0
    second = x * wanted + max(_copied(input) + g + w + sums, 2 * w) if rest else 0
    return max(first, second)


def _by_onednn(
    input: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int
) -> bool:
    if _half(input):
        return True
    spread = any(step != 1 for step in (*stride, *dilation)) or not _single_point(weight)
    large = min(weight.shape[2:], default=1) > 3 or input.numel() > SMALL_IMAGE
    return (spread or input.shape[0] >= SMALL_BATCH) and (groups > 1 or input.shape[0] > 1 or large)


def _columns(input: torch.Tensor, weight: torch.Tensor, result: torch.Tensor) -> int:
    """The image with each point's neighbourhood written out; a single point needs none."""
    if _single_point(weight):
        return 0
    points = math.prod(result.shape[2:])
    return input.shape[0] * input.shape[1] * math.prod(weight.shape[2:]) * points * input.element_size()


def _half(image: torch.Tensor) -> bool:
    return image.element_size() < torch.float32.itemsize


def _single_point(weight: torch.Tensor) -> bool:
    return math.prod(weight.shape[2:]) == 1


def _copied(image: torch.Tensor) -> int:
    return _size(image) if image.shape[1] > PLAIN_CHANNELS else 0


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


INSIDE: Mapping[Any, Callable[..., int]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
"""Operator -> most bytes at once that it takes, its results included; arguments as in the operator."""
