"""Applying the rules: once for all operators that are alike, as those of identical layers are.

Operators that are alike share the very `Strategy` objects that the rules give, so that identity tells strategies apart.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable

from autopart.sharding.layouts import Owned, Routed, Split
from autopart.sharding.operation import Operation, Strategy
from autopart.sharding.rules.labels import Place, replicated
from autopart.sharding.rules.table import rule_of

Strategies = tuple[Strategy, ...]


class Rulebook:
    """The rules for one number of ranks, with what they said before."""

    def __init__(self) -> None:
        self._kinds: dict[Hashable, int] = {}
        self._known: dict[Hashable, Strategies] = {}

    def kind(self, op: Operation) -> int:
        """A number that operators have in common which are alike but for the names of their tensors."""
        return self._kinds.setdefault(op.signature, len(self._kinds))

    def at_once(self, op: Operation) -> Strategies:
        """Strategies that need no dimension to be named, "replicated" first."""

        def find() -> Strategies:
            # An opaque call holds parameters of its own, whose gradients nobody would sum.
            found = replicated(op)[: 1 if op.node.op == "call_module" else 2]
            rule = rule_of(op.node.target)
            return (*found, *(rule.at_once(op) if rule is not None else ()))

        return self._once(op, (self.kind(op),), find)

    def from_split(self, op: Operation, place: Place, split: Split) -> Strategies:
        """The strategy that has this split at this place, if there is one."""
        rule = rule_of(op.node.target)
        if rule is None:
            return ()

        def find() -> Strategies:
            found = rule.from_split(op, place, split)
            return () if found is None else (found,)

        return self._once(op, (self.kind(op), place.kind, place.number, split.dim, split.parts), find)

    def from_owned(self, op: Operation, number: int, owned: Owned) -> Strategies:
        """Strategies that keep the owners of an argument's indices; rules look at their names."""
        rule = rule_of(op.node.target)
        return () if rule is None else tuple(rule.from_owned(op, number, owned))

    def from_routed(self, op: Operation, number: int, routed: Routed) -> Strategies:
        """Strategies that read a routed argument; rules look at the names of sorts."""
        rule = rule_of(op.node.target)
        return () if rule is None else tuple(rule.from_routed(op, number, routed))

    def _once(self, op: Operation, key: Hashable, find: Callable[[], Strategies]) -> Strategies:
        found = self._known.get(key)
        if found is None:
            found = find()
            if not any(
                layout.owned or layout.routed for s in found for layout in (*s.inputs, *s.outputs)
            ):  # they have names
                self._known[key] = found
        return found
