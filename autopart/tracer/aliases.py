"""Which nodes are names of one memory: export's fake values keep the storage that the real ones would share."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch
from torch import fx


def storage(value: Any) -> Any:
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def storage_names(graph: fx.Graph) -> dict[Any, list[fx.Node]]:
    """Nodes by the storage of their (fake) value: views and aliases of one another, in program order."""
    names: dict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.nodes:
        values = node.meta.get("val")
        for mark in {storage(v) for v in (values if isinstance(values, (list, tuple)) else [values])} - {None}:
            names[mark].append(node)
    return names
