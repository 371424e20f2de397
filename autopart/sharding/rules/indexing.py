"""Indexing, gathering, sorting, filling: dimensions that are not looked into may be cut."""

from __future__ import annotations

from collections.abc import Sequence

from autopart.runtime import split_operators
from autopart.sharding.layouts import Layout, Owned, R, belonging
from autopart.sharding.operation import Call, Operand, Operation
from autopart.sharding.rules.labels import LabelRule, Labels, Names, Special, aligned, numbered


def index(op: Operation) -> Names:
    """`x[:, i, j]` with tensors of integers: dimensions of x that are not indexed, and those of the index tensors."""
    nothing = Names(tuple((None,) * v.dim() for v in op.inputs), ((None,) * op.outputs[0].dim(),))
    indices = op.arguments["indices"]
    places = [i for i, item in enumerate(indices) if item is not None]
    tensors = [op.inputs[indices[i].number] for i in places]
    if not places or any(v.dtype.is_floating_point or str(v.dtype) in ("torch.bool", "torch.uint8") for v in tensors):
        return nothing
    source = op.inputs[0]
    rank = max(v.dim() for v in tensors)
    adjacent = places == list(range(places[0], places[-1] + 1))
    first = places[0] if adjacent else 0
    shape = op.outputs[0].shape[first : first + rank]
    looked_up = [f"i{d}" if size != 1 else None for d, size in enumerate(shape)]
    names: list[Labels] = [tuple(None if d in places else f"d{d}" for d in range(source.dim()))]
    for value in tensors:
        offset = rank - value.dim()
        names.append(
            tuple(looked_up[offset + d] if size == shape[offset + d] else None for d, size in enumerate(value.shape))
        )
    kept = [f"d{d}" for d in range(source.dim()) if d not in places]
    special = {}
    if places == [0] and rank == 1 and source.dim() > 1 and source.is_floating_point():
        # A table of matrices, one for each expert: each rank looks up its own, and owns the rows that ask for them.
        names[0] = ("rows", *names[0][1:])
        special["rows"] = Special(_own_rows, outputs=(belonging(Owned(0, op.operands[1].name)),), inputs={1: R})
    return Names(
        tuple(names),
        ((*kept[:first], *looked_up, *kept[first:]),),
        linear=(frozenset({0}),),
        whole=frozenset({"rows"}),
        special=special,
    )


def _own_rows(op: Operation, label: str, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> tuple[Call, ...]:
    return (Call(split_operators.own_rows, (Operand(0), Operand(1), op.inputs[0].shape[0])),)


def gather(op: Operation) -> Names:
    """`gather(x, dim, index)`: other dimensions, where the index has all of x."""
    dim = op.arguments["dim"]
    source, chosen = op.inputs[0], op.inputs[1]
    if not source.dim() or not chosen.dim():
        return Names(((), ())[: len(op.inputs)], ((),))
    labels = numbered(source.shape, [dim])
    same = tuple(label if source.shape[i] == chosen.shape[i] else None for i, label in enumerate(labels))
    # Along the gathered dimension the index itself may be cut: its results stand where it stands.
    wanted = tuple("chosen" if i == dim % source.dim() else label for i, label in enumerate(same))
    return Names((same, wanted), (wanted,))


def expand(op: Operation) -> Names:
    """`expand(x, size)`: a dimension that is expanded from 1 is cut in the result alone."""
    output = op.outputs[0].shape
    result = tuple(f"d{i}" if size != 1 else None for i, size in enumerate(output))
    (labels,) = aligned(op, [op.inputs[0].shape], output)
    return Names(
        (labels, *((None,) * v.dim() for v in op.inputs[1:])), (result,), (frozenset({0}),), local=_sized("size")
    )


def filled(shape_argument: str | None, reads: bool = False) -> LabelRule:
    """A rule for an operator that fills a new tensor with one number: any dimension may be cut.

    Args:
        shape_argument: The argument that holds its shape.
        reads: Its shape is that of its tensor argument instead, whose layout it follows.
    """

    def names(op: Operation) -> Names:
        result = numbered(op.outputs[0].shape)
        rest: tuple[Labels, ...] = tuple(result if reads else (None,) * v.dim() for v in op.inputs)
        return Names(rest, (result,), local=_sized(shape_argument) if shape_argument else None)

    return LabelRule(names)


def _sized(argument: str):  # type: ignore[no-untyped-def]
    def local(op: Operation, label: str, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> tuple[Call, ...]:
        return (op.call(**{argument: op.local_output_shape(outputs[0])}),)

    return local


def topk(op: Operation) -> Names:
    """Values and indices along one dimension: the others may be cut."""
    labels = numbered(op.inputs[0].shape, [op.arguments.get("dim", -1)])
    return Names((labels,), tuple(labels for _ in op.outputs))


def expand_as(op: Operation) -> Names:
    """`expand_as(x, y)`: y gives the shape, and is cut like the result."""
    names = expand(op)
    return Names((names.inputs[0], names.outputs[0]), names.outputs, names.linear)


def index_select(op: Operation) -> Names:
    """`index_select(x, dim, index[n])`."""
    dim = op.arguments["dim"] % max(op.inputs[0].dim(), 1)
    labels = numbered(op.inputs[0].shape, [dim])
    return Names((labels, ("chosen",)), (tuple("chosen" if i == dim else label for i, label in enumerate(labels)),))


EXPAND_AS = LabelRule(expand_as)
INDEX_SELECT = LabelRule(index_select)
INDEX = LabelRule(index, by_rows=True)
GATHER = LabelRule(gather)
EXPAND = LabelRule(expand)
TOPK = LabelRule(topk)
