"""What kernels of a CPU take for themselves through torch's allocator, where the dispatcher does not see it.

oneDNN computes a convolution in blocked layouts: its operands are copied into them, and its result out of them, unless
the kernel is a single point. Seen in the memory events of torch's profiler (torch 2.14, x86-64); nothing of this is
counted for a GPU, where such workspaces are the library's own and part of the stated reserve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten

PLAIN_CHANNELS = 3
"""An image of so few channels is read as it is."""


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
    shape = aten.convolution.default(input, weight, bias, stride, padding, dilation, transposed, output_padding, groups)
    output = _size(shape)
    if _single_point(weight, stride):
        return output if _plain(input) else _size(input) + _size(weight) + 2 * output
    # A transposed one adds its bias in a third place.
    return max(_copied(input) + _size(weight) + output, (3 if transposed and bias is not None else 2) * output)


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
    """First the gradient of the input, then, beside it, that of the weight; each as in the forward pass."""
    wanted, rest = output_mask[0], output_mask[1]
    if _single_point(weight, stride) and _plain(input):
        return _size(input) * wanted + _size(weight) * rest
    g, x, w = _size(gradient), _copied(input), _size(weight)
    first = max(g + w + _size(input), 2 * _size(input)) if wanted else 0
    second = _size(input) * wanted + max(x + g + w, 2 * w) if rest else 0
    return max(first, second)


def _single_point(weight: torch.Tensor, stride: Sequence[int]) -> bool:
    return math.prod(weight.shape[2:]) == 1 and all(step == 1 for step in stride)


def _plain(image: torch.Tensor) -> bool:
    """Whether a single point is computed where its operands lie: half precision is converted first."""
    return image.dtype == torch.float32


def _copied(image: torch.Tensor) -> int:
    return _size(image) if image.shape[1] > PLAIN_CHANNELS else 0


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


INSIDE: Mapping[Any, Callable[..., int]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
}
"""Operator -> most bytes at once that it takes, its results included; arguments as in the operator."""
