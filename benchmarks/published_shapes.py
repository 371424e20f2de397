"""The parts of published transformers, as one rank of a tensor-parallel group holds them.

A layer is norm, attention, residual, norm, MLP, residual; collectives stand between the parts, so each part is a module
of its own. Two families: GPT (layer norm, GELU, biases, learned positions) and Llama (RMS norm, gated SiLU, rotary
positions, shared key and value heads). `fused` stands for systems that compile: chains of pointwise operators are one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Shape:
    """A decoder, and how one rank sees it.

    Attributes:
        tensor, context: Ranks that split its tensors, and its tokens.
        flash: Whether attention is one kernel; else scores, softmax and dropout are.
        fused: Whether chains of pointwise operators are one kernel.
        dropout: Probability; 0: the operators are not there.
        half_loss: Whether the loss is computed in the precision of the logits; else in float32.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    sequence: int
    llama: bool
    tensor: int = 1
    context: int = 1
    flash: bool = True
    fused: bool = False
    dropout: float = 0.0
    half_loss: bool = False

    @staticmethod
    def of(model: Mapping[str, Any], sequence: int, **options: Any) -> Shape:
        """The shape of an entry of `models`."""
        names = ("layers", "hidden", "heads", "kv_heads", "ffn")
        figures = {name: int(model[name]) for name in names}
        vocab = int(model["vocab"] or 51200)
        return Shape(**figures, vocab=vocab, sequence=sequence, llama=bool(model["gated_mlp"]), **options)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def tokens(self) -> int:
        """Of one row that the rank computes."""
        return self.sequence // self.context

    @property
    def layer_parameters(self) -> int:
        """Of the whole layer."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.kv_heads)
        mlp = (3 if self.llama else 2) * self.hidden * self.ffn
        extra = 2 * self.hidden if self.llama else 4 * self.hidden + 5 * self.hidden + self.ffn
        return attention + mlp + extra


class Norm(nn.Module):
    """x [tokens, rows, hidden]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.hidden))
        self.bias = None if shape.llama else nn.Parameter(torch.empty(shape.hidden))
        self.shape = shape

    def forward(self, x: Tensor) -> Tensor:
        if not self.shape.llama:
            return F.layer_norm(x, (self.shape.hidden,), self.weight, self.bias)
        if self.shape.fused:
            return F.rms_norm(x, (self.shape.hidden,), self.weight)
        y = x.float()
        return (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-5)).type_as(x) * self.weight


class Attention(nn.Module):
    """x [tokens, rows, hidden] -> the rank's summand of the output, same shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.kv_heads = shape.heads // shape.tensor, max(1, shape.kv_heads // shape.tensor)
        width = (self.heads + 2 * self.kv_heads) * shape.head_dim
        self.qkv = nn.Linear(shape.hidden, width, bias=not shape.llama)
        self.out = nn.Linear(self.heads * shape.head_dim, shape.hidden, bias=False)
        self.shape = shape

    def forward(self, x: Tensor, angles: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Args: keys, values: Of all tokens, where this rank computes a part of them (ring attention)."""
        tokens, rows, d = x.shape[0], x.shape[1], self.shape.head_dim
        parts = self.qkv(x).split([self.heads * d, self.kv_heads * d, self.kv_heads * d], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, d)) for part in parts)
        if self.shape.llama:
            q, k = self._rotated(q, angles), self._rotated(k, angles)
        if self.shape.context > 1:
            k, v = keys + k.sum() * 0, values + v.sum() * 0
        y = self._core(q, k, v)
        return self.out(y.reshape(tokens, rows, self.heads * d))

    def _core(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """q, k, v [tokens, rows, heads, d]."""
        if self.shape.flash:
            q, k, v = (part.permute(1, 2, 0, 3) for part in (q, k, v))
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=self.heads != self.kv_heads)
            return y.permute(2, 0, 1, 3)
        q, k, v = (part.flatten(1, 2).transpose(0, 1) for part in (q, k, v))
        # Scaling and mask are inside the softmax, as in Megatron-LM's fused kernel.
        scores = torch.softmax(torch.bmm(q, k.transpose(1, 2)), dim=-1)
        if self.shape.dropout:
            scores = F.dropout(scores, self.shape.dropout)
        return torch.bmm(scores, v).transpose(0, 1)

    def _rotated(self, x: Tensor, angles: Tensor) -> Tensor:
        if self.shape.fused:
            return x * angles[:, None, None, :].to(x.dtype)
        pairs = x.float().unflatten(-1, (2, -1))
        first, second = pairs.unbind(-2)
        cos, sin = angles[:, None, None, :].chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, first * sin + second * cos], dim=-1).type_as(x)


class Mlp(nn.Module):
    """x [tokens, rows, hidden] -> the rank's summand of the output, same shape."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        ffn = shape.ffn // shape.tensor
        self.up = nn.Linear(shape.hidden, ffn, bias=not shape.llama)
        self.gate = nn.Linear(shape.hidden, ffn, bias=False) if shape.llama else None
        self.down = nn.Linear(ffn, shape.hidden, bias=False)
        self.fused = shape.fused

    def forward(self, x: Tensor) -> Tensor:
        if self.gate is None:
            return self.down(F.gelu(self.up(x), approximate="tanh"))
        gate = self.gate(x)
        return self.down((gate if self.fused else F.silu(gate)) * self.up(x))


class Residual(nn.Module):
    """(x, y) -> x + dropout(y)."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.dropout = shape.dropout

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x + (F.dropout(y, self.dropout) if self.dropout else y)


class Embedding(nn.Module):
    """ids [tokens, rows] -> [tokens, rows, hidden]."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(shape.vocab // shape.tensor, shape.hidden)
        self.positions = None if shape.llama else nn.Parameter(torch.empty(shape.tokens, 1, shape.hidden))
        self.dropout = shape.dropout

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids)
        x = x if self.positions is None else x + self.positions
        return F.dropout(x, self.dropout) if self.dropout else x


class Head(nn.Module):
    """(x [tokens, rows, hidden], labels) -> loss over the rank's part of the vocabulary."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm = Norm(shape)
        self.out = nn.Linear(shape.hidden, shape.vocab // shape.tensor, bias=False)
        self.half_loss = shape.half_loss

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        logits = self.out(self.norm(x))
        logits = logits if self.half_loss else logits.float()
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())
