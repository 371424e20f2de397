"""Where cuts may fall: anywhere legal ("operator"), or only between the model's blocks ("block").

A block is an element of the outermost list of modules around a call (`h.3` of a transformer, `layer2.1` of a ResNet).
Calls outside any block stay single: embeddings, heads and losses are cut off where that pays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import fx, nn

from autopart.graph import Graph

Granularity = Literal["block", "operator"]

LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def block_groups(graph: Graph, calls: Sequence[fx.Node]) -> dict[str, list[int]]:
    """Block -> the calls it holds, in program order; a further call of the same block is a block of its own."""
    blocks: dict[str, list[int]] = {}
    for i, node in enumerate(calls):
        block = _block(graph, node)
        if block is not None:
            blocks.setdefault(block, []).append(i)
    return blocks


def _block(graph: Graph, node: fx.Node) -> str | None:
    for key, (path, _) in (node.meta.get("nn_module_stack") or {}).items():
        parent = path.rpartition(".")[0]
        if path and issubclass(graph.modules.get(parent, object), LISTS):
            return str(key)
    return None
