"""Sets of nodes that no cut may separate."""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable

from torch import fx

from autopart.effects import mutated
from autopart.tracer.aliases import storage, storage_names


def colocated_sets(graph: fx.Graph) -> tuple[frozenset[str], ...]:
    """Node names that belong together, as disjoint sets in program order.

    - an operator with several outputs and its getitems;
    - a value that is changed in place: its producer, its views and aliases and every reader of them before the last
      change, and the changes;
    - every node that touches a buffer which is changed;
    - the nodes of a leaf module's call that changes a buffer (batch norm's counter and its operator).
    """
    order = {node: i for i, node in enumerate(graph.nodes)}
    unite = _Union()
    for node in graph.nodes:
        if node.op == "call_module" or isinstance(node.meta.get("val"), (list, tuple)):
            unite([node, *(u for u in node.users if u.target is operator.getitem)])
    names = storage_names(graph)
    changes: dict[object, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        for changed in mutated(node):
            changes[storage(changed.meta["val"])].append(node)
    for mark, changers in changes.items():
        holders = names[mark]
        last = max(order[c] for c in changers)
        is_state = any(n.op == "get_attr" for n in holders)
        together = set(changers)
        for holder in holders:
            if is_state or order[holder] <= last:
                together.add(holder)
                together.update(u for u in holder.users if u.op != "output" and (is_state or order[u] <= last))
        unite(n for n in together if n.op.startswith("call"))
        if is_state:
            for changer in changers:
                unite(_leaf_call(graph, changer))
    return unite.sets(order)


def _leaf_call(graph: fx.Graph, node: fx.Node) -> list[fx.Node]:
    """The nodes of the same innermost module call, where that module calls no other."""
    call = next(reversed(node.meta["nn_module_stack"]), None)
    inside = [n for n in graph.nodes if n.op.startswith("call") and call in n.meta["nn_module_stack"]]
    is_leaf = all(next(reversed(n.meta["nn_module_stack"])) == call for n in inside)
    return inside if call is not None and is_leaf else [node]


class _Union:
    """Sets that grow together whenever they share a node."""

    def __init__(self) -> None:
        self.parent: dict[fx.Node, fx.Node] = {}

    def find(self, node: fx.Node) -> fx.Node:
        self.parent.setdefault(node, node)
        while self.parent[node] is not node:
            self.parent[node] = self.parent[self.parent[node]]
            node = self.parent[node]
        return node

    def __call__(self, nodes: Iterable[fx.Node]) -> None:
        first, *rest = nodes if isinstance(nodes, list) else list(nodes)
        for node in rest:
            self.parent[self.find(node)] = self.find(first)

    def sets(self, order: dict[fx.Node, int]) -> tuple[frozenset[str], ...]:
        groups: dict[fx.Node, list[fx.Node]] = defaultdict(list)
        for node in self.parent:
            groups[self.find(node)].append(node)
        found = sorted(
            (sorted(g, key=order.__getitem__) for g in groups.values() if len(g) > 1), key=lambda g: order[g[0]]
        )
        return tuple(frozenset(n.name for n in group) for group in found)
