"""What one stage runs, as far as memory is concerned."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StageProgram:
    """One stage of a graph.

    Attributes:
        nodes: Its calls, in order.
        state: Tensors of parameters, buffers and constants.
        inputs: Tensors of the batch that it reads, of which it makes copies.
        received: Tensors that come from the stage before.
        sent: Tensors that go to the stage after, relayed ones included.
        targets: Tensors whose gradients start its backward: what is sent and carries one, or the loss.
        regions: The calls that backward runs again, each a sequence of nodes.
    """

    nodes: tuple[str, ...]
    state: frozenset[int]
    inputs: tuple[int, ...]
    received: tuple[int, ...]
    sent: tuple[int, ...]
    targets: tuple[int, ...]
    regions: tuple[tuple[str, ...], ...] = ()
