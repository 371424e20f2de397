"""Calls that are changed on their way into the trace, because export would see something else than the user meant."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopart.tracer.errors import Uncapturable

Owners = Mapping[int, tuple[nn.Module, str]]


class Bypass(TorchFunctionMode):
    """Replaces registered tensors that were reached past their module (a plain list, a closure); rewrites some calls.

    Args:
        owners: id of each registered tensor -> its owner and name there; the owner holds what the trace put there.
    """

    def __init__(self, owners: Owners) -> None:
        super().__init__()
        self.owners = owners

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args = current(args, self.owners)
        kwargs = {k: current(v, self.owners) for k, v in (kwargs or {}).items()}
        return REWRITES.get(func, func)(*args, **kwargs)


def current(value: Any, owners: Owners) -> Any:
    """The value with registered tensors replaced by those that their owners hold now."""
    if isinstance(value, torch.Tensor):
        found = owners.get(id(value))
        if found is None:
            return value
        owner, name = found
        parameter = owner._parameters.get(name)
        return owner._buffers.get(name) if parameter is None else parameter
    if type(value) in (tuple, list):
        return type(value)(current(v, owners) for v in value)
    return value


def _assign_data(*args: Any) -> None:
    raise Uncapturable(None, "it assigns to the .data of a tensor")


def _set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    """`tensor[index] = number` by an operator that takes the number, not a tensor made of it on some device."""
    if isinstance(value, (bool, int, float)):
        if _is_basic(index):
            tensor[index].fill_(value)
            return
        if isinstance(index, torch.Tensor) and index.dtype is torch.bool:
            tensor.masked_fill_(index.reshape(*index.shape, *[1] * (tensor.dim() - index.dim())), value)
            return
    torch.Tensor.__setitem__(tensor, index, value)


def _is_basic(index: Any) -> bool:
    """Whether an index gives a view."""
    parts = index if isinstance(index, tuple) else (index,)
    return all(part is None or part is Ellipsis or type(part) in (int, slice) for part in parts)


REWRITES: dict[Any, Callable[..., Any]] = {
    # Export cannot see through .data.
    torch.Tensor.data.__get__: lambda tensor, *_: tensor.detach(),  # type: ignore[attr-defined]
    torch.Tensor.data.__set__: _assign_data,  # type: ignore[attr-defined]
    # Nothing would be recorded where the tensor of this trace happens to be contiguous; elsewhere it may not be.
    torch.Tensor.contiguous: torch.ops.aten.contiguous.default,
    torch.Tensor.__setitem__: _set_item,
}
