"""A step of the joint oracle, half decided: the tensors that a local graph has so far, and what they have cost."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from autopart.profiler.isolated import Call, Outcome, Runner, TensorSpec
from autopart.sharding import Choice, Layout


class Value(NamedTuple):
    """A tensor of the local graph.

    Attributes:
        item: Key of the item that makes it; None for held tensors and inputs.
        stage: Of that item.
        crossed: Whether it is sent to stage 1.
        read: Whether an item reads it.
        held: Whether each stage holds it (held tensors and inputs).
        kept: Whether its item keeps something for itself.
        storage: Where it lives, if an item made that.
    """

    layout: Layout
    spec: TensorSpec
    parameter: bool
    item: Hashable = None
    stage: int | None = None
    crossed: bool = False
    read: bool = False
    held: tuple[bool, bool] = (False, False)
    kept: bool = False
    storage: Hashable = None


class Cell(NamedTuple):
    """A value of the whole graph with its conversions: (layout, whether a gradient flows) -> value."""

    base: Value
    converted: frozenset[tuple[tuple[Layout, bool], Value]] = frozenset()


class Storage(NamedTuple):
    """A storage that an item of a stage made. `sent`: bytes that it holds only because the item's value was sent."""

    bytes: int
    stage: int
    saved: bool
    sent: int = 0


class Reference(NamedTuple):
    """Which tensor an argument is: a cell, and the key of a conversion or None."""

    slot: Hashable
    converted: tuple[Layout, bool] | None = None


class Pricing:
    """Outcomes of calls by signature, for one kind of device and one tensor degree; shared by clusters."""

    def __init__(self, kind: str, t: int) -> None:
        self._runner = Runner(kind, t)
        self._outcomes: dict[str, Outcome] = {}

    def outcome(self, call: Call) -> Outcome:
        key = repr(call)
        if key not in self._outcomes:
            self._outcomes[key] = self._runner.run(call)
        return self._outcomes[key]


@dataclass
class Draft:
    """A node's step, half decided: what has changed, what it costs, and what was decided."""

    slots: dict[Hashable, Any]
    cost: list[float]
    decided: tuple[tuple[Hashable, Any], ...] = ()
    operands: tuple[Reference, ...] = ()

    def copy(self) -> Draft:
        return Draft(dict(self.slots), list(self.cost), self.decided, self.operands)

    def value(self, reference: Reference) -> Value:
        cell = self.slots[reference.slot]
        return cell.base if reference.converted is None else dict(cell.converted)[reference.converted]

    def put(self, reference: Reference, value: Value) -> None:
        cell = self.slots.get(reference.slot)
        if reference.converted is None:
            self.slots[reference.slot] = Cell(value, cell.converted if cell else frozenset())
        else:
            others = {**dict(cell.converted), reference.converted: value}
            self.slots[reference.slot] = cell._replace(converted=frozenset(others.items()))


@dataclass(frozen=True)
class Fixed:
    """One choice and one assignment (item key -> stage): what `Oracle.value` walks."""

    choice: Choice
    stages: Mapping[Hashable, int]


def gradient_bytes(value: Value) -> int:
    return value.spec.bytes if value.spec.requires_grad else 0


def references_in(arguments: Any) -> list[Reference]:
    """The tensors among arguments, in order."""
    if is_reference(arguments):
        return [arguments]
    if isinstance(arguments, Mapping):
        arguments = arguments.values()
    elif not isinstance(arguments, (list, tuple)):
        return []
    return [found for item in arguments for found in references_in(item)]


def is_reference(item: Any) -> bool:
    return isinstance(item, Reference)
