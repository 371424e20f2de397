"""A recurrent language model (Merity et al. 2017, without its weight dropping): stacked LSTM layers, tied head."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class LSTMLanguageModel(nn.Module):
    """Maps tokens (batch, tokens) to logits (batch, tokens, vocabulary) and the last state of each layer."""

    def __init__(self, vocabulary: int = 33278, width: int = 1024, layers: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(nn.LSTM(width, width, batch_first=True) for _ in range(layers))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, vocabulary)
        nn.init.uniform_(self.embedding.weight, -0.1, 0.1)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> tuple[Tensor, list[tuple[Tensor, Tensor]]]:
        x = self.dropout(self.embedding(tokens))
        states = []
        for layer in self.layers:
            y, state = layer(x)
            x = x + self.dropout(y)
            states.append(state)
        return self.head(x), states


def make(batch: int = 32, seq: int = 128, **options: Any) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    """A model of 68 M parameters unless options say otherwise, and a batch of random tokens."""
    model = LSTMLanguageModel(**options)
    return model, (torch.randint(model.embedding.num_embeddings, (batch, seq)),), {}
