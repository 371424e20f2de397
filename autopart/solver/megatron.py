"""Megatron-LM's layouts as restrictions of the program, so that a plan can be held against them at the same prices.

Both (Shoeybi et al. 2019; Korthikanti et al. 2022) cut the first linears of attention and MLP by columns, the second by
rows, attention by heads, and embedding, head and loss by vocabulary. What lies between, norms and residual sums, is
replicated in the classic layout and cut along the sequence in the later one. Everything else is left to the program.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import fx

from autopart.graph import Graph
from autopart.sharding import Operation, Strategy
from autopart.sharding.operation import Operand
from autopart.solver.layout_problem import Allow

Between = Literal["replicated", "sequence"]

# Last name of the module that holds a weight -> the label that is cut in the operator that reads it.
ROLES = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "qkv_proj", "gate_up_proj"), "n"),
    **dict.fromkeys(("c_attn", "c_fc", "fc1", "lm_head", "query", "key", "value"), "n"),
    **dict.fromkeys(("o_proj", "down_proj", "c_proj", "out_proj", "fc2"), "k"),
    **dict.fromkeys(("embed_tokens", "wte"), "vocabulary"),
}
# Operators that are always cut by one label.
LABELS = {"aten::scaled_dot_product_attention": "heads", "aten::cross_entropy_loss": "vocabulary"}
# A tied weight is named by its first reader; the head reads it as a product.
PRODUCT_LABELS = {"vocabulary": "n"}


def megatron(graph: Graph, between: Between) -> Allow:
    """Which strategies Megatron's layout leaves to each node of a decoder.

    Args:
        between: How norms and residual sums are laid out.
    """
    stream = _stream_shape(graph)

    def allow(node: fx.Node, strategy: Strategy) -> bool:
        label = _label(graph, node)
        if label is not None:
            return strategy.name == label
        if not _in_stream(node, stream):
            return True
        if between == "replicated":
            return not any(layout.split or layout.partial for layout in strategy.outputs)
        splits = [layout.split for layout in strategy.outputs]
        return all(split is not None and split.dim == 1 and len(split.parts) == 1 for split in splits)

    return allow


def _label(graph: Graph, node: fx.Node) -> str | None:
    name = _name(node)
    if name in LABELS:
        return LABELS[name]
    for operand in node.all_input_nodes:
        if operand.op == "get_attr" and len(operand.meta["val"].shape) == 2:
            module = graph.state[str(operand.target)].name.rpartition(".")[0].rpartition(".")[2]
            label = ROLES.get(module)
            return label if label is None or name == "aten::embedding" else PRODUCT_LABELS.get(label, label)
    return None


def _name(node: fx.Node) -> str:
    return getattr(getattr(node.target, "_schema", None), "name", "")


def _stream_shape(graph: Graph) -> tuple[int, ...] | None:
    """Shape of the residual stream: that of the looked-up words."""
    found = (
        node for node in graph.primary.calls if _label(graph, node) == "vocabulary" and _name(node) == "aten::embedding"
    )
    first = next(found, None)
    return None if first is None else tuple(first.meta["val"].shape)


def _in_stream(node: fx.Node, stream: tuple[int, ...] | None) -> bool:
    """Whether a node is a residual sum, or the norm or dropout of the residual stream."""
    value = node.meta["val"]
    if stream is None or not isinstance(value, torch.Tensor) or tuple(value.shape[:2]) != stream[:2]:
        return False
    if value.dim() != 3 or not value.is_floating_point():
        return False
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if stack and "Norm" in stack[-1][1]:
        return True
    operation = Operation(node, 2)
    sums = _name(node) == "aten::add" and all(
        isinstance(operation.arguments.get(n), Operand) for n in ("self", "other")
    )
    return sums and tuple(value.shape) == stream
