"""A small model with one of each: a tied weight, batch norm, dropout, a long skip, integer inputs, its own loss."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

WIDTH, WORDS, LENGTH, ROWS, MICROBATCHES = 16, 24, 6, 8, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(LENGTH)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x + self.dropout(self.norm(self.linear(x))) * torch.sigmoid(first))


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(6)])
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        self.head.weight = self.embedding.weight
        self.unused = nn.Linear(2, 2)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        x = first = self.embedding(ids)
        for block in self.blocks:
            x = block(x, first)
        logits = self.head(x)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits, "first": first}


def mixed(frozen_blocks: int = 0) -> tuple[Mixed, dict[str, torch.Tensor]]:
    """The model, in float64, and the keyword arguments of one global batch.

    Args:
        frozen_blocks: That many blocks, and the embedding before them, are frozen; the head then has its own weight.
    """
    generator = torch.Generator().manual_seed(3)
    torch.manual_seed(4)
    model = Mixed().double()
    if frozen_blocks:
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
        for module in (model.embedding, *model.blocks[:frozen_blocks]):
            module.requires_grad_(False)
    ids, labels = (torch.randint(WORDS, (ROWS, LENGTH), generator=generator) for _ in range(2))
    return model, {"ids": ids, "labels": labels}
