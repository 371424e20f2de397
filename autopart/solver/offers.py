"""Blocks of a model that backward may compute again, and what that costs and spares (see `problem.Blocks`).

A block that is computed again runs its forward once more, up to the last call whose backward needs a value. It keeps
none of the storages that only its own backward needs, but for those that leave it, and keeps what it was given instead;
while it runs again, the spared storages of one microbatch exist. What is uncertain counts as kept.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch import fx

from autopart.blocks import find_blocks
from autopart.cluster import Device
from autopart.costs import Costs, SavedTensor
from autopart.graph import Graph
from autopart.solver.problem import Blocks


@dataclass
class _Block:
    """One block: its calls by item, and the bytes that one microbatch spares."""

    items: list[int] = field(default_factory=list)
    calls: list[fx.Node] = field(default_factory=list)
    peak: int = 0
    given: int = 0


def offered(
    graph: Graph, costs: Costs, can: Collection[str], devices: Sequence[Device], in_flight: Sequence[int]
) -> tuple[tuple[str, ...], Blocks] | None:
    """Labels of the blocks that can be recomputed and spare something, and their costs; None if there are none.

    Args:
        can: Labels of those that can be.
        devices, in_flight: Of each stage: where it runs, and the microbatches that it keeps.
    """
    label_of = find_blocks(graph, graph.primary)
    blocks: dict[str, _Block] = {}
    for item, node in enumerate(graph.primary.calls):
        if label_of[node.name] in can:
            block = blocks.setdefault(label_of[node.name], _Block())
            block.items.append(item)
            block.calls.append(node)
    by_owner: dict[str, list[SavedTensor]] = {}
    for saved in costs.saved:
        by_owner.setdefault(saved.owner, []).append(saved)
    savers = {name for saved in costs.saved for name in saved.savers}
    for block in blocks.values():
        _measure(block, by_owner, costs)
    blocks = {label: block for label, block in blocks.items() if block.peak > block.given}
    if not blocks:
        return None
    again = [[_again(block, savers, costs, device) for block in blocks.values()] for device in devices]
    spared = np.array([block.peak - block.given for block in blocks.values()], dtype=float)
    return tuple(blocks), Blocks(
        items=tuple(tuple(block.items) for block in blocks.values()),
        again=np.array(again),
        spared=np.outer(in_flight, spared),
        peak=np.array([block.peak for block in blocks.values()], dtype=float),
    )


def _measure(block: _Block, by_owner: dict[str, list[SavedTensor]], costs: Costs) -> None:
    """Find what one microbatch spares."""
    inside = {node.name for node in block.calls}
    leaving = {_base(node).name for node in block.calls if any(user.name not in inside for user in node.users)}
    for node in block.calls:
        if node.name not in leaving:
            own = (saved for saved in by_owner.get(node.name, ()) if inside.issuperset(saved.savers))
            block.peak += sum(saved.bytes for saved in own)
    given = {_base(source) for node in block.calls for source in node.all_input_nodes if source.name not in inside}
    block.given = sum(
        costs.memory[node.name].output_bytes
        for node in given
        if node.op.startswith("call") and node.name not in by_owner
    )


def _again(block: _Block, savers: set[str], costs: Costs, device: Device) -> float:
    """Seconds of its forward, up to the last call whose backward needs something."""
    last = max((i for i, node in enumerate(block.calls) if node.name in savers), default=-1)
    return sum(costs.times[device.name][node.name].forward_s for node in block.calls[: last + 1])


def _base(node: fx.Node) -> fx.Node:
    """The node whose memory a value is: through views, in-place operators and single results of several."""
    while node.op == "call_function" and node.all_input_nodes:
        returns = getattr(getattr(node.target, "_schema", None), "returns", ())
        if node.target is not operator.getitem and not any(r.alias_info is not None for r in returns):
            break
        node = node.all_input_nodes[0]
    return node
