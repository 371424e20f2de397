"""Norms: layer, group, RMS and batch norm."""

from __future__ import annotations

from collections.abc import Sequence

from autopart.runtime import split_operators
from autopart.sharding.layouts import Layout
from autopart.sharding.operation import Call, Operation
from autopart.sharding.rules.labels import LabelRule, Labels, Names, Special


def layer_norm(op: Operation) -> Names:
    """`layer_norm(x[..., normalized], weight, bias)` and `rms_norm`: what is not normalized may be cut."""
    normalized = len(op.arguments["normalized_shape"])
    rank = op.inputs[0].dim()
    labels: Labels = tuple(f"d{i}" if i < rank - normalized else None for i in range(rank))
    rest = tuple((None,) * v.dim() for v in op.inputs[1:])
    return Names((labels, *rest), (labels,))


def group_norm(op: Operation) -> Names:
    """`group_norm(x[n, c, ...])`: batch, or channels group by group."""
    groups = op.arguments["num_groups"]
    labels: Labels = ("n", "c", *(None,) * (op.inputs[0].dim() - 2))

    def local(
        op: Operation, label: str, inputs: Sequence[Layout], outputs: Sequence[Layout]
    ) -> tuple[Call, ...] | None:
        if label != "c":
            return (op.call(),)
        return (op.call(num_groups=groups // op.t),) if groups % op.t == 0 else None

    return Names((labels, *(("c",) for _ in op.inputs[1:])), (labels,), whole=frozenset("c"), local=local)


def batch_norm(op: Operation) -> Names:
    """`batch_norm(x[n, c, ...], weight, bias, mean, var)`: channels; in training the batch with common statistics."""
    space = [f"s{i}" for i in range(op.inputs[0].dim() - 2)]
    labels: Labels = ("n", "c", *space)
    special = {}
    if op.in_training("training"):
        special = {label: Special(_split_batch) for label in ("n", *space)}
    return Names((labels, *(("c",) for _ in op.inputs[1:])), (labels,), special=special)


def _split_batch(
    op: Operation, label: str, inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> tuple[Call, ...] | None:
    if op.node.meta.get("autocast"):
        return None
    a = op.arguments
    names = ("input", "weight", "bias", "running_mean", "running_var", "training", "momentum", "eps")
    return (Call(split_operators.batch_norm_of_split_batch, tuple(a[name] for name in names)),)


LAYER_NORM = LabelRule(layer_norm, by_rows=True)
GROUP_NORM = LabelRule(group_norm)
BATCH_NORM = LabelRule(batch_norm)
