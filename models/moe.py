"""A mixture-of-experts transformer: in every second layer a router sends each token to its top two experts.

Routing follows GShard (Lepikhin et al. 2020): each sequence is a group, every expert takes at most `capacity` tokens of
a group, and tokens beyond that pass by on the residual. All shapes are therefore fixed, and the result for a sequence
does not depend on what else is in the batch. Each router adds a balance loss to the model's own.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal self-attention over (batch, tokens, width)."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width, bias=False)
        self.key = nn.Linear(width, width, bias=False)
        self.value = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        layers = (self.query, self.key, self.value)
        q, k, v = (layer(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for layer in layers)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class Dense(nn.Module):
    """The two-layer network of an ordinary block."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Router(nn.Module):
    """Decides which tokens each expert takes, and how much its answer counts.

    Returns `combine` (batch, tokens, experts, capacity), zero where a token is not sent, and the balance loss.
    """

    def __init__(self, width: int, experts: int, top: int, capacity_factor: float) -> None:
        super().__init__()
        self.experts, self.top, self.capacity_factor = experts, top, capacity_factor
        self.score = nn.Linear(width, experts, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        capacity = math.ceil(self.top * x.shape[1] * self.capacity_factor / self.experts)
        probability = self.score(x).softmax(-1)
        weight, choice = probability.topk(self.top, dim=-1)
        chosen = F.one_hot(choice, self.experts).to(x.dtype)  # (batch, tokens, top, experts)
        # Places are given first to every token's first choice, then to the second choices.
        ordered = chosen.transpose(1, 2).flatten(1, 2)
        place = (ordered.cumsum(1) - ordered).unflatten(1, (self.top, -1)).transpose(1, 2)
        slot = (place * chosen).sum(-1).long()  # (batch, tokens, top)
        kept = (slot < capacity).to(x.dtype)
        slots = F.one_hot(slot.clamp(max=capacity - 1), capacity).to(x.dtype)
        combine = torch.einsum("btk,btke,btkc->btec", weight * kept, chosen, slots)
        load = chosen[:, :, 0].mean((0, 1))
        balance = self.experts * (load * probability.mean((0, 1))).sum()
        return combine, balance


class Experts(nn.Module):
    """Experts behind a router; maps (batch, tokens, width) to the same shape and a balance loss."""

    def __init__(self, width: int, hidden: int, experts: int, top: int, capacity_factor: float) -> None:
        super().__init__()
        self.router = Router(width, experts, top, capacity_factor)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / math.sqrt(width))
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / math.sqrt(hidden))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        combine, balance = self.router(x)
        sent = torch.einsum("btec,btd->ebcd", (combine > 0).to(x.dtype), x)
        hidden = F.gelu(torch.einsum("ebcd,edh->ebch", sent, self.up))
        answers = torch.einsum("ebch,ehd->ebcd", hidden, self.down)
        return torch.einsum("btec,ebcd->btd", combine, answers), balance


class Layer(nn.Module):
    """Attention, then experts (or an ordinary network); takes and returns the balance loss so far."""

    def __init__(self, width: int, heads: int, network: nn.Module) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width)
        self.network = network

    def forward(self, x: Tensor, balance: Tensor) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.norm1(x))
        if isinstance(self.network, Experts):
            y, more = self.network(self.norm2(x))
            return x + y, balance + more
        return x + self.network(self.norm2(x)), balance


class MixtureOfExperts(nn.Module):
    """Language model. `forward(tokens, labels)` gives (loss, logits); the loss includes the routers' balance."""

    def __init__(
        self,
        vocabulary: int = 32000,
        context: int = 1024,
        width: int = 512,
        heads: int = 8,
        layers: int = 12,
        experts: int = 8,
        top: int = 2,
        capacity_factor: float = 1.25,
        balance_weight: float = 0.01,
    ) -> None:
        super().__init__()
        self.balance_weight = balance_weight
        self.tokens = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(context, width)
        self.layers = nn.ModuleList(
            Layer(
                width,
                heads,
                Experts(width, 4 * width, experts, top, capacity_factor) if i % 2 else Dense(width, 4 * width),
            )
            for i in range(layers)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device))
        balance = x.new_zeros(())
        for layer in self.layers:
            x, balance = layer(x, balance)
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return loss + self.balance_weight * balance, logits


def make(batch: int = 32, seq: int = 512, **options: Any) -> tuple[nn.Module, tuple[Tensor, ...], dict[str, Tensor]]:
    """A model of 159 M parameters unless options say otherwise, and a batch of random tokens that it is to predict."""
    model = MixtureOfExperts(**options)
    tokens = torch.randint(model.tokens.num_embeddings, (batch, seq))
    return model, (tokens,), {"labels": tokens}
