"""Randomness taken out of a run, in the same way in model and package: dropout set to zero, draws made constant.

Torch only: worker processes load this file by its path.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

# Function -> (position, name) of the probability that is set to zero.
DROPOUT: dict[Callable[..., Any], tuple[int, str]] = {
    F.dropout: (1, "p"),
    F.dropout1d: (1, "p"),
    F.dropout2d: (1, "p"),
    F.dropout3d: (1, "p"),
    F.alpha_dropout: (1, "p"),
    F.feature_alpha_dropout: (1, "p"),
    torch.dropout: (1, "p"),
    torch.dropout_: (1, "p"),
    torch.feature_dropout: (1, "p"),
    torch.feature_dropout_: (1, "p"),
    torch.alpha_dropout: (1, "p"),
    torch.alpha_dropout_: (1, "p"),
    torch.feature_alpha_dropout: (1, "p"),
    torch.feature_alpha_dropout_: (1, "p"),
    torch.native_dropout: (1, "p"),
    F.scaled_dot_product_attention: (4, "dropout_p"),
    F.multi_head_attention_forward: (10, "dropout_p"),
}

# Their dropout follows the list of weights, whose place depends on whether sequences are packed.
RECURRENT = {torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu}
AFTER_WEIGHTS = 3


def _pattern(like: torch.Tensor, low: float, high: float) -> torch.Tensor:
    """Numbers between low and high that depend on the position alone."""
    count = torch.arange(like.numel(), dtype=torch.float64, device=like.device)
    return (low + (high - low) * ((count * 0.618033988749895) % 1.0)).reshape(like.shape).to(like.dtype)


def _fill(low: float, high: float) -> Callable[[torch.Tensor], torch.Tensor]:
    return lambda t: t.detach().copy_(_pattern(t, low, high))


# Function -> what it draws instead; the draw is made first, for its shape, dtype and device.
DRAWS: dict[Callable[..., Any], Callable[[torch.Tensor], torch.Tensor]] = {
    # A mask that keeps: drop path then only scales.
    torch.Tensor.bernoulli_: lambda t: t.detach().fill_(1),
    torch.Tensor.bernoulli: lambda t: t.fill_(1),
    torch.bernoulli: lambda t: t.fill_(1),
    torch.rand: _fill(0.0, 1.0),
    torch.rand_like: _fill(0.0, 1.0),
    torch.Tensor.uniform_: _fill(0.0, 1.0),
    torch.randn: _fill(-1.5, 1.5),
    torch.randn_like: _fill(-1.5, 1.5),
    torch.normal: _fill(-1.5, 1.5),
    torch.Tensor.normal_: _fill(-1.5, 1.5),
}


def _weights(args: tuple[Any, ...]) -> int:
    return max(i for i, argument in enumerate(args) if isinstance(argument, (list, tuple)))


class FixedRandomness(TorchFunctionMode):
    """While active, dropout keeps everything and random draws give numbers that depend on their position alone.

    Attributes:
        dropout: Whether dropout was met.
        draws: Names of other random functions that were met.
    """

    def __init__(self) -> None:
        super().__init__()
        self.dropout = False
        self.draws: set[str] = set()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        if func in DROPOUT or func in RECURRENT:
            position, name = DROPOUT.get(func) or (_weights(args) + AFTER_WEIGHTS, "dropout")
            given = options.get(name, args[position] if len(args) > position else None)
            self.dropout |= bool(given)
            if name in options or len(args) <= position:
                options[name] = 0.0
            else:
                args = (*args[:position], 0.0, *args[position + 1 :])
        result = func(*args, **options)
        if func in DRAWS:
            self.draws.add(getattr(func, "__name__", str(func)))
            DRAWS[func](result)
        return result

    def notes(self) -> list[str]:
        """What was changed, for the person who reads the report."""
        found = ["dropout was set to zero in both"] if self.dropout else []
        if self.draws:
            found.append(f"random draws ({', '.join(sorted(self.draws))}) were replaced by fixed numbers in both")
        return found
