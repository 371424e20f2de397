"""Statements: which operations of a method stand alone, and which are written inside the one that reads them.

An operation is written inside its reader when that is its only one, both come from one line of the user's source, and
the expression still runs everything in the order of the program wherever order matters.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from autopart.codegen.forms import frame_context, frame_mode
from autopart.codegen.frames import Frame
from autopart.codegen.functions import is_collective
from autopart.codegen.hints import Hints
from autopart.codegen.loops import Loop
from autopart.codegen.program import SELECT, Context, Op, Value, is_mutating, is_pure

MAX_INLINED = 6
# How far apart an operation and the one it is written inside may stand.
MAX_SPAN = 200
# Operators whose spelling does not have the arguments in the order of the schema.
REORDERED = ("aten.rsub", "aten.embedding", "aten.batch_norm")

Item = Op | Frame | Loop


@dataclass
class Statement:
    """One statement: the item it ends with, and the items written inside it."""

    item: Item
    uses: list[Value]
    defines: list[Value]
    mode: str
    context: Context
    inlined: set[Op | Frame] = field(default_factory=set)


def item_uses(item: Item) -> list[Value]:
    if isinstance(item, Op):
        return item.values()
    return item.inputs


def item_defines(item: Item) -> list[Value]:
    return item.results if isinstance(item, Op) else item.outputs


def is_pure_item(item: Item) -> bool:
    """Whether it may move among others; collectives keep their order, which all ranks share."""
    return isinstance(item, Op) and is_pure(item) and not is_collective(item.target)


def _keeps_order(items: list[Item]) -> bool:
    """Whether one expression, evaluated from left to right, runs the items in the order they stand in."""
    maker = {v: item for item in items for v in item_defines(item)}
    order: list[Item] = []

    def visit(item: Item) -> None:
        for value in item_uses(item):
            if value in maker and maker[value] not in order:
                visit(maker[value])
        order.append(item)

    visit(items[-1])
    reordered = any(isinstance(i, Op) and str(i.target).startswith(REORDERED) for i in items)
    return order == items and not reordered


def item_mode(item: Item) -> str:
    return item.mode if isinstance(item, Op) else frame_mode(item) if isinstance(item, Frame) else "both"


def item_context(item: Item) -> Context | None:
    """The context that the item must run in; None where any will do."""
    if isinstance(item, Op):
        return None if item.target == SELECT else item.context
    return frame_context(item.frames[0] if isinstance(item, Loop) else item)


def split(items: list[Item], call: Frame, hints: Hints, checkpoints: set[Frame]) -> list[Statement]:
    """The statements of the method that `call` runs, from its operations, calls and loops in order.

    Calls that are checkpointed stand alone.
    """
    readers: dict[Value, list[int]] = {}
    for i, item in enumerate(items):
        for value in item_uses(item):
            readers.setdefault(value, []).append(i)
    outputs = set(call.outputs)
    impure = [0]
    for item in items:
        impure.append(impure[-1] + (not is_pure_item(item)))
    final = list(range(len(items)))
    for i in range(len(items) - 1, -1, -1):
        item = items[i]
        results = [v for v in item_defines(item) if v in readers or v in outputs]
        if len(results) != 1 or results[0] in outputs or len(readers[results[0]]) != 1 or item in checkpoints:
            continue
        reader = readers[results[0]][0]
        target = final[reader]
        if target - i > MAX_SPAN:
            continue
        group = [j for j in range(i + 1, target + 1) if final[j] == target]
        if len(group) > MAX_INLINED or not _can_inline(item, items[reader], items[target], call, hints):
            continue
        crosses = impure[target] - impure[i + 1] > 0 or not is_pure_item(item)
        if not crosses or (group == list(range(i + 1, target + 1)) and _keeps_order([items[j] for j in [i, *group]])):
            final[i] = target
    statements = []
    for i, item in enumerate(items):
        if final[i] != i:
            continue
        inside = [items[j] for j in range(max(0, i - MAX_SPAN), i) if final[j] == i]
        hidden = {v for other in inside for v in item_defines(other)}
        uses = [v for other in [*inside, item] for v in item_uses(other) if v not in hidden]
        context = next((c for other in [item, *inside] if (c := item_context(other)) is not None), None)
        if context is None:
            context = frame_context(call)
        statements.append(Statement(item, uses, item_defines(item), item_mode(item), context, set(inside)))  # type: ignore[arg-type]
    return statements


def _can_inline(item: Item, reader: Item, target: Item, call: Frame, hints: Hints) -> bool:
    """Whether one line of source, one mode and one context hold both; order is checked by the caller."""
    if any(isinstance(i, Loop) for i in (item, reader, target)):
        return False
    if isinstance(item, Op) and (is_mutating(item.target) or isinstance(item.target, str)):
        return False
    mode, reader_mode = item_mode(item), item_mode(reader)
    if isinstance(reader, Op) and reader.target == SELECT:
        branch = next(v for v in item_defines(item) if v in reader.values())
        if mode != ("training" if reader.args["training"] is branch else "evaluation"):
            return False
        if isinstance(item, Op) and is_collective(item.target):  # a result that only one mode leaves in shards
            return True
    elif mode != reader_mode:
        return False
    context, reader_context = item_context(item), item_context(reader)
    if reader_context is not None and context != reader_context:
        return False
    if context is not None and reader_context is None and context != frame_context(call):
        return False
    place = hints.place(item, call)
    return place is not None and place == hints.place(reader, call)
