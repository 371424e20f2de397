"""Contexts as node metadata: grad mode, autocast and checkpoint region are written on a node when it is born.

Export turns these contexts into higher-order operators, and loses some (`no_grad` inside `autocast`). The stamp is what
was really in force; the higher-order operators are inlined afterwards and their arguments ignored.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

STAMP = "autopart_stamp"
DEVICE_TYPES = ("cpu", "cuda")


@dataclass(frozen=True)
class Stamp:
    """State of the interpreter at a node's birth; the fields are those of `autopart.graph`'s node metadata."""

    grad_enabled: bool = True
    autocast: tuple[tuple[str, torch.dtype], ...] = ()
    checkpoint: str | None = None

    @classmethod
    def now(cls, checkpoint: str | None) -> Stamp:
        autocast = tuple((d, torch.get_autocast_dtype(d)) for d in DEVICE_TYPES if torch.is_autocast_enabled(d))
        return cls(torch.is_grad_enabled(), autocast, checkpoint)


@contextmanager
def stamped_nodes(regions: list[str]) -> Iterator[None]:
    """Stamp every fx node created inside; `regions` is the stack of open checkpoint regions (innermost last)."""
    original = fx.Graph.create_node

    def create_node(self: fx.Graph, *args: Any, **kwargs: Any) -> fx.Node:
        node = original(self, *args, **kwargs)
        node.meta[STAMP] = Stamp.now(regions[-1] if regions else None)
        return node

    fx.Graph.create_node = create_node  # type: ignore[method-assign]
    try:
        yield
    finally:
        fx.Graph.create_node = original  # type: ignore[method-assign]
