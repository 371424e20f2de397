"""A recommendation model in the shape of DLRM (Naumov et al. 2019): embedding tables and a dense network.

What the tables give and what the network makes of the dense features meet in dot products. The tables hold nearly all
parameters and do nearly no work; the networks are the other way round.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

DENSE_FEATURES = 13
# Rows of the 26 tables of the Criteo data set, each capped at 200,000.
# fmt: off
CRITEO_ROWS = [
    1460, 583, 200000, 200000, 305, 24, 12517, 633, 3, 93145, 5683, 200000, 3194, 27, 14992, 200000, 10, 5652, 2173, 4,
    200000, 18, 15, 200000, 105, 142572,
]
# fmt: on


def mlp(sizes: list[int]) -> nn.Sequential:
    """Linear layers of these sizes with a rectifier after each."""
    return nn.Sequential(*(layer for a, b in pairwise(sizes) for layer in (nn.Linear(a, b), nn.ReLU())))


class DLRM(nn.Module):
    """Click model. `forward(dense (batch, 13), sparse (batch, tables), labels (batch,))` gives {"loss", "logits"}."""

    def __init__(self, rows: list[int], width: int = 64, bottom: int = 512, top: int = 1024) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, width) for n in rows)
        self.bottom = mlp([DENSE_FEATURES, bottom, bottom // 2, width])
        pairs = (len(rows) + 1) * len(rows) // 2
        self.top = nn.Sequential(mlp([pairs + width, top, top, top // 2]), nn.Linear(top // 2, 1))
        first, second = torch.triu_indices(len(rows) + 1, len(rows) + 1, offset=1)
        self.register_buffer("first", first, persistent=False)
        self.register_buffer("second", second, persistent=False)

    def forward(self, dense: Tensor, sparse: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.bottom(dense)
        looked_up = [table(column) for table, column in zip(self.tables, sparse.unbind(1), strict=True)]
        features = torch.stack([x, *looked_up], dim=1)
        products = features @ features.transpose(1, 2)
        logits = self.top(torch.cat([x, products[:, self.first, self.second]], dim=1)).squeeze(1)
        return {"loss": F.binary_cross_entropy_with_logits(logits, labels), "logits": logits}


def make(
    batch: int = 2048, tables: int = 26, rows: int | None = None, **options: Any
) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    """A model of 97 M parameters unless options say otherwise, and a batch of random clicks.

    Args:
        tables: How many of the data set's tables there are.
        rows: Rows of every table, in place of the data set's.
    """
    sizes = CRITEO_ROWS[:tables] if rows is None else [rows] * tables
    model = DLRM(sizes, **options)
    sparse = torch.stack([torch.randint(n, (batch,)) for n in sizes], dim=1)
    labels = torch.randint(2, (batch,)).float()
    return model, (torch.randn(batch, DENSE_FEATURES), sparse), {"labels": labels}
