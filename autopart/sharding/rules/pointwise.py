"""Pointwise operators: broadcast dimensions are cut together; some are linear."""

from __future__ import annotations

from collections.abc import Sequence

from autopart.runtime import split_operators
from autopart.sharding.layouts import Layout
from autopart.sharding.operation import Call, Operand, Operation
from autopart.sharding.rules.labels import LabelRule, Names, aligned


def pointwise(*linear: Sequence[int], zero: bool = False, zero_when_all: bool = False) -> LabelRule:
    """A rule for a pointwise operator.

    Args:
        linear: Sets of tensor arguments in which it is linear together.
        zero: It maps 0 to 0 with a finite derivative, in any one argument: padding stays zero.
        zero_when_all: The same, if every argument is padded.
    """

    def names(op: Operation) -> Names:
        output = op.outputs[0].shape
        labels = aligned(op, [v.shape for v in op.inputs], output)
        result = tuple(f"d{i}" if size != 1 else None for i, size in enumerate(output))
        every = frozenset(label for label in result if label is not None)
        if not _keeps_zero(op):
            every = frozenset()
        kept = every if zero else every.intersection(*map(frozenset, labels)) if zero_when_all else frozenset()
        sets = tuple(frozenset(s) for s in linear if len(op.inputs) > max(s) and _linear(op, s))
        padding = frozenset(label for label in kept if label is not None)
        return Names(tuple(labels), (result,), sets, padding=padding, any_zero=zero and bool(padding))

    return LabelRule(names, by_rows=True)


def _linear(op: Operation, operands: Sequence[int]) -> bool:
    """An operator of two terms is affine, not linear, in one of them when the other is a number or stays as it is."""
    if op.node.target._schema.name.rstrip("_") in ADDITIONS:  # type: ignore[union-attr]
        return len(op.inputs) == 2
    return True


def _keeps_zero(op: Operation) -> bool:
    """Whether the numbers among the arguments leave zero where it is."""
    if op.node.target._schema.name.rstrip("_") in ADDITIONS:  # type: ignore[union-attr]
        return len(op.inputs) == 2
    return op.arguments.get("min_val", 0) <= 0 <= op.arguments.get("max_val", 0)


ADDITIONS = ("aten::add", "aten::sub", "aten::rsub")


def dropout_names(op: Operation) -> Names:
    """`dropout(x, p, train)`: shards draw from a stream of their own rank, replicated values from the common one."""
    labels = tuple(f"d{i}" for i in range(op.inputs[0].dim()))
    return Names((labels,), (labels,), linear=(frozenset({0}),), padding=frozenset(labels), local=_dropout_on_shards)


def _dropout_on_shards(
    op: Operation, label: str, inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> tuple[Call, ...] | None:
    if label in ("partial", "owned") or not op.in_training("train") or op.arguments["p"] in (0, 0.0, 1, 1.0):
        return (op.call(),)
    if op.mutates:
        return None
    return (Call(split_operators.dropout, (Operand(0), op.arguments["p"], op.arguments["train"])),)


DROPOUT = LabelRule(dropout_names, by_rows=True)


def prelu(op: Operation) -> Names:
    """`prelu(x[n, c, ...], weight[c])`, or one weight for all."""
    channel = 1 if op.inputs[0].dim() > 1 else None
    labels = tuple(f"d{i}" for i in range(op.inputs[0].dim()))
    weight = labels[channel] if channel is not None and op.inputs[1].numel() > 1 else None
    return Names((labels, (weight,) * op.inputs[1].dim()), (labels,))


PRELU = LabelRule(prelu, by_rows=True)
