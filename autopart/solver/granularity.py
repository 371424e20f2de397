"""Where cuts may fall: anywhere legal ("operator"), or only between the model's blocks ("block")."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from torch import fx

from autopart.blocks import find_blocks
from autopart.graph import Graph

Granularity = Literal["block", "operator"]


def block_groups(graph: Graph, calls: Sequence[fx.Node]) -> dict[str, list[int]]:
    """Label of a block (see `autopart.blocks`) -> the calls it holds, in program order."""
    label = find_blocks(graph, graph.primary)
    blocks: dict[str, list[int]] = {}
    for i, node in enumerate(calls):
        blocks.setdefault(label[node.name], []).append(i)
    return blocks


def is_layer(label: str) -> bool:
    """Whether a block is an element of a list of modules, which is what people count when they split by hand."""
    return label.partition("@")[0].rpartition(".")[2].isdigit()
