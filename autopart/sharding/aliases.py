"""Which values share memory, and what that forbids.

A value that is changed in place must be the very tensor that its other readers see: between values that share changed
memory no layout may change. Readers elsewhere may convert a value, but what was converted before a change is stale
after it: every change starts a new version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import torch
from networkx.utils import UnionFind
from torch import fx

from autopart.graph import Capture
from autopart.sharding.operation import Operand, Operation

# May give back its argument itself, which its schema does not say.
SILENT_ALIASES = ("aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::pad", "aten::matmul")


class Aliases:
    """Groups of values that share memory."""

    def __init__(self, capture: Capture, operations: Mapping[fx.Node, Operation]) -> None:
        groups = UnionFind(capture.graph.nodes)
        self._edges: set[tuple[fx.Node, int]] = set()
        self._position = {node: i for i, node in enumerate(capture.graph.nodes)}
        for node in capture.graph.nodes:
            if node in operations:
                op = operations[node]
                self._edges |= {(node, number) for number in op.mutated}
                for number in _shared(op):
                    self._edges.add((node, number))
                    groups.union(op.operands[number], node)
            elif node.op == "call_function":  # getitem
                groups.union(node.args[0], node)
        self._root = {node: groups[node] for node in capture.graph.nodes}
        self._changes: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node, op in operations.items():
            for number in op.mutated:
                self._changes[self._root[op.operands[number]]].append(node)
        self._operands = {node: op.operands for node, op in operations.items()}

    def root(self, value: fx.Node) -> fx.Node:
        """The same node for all values that share memory with this one."""
        return self._root[value]

    def group(self, value: fx.Node) -> set[fx.Node]:
        """All values that share memory with this one."""
        return {node for node, root in self._root.items() if root is self._root[value]}

    def changes(self, value: fx.Node) -> Sequence[fx.Node]:
        """The operators that change the value in place, under whatever name, in program order."""
        return self._changes.get(self._root[value], ())

    def fixed(self, user: fx.Node, number: int) -> bool:
        """Whether tensor argument `number` of `user` must be read in the very layout it has."""
        return (user, number) in self._edges and bool(self.changes(self._operands[user][number]))

    def version(self, value: fx.Node, at: fx.Node) -> int:
        """How many changes the value has seen when `at` runs."""
        return sum(self._position[change] < self._position[at] for change in self.changes(value))


def _shared(op: Operation) -> set[int]:
    """Tensor arguments whose memory a result may share: its schema says so, or the captured values do."""
    schema = getattr(op.node.target, "_schema", None)
    if schema is None:  # an opaque call may return its argument
        return set(range(len(op.operands)))
    results = {_memory(value) for value in op.outputs if value is not None}
    found = {number for number, value in enumerate(op.inputs) if _memory(value) in results}
    for argument in schema.arguments:
        if argument.alias_info is not None or (argument.name in ("input", "self") and schema.name in SILENT_ALIASES):
            value = op.arguments.get(argument.name)
            items = value if isinstance(value, (list, tuple)) else [value]
            found |= {item.number for item in items if isinstance(item, Operand)}
    return found


def _memory(value: torch.Tensor) -> int:
    return value.untyped_storage()._cdata
