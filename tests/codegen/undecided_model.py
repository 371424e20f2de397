"""A model with a module that is kept whole; alone in its file, which packages copy."""

from __future__ import annotations

import torch
from torch import nn


class Undecided(nn.Module):
    """Its path depends on its data, so it is kept whole; it takes values of any width."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x) * 2 if float(x.sum()) > 0 else torch.sigmoid(x)


class AroundUndecided(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.whole, self.last = nn.Linear(8, 12), Undecided(), nn.Linear(12, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.whole(self.first(x))).square().mean()
