"""Plan: which stage every node goes to, and what that is predicted to cost. Frozen, versioned, a JSON round trip.

A plan file is read as hostile: whatever is not exactly a plan is refused with `InputFileError`, which names the key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from functools import cache
from typing import Any, ClassVar, Literal

from pydantic import ConfigDict, TypeAdapter

from autopart.plan_check import check_plan
from autopart.strict_json import STRICT, document, read

SCHEMA = "autopart-plan/3"


@dataclass(frozen=True)
class Strategy:
    """How the model is spread over the devices."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    stages: int
    tensor: int
    replicas: int
    zero: int
    schedule: str
    microbatches: int
    microbatch_size: int


@dataclass(frozen=True)
class MicrobatchMemory:
    """What a stage does in memory for one microbatch, in bytes beyond what it held before.

    Attributes:
        kept: What it holds from forward to backward, sent values included.
        sent: The part of it that is sent on.
        forward_peak: Most at once, forward.
        backward_peak, first_backward_peak: Most at once beyond what was there when backward began; in the first
            microbatch of a step gradients of parameters stay.
        gradients: Of parameters.
        returned: Gradients that are sent back.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    kept: int
    sent: int
    forward_peak: int
    backward_peak: int
    first_backward_peak: int
    gradients: int
    returned: int


@dataclass(frozen=True)
class SplitBackwardMemory:
    """What a stage does in memory where a schedule runs its backward in two actions, for one microbatch.

    Attributes:
        input_peak: Most at once beyond what was there when the input gradients began.
        waiting: What it holds from then to the weight gradients, in bytes beyond what it held before its forward; sent
            values and returned gradients included.
        returned: Gradients that are sent back, which stay.
        weight_peak, first_weight_peak: Most at once beyond what was there when the weight gradients began; in the first
            microbatch of a step they stay.
        gradients: Of parameters.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    input_peak: int
    waiting: int
    returned: int
    weight_peak: int
    first_weight_peak: int
    gradients: int


@dataclass(frozen=True)
class StageMemory:
    """Bytes of one stage in training; `simulator.memory` makes a step out of them.

    Attributes:
        parameters, buffers: Constants are buffers.
        gradients: Of the parameters that are trained.
        optimizer_state: From the first optimizer step on.
        received, received_gradients: A receive buffer of the values from the stage before, and one of the gradients
            from the stage after; there is one for each microbatch.
        batch: Of the whole batch, on the stage's process.
        update: What the process needs at once when tied gradients are summed, or when the optimizer runs.
        microbatch: What one microbatch does.
        whole_backward: Where a schedule splits the backward, this stage runs all of it with the input gradients.
        split: What one microbatch does in the two parts of its backward; None where they are not run apart.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    parameters: int
    buffers: int
    gradients: int
    optimizer_state: int
    received: int
    received_gradients: int
    batch: int
    update: int
    microbatch: MicrobatchMemory
    whole_backward: bool = False
    split: SplitBackwardMemory | None = None


@dataclass(frozen=True)
class StagePlan:
    """One stage of a plan; seconds are for one microbatch, bytes are for one device of the stage.

    Attributes:
        backward_s: The whole backward; `backward_weight_s` is the part that zero-bubble schedules run apart.
        update_s: Optimizer, once a step.
        sync_s: Adding up the gradients of states that other stages hold too, once a step.
        sent_bytes: Of each value that goes to the next stage; `returned_bytes` of each gradient that comes back.
        operators: Seconds of forward and backward together, by ATen operator and collective; without what backward
            computes again.
        sliced: Values that every tensor rank holds alike and sends on in slices (see `solver.crossing`).
        recomputed: Labels of blocks (see `autopart.blocks`) that backward computes again instead of keeping what they
            saved; forward and backward times and memory are those with it.
        memory: What its process's peak is made of; None in inference.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    devices: tuple[int, ...]
    nodes: int
    parameters: int
    parameter_bytes: int
    forward_s: float
    backward_s: float
    communication_s: float
    peak_memory_bytes: int
    memory_limit_bytes: int
    backward_weight_s: float = 0.0
    update_s: float = 0.0
    sync_s: float = 0.0
    sent_bytes: tuple[int, ...] = ()
    returned_bytes: tuple[int, ...] = ()
    operators: Mapping[str, float] = field(default_factory=dict)
    sliced: tuple[str, ...] = ()
    recomputed: tuple[str, ...] = ()
    memory: StageMemory | None = None


@dataclass(frozen=True)
class BlockLayout:
    """How one block is split over the ranks of a tensor-parallel group.

    Attributes:
        block: Label of the block (see `autopart.blocks`).
        splits: Module path -> what is split how, in words ("column: weight 4096 x 4096 by 8 on dimension 0").
        collectives: "forward all_reduce" and the like -> how many there are in one microbatch.
        bytes_sent: What a rank sends in one microbatch, both ways.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    block: str
    splits: Mapping[str, str]
    collectives: Mapping[str, int]
    bytes_sent: int


@dataclass(frozen=True)
class Layouts:
    """How every tensor lies on the ranks of a group, in full: a package is made from it.

    Attributes:
        state: `state_dict` name -> layout; what is not named is whole on every rank.
        strategies: Call node of the whole graph -> the strategy it runs by.
        blocks: The same for people.
        time_s, lower_bound_s: Computing and collectives of one microbatch in the layout program, and its bound.
        again: Nodes whose gathered value backward keeps as shards, to gather it again: less memory, more time.
        padding_bytes: Parameters that exist only because a size does not divide, on each rank.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    state: Mapping[str, str]
    strategies: Mapping[str, str]
    blocks: tuple[BlockLayout, ...]
    time_s: float
    lower_bound_s: float
    padding_bytes: int
    again: tuple[str, ...] = ()


@dataclass(frozen=True)
class Baseline:
    """What a split made by hand would cost under the same predictions."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
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
        assignment: Node name (of the primary capture; of the local one where tensors are split) -> stage.
        granularity: "block" or "operator": where cuts were allowed in the chosen plan.
        alternatives: What the other granularity would have cost: granularity -> step time in seconds.
        degrees: Tensor degree -> step time in seconds of the best plan found with it.
        times_from: Where seconds come from: formulas, (mostly) a profile, or formulas corrected by a record or profile.
        layouts: How tensors are split; None where `strategy.tensor` is 1.
        cluster: The cluster as plain data, so that the file stands alone.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    model: str
    mode: Literal["training", "inference"]
    strategy: Strategy
    status: Literal["optimal", "feasible", "infeasible"]
    step_time_s: float
    lower_bound_s: float
    gap: float
    stopped_by: Literal["proof", "time limit", "work limit"]
    per_stage: tuple[StagePlan, ...]
    balance: float
    baselines: tuple[Baseline, ...]
    assignment: Mapping[str, int]
    signature: str
    granularity: Literal["block", "operator"]
    optimizer: str
    dtype: str
    cluster: Mapping[str, Any]
    alternatives: Mapping[str, float] = field(default_factory=dict)
    degrees: Mapping[str, float] = field(default_factory=dict)
    layouts: Layouts | None = None
    times_from: Literal["analytic", "measured", "corrected"] = "analytic"
    seconds: Mapping[str, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    versions: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The plan as one JSON object with sorted keys; the same plan gives the same text."""
        data = {f.name: getattr(self, f.name) for f in fields(Plan)}
        return json.dumps({"schema": SCHEMA, **data}, default=_plain, indent=1, sort_keys=True, allow_nan=False) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "plan") -> Plan:
        """Read what `to_json` wrote.

        Args:
            where: How messages name the text (its file).

        Raises:
            InputFileError: It is not a plan of this version; the message names the key.
        """
        hint = "Write the file anew with `autopart partition`."
        plan = document(_adapter(), text, where, "a plan", SCHEMA, hint)
        check_plan(plan, where)
        return plan

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Plan:
        """Read a plan file; errors as in `from_json`, and for a file that cannot be read."""
        return Plan.from_json(read(path), where=str(path))


@cache
def _adapter() -> TypeAdapter[Plan]:
    return TypeAdapter(Plan)


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else asdict(value)
