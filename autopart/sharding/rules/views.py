"""Operators that move, regroup or cut dimensions: how a split of the argument becomes one of the result, and back."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any

import torch

from autopart.runtime.shards import local_size
from autopart.sharding.layouts import Owned, P, Routed, Split, belonging, shards
from autopart.sharding.operation import Call, Operand, Operation, Strategy
from autopart.sharding.rules.labels import Place, knows_no_size, strategy

Map = Callable[[Operation, Split], Split | None]
Localize = Callable[[Operation, Split, Split], Call]


@dataclass(frozen=True)
class MapRule:
    """A rule for an operator of one tensor argument and one result, which has the argument's elements (or some of
    them).

    Attributes:
        forward: Split of the argument -> split of the result.
        backward: Split of the result -> split of the argument.
        local: The call on shards; None when the operator runs as it is.
    """

    forward: Map
    backward: Map
    local: Localize | None = None

    def at_once(self, op: Operation) -> Iterable[Strategy]:
        if op.inputs[0].is_floating_point() and op.outputs[0].is_floating_point():
            yield strategy(op, "partial", [P], [P], (op.call(),))

    def from_split(self, op: Operation, place: Place, split: Split) -> Strategy | None:
        here = self.forward(op, split) if place.kind == "in" else self.backward(op, split)
        if here is None:
            return None
        source, result = (split, here) if place.kind == "in" else (here, split)
        if self.forward(op, source) != result:
            return None
        call = self.local(op, source, result) if self.local is not None else op.call()
        return strategy(op, "moved", [shards(source)], [shards(result)], (call,))

    def from_owned(self, op: Operation, number: int, owned: Owned) -> Iterable[Strategy]:
        """A dimension that stays whole keeps its owners."""
        size = op.inputs[0].shape[owned.dim]
        result = self.forward(op, Split(owned.dim, (size,)))
        if result is None or result.parts != (size,) or self.backward(op, result) != Split(owned.dim, (size,)):
            return
        yield strategy(op, "owned", [belonging(owned)], [belonging(Owned(result.dim, owned.owner))], (op.call(),))

    def from_routed(self, op: Operation, number: int, routed: Routed) -> Iterable[Strategy]:
        """A dimension that stays whole keeps its rows."""
        if not routed.rows:
            return
        source = Split(routed.dim, (op.inputs[0].shape[routed.dim],))
        result = self.forward(op, source)
        if result is None or result.parts != source.parts or self.backward(op, result) != source:
            return
        calls = (self.local(op, source, result) if self.local is not None else op.call(),)
        if knows_no_size(op, routed, calls):
            outputs = [belonging(replace(routed, dim=result.dim))]
            yield strategy(op, "rows", [belonging(routed)], outputs, calls)


# Views: view, reshape, flatten, unflatten, squeeze, unsqueeze.


def view_split(before: Sequence[int], after: Sequence[int], split: Split, t: int) -> Split | None:
    """Where a cut lands when a tensor of shape `before` is viewed as `after`.

    A cut into equal parts has M = (elements before the dimension) x parts blocks, each cut into t. It lands in the
    dimension j whose prefix Q (elements before it) divides M and which holds the rest: (M / Q) parts, t times.
    A dimension that stays as it is keeps any parts.
    """
    if 0 in before or 0 in after:
        return None
    outer = prod(before[: split.dim])
    for j, size in enumerate(after):
        if prod(after[:j]) == outer and size == before[split.dim] and size != 1:
            return Split(j, split.parts)
    if split.equal_parts is None or split.padded(t):
        return None
    blocks = outer * split.equal_parts
    for j, size in enumerate(after):
        prefix = prod(after[:j])
        if blocks % prefix == 0 and size % ((blocks // prefix) * t) == 0:
            parts = blocks // prefix
            return Split(j, (size // parts,) * parts)
    return None


def _view_forward(op: Operation, split: Split) -> Split | None:
    return view_split(op.inputs[0].shape, op.outputs[0].shape, split, op.t)


def _view_backward(op: Operation, split: Split) -> Split | None:
    return view_split(op.outputs[0].shape, op.inputs[0].shape, split, op.t)


def view(shape_argument: str | None) -> MapRule:
    """A rule for an operator that regroups dimensions.

    Args:
        shape_argument: The argument that holds the shape of the result; None when it has none.
    """

    def local(op: Operation, source: Split, result: Split) -> Call:
        if shape_argument is None:
            return op.call()
        return op.call(**{shape_argument: op.local_output_shape(shards(result))})

    return MapRule(_view_forward, _view_backward, local)


def _unflatten(op: Operation, source: Split, result: Split) -> Call:
    dim = op.arguments["dim"] % op.inputs[0].dim()
    sizes = op.local_output_shape(shards(result))[dim : dim + len(op.arguments["sizes"])]
    return op.call(sizes=sizes)


def _squeeze(op: Operation, source: Split, result: Split) -> Call:
    """Only what is of size 1 in the whole: a shard may be of size 1 where the whole is not."""
    shape = op.inputs[0].shape
    dims = op.arguments.get("dim", range(len(shape)))
    dims = [d % len(shape) for d in (dims if isinstance(dims, (list, tuple, range)) else [dims])]
    return Call(torch.ops.aten.squeeze.dims, (Operand(0), [d for d in dims if shape[d] == 1]))


SQUEEZE = MapRule(_view_forward, _view_backward, _squeeze)
UNFLATTEN = MapRule(_view_forward, _view_backward, _unflatten)


# Permutations.


def permutation(order: Callable[[Operation], Sequence[int]]) -> MapRule:
    """A rule for an operator whose result's dimension i is dimension order(op)[i] of its argument."""

    def forward(op: Operation, split: Split) -> Split | None:
        return Split(list(order(op)).index(split.dim), split.parts)

    def backward(op: Operation, split: Split) -> Split | None:
        return Split(order(op)[split.dim], split.parts)

    return MapRule(forward, backward)


def permuted(op: Operation) -> Sequence[int]:
    return [d % op.inputs[0].dim() for d in op.arguments["dims"]]


def transposed(op: Operation) -> Sequence[int]:
    order = list(range(op.inputs[0].dim()))
    if order:
        first, second = op.arguments.get("dim0", 0) % len(order), op.arguments.get("dim1", 1) % len(order)
        if len(order) > 1:
            order[first], order[second] = order[second], order[first]
    return order


# Slices.


def sub_parts(parts: Sequence[int], start: int, end: int) -> tuple[int, int] | None:
    """The range of parts that make up the elements from start to end, if some do."""
    borders = [sum(parts[:i]) for i in range(len(parts) + 1)]
    return (borders.index(start), borders.index(end)) if start in borders and end in borders else None


def _slice_range(op: Operation) -> tuple[int, int, int, int]:
    a = op.arguments
    dim = a["dim"] % op.inputs[0].dim()
    size = op.inputs[0].shape[dim]
    start, end = (_clamp(a[key], size, default) for key, default in (("start", 0), ("end", size)))
    return dim, start, max(start, end), a["step"]


def _clamp(value: Any, size: int, default: int) -> int:
    if value is None:
        return default
    return min(max(value + size if value < 0 else value, 0), size)


def _slice_forward(op: Operation, split: Split) -> Split | None:
    dim, start, end, step = _slice_range(op)
    if split.dim != dim:
        return split
    found = sub_parts(split.parts, start, end) if step == 1 and end > start else None
    if found is None or (split.padded(op.t) and (start, end) != (0, split.size)):
        return None
    return Split(dim, split.parts[slice(*found)])


def _slice_backward(op: Operation, split: Split) -> Split | None:
    dim, start, end, step = _slice_range(op)
    if split.dim != dim:
        return split
    size = op.inputs[0].shape[dim]
    parts = tuple(p for p in (start, *split.parts, size - end) if p)
    whole = (start, end) == (0, size)
    if step != 1 or end <= start or (not whole and any(p % op.t for p in parts)):
        return None
    return Split(dim, parts)


def _slice_local(op: Operation, source: Split, result: Split) -> Call:
    dim, start, end, _ = _slice_range(op)
    if source.dim != dim or (start, end) == (0, op.inputs[0].shape[dim]):
        return op.call()
    first, last = sub_parts(source.parts, start, end) or (0, 0)
    return op.call(start=local_size(source.parts[:first], op.t), end=local_size(source.parts[:last], op.t))


SLICE = MapRule(_slice_forward, _slice_backward, _slice_local)


def _select_forward(op: Operation, split: Split) -> Split | None:
    dim = op.arguments["dim"] % op.inputs[0].dim()
    return None if split.dim == dim else Split(split.dim - (split.dim > dim), split.parts)


def _select_backward(op: Operation, split: Split) -> Split | None:
    dim = op.arguments["dim"] % op.inputs[0].dim()
    return Split(split.dim + (split.dim >= dim), split.parts)


SELECT = MapRule(_select_forward, _select_backward)


@dataclass(frozen=True)
class PiecesRule:
    """split, chunk, unbind: one tensor into a list.

    A dimension that is kept is cut in all pieces; the dimension of the pieces is cut where the pieces' own parts are.
    """

    removes_dim: bool = False

    def at_once(self, op: Operation) -> Iterable[Strategy]:
        if op.inputs[0].is_floating_point():
            yield strategy(op, "partial", [P], [P] * len(op.outputs), (op.call(),))
        if not self.removes_dim:
            _, sizes = self._sizes(op)
            if all(size and size % op.t == 0 for size in sizes):
                yield from filter(None, [self._across(op, [(size,) for size in sizes])])

    def from_split(self, op: Operation, place: Place, split: Split) -> Strategy | None:
        dim, sizes = self._sizes(op)
        if place.kind == "in" and split.dim == dim:
            return None if self.removes_dim else self._from_parts(op, split, sizes)
        if place.kind == "out" and split.dim == dim and not self.removes_dim:
            parts = [split.parts if size == split.size else (size,) for size in sizes]
            return self._across(op, parts)
        shift = int(self.removes_dim)
        if place.kind == "in":
            source, result = split, Split(split.dim - (split.dim > dim) * shift, split.parts)
        else:
            source, result = Split(split.dim + (split.dim >= dim) * shift, split.parts), split
        return strategy(op, "moved", [shards(source)], [shards(result)] * len(op.outputs), (op.call(),))

    def from_owned(self, op: Operation, number: int, owned: Owned) -> Iterable[Strategy]:
        dim, _ = self._sizes(op)
        if owned.dim != dim:
            result = Owned(owned.dim - (owned.dim > dim and self.removes_dim), owned.owner)
            yield strategy(op, "owned", [belonging(owned)], [belonging(result)] * len(op.outputs), (op.call(),))

    def from_routed(self, op: Operation, number: int, routed: Routed) -> Iterable[Strategy]:
        dim, _ = self._sizes(op)
        if routed.rows and routed.dim != dim:
            result = replace(routed, dim=routed.dim - (routed.dim > dim and self.removes_dim))
            yield strategy(op, "rows", [belonging(routed)], [belonging(result)] * len(op.outputs), (op.call(),))

    def _sizes(self, op: Operation) -> tuple[int, list[int]]:
        dim = op.arguments["dim"] % op.inputs[0].dim()
        return dim, [1 if self.removes_dim else v.shape[dim] for v in op.outputs]

    def _from_parts(self, op: Operation, split: Split, sizes: list[int]) -> Strategy | None:
        parts, start = [], 0
        for size in sizes:
            found = sub_parts(split.parts, start, start + size) if size else None
            if found is None:
                return None
            parts.append(split.parts[slice(*found)])
            start += size
        return self._across(op, parts)

    def _across(self, op: Operation, parts: list[tuple[int, ...]]) -> Strategy | None:
        dim, _ = self._sizes(op)
        if any(p % op.t for piece in parts for p in piece):
            return None
        sizes = [local_size(piece, op.t) for piece in parts]
        name = op.node.target._schema.name  # type: ignore[union-attr]
        changes: dict[str, Any] = {}
        if name == "aten::split":
            changes["split_size"] = sizes[0]
        elif name == "aten::split_with_sizes":
            changes["split_sizes"] = sizes
        if name == "aten::chunk" and len(set(sizes)) > 1:
            return None
        source = Split(dim, tuple(p for piece in parts for p in piece))
        outputs = [shards(Split(dim, piece)) for piece in parts]
        return strategy(op, "pieces", [shards(source)], outputs, (op.call(**changes),))


@dataclass(frozen=True)
class JoinRule:
    """cat and stack: a list of tensors into one. Along the joined dimension, the parts of the result are those of
    all."""

    adds_dim: bool = False

    def at_once(self, op: Operation) -> Iterable[Strategy]:
        if self._legacy(op):
            return
        if all(v.is_floating_point() for v in op.inputs):
            yield strategy(op, "partial", [P] * len(op.inputs), [P], (op.call(),))
        dim = self._dim(op)
        if not self.adds_dim:
            parts: list[tuple[int, ...]] = [(v.shape[dim],) for v in op.inputs]
            yield from filter(None, [self._across(op, parts)])

    def from_split(self, op: Operation, place: Place, split: Split) -> Strategy | None:
        if self._legacy(op):
            return None
        dim = self._dim(op)
        shift = int(self.adds_dim)
        if not self.adds_dim and split.dim == dim:
            if place.kind == "in":
                size = op.inputs[place.number].shape[dim]
                return self._across(op, [split.parts if v.shape[dim] == size else (v.shape[dim],) for v in op.inputs])
            parts, start = [], 0
            for value in op.inputs:
                found = sub_parts(split.parts, start, start + value.shape[dim])
                if found is None:
                    return None
                parts.append(split.parts[slice(*found)])
                start += value.shape[dim]
            return self._across(op, parts)
        if place.kind == "in":
            source, result = split, Split(split.dim + (split.dim >= dim) * shift, split.parts)
        elif self.adds_dim and split.dim == dim:
            return None
        else:
            source, result = Split(split.dim - (split.dim > dim) * shift, split.parts), split
        return strategy(op, "moved", [shards(source)] * len(op.inputs), [shards(result)], (op.call(),))

    def from_owned(self, op: Operation, number: int, owned: Owned) -> Iterable[Strategy]:
        dim = self._dim(op)
        if self._legacy(op) or (owned.dim == dim and not self.adds_dim):
            return
        result = Owned(owned.dim + (owned.dim >= dim and self.adds_dim), owned.owner)
        yield strategy(op, "owned", [belonging(owned)] * len(op.inputs), [belonging(result)], (op.call(),))

    def from_routed(self, op: Operation, number: int, routed: Routed) -> Iterable[Strategy]:
        dim = self._dim(op)
        if self._legacy(op) or not routed.rows or (routed.dim == dim and not self.adds_dim):
            return
        result = replace(routed, dim=routed.dim + (routed.dim >= dim and self.adds_dim))
        yield strategy(op, "rows", [belonging(routed)] * len(op.inputs), [belonging(result)], (op.call(),))

    def _dim(self, op: Operation) -> int:
        return int(op.arguments["dim"]) % op.outputs[0].dim()

    def _legacy(self, op: Operation) -> bool:
        """Whether an empty tensor of one dimension is among the arguments, which `cat` skips."""
        return any(v.dim() != op.inputs[0].dim() for v in op.inputs)

    def _across(self, op: Operation, parts: list[tuple[int, ...]]) -> Strategy | None:
        if any(p % op.t for piece in parts for p in piece) or not all(sum(piece) for piece in parts):
            return None
        dim = self._dim(op)
        result = Split(dim, tuple(p for piece in parts for p in piece))
        return strategy(op, "joined", [shards(Split(dim, piece)) for piece in parts], [shards(result)], (op.call(),))


__all__ = [
    "SELECT",
    "SLICE",
    "SQUEEZE",
    "UNFLATTEN",
    "JoinRule",
    "MapRule",
    "PiecesRule",
    "permutation",
    "permuted",
    "transposed",
    "view",
]
