"""Activation checkpoints run twice: what a region changes outside itself, eager PyTorch changes twice."""

from __future__ import annotations

from collections.abc import Mapping

from torch import fx

from autopart.effects import mutated
from autopart.errors import CaptureError
from autopart.graph import StateEntry
from autopart.tracer.aliases import storage, storage_names


def refuse_repeated_changes(graph: fx.Graph, state: Mapping[str, StateEntry], name: str) -> None:
    """Refuse regions that backward runs again although they change something that outlives them.

    Raises:
        CaptureError: Naming what is changed, and the module that changes it.
    """
    names = storage_names(graph)
    recomputed = {n.meta["checkpoint"] for n in graph.nodes if n.op != "output" and _tracked(n)} - {None}
    for node in graph.nodes:
        region = _region(node)
        if region not in recomputed:
            continue
        for changed in mutated(node):
            held = [n for n in names[storage(changed.meta["val"])] if n.meta["checkpoint"] != region]
            if not held:
                continue
            what = next((repr(state[str(n.target)].name) for n in held if n.op == "get_attr"), "a value made before it")
            path = list(node.meta["nn_module_stack"].values())[-1:]
            where = f" by {path[0][0]}" if path and path[0][0] else ""
            raise CaptureError(
                f"{name} cannot be captured: inside an activation checkpoint, {what} is changed{where}, and changed "
                "once more when backward recomputes the region",
                "Switch the model's activation checkpointing off (such as model.gradient_checkpointing_disable() or "
                "memory_efficient=False), or keep what changes state, such as batch norm, out of its regions.",
            )


def _tracked(node: fx.Node) -> bool:
    flags = node.meta["requires_grad"]
    return any(flags) if isinstance(flags, list) else bool(flags)


def _region(node: fx.Node) -> str | None:
    """The region that a node runs in; a buffer is reassigned in the one that its new value is made in."""
    return node.args[1].meta["checkpoint"] if node.meta.get("reassigns") else node.meta.get("checkpoint")  # type: ignore[union-attr]
