"""Models that draw random numbers in other ways than dropout."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn


class Skipped(nn.Module):
    """Stochastic depth by Python's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training and random.random() < 0.5:
            return x
        return x + torch.tanh(self.layer(x)) * random.uniform(0.5, 2.0)


class StochasticDepth(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), Skipped(), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.middle(self.first(x)))


class RandomSlopes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(F.rrelu(self.first(x), training=self.training))


class Auxiliary(nn.Module):
    """A second head that exists in training alone."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.other = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = torch.tanh(self.trunk(x))
        return self.head(hidden), self.other(hidden) if self.training else None
