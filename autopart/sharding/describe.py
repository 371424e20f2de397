"""A choice in the field's words: what is split how, and what is sent."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import fx

from autopart.graph import Capture, Graph
from autopart.runtime import collectives, dispatch
from autopart.sharding.choice import Choice
from autopart.sharding.conversions import Collective, sent_bytes
from autopart.sharding.layouts import R
from autopart.sharding.operation import Strategy

_GROUPED = {"experts": "experts", "all-to-all": "experts, all-to-all", "n": "column", "k": "row"}
# Operator -> label -> word. Labels that are not here are named by where they stand in the result (`_POSITIONS`).
_WORDS: dict[str, dict[str, str]] = {
    "aten::linear": {"n": "column", "k": "row"},
    "aten::addmm": {"n": "column", "k": "row", "m": "batch"},
    "aten::mm": {"n": "column", "k": "row", "m": "batch"},
    "aten::embedding": {"vocabulary": "vocabulary", "d": "column"},
    "aten::cross_entropy_loss": {"vocabulary": "vocabulary", "n": "batch"},
    "aten::scaled_dot_product_attention": {"heads": "heads", "queries": "sequence", "b0": "batch"},
    **{
        f"aten::conv{d}d": {"o": "output channels", "c": "input channels", "g": "channel groups", "n": "batch"}
        for d in (1, 2, 3)
    },
    "aten::batch_norm": {"c": "channels", "n": "batch"},
    "aten::group_norm": {"c": "channels", "n": "batch"},
    "aten::index": {"rows": "experts"},
    "transformers::grouped_mm_fallback": _GROUPED,
    "aten::_grouped_mm": _GROUPED,
}


def word(node: fx.Node, strategy: Strategy) -> str:
    """What a strategy is called: "column", "row", "heads", "vocabulary", "experts", "sequence", "batch", "hidden", ...

    "replicated" when all ranks do the same, "partial" when they work on summands.
    """
    name = getattr(getattr(node.target, "_schema", None), "name", "")
    found = _WORDS.get(name, {}).get(strategy.name)
    if found is not None:
        return found
    split = next((layout.split for layout in strategy.outputs if layout.split is not None), None)
    if split is None:
        return "summed" if strategy.name not in ("partial", "replicated", "replicated*") else strategy.name.rstrip("*")
    value = node.meta["val"]
    rank = (value if isinstance(value, torch.Tensor) else value[0]).dim()
    if split.dim == 0:
        return "batch"
    return (
        "hidden" if split.dim == rank - 1 else "sequence" if split.dim == 1 and rank == 3 else f"dimension {split.dim}"
    )


def describe(graph: Graph, choice: Choice, t: int) -> dict[str, str]:
    """Module path -> how its tensors are split, for every module that holds a split tensor.

    Example: `{"model.layers.0.self_attn.q_proj": "column: weight 4096 x 4096 by 8 on dimension 0"}`.
    """
    words: dict[str, set[str]] = defaultdict(set)
    for node in graph.primary.calls:
        strategy = choice.strategies.get(node.name)
        if strategy is None:
            continue
        for operand in node.all_input_nodes:
            if operand.op == "get_attr" and _splits(strategy):
                words[str(operand.target)] |= {word(n, choice.strategies[n.name]) for n in _computing(node, choice)}
    lines: dict[str, str] = {}
    for key, entry in graph.state.items():
        split = choice.state.get(key, R).split
        if split is None:
            continue
        path, _, own = entry.name.rpartition(".")
        shape = " x ".join(map(str, entry.tensor.shape))
        parts = f", parts {list(split.parts)}" if len(split.parts) > 1 else ""
        padding = ", padded" if split.padded(t) else ""
        text = f"{own} {shape} by {t} on dimension {split.dim}{parts}{padding}"
        if path in lines:
            lines[path] += f"; {text}"
        else:
            names = ", ".join(sorted(words[key])) or "held in shards"
            lines[path] = f"{names}: {text}"
    return lines


def _computing(reader: fx.Node, choice: Choice) -> list[fx.Node]:
    """A reader of a tensor; of one that only moves its dimensions, those who read that."""
    if choice.strategies[reader.name].name != "moved":
        return [reader]
    users = [user for user in reader.users if user.name in choice.strategies]
    return [node for user in users for node in _computing(user, choice)] or [reader]


def _splits(strategy: Strategy) -> bool:
    return any(layout.split is not None for layout in (*strategy.inputs, *strategy.outputs))


DISPATCHES = (dispatch.send_to_experts, dispatch.return_from_experts)


@dataclass(frozen=True)
class Sent:
    """One conversion of a local graph: what each rank sends in a microbatch.

    Attributes:
        node: Name of the node in the local graph.
        forward, backward: The collectives; None where nothing is sent.
        forward_bytes, backward_bytes: What a rank sends.
        again: Whether this is the second gather of a value, for backward.
    """

    node: str
    forward: Collective | None
    backward: Collective | None
    forward_bytes: int
    backward_bytes: int
    again: bool = False


# Function -> collectives of value and gradient; the second pair is with `partial_gradient=True`.
_SENDS: dict[Any, tuple[tuple[Collective | None, Collective | None], tuple[Collective | None, Collective | None]]] = {
    collectives.copy_to: ((None, "all_reduce"), (None, "all_reduce")),
    collectives.all_reduce: (("all_reduce", None), ("all_reduce", "all_reduce")),
    collectives.all_gather: (("all_gather", None), ("all_gather", "reduce_scatter")),
    collectives.split: ((None, "all_gather"), (None, None)),
    collectives.reduce_scatter: (("reduce_scatter", "all_gather"), ("reduce_scatter", "all_gather")),
    collectives.all_to_all: (("all_to_all", "all_to_all"), ("all_to_all", "all_to_all")),
    dispatch.send_to_experts: (("all_to_all", "all_to_all"), ("all_to_all", "all_to_all")),
    dispatch.return_from_experts: (("all_to_all", "all_to_all"), ("all_to_all", "all_to_all")),
}


def collectives_of(capture: Capture, t: int) -> list[Sent]:
    """What the explicit collectives of a local capture send, read from the graph itself.

    Operators that exchange something inside (`runtime.split_operators`) send a few numbers a row; they are not here.
    Of rows for experts, as many are counted as an even routing sends.
    """
    found = []
    for node in capture.graph.nodes:
        if node.op != "call_function" or node.target not in _SENDS:
            continue
        forward, backward = _SENDS[node.target][bool(node.kwargs.get("partial_gradient", False))]
        if not node.meta["requires_grad"]:
            backward = None
        within = node.target is collectives.all_to_all and node.args[1] == node.args[2]
        if within:
            forward = "all_gather"
            backward = backward and "all_gather"
        source = node.args[0].meta["val"]
        result = node.meta["val"]
        # The shards are the smaller side, and padding is sent too; where one shard becomes another, whole in both of
        # their dimensions.
        small, large = sorted((prod(source.shape), prod(result.shape)))
        elements = large if small == large else t * small
        if node.target is collectives.all_to_all:
            shape = list(source.shape)
            shape[node.args[1]] *= t
            if not within:
                shape[node.args[2]] = t * result.shape[node.args[2]]
            elements = prod(shape)
        elif node.target in DISPATCHES:
            elements = t * prod(source.shape)
        whole = elements * source.element_size()
        found.append(
            Sent(
                node.name,
                forward,
                backward,
                _sent(forward, whole, t),
                _sent(backward, whole, t),
            )
        )
        if node.kwargs.get("again", False):
            found.append(Sent(node.name, None, "all_gather", 0, _sent("all_gather", whole, t), again=True))
    return found


def sent_to_experts(node: fx.Node, strategy: Strategy, t: int) -> list[Sent]:
    """What an operator's strategy sends to experts and back, if the routing is even."""
    found = []
    for call in strategy.calls:
        if call.target in DISPATCHES:
            value = node.all_input_nodes[0] if call.target is dispatch.send_to_experts else node
            size = _sent("all_to_all", value.meta["val"].nbytes, t)
            backward = value.meta["requires_grad"]
            found.append(Sent(node.name, "all_to_all", "all_to_all" if backward else None, size, size * backward))
    return found


def _sent(collective: Collective | None, whole: int, t: int) -> int:
    return 0 if collective is None else sent_bytes(collective, whole, t)
