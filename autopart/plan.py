"""Plan: which stage every node goes to, and what that is predicted to cost. Frozen, versioned, a JSON round trip."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

SCHEMA = "autopart-plan/1"


@dataclass(frozen=True)
class Strategy:
    """How the model is spread over the devices."""

    stages: int
    tensor: int
    replicas: int
    zero: int
    schedule: str
    microbatches: int
    microbatch_size: int


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan; seconds are for one microbatch, bytes are for one device of the stage."""

    devices: tuple[int, ...]
    nodes: int
    parameters: int
    parameter_bytes: int
    forward_s: float
    backward_s: float
    communication_s: float
    peak_memory_bytes: int
    memory_limit_bytes: int


@dataclass(frozen=True)
class Baseline:
    """What a split made by hand would cost under the same predictions."""

    name: str
    step_time_s: float | None
    fits: bool
    reason: str | None = None


@dataclass(frozen=True)
class Plan:
    """The answer of the solver. Field names are a contract (see docs/plan.md).

    Attributes:
        model: How the model was named by the user ("hf:gpt2"), or its class name.
        signature: sha256 of the captured graph; a plan only fits the graph it was made for.
        status: "optimal" (proven within the tolerance), "feasible", or "infeasible".
        stopped_by: "proof", "time limit", or "work limit".
        seconds: Wall time of "trace", "profile", "solve", "emit".
        assignment: Node name (of the primary capture) -> stage.
        granularity: "block" or "operator": where cuts were allowed in the chosen plan.
        alternatives: What the other granularity would have cost: granularity -> step time in seconds.
        cluster: The cluster as plain data, so that the file stands alone.
    """

    model: str
    mode: str
    strategy: Strategy
    status: str
    step_time_s: float
    lower_bound_s: float
    gap: float
    stopped_by: str
    per_stage: tuple[StagePlan, ...]
    balance: float
    baselines: tuple[Baseline, ...]
    assignment: Mapping[str, int]
    signature: str
    granularity: str
    optimizer: str
    dtype: str
    cluster: Mapping[str, Any]
    alternatives: Mapping[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
