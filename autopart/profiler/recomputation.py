"""Activation checkpoints: the regions of a graph that backward runs again."""

from __future__ import annotations

from collections import defaultdict

from torch import fx

from autopart.graph import Capture


def recomputed_regions(capture: Capture) -> list[list[fx.Node]]:
    """The calls of each region, in program order.

    Only regions that are one module call: a package runs any other without recomputation.
    """
    regions: dict[object, list[fx.Node]] = defaultdict(list)
    modules: dict[str, list[fx.Node]] = defaultdict(list)
    for node in capture.calls:
        if node.meta.get("checkpoint") is not None:
            regions[node.meta["checkpoint"]].append(node)
        for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
            if path:
                modules[key].append(node)
    found = []
    for nodes in regions.values():
        keys = nodes[0].meta.get("nn_module_stack") or {}
        if any(modules[key] == nodes for key in keys if key in modules):
            found.append(nodes)
    return found
