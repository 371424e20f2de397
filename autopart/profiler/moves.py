"""The kernels that a conversion runs beside its collective, by formula: as bytes, for all of them only copy.

These are the copies of `runtime.collectives` and `runtime.shards`, function by function. All but
padding is rank 0's, as in the profile.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from math import prod
from typing import Any

from autopart.profiler.isolated import TensorSpec
from autopart.runtime import collectives
from autopart.runtime.shards import local_size, piece_size
from autopart.sharding import Conversion

Bytes = list[int]


class _Tensor:
    """Sizes of a tensor. `line`: bytes of one index of each dimension; `most`: bytes of its storage."""

    def __init__(self, shape: Sequence[int], item: int, contiguous: bool = True, most: int | None = None) -> None:
        self.shape, self.item, self.contiguous = tuple(shape), item, contiguous
        self.bytes = prod(shape) * item
        self.read = self.bytes if most is None else min(self.bytes, most)
        self.most = self.bytes if most is None else most

    def line(self, dim: int) -> int:
        return self.bytes // self.shape[dim] if self.shape[dim] else 0

    def resized(self, dim: int, size: int) -> _Tensor:
        return _Tensor((*self.shape[:dim], size, *self.shape[dim + 1 :]), self.item)


def copied(made: Conversion, spec: TensorSpec, ranks: int) -> tuple[Bytes, Bytes]:
    """Bytes that each kernel of a conversion reads and writes, forward and backward.

    Args:
        spec: What a rank holds of the value before.
    """
    contiguous, size = _layout(spec)
    x = _Tensor(spec.shape, spec.dtype.itemsize, contiguous, size * spec.dtype.itemsize)
    options: dict[str, Any] = dict(made.kwargs)
    partial = options.get("partial_gradient", False)
    dim = made.args[0] if made.args else 0
    after = _Tensor(x.shape, x.item)  # the gradient that arrives

    def shards() -> Sequence[int]:
        return options.get("parts") or (x.shape[dim] * ranks,)

    def whole() -> Sequence[int]:
        return options.get("parts") or (x.shape[dim],)

    if made.target is collectives.copy_to:
        return [], _sum(after)
    if made.target is collectives.all_reduce:
        return _sum(x), _sum(after) if partial else []
    if made.target is collectives.share:
        return _sum(x), _sum(after) if partial else []
    if made.target is collectives.share_gradient:
        return [], _sum(after)
    if made.target is collectives.all_gather:
        after = x.resized(dim, sum(shards()))
        return _gather(x, dim, shards(), ranks), (_sum_own if partial else _own)(after, dim, shards(), ranks)
    if made.target is collectives.split:
        after = x.resized(dim, local_size(whole(), ranks))
        return _own(x, dim, whole(), ranks), (_between_zeros if partial else _gather)(after, dim, whole(), ranks)
    if made.target is collectives.reduce_scatter:
        after = x.resized(dim, local_size(whole(), ranks))
        return _sum_own(x, dim, whole(), ranks), _gather(after, dim, whole(), ranks)
    if made.target is collectives.place:
        after = x.resized(dim, sum(shards()))
        return _between_zeros(x, dim, shards(), ranks), _own(after, dim, shards(), ranks)
    new_dim = made.args[1]
    size = sum(shards()) if new_dim == dim else x.shape[new_dim]
    new = options.get("new_parts") or (size,)
    after = x.resized(dim, sum(shards()))
    after = after.resized(new_dim, local_size(new, ranks))
    return _exchange(x, dim, shards(), new_dim, new, ranks), _exchange(after, new_dim, new, dim, shards(), ranks)


def _layout(spec: TensorSpec) -> tuple[bool, int]:
    """Whether a tensor is contiguous, and the number of elements of its storage."""
    step, contiguous, last = 1, True, 0
    for size, stride in zip(reversed(spec.shape), reversed(spec.stride), strict=True):
        contiguous = contiguous and (size == 1 or stride == step)
        step *= size
        last += (size - 1) * stride
    return contiguous, last + 1


def _sum(x: _Tensor) -> Bytes:
    return [x.read + x.bytes]


def _cut(x: _Tensor, dim: int, parts: Sequence[int], rank: int, ranks: int) -> Bytes:
    found, read, written, line = [], 0, 0, x.line(dim)
    for part in parts:
        size = piece_size(part, ranks)
        have = min(size, part - min(rank * size, part))
        taken, missing = min(have * line, x.most), (size - have) * line
        if missing:
            found += [taken + missing, taken + missing + size * line]  # zeros, and both together
        read += size * line if missing else taken
        written += size * line
    return [*found, read + written]


def _join(shard: _Tensor, dim: int, parts: Sequence[int], ranks: int) -> Bytes:
    line = shard.line(dim)
    found = [2 * ranks * piece_size(part, ranks) * line for part in parts]
    whole = 2 * sum(parts) * line
    if len(parts) > 1:
        return [*found, whole]
    narrowed = ranks * piece_size(parts[0], ranks) > parts[0] and prod(shard.shape[:dim]) > 1
    return [*found, whole] if narrowed else found


def _own(x: _Tensor, dim: int, parts: Sequence[int], ranks: int) -> Bytes:
    return _cut(x, dim, parts, 0, ranks)


def _contiguous(x: _Tensor) -> Bytes:
    return [] if x.contiguous else [x.read + x.bytes]


def _gather(x: _Tensor, dim: int, parts: Sequence[int], ranks: int) -> Bytes:
    return [*_contiguous(x), *_join(x, dim, parts, ranks)]


def _cut_for_all(x: _Tensor, dim: int, parts: Sequence[int], ranks: int) -> Bytes:
    """What every rank gets, and all of it in one tensor."""
    found = [size for rank in range(ranks) for size in _cut(x, dim, parts, rank, ranks)]
    return [*found, 2 * ranks * local_size(parts, ranks) * x.line(dim)]


def _sum_own(x: _Tensor, dim: int, parts: Sequence[int], ranks: int) -> Bytes:
    return _cut_for_all(x, dim, parts, ranks)


def _between_zeros(x: _Tensor, dim: int, parts: Sequence[int], ranks: int) -> Bytes:
    own = [piece_size(part, ranks) * x.line(dim) for part in parts]
    joined = _join(x, dim, parts, ranks)
    less = [size - min(size, x.most) for size in own]  # of an expanded value less is read than there is
    return [x.read + x.bytes, *(a - b for a, b in zip_longest(joined, less, fillvalue=0))]


def _exchange(x: _Tensor, dim: int, parts: Sequence[int], new_dim: int, new_parts: Sequence[int], ranks: int) -> Bytes:
    if dim == new_dim:
        whole = x.resized(dim, sum(parts))
        return [*_gather(x, dim, parts, ranks), *_cut(whole, dim, new_parts, 0, ranks)]
    piece = x.resized(new_dim, local_size(new_parts, ranks))
    return [*_cut_for_all(x, new_dim, new_parts, ranks), *_join(piece, dim, parts, ranks)]
