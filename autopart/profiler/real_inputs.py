"""Real inputs: tensors for a call of which only shapes are known, of the kind that its operator takes.

Numbers are normal, masks are true or false alike, and integers are what the operator reads them as: rows of a table,
positions along a dimension, classes, ends of groups. Values are the same at every call for a seed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from autopart.effects import named
from autopart.profiler.isolated import Call, TensorSpec

Fill = Callable[[tuple[int, ...], torch.dtype, torch.Generator], torch.Tensor]
"""Values of a shape and dtype, on the generator's device."""


@dataclass(frozen=True)
class Inputs:
    """Arguments with real tensors; `leaves` are the tensors in the order of `Call.tensors`."""

    leaves: list[torch.Tensor]
    arguments: Any


def real_inputs(call: Call, device: torch.device, seed: int) -> Inputs:
    """Tensors as the call's specs describe them, strides included."""
    generator = torch.Generator(device).manual_seed(seed)
    fills = _fills(call)
    leaves: list[torch.Tensor] = []

    def argument(path: Any, leaf: Any) -> Any:
        if isinstance(leaf, torch.device):
            return device
        if not isinstance(leaf, TensorSpec):
            return leaf
        tensor = _strided(leaf, fills.get(path, _plain), generator)
        leaves.append(tensor.requires_grad_(leaf.requires_grad and call.grad))
        return tensor

    return Inputs(leaves, pytree.tree_map_with_path(argument, call.arguments))


def _strided(spec: TensorSpec, fill: Fill, generator: torch.Generator) -> torch.Tensor:
    if len(spec.stride) != len(spec.shape):
        raise ValueError("only tensors with strides can be made")
    if 0 in spec.shape:
        return torch.empty(spec.shape, dtype=spec.dtype, device=generator.device)
    extent = 1 + sum((size - 1) * stride for size, stride in zip(spec.shape, spec.stride, strict=True))
    dense = extent == torch.Size(spec.shape).numel()
    values = fill(spec.shape, spec.dtype, generator)
    # The storage of a tensor that overlaps itself or has gaps takes as many of the values as it has room for.
    flat = values.new_empty(extent)
    if dense and all(stride for stride in spec.stride):
        return flat.as_strided(spec.shape, spec.stride).copy_(values)
    flat.copy_(values.reshape(-1).repeat(-(-extent // values.numel()))[:extent])
    return flat.as_strided(spec.shape, spec.stride)


# ------------------------------------------------------------------------------------------------------ values


def _plain(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers, true and false alike, and ones for integers: a size, a step or a divisor more often than not."""
    device = generator.device
    if dtype.is_floating_point or dtype.is_complex:
        wide = dtype if dtype.itemsize >= 2 else torch.float32
        return torch.randn(shape, dtype=wide, device=device, generator=generator).to(dtype)
    if dtype is torch.bool:
        mask = torch.rand(shape, device=device, generator=generator) < 0.5
        mask.view(-1)[:1] = True
        return mask
    return torch.ones(shape, dtype=dtype, device=device)


def _below(limit: int) -> Fill:
    def fill(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        if dtype.is_floating_point or dtype is torch.bool:
            return _plain(shape, dtype, generator)
        return torch.randint(max(limit, 1), shape, dtype=dtype, device=generator.device, generator=generator)

    return fill


def _shares(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Numbers from 0 to 1."""
    if not dtype.is_floating_point:
        return _plain(shape, dtype, generator)
    return torch.rand(shape, dtype=dtype, device=generator.device, generator=generator)


def _positive(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    return _shares(shape, dtype, generator) + 0.5


def _positive_definite(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Hermitian matrices whose diagonal outweighs the rest."""
    half = torch.rand(shape, dtype=dtype, device=generator.device, generator=generator)
    return half + half.mH + 4 * shape[-1] * torch.eye(shape[-1], dtype=dtype, device=generator.device)


def _group_starts(rows: int) -> Fill:
    """Where equal groups of rows begin."""

    def fill(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        return (torch.arange(shape[0], device=generator.device) * rows // shape[0]).to(dtype)

    return fill


def _group_ends(rows: int) -> Fill:
    """Ends of equal groups of rows."""

    def fill(shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
        groups = shape[0]
        ends = torch.arange(1, groups + 1, device=generator.device) * rows // groups
        return ends.to(dtype)

    return fill


# --------------------------------------------------------------------------------------------------- operators

Given = Mapping[str, Any]
Fills = Iterator[tuple[str, Fill]]
"""Argument name -> values."""


def _along_dim(given: Given) -> Fills:
    size = given["self"].shape
    limit = size[given["dim"]] if size else 1
    yield "index", _below(limit)


def _classes(given: Given) -> Fills:
    logits = given["self"].shape
    yield "target", _below(logits[0] if len(logits) == 1 else logits[1])


def _table_rows(given: Given) -> Fills:
    yield "indices", _below(given["weight"].shape[0])
    yield "offsets", _group_starts(torch.Size(given["indices"].shape).numel())


def _grouped(given: Given) -> Fills:
    left, right = given["self"].shape, given["mat2"].shape
    # The dimension that the groups cut: rows of the left, the inner one of both, or columns of the right.
    cut = left[0] if len(left) == 2 and len(right) == 3 else left[1] if len(left) == 2 else right[1]
    yield "offs", _group_ends(cut)


def _named(**fills: Fill) -> Callable[[Given], Fills]:
    return lambda given: iter(fills.items())


# Operator packet -> what its arguments are, where that is not what `_plain` makes. `indices` lists are in `_fills`.
OPERATORS: dict[str, Callable[[Given], Fills]] = {
    **dict.fromkeys(("gather", "index_select", "scatter", "scatter_add", "scatter_reduce"), _along_dim),
    **dict.fromkeys(("scatter_", "scatter_add_", "scatter_reduce_"), _along_dim),
    **dict.fromkeys(("index_add", "index_copy", "index_fill", "index_add_", "index_copy_", "index_fill_"), _along_dim),
    **dict.fromkeys(("nll_loss", "nll_loss2d", "nll_loss_nd", "nll_loss_forward", "cross_entropy_loss"), _classes),
    **dict.fromkeys(("multi_margin_loss",), _classes),
    **dict.fromkeys(("embedding", "embedding_bag", "_embedding_bag"), _table_rows),
    "take": lambda given: iter([("index", _below(torch.Size(given["self"].shape).numel()))]),
    "one_hot": lambda given: iter([("self", _below(given["num_classes"]))]),
    "_grouped_mm": _grouped,
    **dict.fromkeys(("cholesky", "linalg_cholesky", "linalg_cholesky_ex"), _named(self=_positive_definite)),
    "bernoulli": _named(self=_shares),
    "multinomial": _named(self=_shares),
    "binary_cross_entropy": _named(self=_shares, target=_shares),
    "binary_cross_entropy_with_logits": _named(target=_shares),
    "batch_norm": _named(running_var=_positive),
    "native_batch_norm": _named(running_var=_positive),
    "_native_batch_norm_legit": _named(running_var=_positive),
    "cudnn_batch_norm": _named(running_var=_positive),
}

# Index lists: one index for each dimension of `self`, None where a dimension is kept.
INDEXED = {"index", "_unsafe_index", "index_put", "index_put_", "_unsafe_index_put", "_index_put_impl_"}


def _fills(call: Call) -> dict[Any, Fill]:
    """Path of a tensor argument -> its values."""
    schema = getattr(call.target, "_schema", None)
    if schema is None:
        return {}
    packet = schema.name.rpartition("::")[2]
    args, kwargs = call.arguments
    given = named(schema, args, kwargs)
    found: dict[str, Fill] = dict(OPERATORS.get(packet, _named())(given))
    positions = {argument.name: i for i, argument in enumerate(schema.arguments)}

    def path(name: str, *inside: int) -> Any:
        place = positions.get(name, len(args))
        start: tuple[Any, ...] = (pytree.SequenceKey(0), pytree.SequenceKey(place))
        if place >= len(args):
            start = (pytree.SequenceKey(1), pytree.MappingKey(name))
        return (*start, *map(pytree.SequenceKey, inside))

    fills: dict[Any, Fill] = {path(name): fill for name, fill in found.items()}
    if packet in INDEXED:
        dim = 0
        for i, index in enumerate(given["indices"]):
            if isinstance(index, TensorSpec):
                fills[path("indices", i)] = _below(given["self"].shape[dim])
                dim += len(index.shape) - 1 if index.dtype in (torch.bool, torch.uint8) else 0
            dim += 1
    return fills
