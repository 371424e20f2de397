"""Matrix products and convolutions: the labels of an equation; what is summed away gives partial results."""

from __future__ import annotations

from collections.abc import Sequence

from autopart.sharding.layouts import Layout
from autopart.sharding.operation import Call, Operation
from autopart.sharding.rules.labels import LabelRule, Labels, Names

BOTH = (frozenset({0}), frozenset({1}))


def contraction(inputs: Sequence[Labels], output: Labels, additive: Sequence[int] = ()) -> Names:
    """Names of a product of the first two factors, to which further arguments are added.

    It is linear in either factor, together with everything added; every label may be padded, for zeros times anything
    finite add nothing, and rows of zeros give zeros.
    """
    factors = [i for i in range(len(inputs)) if i not in additive]
    labels = {label for i in factors for label in inputs[i] if label is not None}
    added = frozenset(additive)
    # A dimension that only the other factor has meets no zeros of this one when something whole is added.
    return Names(
        tuple(inputs),
        (output,),
        linear=tuple(frozenset({i}) | added for i in factors),
        sums=frozenset(label for label in labels if label not in output),
        additive=added,
        any_zero=not additive,
        padding=frozenset(label for label in labels if all(label in inputs[i] or label not in output for i in added)),
    )


def linear(op: Operation) -> Names:
    """`linear(x[..., k], w[n, k], b[n])`."""
    batch: Labels = tuple(f"b{i}" for i in range(op.inputs[0].dim() - 1))
    if op.inputs[1].dim() == 1:
        return Names(((*batch, None), (None,), ())[: len(op.inputs)], (batch,))
    inputs: list[Labels] = [(*batch, "k"), ("n", "k"), ("n",)]
    bias = len(op.inputs) == 3
    return contraction(inputs[: len(op.inputs)], (*batch, "n"), additive=[2] if bias else [])


def addmm(op: Operation) -> Names:
    """`addmm(b[(m,) n], x[m, k], w[k, n])`."""
    shape = op.inputs[0].shape
    bias: Labels = tuple(
        None if size == 1 else label for size, label in zip(shape, ("m", "n")[-len(shape) :], strict=True)
    )
    return contraction([bias, ("m", "k"), ("k", "n")], ("m", "n"), additive=[0])


def mm(op: Operation) -> Names:
    return contraction([("m", "k"), ("k", "n")], ("m", "n"))


def bmm(op: Operation) -> Names:
    return contraction([("b", "m", "k"), ("b", "k", "n")], ("b", "m", "n"))


def baddbmm(op: Operation) -> Names:
    labels = ("b", "m", "n")
    shape = op.inputs[0].shape
    added = tuple(None if size == 1 else label for size, label in zip(shape, labels[-len(shape) :], strict=True))
    return contraction([added, ("b", "m", "k"), ("b", "k", "n")], labels, additive=[0])


def matmul(op: Operation) -> Names:
    """`matmul`, with its broadcast batch dimensions."""
    a, b = op.inputs
    output = op.outputs[0].dim()
    batches = [f"b{i}" for i in range(output)]
    names: list[Labels] = []
    for value, last in ((a, ("m", "k")), (b, ("k", "n"))):
        inner: Labels = last if value.dim() > 1 else ("k",)
        outer = value.shape[: value.dim() - len(inner)]
        matrix = (a.dim() > 1) + (b.dim() > 1)
        first = output - matrix - len(outer)
        names.append((*(batches[first + i] if size != 1 else None for i, size in enumerate(outer)), *inner))
    rows = [label for label, value in (("m", a), ("n", b)) if value.dim() > 1]
    result: Labels = (*batches[: output - len(rows)], *rows)
    present = {label for labels in names for label in labels}
    result = tuple(label if label in present else None for label in result)
    return contraction(names, result)


def dot(op: Operation) -> Names:
    return contraction([("k",), ("k",)], ())


def einsum(op: Operation) -> Names:
    """`einsum` of two factors without repeated indices; others run replicated."""
    equation = str(op.arguments["equation"]).replace(" ", "")
    sides = equation.split("->")
    factors = sides[0].split(",")
    if len(sides) != 2 or len(factors) != 2 or "." in equation or any(len(set(f)) < len(f) for f in factors):
        return Names(tuple((None,) * v.dim() for v in op.inputs), ((None,) * op.outputs[0].dim(),))
    return contraction([tuple(f) for f in factors], tuple(sides[1]))


def convolution(op: Operation) -> Names:
    """`conv(x[n, c, ...], w[o, c, ...], b[o])`; with groups, channels in and out are cut together, group by group."""
    space: Labels = (None,) * (op.inputs[1].dim() - 2)
    batch: Labels = ("n",) if op.inputs[0].dim() == op.inputs[1].dim() else ()
    bias = len(op.inputs) == 3
    groups = op.arguments["groups"]
    if groups == 1:
        inputs: list[Labels] = [(*batch, "c", *space), ("o", "c", *space), ("o",)]
        return contraction(inputs[: len(op.inputs)], (*batch, "o", *space), additive=[2] if bias else [])
    inputs = [(*batch, "g", *space), ("g", None, *space), ("g",)]
    return Names(
        tuple(inputs[: len(op.inputs)]),
        ((*batch, "g", *space),),
        linear=() if bias else BOTH,
        whole=frozenset("g"),
        local=_grouped,
    )


def transposed_convolution(op: Operation) -> Names:
    """`conv_transpose(x[n, c, ...], w[c, o, ...], b[o])`."""
    space: Labels = (None,) * (op.inputs[1].dim() - 2)
    batch: Labels = ("n",) if op.inputs[0].dim() == op.inputs[1].dim() else ()
    if op.arguments["groups"] != 1:
        return Names(tuple((None,) * v.dim() for v in op.inputs), ((None,) * op.outputs[0].dim(),))
    inputs: list[Labels] = [(*batch, "c", *space), ("c", "o", *space), ("o",)]
    bias = len(op.inputs) == 3
    return contraction(inputs[: len(op.inputs)], (*batch, "o", *space), additive=[2] if bias else [])


def _grouped(op: Operation, label: str, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> tuple[Call, ...] | None:
    groups = op.arguments["groups"]
    if label != "g":
        return (op.call(),)
    return (op.call(groups=groups // op.t),) if groups % op.t == 0 else None


LINEAR = LabelRule(linear, by_rows=True)
ADDMM = LabelRule(addmm, by_rows=True)
MM = LabelRule(mm, by_rows=True)
BMM = LabelRule(bmm)
BADDBMM = LabelRule(baddbmm)
MATMUL = LabelRule(matmul)
DOT = LabelRule(dot)
EINSUM = LabelRule(einsum)
CONVOLUTION = LabelRule(convolution)
TRANSPOSED_CONVOLUTION = LabelRule(transposed_convolution)
