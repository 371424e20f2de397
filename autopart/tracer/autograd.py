"""Which values autograd tracks: each distinct operator call is tried once on fake tensors, then read off a table."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopart.effects import mutated
from autopart.graph import StateEntry
from autopart.torch_private import FakeTensorMode
from autopart.tracer.aliases import storage, storage_names

Flags = bool | list[bool]


def stamp_requires_grad(graph: fx.Graph, state: Mapping[str, StateEntry]) -> None:
    """Write `meta["requires_grad"]` on every node but `output`.

    An operator's answer depends on the operator, its constants, and the dtype and flag of each tensor: equal calls are
    tried once. A tensor changed in place by something tracked is tracked from then on, and so are its other names.
    """
    names = storage_names(graph)
    trial = _Trial()
    for node in graph.nodes:
        if node.op == "placeholder":
            node.meta["requires_grad"] = False
        elif node.op == "get_attr":
            entry = state[str(node.target)]
            node.meta["requires_grad"] = entry.kind == "parameter" and entry.tensor.requires_grad
        elif node.op == "call_module":
            node.meta["requires_grad"] = list(node.meta["opaque_requires_grad"])
        elif node.op == "call_function":
            node.meta["requires_grad"] = trial.flags(node)
        if node.op in ("call_function", "call_module") and node.meta["grad_enabled"]:
            for changed in mutated(node):
                after = node.meta["requires_grad"]
                if (any(after) if isinstance(after, list) else after) and _can_require_grad(changed.meta["val"]):
                    for other in names[storage(changed.meta["val"])]:
                        if (
                            "requires_grad" in other.meta
                            and other.meta["requires_grad"] is False
                            and other.op == "call_function"
                        ):
                            other.meta["requires_grad"] = not _detached(other)


def _can_require_grad(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _detached(node: fx.Node) -> bool:
    return "detach" in str(node.target) or not node.meta["grad_enabled"]


class _Trial:
    """Runs one call of each kind on fake tensors that carry the flags, and remembers the answer."""

    def __init__(self) -> None:
        self.mode = FakeTensorMode(allow_non_fake_inputs=True)
        self.known: dict[Any, Flags] = {}

    def flags(self, node: fx.Node) -> Flags:
        if node.target is operator.getitem:
            return node.args[0].meta["requires_grad"][node.args[1]]  # type: ignore[union-attr,index]
        value = node.meta["val"]
        several = isinstance(value, (list, tuple))
        inputs = node.all_input_nodes
        tracked = node.meta["grad_enabled"] and any(_any(n.meta["requires_grad"]) for n in inputs)
        if not tracked:
            changed = mutated(node)
            kept = bool(changed) and not several and changed[0].meta["requires_grad"] is True
            return [False] * len(value) if several else kept
        key = self._key(node)
        if key not in self.known:
            self.known[key] = self._try(node)
        return self.known[key]

    def _key(self, node: fx.Node) -> Any:
        def mark(n: fx.Node) -> str:
            value = n.meta["val"]
            return f"<{value.dtype},{value.dim()},{n.meta['requires_grad']}>"

        return node.target, str(map_arg((node.args, node.kwargs), lambda n: _Text(mark(n))))  # type: ignore[arg-type,return-value]

    def _try(self, node: fx.Node) -> Flags:
        value = node.meta["val"]
        with self.mode, torch.enable_grad():
            made: dict[fx.Node, torch.Tensor] = {}

            def tensor(n: fx.Node) -> torch.Tensor:
                if n not in made:
                    v, flag = n.meta["val"], n.meta["requires_grad"]
                    made[n] = torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device)
                    if flag is True:
                        # Not a leaf, so that it may be changed in place.
                        made[n] = made[n].requires_grad_().mul(1)
                return made[n]

            try:
                result = node.target(*map_arg(node.args, tensor), **map_arg(node.kwargs, tensor))  # type: ignore[operator]
            except Exception:
                # An operator that cannot run on these stand-ins: floating outputs of tracked inputs are tracked.
                if isinstance(value, (list, tuple)):
                    return [_can_require_grad(v) for v in value]
                return _can_require_grad(value)
        if isinstance(result, (list, tuple)):
            return [isinstance(r, torch.Tensor) and r.requires_grad for r in result]
        return bool(isinstance(result, torch.Tensor) and result.requires_grad)


class _Text:
    """Prints as its text, so that a call with nodes replaced by marks can be a key."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _any(flags: Flags) -> bool:
    return any(flags) if isinstance(flags, list) else flags
