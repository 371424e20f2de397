"""Record: what a package measured of itself (`train.py --record`), by process, stage, microbatch and operator.

A record file is read as hostile, like a plan's.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import median, quantiles
from typing import Annotated, ClassVar, Literal, NoReturn

from pydantic import BeforeValidator, ConfigDict, Field, TypeAdapter

from autopart.errors import InputFileError
from autopart.plan import Plan
from autopart.runtime.record import SCHEMA
from autopart.runtime.schedules import SCHEDULES
from autopart.strict_json import STRICT, document, read, short

Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, le=1e12)]
ByMicrobatch = tuple[tuple[Seconds, ...], ...]
"""For every measured step, seconds of each microbatch."""

Direction = Literal["forward", "backward"]

SAME = {
    "cudnn_convolution": "convolution",
    "cudnn_batch_norm": "native_batch_norm",
    "cudnn_batch_norm_backward": "native_batch_norm_backward",
}
"""Operators that a device puts in the place of others, which is what predictions call them."""


@dataclass(frozen=True)
class Spread:
    """Several measurements of one thing: their median, and the range of their middle half over it."""

    median: float
    spread: float

    @staticmethod
    def of(values: Iterable[float]) -> Spread:
        found = sorted(values)
        middle = median(found) if found else 0.0
        if len(found) < 2 or not middle:
            return Spread(middle, 0.0)
        low, _, high = quantiles(found, n=4, method="inclusive")
        return Spread(middle, (high - low) / middle)


@dataclass(frozen=True)
class OperatorRecord:
    """One operator in one direction of a stage, in the step under the profiler: all its runs."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    count: Count
    seconds: Seconds


@dataclass(frozen=True)
class StageRecord:
    """One stage on one process.

    Attributes:
        backward_s: Of the whole backward; of the gradients of its inputs alone where the schedule splits it.
        weights_s: The rest of a split backward; else nothing for each step.
        profiled_s: All microbatches of the step under the profiler, which takes longer than others.
        operators: What ran in that step, by ATen name.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    stage: Count
    forward_s: ByMicrobatch
    backward_s: ByMicrobatch
    weights_s: ByMicrobatch
    profiled_s: Mapping[Direction, Seconds]
    operators: Mapping[Direction, Mapping[str, OperatorRecord]]

    @property
    def forward(self) -> Spread:
        """Seconds of one microbatch."""
        return Spread.of(seconds for step in self.forward_s for seconds in step)

    @property
    def backward(self) -> Spread:
        """Seconds of one microbatch, both parts."""
        weights = [step or (0.0,) * len(whole) for step, whole in zip(self.weights_s, self.backward_s, strict=True)]
        return Spread.of(
            a + b
            for whole, rest in zip(self.backward_s, weights, strict=True)
            for a, b in zip(whole, rest, strict=True)
        )

    def operator_seconds(self, microbatches: int, kind: str) -> dict[str, float]:
        """Operator -> seconds of one microbatch, both directions.

        On a CPU they are scaled so that a direction takes what it took in the timed steps: the profiler makes every
        call slower. On a GPU it does not touch the kernels, whose seconds are taken as they are.
        """
        found: dict[str, float] = {}
        directions: tuple[tuple[Direction, Spread], ...] = (("forward", self.forward), ("backward", self.backward))
        for direction, timed in directions:
            profiled_s = self.profiled_s.get(direction, 0.0) / microbatches
            scale = timed.median / profiled_s if kind == "cpu" and profiled_s else 1.0
            for name, operator in self.operators.get(direction, {}).items():
                name = SAME.get(name, name)
                found[name] = found.get(name, 0.0) + operator.seconds / microbatches * scale
        return found


@dataclass(frozen=True)
class ProcessRecord:
    """One process.

    Attributes:
        place, rank: In the pipeline, and among the tensor ranks of its stages.
        device: As its vendor calls it.
        threads: Of torch.
        optimizer_s, wait_s: For every measured step; waiting is what is neither computing nor optimizer.
        resident_bytes: Tensors that are there between steps.
        peak_bytes: The most that was held in a step.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    number: Count
    place: Count
    rank: Count
    device: str
    kind: str
    threads: Count
    optimizer_s: tuple[Seconds, ...]
    wait_s: tuple[Seconds, ...]
    resident_bytes: Count
    peak_bytes: Count
    stages: tuple[StageRecord, ...]


@dataclass(frozen=True)
class Record:
    """A run of a package.

    Attributes:
        plan: The package's.
        schedule: As it ran; None where one place ran every stage.
        microbatches, optimizer, dtype: As they ran.
        torch: Its version.
        step_s: For every measured step, seconds of the slowest process.
    """

    __pydantic_config__: ClassVar[ConfigDict] = STRICT
    plan: Annotated[Plan, BeforeValidator(lambda data: Plan.from_json(json.dumps(data), "the plan in the record"))]
    schedule: str | None
    microbatches: Annotated[int, Field(ge=1, lt=2**63)]
    optimizer: str
    dtype: str
    torch: str
    step_s: Annotated[tuple[Seconds, ...], Field(min_length=1)]
    processes: Annotated[tuple[ProcessRecord, ...], Field(min_length=1)]

    def of_stage(self, stage: int) -> Iterator[tuple[ProcessRecord, StageRecord]]:
        """A stage on each of its tensor ranks."""
        for process in self.processes:
            for found in process.stages:
                if found.stage == stage:
                    yield process, found

    @property
    def places(self) -> int:
        """Of the pipeline."""
        return 1 + max(process.place for process in self.processes)

    @classmethod
    def from_json(cls, text: str | bytes, where: str = "record") -> Record:
        """Read what `train.py --record` wrote.

        Args:
            where: How messages name the text (its file).

        Raises:
            InputFileError: It is not a record of this version; the message names the key.
        """
        hint = "Record anew, with a package of this version."
        record = document(_adapter(), text, where, "a record", SCHEMA, hint)
        _check(record, where)
        return record

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Record:
        """Read a file; errors as in `from_json`, and for a file that cannot be read."""
        return cls.from_json(read(path), where=str(path))


@cache
def _adapter() -> TypeAdapter[Record]:
    return TypeAdapter(Record)


def _check(record: Record, where: str) -> None:
    """What types cannot say: every process and stage is there once, with as many figures as there were to measure."""
    strategy = record.plan.strategy

    def refuse(key: str, reason: str) -> NoReturn:
        raise InputFileError(f"{where}: key {short(key)}: {reason}")

    if record.schedule is not None and record.schedule not in SCHEDULES:
        refuse("schedule", f"{short(record.schedule)} is not a schedule")
    if [process.number for process in record.processes] != list(range(len(record.processes))):
        refuse("processes", "their numbers must be 0, 1, ... in order")
    held = sorted((stage.stage, process.rank) for process in record.processes for stage in process.stages)
    if held != [(stage, rank) for stage in range(strategy.stages) for rank in range(strategy.tensor)]:
        refuse("processes", f"they must hold {strategy.stages} stages of {strategy.tensor} tensor ranks, each once")
    if len({process.place for process in record.processes}) != record.places:
        refuse("processes", "their places must be 0, 1, ... with at least one process each")
    for process in record.processes:
        key = f"processes.{process.number}"
        for name, values in (("optimizer_s", process.optimizer_s), ("wait_s", process.wait_s)):
            if len(values) != len(record.step_s):
                refuse(f"{key}.{name}", f"it must have {len(record.step_s)} numbers, one for each measured step")
        for i, stage in enumerate(process.stages):
            for name, steps, needed in (
                ("forward_s", stage.forward_s, True),
                ("backward_s", stage.backward_s, False),
                ("weights_s", stage.weights_s, False),
            ):
                whole = all(len(row) == record.microbatches or not (row or needed) for row in steps)
                if len(steps) != len(record.step_s) or not whole:
                    refuse(f"{key}.stages.{i}.{name}", "it must have a number for each measured step and microbatch")
            if any(rest and not whole for whole, rest in zip(stage.backward_s, stage.weights_s, strict=True)):
                refuse(f"{key}.stages.{i}.weights_s", "there is no backward that these could be the rest of")
