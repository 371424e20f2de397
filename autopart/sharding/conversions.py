"""Changes of layout: which function of `runtime.collectives` makes one, what moves both ways, and what that costs.

A conversion from layout a to layout b takes the value from forward kind a to forward kind b, and the gradient from
gradient kind b to gradient kind a, by one table:

| from \\ to  | replicated | partial          | shards         |
|------------|------------|------------------|----------------|
| replicated | -          | x / t            | own shard      |
| partial    | all-reduce | -                | reduce-scatter |
| shards     | all-gather | between zeros    | all-to-all     |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import ceil, log2, prod
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from autopart.cluster import CollectiveCost, Link
from autopart.runtime import collectives
from autopart.runtime.shards import local_size
from autopart.sharding.layouts import R_STAR, Kind, Layout, P, R, Split, convertible, local_shape

Amount = TypeVar("Amount", float, NDArray[np.float64])

Collective = Literal["all_reduce", "all_gather", "reduce_scatter", "all_to_all"]

# Bytes that a rank sends, as a share of the whole tensor times (t - 1) / t, and how often an algorithm goes through its
# steps: an all-reduce is a reduce-scatter and an all-gather (Thakur, Rabenseifner, Gropp 2005).
SHARES: dict[Collective, tuple[float, int]] = {
    "all_reduce": (2.0, 2),
    "all_gather": (1.0, 1),
    "reduce_scatter": (1.0, 1),
    "all_to_all": (1.0, 1),  # of a shard
}

# Steps among t ranks: around a ring (NCCL's and gloo's for large messages), or in doubling distances, which is what
# NCCL's trees take (its `tuning.cc` prices both as here: latency times steps plus bytes over bandwidth).
STEPS: dict[str, Callable[[int], int]] = {"ring": lambda t: t - 1, "tree": lambda t: ceil(log2(t)) if t > 1 else 0}


def move(before: Kind, after: Kind) -> Collective | None:
    """The collective that takes a value from one kind to another; None where nothing is sent."""
    if before == after:
        return None
    if isinstance(before, Split):
        if isinstance(after, Split):
            return "all_to_all" if after.dim != before.dim else "all_gather"
        return "all_gather" if after == "R" else None
    if before == "P":
        return "reduce_scatter" if isinstance(after, Split) else "all_reduce"
    return None


@dataclass(frozen=True)
class Price:
    """What a conversion costs each rank.

    Attributes:
        forward, backward: The collectives; None where nothing is sent.
        forward_bytes, backward_bytes: What a rank sends.
        forward_s, backward_s: Seconds on the link.
        temporary_bytes: What the converted value takes beside the one it is made from.
    """

    forward: Collective | None
    backward: Collective | None
    forward_bytes: int
    backward_bytes: int
    forward_s: float
    backward_s: float
    temporary_bytes: int

    @property
    def time_s(self) -> float:
        return self.forward_s + self.backward_s


@dataclass(frozen=True)
class Conversion:
    """A change of layout as a call of `runtime.collectives`; target None: the value is read as it is."""

    target: Callable[..., torch.Tensor] | None
    args: tuple[Any, ...] = ()
    kwargs: tuple[tuple[str, Any], ...] = ()


def conversions(a: Layout, b: Layout, value: torch.Tensor, t: int, link: Link, differentiable: bool = True) -> Price:
    """What the change from layout a to layout b costs.

    Args:
        value: The whole value (its shape and dtype; it may be a fake tensor).
        t: Number of ranks.
        link: Between the ranks.
        differentiable: Whether a gradient flows back.
    """
    a = _leaving(a, b)
    forward = move(a.forward, b.forward)
    backward = move(b.gradient, a.gradient) if differentiable else None
    forward_bytes = _bytes(forward, a.forward, b.forward, value, t)
    backward_bytes = _bytes(backward, b.gradient, a.gradient, value, t)
    changed = a.forward != b.forward
    return Price(
        forward,
        backward,
        forward_bytes,
        backward_bytes,
        collective_seconds(forward, forward_bytes, t, link),
        collective_seconds(backward, backward_bytes, t, link),
        prod(local_shape(value.shape, b, t)) * value.element_size() if changed else 0,
    )


def _leaving(a: Layout, b: Layout) -> Layout:
    """Owned values that are read otherwise are summands, whose gradient is replicated."""
    if not convertible(a, b):
        raise ValueError(f"{a} cannot become {b}")
    return P if a.owned is not None and a != b else a


def _bytes(collective: Collective | None, before: Kind, after: Kind, value: torch.Tensor, t: int) -> int:
    if collective is None:
        return 0
    shape = list(value.shape)
    for kind in (before, after) if collective == "all_to_all" else (before if isinstance(before, Split) else after,):
        if isinstance(kind, Split):
            shape[kind.dim] = t * local_size(kind.parts, t)  # padding is sent too
    return sent_bytes(collective, prod(shape) * value.element_size(), t)


def sent_bytes(collective: Collective, whole_bytes: int, t: int) -> int:
    """What a rank sends in a collective over t ranks.

    Args:
        whole_bytes: Of the tensor of which the ranks hold shards or summands.
    """
    share = SHARES[collective][0] / (t if collective == "all_to_all" else 1)
    return int(whole_bytes * share * (t - 1) / t)


def collective_seconds(collective: Collective | None, sent_bytes: Amount, t: int, link: Link) -> Amount:
    """Time of a collective in which each of t ranks sends so many bytes (a number, or an array of them).

    By what was measured for it on the link; else as a tree of messages with the link's own latency and bandwidth.
    """
    if collective is None:
        return 0.0 * sent_bytes
    fitted = link.measured(collective) or CollectiveCost(collective, "tree", link.latency_s, link.bandwidth_bytes_per_s)
    steps = SHARES[collective][1] * STEPS[fitted.algorithm](t)
    return steps * fitted.latency_s + sent_bytes / fitted.bandwidth_bytes_per_s


def conversion(a: Layout, b: Layout, shape: tuple[int, ...], t: int, differentiable: bool = True) -> Conversion:
    """The call that changes layout a into layout b."""
    a = _leaving(a, b)
    if not differentiable:
        a, b = a.without_gradient(), b.without_gradient()
    if a == b:
        return Conversion(None)
    source, target = a.split, b.split
    if source is not None and target is not None:
        return Conversion(collectives.all_to_all, (source.dim, target.dim), _both(source, target, shape, t))
    if source is not None:
        if b == P:
            return Conversion(collectives.place, (source.dim,), _parts(source, t))
        return Conversion(collectives.all_gather, (source.dim,), _parts(source, t) + _partial(b == R_STAR))
    if target is not None:
        if a == P:
            return Conversion(collectives.reduce_scatter, (target.dim,), _parts(target, t))
        return Conversion(collectives.split, (target.dim,), _parts(target, t) + _partial(a == R_STAR))
    return _UNSPLIT[(a, b)]


def _partial(flag: bool) -> tuple[tuple[str, Any], ...]:
    return (("partial_gradient", True),) if flag else ()


_UNSPLIT: dict[tuple[Layout, Layout], Conversion] = {
    (R, R_STAR): Conversion(collectives.copy_to),
    (R_STAR, R): Conversion(collectives.share_gradient),
    (P, R): Conversion(collectives.all_reduce),
    (P, R_STAR): Conversion(collectives.all_reduce, (), _partial(True)),
    (R, P): Conversion(collectives.share),
    (R_STAR, P): Conversion(collectives.share, (), _partial(True)),
}


def _parts(split: Split, t: int) -> tuple[tuple[str, Any], ...]:
    plain = len(split.parts) == 1 and not split.padded(t)
    return () if plain else (("parts", list(split.parts)),)


def _both(source: Split, target: Split, shape: tuple[int, ...], t: int) -> tuple[tuple[str, Any], ...]:
    parts = [("parts", value) for _, value in _parts(source, t)]
    new = [("new_parts", value) for _, value in _parts(target, t)]
    return (*parts, *new)
