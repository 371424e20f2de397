"""Shapes of local values: each call is run once on fake tensors, for all calls that are alike."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx

from autopart.runtime import collectives
from autopart.sharding.operation import Call, Operand, Result, substitute
from autopart.torch_private import FakeTensor, FakeTensorMode


class LocalValues:
    """Fake results of local calls on t ranks.

    Results of calls that are alike are tensors of their own: equal fake tensors do not share memory.
    """

    def __init__(self, graph: fx.Graph, t: int) -> None:
        self._mode = _fake_mode(graph)
        self._ranks = collectives.ShapeRanks(t)
        self._known: dict[Hashable, tuple[Call, Any]] = {}

    def empty(self, like: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """A tensor of another shape."""
        if tuple(like.shape) == shape:
            return like
        with self._mode:
            return torch.empty(shape, dtype=like.dtype, device=like.device)

    def value(self, call: Call, operands: Sequence[Any], results: Sequence[Any], meta: Mapping[str, Any]) -> Any:
        """What a call gives.

        Args:
            operands, results: Values of the tensor arguments, and of the calls before it in its strategy.
            meta: Of its node; the autocast regions are read.
        """
        autocast = tuple(meta.get("autocast", ()))
        key = (id(call), autocast, *map(_described, operands), *map(_described, results))
        if key in self._known:
            return self._again(self._known[key][1])

        def look(item: Operand | Result) -> Any:
            return operands[item.number] if isinstance(item, Operand) else results[item.number]

        args, kwargs = substitute(call.args, look), substitute(call.kwargs or {}, look)
        before = collectives.use(self._ranks)
        try:
            with ExitStack() as stack:
                stack.enter_context(self._mode)
                stack.enter_context(torch.no_grad())
                for device, dtype in autocast:
                    stack.enter_context(torch.autocast(device, dtype))
                found = call.target(*args, **kwargs)
        finally:
            collectives.use(before)
        self._known[key] = call, found  # the call is kept alive, so that its id stays its own
        return found

    def _again(self, value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [self._again(item) for item in value]
        if not isinstance(value, torch.Tensor):
            return value
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")
        return FakeTensor(self._mode, made, value.device)


def _described(value: Any) -> Hashable:
    if isinstance(value, torch.Tensor):
        return tuple(value.shape), value.stride(), value.dtype
    return tuple(map(_described, value)) if isinstance(value, (list, tuple)) else value


def _fake_mode(graph: fx.Graph) -> FakeTensorMode:
    for node in graph.nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, (list, tuple)) else [value]:
            mode = getattr(item, "fake_mode", None)
            if mode is not None:
                return mode
    return FakeTensorMode()
