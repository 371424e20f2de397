"""Reductions, and operators that work along one dimension: the others may be cut; what is summed gives partial
results."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from autopart.sharding.layouts import Layout
from autopart.sharding.operation import Call, Operation, Result
from autopart.sharding.rules.labels import LabelRule, Labels, Names, numbered

aten = torch.ops.aten


def reduced_dims(op: Operation) -> list[int]:
    dim = op.arguments.get("dim")
    rank = op.inputs[0].dim()
    if dim is None or (isinstance(dim, (list, tuple)) and not dim):
        return list(range(rank))
    dims = dim if isinstance(dim, (list, tuple)) else [dim]
    return [int(d) % rank for d in dims] if rank else []


def _after_reduction(op: Operation, labels: Labels) -> Labels:
    dims = reduced_dims(op)
    if op.arguments.get("keepdim"):
        return tuple(None if i in dims else label for i, label in enumerate(labels))
    return tuple(label for i, label in enumerate(labels) if i not in dims)


def total(op: Operation) -> Names:
    """sum and mean: linear; a reduced dimension that is cut leaves summands, and a mean of shards is 1/t of one."""
    labels = tuple(f"d{i}" for i in range(op.inputs[0].dim()))
    dims = reduced_dims(op)
    result = _after_reduction(op, labels)
    kept = frozenset(label for i, label in enumerate(labels) if i not in dims)
    floating = op.inputs[0].is_floating_point()
    mean = op.node.target._schema.name == "aten::mean"  # type: ignore[union-attr]
    sums = frozenset(labels[d] for d in dims) if floating else frozenset()

    def local(op: Operation, label: str, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> tuple[Call, ...]:
        if mean and label in sums:
            return (op.call(), Call(aten.div.Tensor, (Result(0), op.t)))
        return (op.call(),)

    return Names((labels,), (result,), (frozenset({0}),), sums=sums, padding=kept, local=local)


def reduction(op: Operation) -> Names:
    """max, min, any, argmax, ...: only what is not reduced may be cut."""
    labels = numbered(op.inputs[0].shape, reduced_dims(op))
    return Names((labels,), tuple(_after_reduction(op, labels) for _ in op.outputs))


def along(dims: Callable[[Operation], Sequence[int]], linear: bool = False, by_rows: bool = False) -> LabelRule:
    """A rule for an operator of one tensor whose results have its shape, and which mixes along dims(op) only."""

    def names(op: Operation) -> Names:
        labels = numbered(op.inputs[0].shape, dims(op))
        outputs = tuple(labels if v is not None else () for v in op.outputs)
        return Names((labels,), outputs, (frozenset({0}),) if linear else ())

    return LabelRule(names, by_rows)


def one_dim(op: Operation) -> Sequence[int]:
    dim: Any = op.arguments.get("dim")
    return [int(-1 if dim is None else dim)]


def many_dims(op: Operation) -> Sequence[int]:
    dims = op.arguments.get("dims") or range(op.inputs[0].dim())
    return [int(d) for d in dims]


def padded_dims(op: Operation) -> Sequence[int]:
    """Dimensions that `pad` changes: its list goes from the last dimension backwards."""
    pads = list(op.arguments["pad"])
    rank = op.inputs[0].dim()
    return [rank - 1 - i for i in range(len(pads) // 2) if pads[2 * i] or pads[2 * i + 1]]


def last_dims(count: Callable[[Operation], int]) -> Callable[[Operation], Sequence[int]]:
    return lambda op: range(op.inputs[0].dim() - count(op), op.inputs[0].dim())


def gated(op: Operation) -> Names:
    """`glu`: halves of one dimension; the others may be cut."""
    labels = numbered(op.inputs[0].shape, one_dim(op))
    return Names((labels,), (labels,))


GLU = LabelRule(gated, by_rows=True)
SUM = LabelRule(total, by_rows=True)
REDUCTION = LabelRule(reduction, by_rows=True)
ALONG_DIM = along(one_dim, by_rows=True)
CUMULATIVE_SUM = along(one_dim, linear=True)
ROLL = along(many_dims, linear=True)
FLIP = along(many_dims, linear=True)
PAD = along(padded_dims)
TRIANGLE = along(last_dims(lambda op: 2), linear=True)
POOL_1D = along(last_dims(lambda op: 1))
POOL_2D = along(last_dims(lambda op: 2))
POOL_3D = along(last_dims(lambda op: 3))
AVERAGE_POOL_1D = along(last_dims(lambda op: 1), linear=True)
AVERAGE_POOL_2D = along(last_dims(lambda op: 2), linear=True)
