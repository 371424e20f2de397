"""Scaled dot-product attention: batch and heads (grouped-query heads too); rows of queries where no mask is implied."""

from __future__ import annotations

from collections.abc import Sequence

from autopart.runtime import split_operators
from autopart.sharding.layouts import Layout
from autopart.sharding.operation import Call, Operand, Operation
from autopart.sharding.rules.labels import LabelRule, Labels, Names


def attention(op: Operation) -> Names:
    """`sdpa(q[..., h, s, d], k[..., h, l, d], v[..., h, l, e], mask)`.

    Keys are never cut (softmax runs over them), nor are queries under `is_causal`, which counts rows from the first.
    Grouped-query heads are cut as one part: a rank's queries belong to its keys when t divides both numbers of heads.
    """
    a = op.arguments
    query, key, value = (op.inputs[a[name].number] for name in ("query", "key", "value"))
    rows = None if a["is_causal"] else "queries"
    outer = tuple("heads" if i == query.dim() - 3 else f"b{i}" for i in range(query.dim() - 2))
    names: dict[int, Labels] = {}

    def batch(tensor_outer: Sequence[int]) -> Labels:
        first = len(outer) - len(tensor_outer)
        return tuple(outer[first + i] if size != 1 else None for i, size in enumerate(tensor_outer))

    names[a["query"].number] = (*batch(query.shape[:-2]), rows, None)
    names[a["key"].number] = (*batch(key.shape[:-2]), None, None)
    names[a["value"].number] = (*batch(value.shape[:-2]), None, None)
    mask = a.get("attn_mask")
    if isinstance(mask, Operand):
        shape = op.inputs[mask.number].shape
        names[mask.number] = (*batch(shape[:-2]), rows if shape[-2] != 1 else None, None)
    grouped = bool(a.get("enable_gqa")) and len(query.shape) > 2 and query.shape[-3] != key.shape[-3]
    return Names(
        tuple(names[i] for i in range(len(op.inputs))),
        ((*outer, rows, None),),
        linear=(frozenset({a["value"].number}),),
        whole=frozenset({"heads"}) if grouped else frozenset(),
        local=_local,
    )


def _local(op: Operation, label: str, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> tuple[Call, ...] | None:
    a = op.arguments
    if label in ("partial", "owned") or not op.in_training("dropout_p"):
        return (op.call(),)
    options = {name: a[name] for name in ("is_causal", "scale", "enable_gqa")}
    args = (a["query"], a["key"], a["value"], a["attn_mask"], a["dropout_p"])
    return (Call(split_operators.attention, args, options),)


ATTENTION = LabelRule(attention)
