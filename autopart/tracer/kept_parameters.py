"""Parameters that forward itself changes (the moving average of a teacher) are put back after a trial run.

A copy is made at the first operation that may change a parameter, so that other models pay nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from autopart.errors import CaptureError

# What gives another tensor on the same memory, which may be changed in place next.
ALIASES = (torch.Tensor.data.__get__, torch.Tensor.data.__set__, torch.Tensor.detach)  # type: ignore[attr-defined]
VIEWS = {"__getitem__", "view", "reshape", "flatten", "narrow", "select", "chunk", "split", "unbind"}
IN_PLACE = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__"}


class KeptParameters(TorchFunctionMode):
    """Copies each parameter before it is changed.

    Attributes:
        saved: Name -> value before.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.parameters = dict(model.named_parameters())
        self.versions = {name: p._version for name, p in self.parameters.items()}
        self.saved: dict[str, torch.Tensor] = {}
        self._names = {id(p): name for name, p in self.parameters.items()}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if may_change(func, kwargs):
            self._save((*args, *kwargs.values()))
        return func(*args, **kwargs)

    def _save(self, values: Any) -> None:
        for value in values:
            if isinstance(value, (tuple, list)):
                self._save(value)
            name = self._names.get(id(value))
            if name is not None and name not in self.saved:
                with torch._C.DisableTorchFunction():
                    self.saved[name] = value.detach().clone()

    def changed(self) -> dict[str, torch.Tensor]:
        """Copies of the present values of what may have been changed."""
        return {name: self.parameters[name].detach().clone() for name in self.saved}

    def restore(self) -> list[str]:
        """Put the values back; returns the names of what was changed past this mode."""
        unsaved = [n for n, p in self.parameters.items() if p._version != self.versions[n] and n not in self.saved]
        with torch.no_grad():
            for name, value in self.saved.items():
                if not torch.equal(self.parameters[name], value):
                    self.parameters[name].copy_(value)
        return unsaved


def may_change(func: Any, kwargs: Any) -> bool:
    """Whether a function changes an argument in place or lets others do it, by its schema or by its name."""
    if func in ALIASES or kwargs.get("out") is not None:
        return True
    schema = getattr(func, "_schema", None)
    if schema is not None:
        return any(a.alias_info is not None for a in schema.arguments)
    name = getattr(func, "__name__", "")
    return name in IN_PLACE or name in VIEWS or (name.endswith("_") and not name.endswith("__"))


@contextmanager
def kept_parameters(model: nn.Module) -> Iterator[KeptParameters]:
    """Put the values of parameters back afterwards.

    Raises:
        CaptureError: One was changed in a way that was not seen, so that its value before is lost.
    """
    kept = KeptParameters(model)
    if any(p.device.type == "meta" for p in kept.parameters.values()):
        yield kept
        return
    try:
        with kept:
            yield kept
    finally:
        unsaved = kept.restore()
    if unsaved:
        raise CaptureError(
            f"forward of {type(model).__name__} changes the parameter {unsaved[0]!r}, and trying it out changed it too",
            "Change parameters in the training loop, or through the parameter itself (parameter.mul_(...)).",
        )
