"""The process's default dtype and device, written out: a package must not depend on those of the process it runs in."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopart.errors import CaptureError

# What a process starts with; a model that was captured under it needs no word about it where tensors are promoted.
INITIAL_DTYPE = torch.float32
# They make a floating tensor of numbers and an integer tensor that no cast can stand for.
_NOT_CAST = ("aten::where", "aten::bernoulli")


def made_of_nothing(node: fx.Node) -> dict[str, Any]:
    """The dtype and the device of a tensor that is made from numbers, where the call leaves them to the defaults."""
    target, given = node.target, node.kwargs
    if not isinstance(target, torch._ops.OpOverload) or node.all_input_nodes:
        return {}
    options = {a.name for a in target._schema.arguments if a.kwarg_only}
    made = node.meta["val"]
    if not {"dtype", "device"} <= options or not isinstance(made, torch.Tensor):
        return {}
    found: dict[str, Any] = {} if given.get("device") is not None else {"device": made.device}
    if given.get("dtype") is None and (made.is_floating_point() or made.is_complex()):
        found["dtype"] = made.dtype
    return found


def promoted_to(node: fx.Node, arguments: dict[str, Any], tensors: list[torch.Tensor]) -> torch.dtype | None:
    """The default dtype that the integer tensors of a call became, where it is not what a process starts with.

    Args:
        tensors: All tensors among `arguments`.

    Raises:
        CaptureError: The default dtype decides the result, and no cast of the arguments does the same.
    """
    made, target = node.meta["val"], node.target
    if not isinstance(target, torch._ops.OpOverload) or not isinstance(made, torch.Tensor) or not tensors:
        return None
    if made.dtype == INITIAL_DTYPE or not made.is_floating_point() or arguments.get("dtype") is not None:
        return None
    if any(t.is_floating_point() or t.is_complex() for t in tensors):
        return None
    if target._schema.name in _NOT_CAST or target._schema.is_mutable:
        raise CaptureError(
            f"{node.name} ({target}) makes a {made.dtype} tensor because that was the default dtype",
            "Name the dtype in the model, or plan under torch.set_default_dtype(torch.float32).",
        )
    return made.dtype
