"""Grouped matrix products: one matrix for each expert, rows sorted by expert."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import torch

from autopart.runtime import dispatch, split_operators
from autopart.sharding.layouts import Layout, Owned, R, Routed, Split, belonging, shards
from autopart.sharding.operation import Call, Operand, Operation, Result, Strategy, substitute
from autopart.sharding.rules.labels import LabelRule, Names, Special, strategy

BY_EXPERT = (Call(split_operators.grouped_mm_of_own_experts, (Operand(0), Operand(1), Operand(2))),)


def grouped(op: Operation) -> Names:
    """`grouped_mm(x[rows, k], w[e, k, n], ends[e])`: rows up to ends[0] meet w[0], and so on.

    Cut by experts, a rank owns the rows of its experts. Rows are never cut otherwise: whose they are depends on data.
    """
    if op.inputs[0].dim() != 2 or op.inputs[1].dim() != 3 or len(op.inputs) != 3:
        return Names(tuple((None,) * v.dim() for v in op.inputs), ((None,) * op.outputs[0].dim(),))
    mine = belonging(Owned(0, op.operands[2].name))
    k, n = (name if _aligned(op, size) else None for name, size in zip("kn", op.inputs[1].shape[1:], strict=True))
    return Names(
        ((None, k), ("experts", k, n), (None,)),
        ((None, n),),
        linear=(frozenset({0}), frozenset({1})),
        sums=frozenset("k"),
        whole=frozenset({"experts"}),
        special={"experts": Special(_by_expert, outputs=(mine,), inputs={2: R})},
    )


def _aligned(op: Operation, size: int) -> bool:
    """Whether a shard of that dimension suits the operator: torch's own wants rows of a multiple of 16 bytes."""
    return op.node.target != torch.ops.aten._grouped_mm.default or size * op.inputs[0].itemsize % (16 * op.t) == 0


def _by_expert(op: Operation, label: str, inputs: Sequence[Layout], outputs: Sequence[Layout]) -> tuple[Call, ...]:
    return BY_EXPERT


class GroupedRule(LabelRule):
    """By labels; rows that are owned by the same experts stay with them; and rows of a rank's own slots are sent to
    their experts, and stay there or come back."""

    def from_owned(self, op: Operation, number: int, owned: Owned) -> Iterable[Strategy]:
        weight = Split(0, (op.inputs[1].shape[0],))
        if number == 0 and owned == Owned(0, op.operands[2].name) and not weight.padded(op.t):
            inputs: list[Layout] = [belonging(owned), shards(weight), R]
            yield strategy(op, "experts", inputs, [belonging(owned)], BY_EXPERT)

    def from_routed(self, op: Operation, number: int, routed: Routed) -> Iterable[Strategy]:
        weight = Split(0, (op.inputs[1].shape[0],))
        if number or not routed.rows or routed.dim or weight.padded(op.t) or op.inputs[1].dim() != 3:
            return
        ends = Operand(2)
        calls = [Call(dispatch.ends_of_own_experts, (ends,))]
        own: list[Operand | Result] = [Operand(0), Operand(1), Result(0)]
        if routed.role == "sorted":
            calls.append(Call(dispatch.send_to_experts, (Operand(0), ends)))
            own[0] = Result(1)
        args, kwargs = substitute((op.args, op.kwargs), lambda item: own[item.number])
        calls.append(Call(op.node.target, args, kwargs))
        inputs = [belonging(routed), shards(weight), belonging(replace(routed, role="ends"))]
        yield strategy(op, "all-to-all", inputs, [belonging(replace(routed, role="sent"))], tuple(calls))
        calls.append(Call(dispatch.return_from_experts, (Result(len(calls) - 1), ends, op.outputs[0].shape[0] // op.t)))
        yield strategy(op, "all-to-all", inputs, [belonging(replace(routed, role="sorted"))], tuple(calls))


GROUPED = GroupedRule(grouped)
