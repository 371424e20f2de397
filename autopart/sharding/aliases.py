"""Which values share memory, and what that forbids.

A value that is changed in place must be the very tensor that its other readers see: between values that share changed
memory no layout may change. Readers elsewhere may convert a value, but what was converted before a change is stale
after it: every change starts a new version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from networkx.utils import UnionFind
from torch import fx

from autopart.graph import Capture
from autopart.sharding.operation import Operand, Operation

# May give back its argument itself, which its schema does not say.
SILENT_ALIASES = ("aten::dropout", "aten::feature_dropout", "aten::alpha_dropout", "aten::pad", "aten::matmul")


class Aliases:
    """Groups of values that share memory."""

    def __init__(self, capture: Capture, operations: Mapping[fx.Node, Operation]) -> None:
        self._groups = UnionFind(capture.graph.nodes)
        self._edges: set[tuple[fx.Node, int]] = set()

        self._position = {node: i for i, node in enumerate(capture.graph.nodes)}
        for node in capture.graph.nodes:
            if node in operations:
                op = operations[node]
                self._edges |= {(node, number) for number in op.mutated}
                for number in _shared(op):
                    self._edges.add((node, number))
                    self._groups.union(op.operands[number], node)
            elif node.op == "call_function":  # getitem
                self._groups.union(node.args[0], node)
        self._changed: dict[fx.Node, list[int]] = defaultdict(list)
        for node, op in operations.items():
            for number in op.mutated:
                self._changed[self._groups[op.operands[number]]].append(self._position[node])
        self._operands = {node: op.operands for node, op in operations.items()}

    def changed(self, value: fx.Node) -> bool:
        """Whether the value shares memory with one that is changed in place."""
        return self._groups[value] in self._changed

    def fixed(self, user: fx.Node, number: int) -> bool:
        """Whether tensor argument `number` of `user` must be read in the very layout it has."""
        return (user, number) in self._edges and self.changed(self._operands[user][number])

    def root(self, value: fx.Node) -> fx.Node:
        """The same node for all values that share memory with this one."""
        return self._groups[value]

    def group(self, value: fx.Node) -> set[fx.Node]:
        """All values that share memory with this one."""
        return {node for node in self._position if self._groups[node] == self._groups[value]}

    def version(self, value: fx.Node, at: fx.Node) -> int:
        """How many changes the value has seen when `at` runs."""
        return sum(position < self._position[at] for position in self._changed.get(self._groups[value], ()))


def _shared(op: Operation) -> set[int]:
    """Tensor arguments whose memory a result may share."""
    found: set[int] = set()
    schema = getattr(op.node.target, "_schema", None)
    if schema is None:  # an opaque call may return its argument
        return set(range(len(op.operands)))
    for argument in schema.arguments:
        if argument.alias_info is not None or (argument.name in ("input", "self") and schema.name in SILENT_ALIASES):
            value = op.arguments.get(argument.name)
            items = value if isinstance(value, (list, tuple)) else [value]
            found |= {item.number for item in items if isinstance(item, Operand)}
    return found
