"""Operators around a sort of slots: what each of them makes of a rank's own slots (`layouts.Routed`).

A mixture of experts sorts the (token, k) slots of its tokens by expert, gathers the tokens' rows in that order, counts
each expert's, and puts the results back in the order of the slots. All of it can be done by each rank for the slots of
its own tokens, without a word to the others.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopart.runtime import dispatch
from autopart.sharding.layouts import Layout, Owned, R, Role, Routed, Split, belonging, shards
from autopart.sharding.operation import Call, Operand, Operation, Result, Strategy
from autopart.sharding.rules.indexing import INDEX, TOPK, filled
from autopart.sharding.rules.labels import LabelRule, Names, Place, Rule, strategy
from autopart.sharding.rules.pointwise import pointwise
from autopart.sharding.rules.reductions import CUMULATIVE_SUM

aten = torch.ops.aten
CASTS = (aten.to.dtype, aten._to_copy.default)

OwnSlots = Callable[[Operation, int, Routed], Iterable[Strategy]]


@dataclass(frozen=True)
class RoutedRule:
    """A rule, and what the operator makes of own slots besides."""

    rule: Rule
    own_slots: OwnSlots

    def at_once(self, op: Operation) -> Iterable[Strategy]:
        return self.rule.at_once(op)

    def from_split(self, op: Operation, place: Place, split: Split) -> Strategy | None:
        return self.rule.from_split(op, place, split)

    def from_owned(self, op: Operation, number: int, owned: Owned) -> Iterable[Strategy]:
        return self.rule.from_owned(op, number, owned)

    def from_routed(self, op: Operation, number: int, routed: Routed) -> Iterable[Strategy]:
        yield from self.rule.from_routed(op, number, routed)
        yield from self.own_slots(op, number, routed)


class SortRule(LabelRule):
    """Shards of a list are sorted by themselves."""

    def from_split(self, op: Operation, place: Place, split: Split) -> Strategy | None:
        if op.inputs[0].dim() != 1:
            return super().from_split(op, place, split)
        if place.kind != "in" or split.padded(op.t):
            return None
        name = op.node.name
        values, places = (belonging(Routed(role, 0, name, split.parts)) for role in ("sorted", "places"))  # type: ignore[arg-type]
        outputs = [values, places] if len(op.outputs) == 2 else [places]
        return strategy(op, "own slots", [shards(split)], outputs, (op.call(),))


def _divided(op: Operation, number: int, routed: Routed) -> Iterable[Strategy]:
    """`places // k`: of k slots in a row, whose token it is."""
    k = op.args[1]
    if (
        routed.role == "places"
        and isinstance(k, int)
        and k > 0
        and all(part % (k * op.t) == 0 for part in routed.parts)
    ):
        tokens = replace(routed, parts=tuple(part // k for part in routed.parts))
        yield strategy(op, "own slots", [belonging(routed)], [belonging(tokens)], (op.call(),))


def _looked_up(op: Operation, number: int, routed: Routed) -> Iterable[Strategy]:
    """`x[places]` takes rows into the sorted order, `x[back]` out of it."""
    indices = op.arguments["indices"]
    if number != 1 or len(op.inputs) != 2 or indices[0] is None or op.inputs[1].dim() != 1:
        return
    source, slots = op.inputs[0].shape[0], op.inputs[1].shape[0]
    if routed.role == "places" and source == sum(routed.parts):
        repeated = slots // source
        result = replace(routed, role="sorted", parts=tuple(part * repeated for part in routed.parts))
        inputs = [shards(Split(0, routed.parts)), belonging(routed)]
        yield strategy(op, "own slots", inputs, [belonging(result)], (op.call(),))
    if routed.role == "back" and source == slots:
        inputs = [belonging(replace(routed, role="sorted")), belonging(routed)]
        yield strategy(op, "own slots", inputs, [shards(Split(0, routed.parts))], (op.call(),))


def _counted(op: Operation, number: int, routed: Routed) -> Iterable[Strategy]:
    """How many slots each expert has, if what is counted is that by which they are sorted."""
    if routed.role == "sorted" and _sorted_by(op.operands[0], routed.sort):
        a = op.arguments
        calls = (Call(dispatch.counts_of_sorted, (Operand(0), a["bins"], a["min"], a["max"])),)
        yield strategy(op, "own slots", [belonging(routed)], [_as(routed, "counts")], calls)


def _summed_up(op: Operation, number: int, routed: Routed) -> Iterable[Strategy]:
    """Where each expert's rows end, known to all ranks, for rows to be sent by it."""
    if routed.role == "counts":
        calls = (op.call(), Call(dispatch.ends_of_all_ranks, (Result(0),)))
        yield strategy(op, "own slots", [belonging(routed)], [_as(routed, "ends")], calls)


def _like(op: Operation, number: int, routed: Routed) -> Iterable[Strategy]:
    """Memory for the way back."""
    if routed.role == "places" and sum(routed.parts) == op.inputs[0].shape[0]:
        yield strategy(op, "own slots", [belonging(routed)], [_as(routed, "back")], (op.call(),))


def _put(op: Operation, number: int, routed: Routed) -> Iterable[Strategy]:
    """`back[places] = arange(slots)`."""
    slots = op.inputs[0].shape[0]
    if routed.role != "places" or number != 1 or len(op.inputs) != 3 or sum(routed.parts) != slots:
        return
    counted = op.operands[2]
    if counted.target is not aten.arange.default or counted.args != (slots,) or op.arguments["accumulate"]:
        return
    back = _as(routed, "back")
    own = Call(aten.slice.Tensor, (Operand(2), 0, 0, slots // op.t))
    put = Call(op.node.target, (Operand(0), [Operand(1)], Result(0)))
    yield strategy(op, "own slots", [back, belonging(routed), R], [back], (own, put))


def _sorted_by(node: fx.Node, sort: str) -> bool:
    """Whether a value is the keys of that sort, in ascending order, cast or not."""
    while node.target in CASTS:
        node = node.args[0]  # type: ignore[assignment]
    if node.target is not operator.getitem or node.args[1] != 0:
        return False
    source, readers = node.all_input_nodes[0], [getattr(user.target, "_schema", None) for user in node.users]
    changed = any(schema is None or schema.is_mutable for schema in readers)
    return source.name == sort and not Operation(source, 1).arguments["descending"] and not changed


def _as(routed: Routed, role: Role) -> Layout:
    return belonging(replace(routed, role=role))


def put(op: Operation) -> Names:
    """`index_put_(x, [i], values)` of rows of a matrix: what a row holds may be cut."""
    whole = tuple((None,) * v.dim() for v in op.inputs)
    if len(op.inputs) != 3 or [v.dim() for v in op.inputs] != [2, 1, 2] or op.arguments["indices"][0] is None:
        return Names(whole, ((None,) * op.outputs[0].dim(),))
    width = op.inputs[0].shape[1]
    return Names(((None, "d"), (None,), (None, "d" if op.inputs[2].shape[1] == width else None)), ((None, "d"),))


def histogram(op: Operation) -> Names:
    """`histc` between given limits: counts of shards add up."""
    a = op.arguments
    limited = a["min"] != a["max"] and op.inputs[0].dim() == 1
    return Names((("n" if limited else None,) * op.inputs[0].dim(),), ((None,),), sums=frozenset({"n"}))


SORT = RoutedRule(SortRule(TOPK.names), lambda op, number, routed: ())
FLOOR_DIVIDE = RoutedRule(pointwise(), _divided)
INDEX_OF_SLOTS = RoutedRule(INDEX, _looked_up)
HISTOGRAM = RoutedRule(LabelRule(histogram), _counted)
CUMSUM = RoutedRule(CUMULATIVE_SUM, _summed_up)
EMPTY_LIKE = RoutedRule(filled(None, reads=True), _like)
INDEX_PUT = RoutedRule(LabelRule(put), _put)
