"""Embeddings and losses: tables by rows of words or by width, cross-entropy by classes or by rows."""

from __future__ import annotations

from collections.abc import Sequence

from autopart.runtime import split_operators
from autopart.sharding.layouts import Layout, P, R
from autopart.sharding.operation import Call, Operation
from autopart.sharding.rules.labels import LabelRule, Labels, Names, Special


def embedding(op: Operation) -> Names:
    """`embedding(weight[v, d], indices[i...])`; cut by words, each rank looks up its own and the results are summed."""
    rows: Labels = tuple(f"i{i}" for i in range(op.inputs[1].dim()))
    special = {}
    if not op.arguments["scale_grad_by_freq"]:
        special["vocabulary"] = Special(_by_words, outputs=(P,), inputs={1: R})
    return Names(
        (("vocabulary", "d"), rows),
        ((*rows, "d"),),
        whole=frozenset({"vocabulary"}),
        padding=frozenset({"vocabulary"}),
        special=special,
        local=_by_rows,
    )


def _by_rows(op: Operation, label: str, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> tuple[Call, ...] | None:
    # Counting how often an index occurs in the batch needs the whole batch.
    return None if op.arguments["scale_grad_by_freq"] and label != "d" else (op.call(),)


def _by_words(
    op: Operation, label: str, inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> tuple[Call, ...] | None:
    a = op.arguments
    padding = a["padding_idx"]
    whole = (a["weight"], a["indices"]) if padding < 0 else (a["weight"], a["indices"], padding)
    return (Call(split_operators.vocabulary_embedding, whole),)


MEAN, SUM = 1, 2


def cross_entropy(op: Operation) -> Names:
    """`cross_entropy(logits[n, c], target[n])` with class indices.

    Cut by rows, the mean is a sum of summands over the count of all ranks' rows; cut by classes, maxima, sums and the
    chosen logits are exchanged, which are one number a row.
    """
    a = op.arguments
    none = Names(tuple((None,) * v.dim() for v in op.inputs), ((None,) * op.outputs[0].dim(),))
    plain = a.get("weight") is None and not a.get("label_smoothing") and not op.node.meta.get("autocast")
    logits, target = op.inputs[0], op.inputs[-1]
    if not plain or logits.dim() != target.dim() + 1 or target.is_floating_point() or logits.dim() < 2:
        return none
    rows: Labels = ("n", *(f"s{i}" for i in range(logits.dim() - 2)))
    reduction = a["reduction"]
    special = {}
    if logits.dim() == 2:
        special["vocabulary"] = Special(_by_classes, outputs=(R,), inputs={1: R})
    if reduction == MEAN:
        special |= {label: Special(_rows, outputs=(P,)) for label in rows if label is not None}
    return Names(
        (("n", "vocabulary", *rows[1:]), rows),
        (rows if reduction == 0 else (),),
        sums=frozenset(label for label in rows if label is not None) if reduction == SUM else frozenset(),
        whole=frozenset({"vocabulary"}),
        padding=frozenset({"vocabulary"}),
        special=special,
    )


def _rows(op: Operation, label: str, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> tuple[Call, ...] | None:
    a = op.arguments
    return (Call(split_operators.cross_entropy_of_rows, (a["self"], a["target"], a["ignore_index"])),)


def _by_classes(
    op: Operation, label: str, inputs: Sequence[Layout], outputs: Sequence[Layout]
) -> tuple[Call, ...] | None:
    a = op.arguments
    args = (a["self"], a["target"], op.inputs[0].shape[1], a["reduction"], a["ignore_index"])
    return (Call(split_operators.vocabulary_cross_entropy, args),)


EMBEDDING = LabelRule(embedding)
CROSS_ENTROPY = LabelRule(cross_entropy)
