"""Values that every rank holds alike: of these a pipeline need send only a slice from each rank."""

from __future__ import annotations

from torch import fx

from autopart.sharding.layouts import R


def alike(node: fx.Node) -> bool:
    """Whether the value of a local node, and its gradient where it has one, is the same on every rank."""
    layout = node.meta.get("layout")
    if layout is None:
        return False
    return (layout if node.meta.get("requires_grad", False) else layout.without_gradient()) == R
