"""Cutting one dimension of a tensor among ranks, part by part, and joining the shards again.

A dimension of size n is a list of parts (n = sum(parts)); every part is cut into `ranks` pieces of equal size, and a
rank holds its piece of each part, in order. One part is the plain split. Fused weights have several: GPT-2's query,
key and value in one matrix are three equal parts; Phi-3's are of unequal sizes. A part that `ranks` does not divide is
padded with zeros at its end to the next multiple.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def piece_size(part: int, ranks: int) -> int:
    """Elements of one part that a rank holds, padding included."""
    return -(-part // ranks)


def local_size(parts: Sequence[int], ranks: int) -> int:
    """Elements of a dimension that a rank holds."""
    return sum(piece_size(part, ranks) for part in parts)


def cut(x: torch.Tensor, dim: int, parts: Sequence[int], rank: int, ranks: int) -> torch.Tensor:
    """The shard of `rank`: its piece of every part along `dim`, in memory of its own."""
    pieces = []
    for part in x.split(list(parts), dim):
        size = piece_size(part.shape[dim], ranks)
        start = min(rank * size, part.shape[dim])
        piece = part.narrow(dim, start, min(size, part.shape[dim] - start))
        missing = size - piece.shape[dim]
        if missing:
            shape = list(piece.shape)
            shape[dim] = missing
            piece = torch.cat([piece, piece.new_zeros(shape)], dim)
        pieces.append(piece)
    return pieces[0].clone(memory_format=torch.contiguous_format) if len(pieces) == 1 else torch.cat(pieces, dim)


def join(shards: Sequence[torch.Tensor], dim: int, parts: Sequence[int]) -> torch.Tensor:
    """The whole tensor from the shards of all ranks in rank order, without padding."""
    ranks = len(shards)
    sizes = [piece_size(part, ranks) for part in parts]
    pieces = [shard.split(sizes, dim) for shard in shards]
    whole = []
    for number, part in enumerate(parts):
        joined = torch.cat([piece[number] for piece in pieces], dim)
        whole.append(joined.narrow(dim, 0, part) if joined.shape[dim] != part else joined)
    return torch.cat(whole, dim) if len(whole) > 1 else whole[0].contiguous()
