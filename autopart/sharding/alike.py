"""Values that every rank holds alike: of these a pipeline need send only a slice from each rank."""

from __future__ import annotations

from torch import fx

from autopart.runtime import collectives
from autopart.sharding.layouts import R
from autopart.sharding.rewrite import LocalGraph

# Conversions whose result is whole, and whose gradient arrives whole, unless `partial_gradient` says otherwise.
_WHOLE = (collectives.all_reduce, collectives.all_gather, collectives.share_gradient)


def alike(local: LocalGraph) -> frozenset[fx.Node]:
    """The tensors of the primary capture whose value, and whose gradient, is the same on every rank."""
    return frozenset(node for node in local.primary.calls if _alike(node, local))


def _alike(node: fx.Node, local: LocalGraph) -> bool:
    strategy = local.choice.strategies.get(node.name)
    if strategy is None:
        return node.target in _WHOLE and not node.kwargs.get("partial_gradient", False)
    layouts = strategy.outputs
    if not node.meta.get("requires_grad", False):
        layouts = tuple(layout.without_gradient() for layout in layouts)
    return layouts == (R,)
