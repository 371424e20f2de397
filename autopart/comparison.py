"""Comparison: what a plan predicted beside what a record measured, and what to correct by it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from statistics import fmean

from autopart.cluster import Cluster
from autopart.errors import UsageError
from autopart.plan import Plan, StagePlan
from autopart.records import Record, Spread
from autopart.runtime.schedules import SCHEDULES, process_of_stage

REST = "(in no operator)"
"""What a stage took beyond its operators: Python, autograd, and on a GPU the gaps between kernels."""

MEASURABLE_SHARE = 0.005
"""Of a device's computing: an operator that takes less is not corrected."""
MOST_CORRECTION = 50.0
"""An operator that is further off than this is taken for two that share a name, and not corrected."""


@dataclass(frozen=True)
class Figure:
    """One thing that was predicted and measured: seconds, or bytes of "memory".

    Attributes:
        where: "stage 0", "process 1", "run".
        spread: The middle half of the measurements over their median; None where there was one.
    """

    where: str
    what: str
    predicted: float
    measured: float
    spread: float | None = None

    @property
    def ratio(self) -> float | None:
        """Predicted over measured."""
        return self.predicted / self.measured if self.measured else None


@dataclass(frozen=True)
class OperatorFigure:
    """An operator in one stage: seconds of one microbatch, forward and backward, on one of its tensor ranks."""

    stage: int
    name: str
    predicted_s: float
    measured_s: float

    @property
    def difference_s(self) -> float:
        """What it took longer than predicted."""
        return self.measured_s - self.predicted_s


@dataclass(frozen=True)
class Comparison:
    """All of it, in the order of a report.

    Attributes:
        operators: Of every stage, those that are furthest off first.
        notes: What cannot be compared, for people.
    """

    figures: tuple[Figure, ...]
    operators: tuple[OperatorFigure, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Corrections:
    """What to multiply predicted seconds on a device with.

    Attributes:
        operators: ATen name -> measured over predicted, of those that take long enough to be measured.
        overall: For everything, operators included: what they do not account for.
    """

    operators: Mapping[str, float]
    overall: float

    def factor(self, operator: str) -> float:
        """For a kernel's predicted seconds, by its name."""
        return self.operators.get(operator, 1.0) * self.overall


def compare(plan: Plan, record: Record) -> Comparison:
    """Predicted and measured, side by side.

    Of several tensor ranks the slowest counts, and the one that holds most; operators are means over ranks.

    Raises:
        UsageError: The record is of another plan, or of a run that the plan does not describe.
    """
    _check_same(plan, record)
    figures = []
    for number, stage in enumerate(plan.per_stage):
        held = [found for _, found in record.of_stage(number)]
        for what, predicted, measured in (
            ("forward", stage.forward_s, [found.forward for found in held]),
            ("backward", stage.backward_s, [found.backward for found in held]),
        ):
            slowest = max(measured, key=lambda spread: spread.median)
            if predicted or slowest.median:
                figures.append(Figure(f"stage {number}", what, predicted, slowest.median, slowest.spread))
    notes = []
    if record.places == _places(plan):
        figures += _of_processes(plan, record)
        step = Spread.of(record.step_s)
        figures.append(Figure("run", "step", plan.step_time_s, step.median, step.spread))
    else:
        notes.append("one process ran all stages: waiting, memory and the step are not those of the plan")
    if record.optimizer != plan.optimizer:
        notes.append(f"the plan is for {plan.optimizer}, the run was made with {record.optimizer}")
    return Comparison(tuple(figures), tuple(_operators(plan, record)), tuple(notes))


def corrections(record: Record) -> Mapping[str, Corrections]:
    """Device, as the cluster of the record's plan calls it -> its corrections.

    With them, the plan's stages are predicted to compute as long as was measured, on the whole of each device.
    """
    predicted: dict[str, dict[str, float]] = {}
    measured: dict[str, dict[str, float]] = {}
    devices = Cluster.from_data(record.plan.cluster).devices
    for figure in _operators(record.plan, record):
        device = devices[record.plan.per_stage[figure.stage].devices[0]].name
        for table, seconds in ((predicted, figure.predicted_s), (measured, figure.measured_s)):
            of_device = table.setdefault(device, {})
            of_device[figure.name] = of_device.get(figure.name, 0.0) + seconds
    return {device: _corrections(predicted[device], measured[device]) for device in predicted}


def _corrections(predicted: Mapping[str, float], measured: Mapping[str, float]) -> Corrections:
    least = MEASURABLE_SHARE * sum(measured.values())
    factors = {
        name: measured[name] / predicted[name]
        for name in sorted(predicted)
        if name != REST and min(predicted[name], measured[name]) > 0 and max(predicted[name], measured[name]) >= least
    }
    factors = {name: factor for name, factor in factors.items() if 1 / MOST_CORRECTION <= factor <= MOST_CORRECTION}
    corrected = sum(seconds * factors.get(name, 1.0) for name, seconds in predicted.items())
    return Corrections(factors, sum(measured.values()) / corrected if corrected else 1.0)


def _check_same(plan: Plan, record: Record) -> None:
    """Whether the record's plan is this one, and was run as it says."""
    theirs = record.plan
    for what, ours, other in (
        ("signature", plan.signature, theirs.signature),
        ("strategy", plan.strategy, theirs.strategy),
        ("assignment", plan.assignment, theirs.assignment),
    ):
        if ours != other:
            raise UsageError(f"the record is of another plan: its {what} differs", "Record the package of this plan.")
    if record.dtype != plan.dtype:
        raise UsageError(f"the plan is for {plan.dtype}, the record is of a run in {record.dtype}")
    planned = (plan.strategy.schedule, plan.strategy.microbatches)
    ran = (record.schedule, record.microbatches)
    if record.schedule is not None and ran != planned:
        raise UsageError(
            f"the plan is for schedule {planned[0]} and {planned[1]} microbatches, the record is of a run under "
            f"{ran[0]} with {ran[1]}",
            "Record without --schedule and --microbatches.",
        )


def _places(plan: Plan) -> int:
    return -(-plan.strategy.stages // SCHEDULES[plan.strategy.schedule].stages_per_process)


def _of_processes(plan: Plan, record: Record) -> Iterator[Figure]:
    """Waiting, optimizer and memory of each place."""
    strategy = plan.strategy
    info = SCHEDULES[strategy.schedule]
    for place in range(record.places):
        processes = [process for process in record.processes if process.place == place]
        stages = [s for i, s in enumerate(plan.per_stage) if process_of_stage(i, strategy.stages, info) == place]
        update_s = sum(stage.update_s for stage in stages)
        computing_s = strategy.microbatches * sum(stage.forward_s + stage.backward_s for stage in stages)
        wait_s = max(0.0, plan.step_time_s - computing_s - update_s)
        where = "process " + ", ".join(str(process.number) for process in processes)
        for what, predicted, found in (
            ("wait", wait_s, min((Spread.of(p.wait_s) for p in processes), key=lambda s: s.median)),
            ("optimizer", update_s, max((Spread.of(p.optimizer_s) for p in processes), key=lambda s: s.median)),
        ):
            if predicted or found.median:
                yield Figure(where, what, predicted, found.median, found.spread)
        yield Figure(where, "memory", stages[0].peak_memory_bytes, max(process.peak_bytes for process in processes))


def _operators(plan: Plan, record: Record) -> Iterator[OperatorFigure]:
    for number, stage in enumerate(plan.per_stage):
        predicted = dict(predicted_operators(stage))
        predicted[REST] = max(0.0, stage.forward_s + stage.backward_s - sum(predicted.values()))
        measured: dict[str, float] = {}
        held = list(record.of_stage(number))
        for process, found in held:
            for name, seconds in found.operator_seconds(record.microbatches, process.kind).items():
                measured[name] = measured.get(name, 0.0) + seconds / len(held)
        whole = fmean(found.forward.median + found.backward.median for _, found in held)
        measured[REST] = max(0.0, whole - sum(measured.values()))
        figures = [OperatorFigure(number, n, predicted.get(n, 0.0), measured.get(n, 0.0)) for n in predicted | measured]
        yield from sorted(figures, key=lambda figure: (-abs(figure.difference_s), figure.name))


def predicted_operators(stage: StagePlan) -> Mapping[str, float]:
    """ATen name -> predicted seconds of one microbatch, forward and backward; nothing in plans that do not tell."""
    found: Mapping[str, float] = getattr(stage, "operators", {})
    return found
