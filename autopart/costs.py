"""Costs: time and memory of every node of a graph, as the profiler predicts or measures them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal


def added_up(parts: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """Name -> the sum of what the parts have under it."""
    found: dict[str, float] = {}
    for part in parts:
        for name, value in part.items():
            found[name] = found.get(name, 0.0) + value
    return found


@dataclass(frozen=True)
class NodeTime:
    """Seconds of one node for one microbatch; zero-bubble schedules run the two backward parts apart.

    Attributes:
        operators: The same, forward and backward together, by ATen operator and collective.
    """

    forward_s: float
    backward_input_s: float
    backward_weight_s: float
    operators: Mapping[str, float] = field(default_factory=dict, compare=False)

    @property
    def backward_s(self) -> float:
        return self.backward_input_s + self.backward_weight_s


@dataclass(frozen=True)
class NodeMemory:
    """Bytes of one node for one microbatch.

    Attributes:
        output_bytes: Its result as it would be sent to another stage.
        gradient_bytes: The gradient that would be sent back for it; 0 if autograd does not track it.
        temporary_bytes: Largest allocation that exists only while the node runs, forward or backward.
    """

    output_bytes: int
    gradient_bytes: int
    temporary_bytes: int


@dataclass(frozen=True)
class SavedTensor:
    """One storage that autograd keeps from forward to backward (parameters are not among them).

    Attributes:
        bytes: Size of the storage.
        owner: The node that made the storage.
        savers: The nodes whose backward needs it. A stage that holds any of them keeps it.
    """

    bytes: int
    owner: str
    savers: tuple[str, ...]


@dataclass(frozen=True)
class InputGradient:
    """The gradient that a node's backward gives to one tensor that it reads.

    Attributes:
        tensor: Which (see `Allocations`).
        bytes: Size of the gradient itself.
        of: Whether it lies in the gradient of a result, passed through, or in a storage that backward makes.
        index: Of that result or storage. Gradients with one `index` share a storage.
        storage_bytes: Size of the storage that backward makes.
        view: Whether it is a view, to which autograd adds nothing in place.
        contiguous: Whether it is sent as it is, with all of its storage; else a copy is.
    """

    tensor: int
    bytes: int
    of: Literal["result", "new"]
    index: int
    storage_bytes: int
    view: bool
    contiguous: bool = True


@dataclass(frozen=True)
class NodeAllocations:
    """What a node does in memory for one microbatch, by the numbers of `Allocations`.

    Attributes:
        reads, results: Tensors.
        makes: Storages of its results and of what it saves.
        saves: Storages that autograd keeps for its backward.
        forward_bytes: Most bytes at once that were not there before it ran forward.
        cast_bytes: Weights that autocast converts, and keeps until the forward pass ends.
        backward_bytes: Most bytes at once while it runs backward, beyond those before it, incoming gradients included;
            each of these goes when it is no longer needed.
        backward_shared_bytes: The same where something else keeps the incoming gradients.
        backward_input_bytes, backward_weight_bytes: The same while it gives gradients to activations alone, or to
            parameters alone (see `simulator.memory_split_backward`).
        gradients: What backward gives to the tensors it reads.
    """

    reads: tuple[int, ...]
    results: tuple[int, ...]
    makes: tuple[int, ...]
    saves: tuple[int, ...]
    forward_bytes: int
    cast_bytes: int
    backward_bytes: int
    backward_shared_bytes: int
    backward_input_bytes: int
    backward_weight_bytes: int
    gradients: tuple[InputGradient, ...]


@dataclass(frozen=True)
class Allocations:
    """Storages and tensors of a graph, numbered, and what every node does with them for one microbatch.

    Attributes:
        storages: Bytes of each.
        tensors: The storage of each; a view is another tensor in the storage of its base.
        tensor_bytes: Of each, when it is sent.
        scattered: Tensors whose elements do not lie one after the other: a copy of them is sent.
        values: Node (placeholders and states, too) -> the tensors of its value.
        nodes: Call -> what it does.
        regions: Calls that backward runs again because the model says so.
        block_bytes: The device's allocator rounds every block up to a multiple of this.
    """

    storages: tuple[int, ...]
    tensors: tuple[int, ...]
    tensor_bytes: tuple[int, ...]
    scattered: frozenset[int]
    values: Mapping[str, tuple[int, ...]]
    nodes: Mapping[str, NodeAllocations]
    regions: tuple[tuple[str, ...], ...] = ()
    block_bytes: int = 1

    def rounded(self, size: int) -> int:
        """What the allocator takes for a block."""
        return -(-size // self.block_bytes) * self.block_bytes


@dataclass(frozen=True)
class Costs:
    """What the solver knows of a graph's nodes.

    Attributes:
        times: Device name (as in the cluster) -> node name -> seconds.
        memory: Node name -> bytes.
        saved: Every storage that autograd keeps for one microbatch.
        source: "analytic"; "measured", for most of the time; or "corrected" by a record or a profile.
        notes: What had to be estimated, for the person who reads the plan.
        allocations: Every allocation of a microbatch; None where only estimates are known (see `profile_rows`).
        updates: Device name -> optimizer -> what to multiply the formula of its time with; 1 where it is not named.
    """

    times: Mapping[str, Mapping[str, NodeTime]]
    memory: Mapping[str, NodeMemory]
    saved: tuple[SavedTensor, ...]
    source: Literal["analytic", "measured", "corrected"]
    notes: tuple[str, ...] = ()
    allocations: Allocations | None = None
    updates: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


@dataclass(frozen=True)
class StrategyCost:
    """What one operator costs a rank under one strategy, for one microbatch, forward and backward.

    Attributes:
        compute_s: Kernels.
        exchange_s: What its local calls exchange inside.
        exchange_bytes: What the rank sends there.
    """

    compute_s: float
    exchange_s: float
    exchange_bytes: int
