"""Costs: time and memory of every node of a graph, as the profiler predicts or measures them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class NodeTime:
    """Seconds of one node for one microbatch; zero-bubble schedules run the two backward parts apart."""

    forward_s: float
    backward_input_s: float
    backward_weight_s: float

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
class Costs:
    """What the solver knows of a graph's nodes.

    Attributes:
        times: Device name (as in the cluster) -> node name -> seconds.
        memory: Node name -> bytes.
        saved: Every storage that autograd keeps for one microbatch.
        source: "analytic" or "measured".
        notes: What had to be estimated, for the person who reads the plan.
    """

    times: Mapping[str, Mapping[str, NodeTime]]
    memory: Mapping[str, NodeMemory]
    saved: tuple[SavedTensor, ...]
    source: str
    notes: tuple[str, ...] = ()


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
