"""What no cut may separate in a local graph: what may not be separated in the whole one, and the new nodes with it."""

from __future__ import annotations

from collections.abc import Iterable

from networkx.utils import UnionFind
from torch import fx

from autopart.sharding.program import Program, is_getitem


def colocated_sets(
    program: Program,
    graph: fx.Graph,
    parts: Iterable[list[str]],
    conversions: Iterable[tuple[fx.Node, int, fx.Node]],
) -> tuple[frozenset[str], ...]:
    """Disjoint sets of node names of the local graph, in program order.

    Args:
        parts: For each operator that has several local calls, their names: they belong together.
        conversions: Value of the whole graph, number of changes that it had seen, and node of its conversion: this
            belongs to the changes if any comes later, or if the value is state.
    """
    together = UnionFind()
    for names in (*program.capture.colocated, *parts):
        together.union(*names)
    for node in graph.nodes:  # how many rows are sent depends on data, and stages exchange values of known shapes
        layout = node.meta.get("layout")
        if layout is not None and layout.routed is not None and layout.routed.role == "sent":
            makers = node.all_input_nodes if is_getitem(node) else []
            together.union(node.name, *(other.name for other in (*makers, *node.users)))
    held = {program.aliases.root(node) for node in program.layouts if node.op == "get_attr"}
    for value, version, node in conversions:
        changes = program.aliases.changes(value)
        if version < len(changes) or (changes and program.aliases.root(value) in held):
            together.union(changes[0].name, node.name)
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    found = (sorted(names, key=place.__getitem__) for names in together.to_sets() if len(names) > 1)
    return tuple(map(frozenset, sorted(found, key=lambda names: place[names[0]])))
