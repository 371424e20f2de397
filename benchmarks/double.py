"""Models whose code casts to a smaller dtype, run in float64 throughout."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

SMALLER = (torch.float32, torch.bfloat16, torch.float16)
CASTS = (torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half)


class InDouble(TorchFunctionMode):
    """While active, casts to a smaller floating dtype go to float64, as libraries make them around norms and losses.

    Rounding to float32 makes 1e-7 of a difference in the last bit of a float64, and hides every fault below that.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func in CASTS:
            return torch.Tensor.double(*args)
        options = {key: _raised(value) for key, value in (kwargs or {}).items()}
        return func(*map(_raised, args), **options)


def _raised(argument: Any) -> Any:
    return torch.float64 if any(argument is dtype for dtype in SMALLER) else argument
