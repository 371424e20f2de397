"""Runs a captured graph with real tensors, for checks: the graph's meaning, said in code."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopart.graph import Capture, Graph


def run_capture(
    graph: Graph, capture: Capture, inputs: Sequence[torch.Tensor], state: Mapping[str, torch.Tensor] | None = None
) -> list[torch.Tensor]:
    """The flat outputs of a capture.

    Args:
        inputs: One microbatch, in the order of `graph.inputs`.
        state: Tensors by state key; the model's own where not given.
    """
    values: dict[fx.Node, Any] = {}
    given = iter(inputs)
    contexts = ExitStack()
    inside: Any = None
    with contexts:
        for node in capture.graph.nodes:
            if node.op == "placeholder":
                values[node] = next(given)
            elif node.op == "get_attr":
                key = str(node.target)
                values[node] = state[key] if state is not None and key in state else graph.state[key].tensor
            elif node.op == "output":
                return list(map_arg(node.args[0], values.__getitem__))  # type: ignore[arg-type]
            else:
                # One context for a run of nodes, as in the user's code: autocast keeps casts of weights until it ends.
                wanted = (node.meta["grad_enabled"], node.meta["autocast"])
                if wanted != inside:
                    contexts.close()
                    enter(contexts, *wanted)
                    inside = wanted
                target = graph.opaque[str(node.target)].call if node.op == "call_module" else node.target
                args = map_arg(node.args, values.__getitem__)
                values[node] = target(*args, **map_arg(dict(node.kwargs), values.__getitem__))
    raise AssertionError("a graph ends in its output node")


def enter(contexts: ExitStack, grad_enabled: bool, autocast: Sequence[tuple[str, torch.dtype]]) -> None:
    """Enter the contexts that nodes were made in."""
    contexts.enter_context(torch.set_grad_enabled(grad_enabled))
    for device, dtype in autocast:
        contexts.enter_context(torch.autocast(device, dtype))
