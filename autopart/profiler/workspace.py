"""What kernels of a CPU take for themselves through torch's allocator, where the dispatcher does not see it.

Convolutions, that is, and the backward of batch norm. oneDNN computes convolutions in blocked layouts: operands are
copied into them, and the result out of them. torch gives it only those that `ConvParams::use_mkldnn` names
(aten/src/ATen/native/Convolution.cpp; as with one thread); the others unfold the image into columns. The copies are
those seen in the memory events of torch's profiler (torch 2.14, x86-64). Nothing of this is counted for a GPU, where
workspaces are part of the stated reserve.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

aten = torch.ops.aten

PLAIN_CHANNELS = 3
"""An image of so few channels is read as it is."""

BLOCK = 16
"""Channels that lie together in a blocked layout."""

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
    if not _by_onednn(input, weight, stride, dilation, groups):
        return _size(result) + (_columns(result, weight, input) if transposed else _columns(input, weight, result))
    blocked = _blocked(result)
    # A transposed one adds its bias in a third place.
    after = blocked + (2 if transposed and bias is not None else 1) * _size(result)
    if transposed:
        scratch = _back_scratch(input, weight, result, stride)
    else:
        scratch = _sums(weight, result) + _chosen_points(input, weight, result, stride)
    return max(_copied(input) + _weight(weight, groups) + blocked + scratch, after)


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
    x, w = _size(input), _size(weight)
    fine, coarse = (gradient, input) if transposed else (input, gradient)
    if not _by_onednn(input, weight, stride, dilation, groups):
        return x * wanted + w * rest + _columns(fine, weight, coarse)
    operands = _blocked(gradient) + _weight(weight, groups)
    scratch = _sums(weight, input) if transposed else _back_scratch(gradient, weight, input, stride)
    # One of fewer points is copied once more.
    after = _blocked(input) + (2 if max(stride) > 1 and not transposed else 1) * x
    first = max(operands + _blocked(input) + scratch, after) if wanted else 0
    scratch = _weight_scratch(fine, coarse, weight, stride, padding, groups)
    second = x * wanted + max(_copied(input) + operands + scratch, _weight(weight, groups) + w) if rest else 0
    return max(first, second)


def _sums(weight: torch.Tensor, result: torch.Tensor) -> int:
    """A single point in half precision is added up in float32, image by image."""
    if not _single_point(weight) or not _half(result):
        return 0
    return _blocked(_one(result)) * torch.float32.itemsize // result.element_size()


def _chosen_points(input: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, stride: Sequence[int]) -> int:
    """The points of one image that a kernel of a single point reads, if these are not all."""
    if not _single_point(weight) or max(stride) == 1:
        return 0
    return input.shape[1] * math.prod(result.shape[2:]) * input.element_size()


def _back_scratch(gradient: torch.Tensor, weight: torch.Tensor, result: torch.Tensor, stride: Sequence[int]) -> int:
    """From few points to many: the few of one image are laid out once more."""
    return _size(_one(gradient)) if max(stride) > 1 else _sums(weight, result)


def _weight_scratch(
    fine: torch.Tensor,
    coarse: torch.Tensor,
    weight: torch.Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    groups: int,
) -> int:
    """The gradient of a weight: half precision adds it up in float32, and multiplies pairs of neighbours in a row.

    Args:
        fine, coarse: The convolution's input and its result's gradient; of a transposed one the other way round.
    """
    chosen = _chosen_points(fine, weight, coarse, stride)
    if not _half(fine):
        return chosen
    sums = _weight(weight, groups) * torch.float32.itemsize // weight.element_size()
    if _single_point(weight) or _narrow(weight, groups):
        return sums + chosen
    step, wide = stride[-1], fine.shape[-1]
    paired = _pairs(coarse, coarse.shape[-1])
    if fine.shape[1] > PLAIN_CHANNELS:
        paired += _pairs(fine, step * (_even(-(-wide // step) + _even(padding[-1] + 1))))
    return sums + paired


def _pairs(image: torch.Tensor, width: int) -> int:
    """One image in rows of an even `width`."""
    return _blocked(_one(image)) // image.shape[-1] * _even(width)


def _even(width: int) -> int:
    return width + width % 2


def _one(batch: torch.Tensor) -> torch.Tensor:
    return batch[:1]


def _by_onednn(
    input: torch.Tensor, weight: torch.Tensor, stride: Sequence[int], dilation: Sequence[int], groups: int
) -> bool:
    if _half(input):
        return True
    spread = any(step != 1 for step in (*stride, *dilation)) or not _single_point(weight)
    large = min(weight.shape[2:], default=1) > 3 or input.numel() > SMALL_IMAGE
    return (spread or input.shape[0] >= SMALL_BATCH) and (groups > 1 or input.shape[0] > 1 or large)


def _columns(fine: torch.Tensor, weight: torch.Tensor, coarse: torch.Tensor) -> int:
    """The image of more points with each point's neighbourhood written out; a single point needs none."""
    if _single_point(weight):
        return 0
    points = math.prod(coarse.shape[2:])
    return fine.shape[0] * fine.shape[1] * math.prod(weight.shape[2:]) * points * fine.element_size()


def _half(image: torch.Tensor) -> bool:
    return image.element_size() < torch.float32.itemsize


def _single_point(weight: torch.Tensor) -> bool:
    return math.prod(weight.shape[2:]) == 1


def _narrow(weight: torch.Tensor, groups: int) -> bool:
    return groups > 1 and weight.shape[1] < BLOCK


def _copied(image: torch.Tensor) -> int:
    return _blocked(image) if image.shape[1] > PLAIN_CHANNELS else 0


def _blocked(image: torch.Tensor) -> int:
    return _size(image) // image.shape[1] * _whole_blocks(image.shape[1])


def _weight(weight: torch.Tensor, groups: int) -> int:
    results, inputs = weight.shape[:2]
    if groups > 1 or inputs <= PLAIN_CHANNELS:
        return _size(weight)
    return _size(weight) // (results * inputs) * _whole_blocks(results) * _whole_blocks(inputs)


def _whole_blocks(channels: int) -> int:
    return -(-channels // BLOCK) * BLOCK


def _size(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _batch_norm_backward(gradient: torch.Tensor, input: torch.Tensor, *rest: Any) -> int:
    """The gradient of the input twice, where both operands lie alike."""
    return 2 * _size(input) if rest[-1][0] and gradient.stride() == input.stride() else 0


INSIDE: Mapping[Any, Callable[..., int]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    aten.native_batch_norm_backward.default: _batch_norm_backward,
}
"""Operator -> most bytes at once that it takes, its results included; arguments as in the operator."""
