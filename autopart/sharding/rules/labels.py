"""Rules by labels: dimensions of one name are cut together.

An operator's rule names the dimensions of its tensor arguments and results. For a label L, all in one strategy:

- arguments that have L are shards; those that lack it are R*, for each rank adds its part to their gradient;
- results that have L are shards; a result that lacks it is partial where the operator sums L away;
- additive arguments (a bias) are partial where the result is.

An operator that is linear in a set of arguments also runs on partial values of them, the others being R*. And every
operator runs replicated, with replicated or with partial gradients: backward is linear in the gradient of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from autopart.sharding.layouts import R_STAR, Layout, Owned, P, R, Routed, Split, belonging, shards
from autopart.sharding.operation import Call, Operation, Strategy

Labels = tuple[str | None, ...]


@dataclass(frozen=True)
class Place:
    """A tensor of an operator: its n-th argument or its n-th result."""

    kind: str
    number: int


class Rule(Protocol):
    """How an operator may be split."""

    def at_once(self, op: Operation) -> Iterable[Strategy]:
        """Strategies that need no dimension to be named: on partial values, and the rule's own splits."""
        ...

    def from_split(self, op: Operation, place: Place, split: Split) -> Strategy | None:
        """The strategy that has this split at this place, if there is one."""
        ...

    def from_owned(self, op: Operation, number: int, owned: Owned) -> Iterable[Strategy]:
        """Strategies that keep the owners of an argument's indices."""
        ...

    def from_routed(self, op: Operation, number: int, routed: Routed) -> Iterable[Strategy]:
        """Strategies that read a routed argument."""
        ...


Localize = Callable[[Operation, str, Sequence[Layout], Sequence[Layout]], tuple[Call, ...] | None]


@dataclass(frozen=True)
class Names:
    """Names of the dimensions of one operator's tensors.

    Attributes:
        inputs, outputs: A label for each dimension; None for one that is never cut.
        linear: Sets of arguments in which the operator is linear together.
        sums: Labels that are summed away: a result that lacks them is partial.
        additive: Arguments that are added to the result.
        whole: Labels that may only be cut as one part.
        padding: Labels that may be padded: padding stays zero in values and gradients.
        any_zero: Whether a zero in any one argument gives zero, so that one owned argument is enough.
        special: Label -> how to run it when that label is cut, and the layouts of the results then (None: by labels).
        local: How to run it otherwise, when arguments must change; None when the operator runs as it is.
    """

    inputs: tuple[Labels, ...]
    outputs: tuple[Labels, ...]
    linear: tuple[frozenset[int], ...] = ()
    sums: frozenset[str] = frozenset()
    additive: frozenset[int] = frozenset()
    whole: frozenset[str] = frozenset()
    padding: frozenset[str] = frozenset()
    any_zero: bool = False
    special: Mapping[str, Special] = field(default_factory=dict)
    local: Localize | None = None


@dataclass(frozen=True)
class Special:
    """A label that is cut by another computation than the operator itself.

    Attributes:
        calls: The local calls; None where the split is not possible.
        outputs: Layouts of the results.
        inputs: Layouts that differ from those by labels: number of the argument -> layout.
    """

    calls: Localize
    outputs: tuple[Layout, ...] | None = None
    inputs: Mapping[int, Layout] = field(default_factory=dict)


@dataclass(frozen=True)
class LabelRule:
    """A rule by labels; `names` gives them for one operation.

    Attributes:
        by_rows: Whether the operator takes indices of any dimension that may be cut one by one: whichever they are, in
            whatever order, and however many.
    """

    names: Callable[[Operation], Names]
    by_rows: bool = False

    def at_once(self, op: Operation) -> Iterable[Strategy]:
        names = self.names(op)
        for linear in names.linear:
            tensors = [op.inputs[i] for i in linear] + [v for v in op.outputs if v is not None]
            if not all(v.is_floating_point() for v in tensors):
                continue
            inputs = tuple(P if i in linear else R_STAR for i in range(len(op.inputs)))
            outputs = tuple(P for _ in op.outputs)
            calls = names.local(op, "partial", inputs, outputs) if names.local else (op.call(),)
            if calls is not None:
                yield strategy(op, "partial", inputs, outputs, calls)

    def from_split(self, op: Operation, place: Place, split: Split) -> Strategy | None:
        names = self.names(op)
        labels = (names.inputs if place.kind == "in" else names.outputs)[place.number]
        label = labels[split.dim] if split.dim < len(labels) else None
        if label is None or (len(split.parts) > 1 and label in names.whole):
            return None
        if split.padded(op.t) and label not in names.padding:
            return None
        return by_label(op, names, label, split.parts)

    def from_owned(self, op: Operation, number: int, owned: Owned) -> Iterable[Strategy]:
        names = self.names(op)
        label = names.inputs[number][owned.dim]
        if label is None or label not in names.padding or not all(label in labels for labels in names.outputs):
            return
        having = [i for i, labels in enumerate(names.inputs) if label in labels]
        sets = [having, [number]] if names.any_zero and len(having) > 1 else [having]
        for owned_ones in sets:
            inputs = [
                belonging(Owned(names.inputs[i].index(label), owned.owner)) if i in owned_ones else R_STAR
                for i in range(len(op.inputs))
            ]
            outputs = [belonging(Owned(labels.index(label), owned.owner)) for labels in names.outputs]
            calls = names.local(op, "owned", inputs, outputs) if names.local else (op.call(),)
            if calls is not None:
                yield strategy(op, "owned", inputs, outputs, calls)

    def from_routed(self, op: Operation, number: int, routed: Routed) -> Iterable[Strategy]:
        names = self.names(op)
        label = names.inputs[number][routed.dim] if routed.rows and self.by_rows else None
        if label is None or label in names.special or not all(label in labels for labels in names.outputs):
            return
        if routed.role == "sent" and label not in names.inputs[0]:  # a weight without rows is no weight
            return

        def layout(labels: Labels) -> Layout:
            return belonging(replace(routed, dim=labels.index(label))) if label in labels else R_STAR

        inputs, outputs = list(map(layout, names.inputs)), list(map(layout, names.outputs))
        calls = names.local(op, label, inputs, outputs) if names.local else (op.call(),)
        if calls is not None and knows_no_size(op, routed, calls):
            yield strategy(op, "rows", inputs, outputs, calls)


def knows_no_size(op: Operation, routed: Routed, calls: tuple[Call, ...]) -> bool:
    """Whether calls take any number of rows, where that depends on data."""
    return routed.role != "sent" or calls == (op.call(),)


def by_label(op: Operation, names: Names, label: str, parts: tuple[int, ...]) -> Strategy | None:
    """The strategy in which one label is cut."""
    outputs: list[Layout] = []
    for labels, value in zip(names.outputs, op.outputs, strict=True):
        if value is None:
            outputs.append(R)
        elif label in labels:
            outputs.append(shards(Split(labels.index(label), parts)))
        elif label in names.sums and value.is_floating_point():
            outputs.append(P)
        elif label in names.special:
            outputs.append(R)
        else:
            return None
    inputs: list[Layout] = []
    for number, labels in enumerate(names.inputs):
        if label in labels:
            split = Split(labels.index(label), parts)
            if op.inputs[number].shape[split.dim] != split.size:
                return None
            inputs.append(shards(split))
        else:
            inputs.append(P if number in names.additive and outputs[0] == P else R_STAR)
    special = names.special.get(label)
    localize = names.local
    if special is not None:
        localize = special.calls
        outputs = list(special.outputs) if special.outputs is not None else outputs
        for number, layout in special.inputs.items():
            inputs[number] = layout
    calls = localize(op, label, inputs, outputs) if localize is not None else (op.call(),)
    return None if calls is None else strategy(op, label, inputs, outputs, calls)


def strategy(
    op: Operation, name: str, inputs: Sequence[Layout], outputs: Sequence[Layout], calls: tuple[Call, ...]
) -> Strategy:
    """A strategy in normal form: layouts of what has no gradient say nothing of one."""
    return Strategy(
        name,
        tuple(layout if g else layout.without_gradient() for layout, g in zip(inputs, op.tracked_inputs, strict=True)),
        tuple(
            layout if g else layout.without_gradient() for layout, g in zip(outputs, op.tracked_outputs, strict=True)
        ),
        calls,
    )


def replicated(op: Operation) -> list[Strategy]:
    """The strategies that every operator has: all ranks do the same."""
    found = []
    for name, layout in (("replicated", R), ("replicated*", R_STAR)):
        made = strategy(op, name, [layout] * len(op.inputs), [layout] * len(op.outputs), (op.call(),))
        if made not in found:
            found.append(made)
    if len(found) == 2 and found[0].key == found[1].key:
        found.pop()
    return found


def aligned(op: Operation, shapes: Sequence[Sequence[int]], output: Sequence[int]) -> list[Labels]:
    """Labels of broadcast operands: dimensions counted from the right; one of size 1 that is expanded has none."""
    return [
        tuple(
            f"d{len(output) - len(shape) + i}" if size == output[len(output) - len(shape) + i] and size != 1 else None
            for i, size in enumerate(shape)
        )
        for shape in shapes
    ]


def numbered(shape: Sequence[int], but: Iterable[int] = ()) -> Labels:
    """One label for each dimension, except those in `but` (negative ones count from the end)."""
    barred = {d % len(shape) for d in but} if shape else set()
    return tuple(None if d in barred else f"d{d}" for d in range(len(shape)))
