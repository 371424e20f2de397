"""Comparison: what a plan predicted beside what a record of its package measured."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from autopart.corrections import OperatorFigure, operators
from autopart.errors import UsageError
from autopart.plan import Plan
from autopart.records import Record, Spread
from autopart.simulator import Simulation, simulate


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
class Comparison:
    """All of it, in the order of a report.

    Attributes:
        operators: Of every stage, those that are furthest off first.
        notes: What cannot be compared, for people.
    """

    figures: tuple[Figure, ...]
    operators: tuple[OperatorFigure, ...]
    notes: tuple[str, ...]


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
    simulation = simulate(plan)
    if record.places == simulation.timeline.processes:
        figures += _of_processes(plan, record, simulation)
    else:
        notes.append("one process ran all stages: waiting, memory and the step are not those of the plan")
    if record.optimizer != plan.optimizer:
        notes.append(f"the plan is for {plan.optimizer}, the run was made with {record.optimizer}")
    return Comparison(tuple(figures), tuple(operators(plan, record)), tuple(notes))


def left_s(whole_s: float, part_s: float) -> float:
    """Seconds of a whole beside one of its parts; what rounding of the sums leaves is nothing."""
    return 0.0 if math.isclose(whole_s, part_s, rel_tol=1e-9) else whole_s - part_s


def _check_same(plan: Plan, record: Record) -> None:
    """Whether the record's plan is this one, and was run as it says."""
    theirs = record.plan
    for what, ours, other in (
        ("signature", plan.signature, theirs.signature),
        ("strategy", plan.strategy, theirs.strategy),
        ("assignment", plan.assignment, theirs.assignment),
        ("layouts", _layouts(plan), _layouts(theirs)),
        ("recomputation", _recomputed(plan), _recomputed(theirs)),
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


def _layouts(plan: Plan) -> object:
    """How tensors are split, without what that was predicted to cost."""
    return None if plan.layouts is None else (plan.layouts.state, plan.layouts.strategies, plan.layouts.again)


def _recomputed(plan: Plan) -> object:
    return [set(stage.recomputed) for stage in plan.per_stage]


def _of_processes(plan: Plan, record: Record, simulation: Simulation) -> Iterator[Figure]:
    """Waiting, optimizer and memory of each place, and the step."""
    for place in range(record.places):
        processes = [process for process in record.processes if process.place == place]
        stages = [plan.per_stage[s] for s in simulation.stages_of(place)]
        where = "process " + ", ".join(str(process.number) for process in processes)
        wait_s = left_s(simulation.step_s, simulation.timeline.busy_s(place))
        update_s = sum(stage.update_s for stage in stages)
        for what, predicted, found in (
            ("wait", wait_s, min((Spread.of(p.wait_s) for p in processes), key=lambda s: s.median)),
            ("optimizer", update_s, max((Spread.of(p.optimizer_s) for p in processes), key=lambda s: s.median)),
        ):
            if predicted or found.median:
                yield Figure(where, what, predicted, found.median, found.spread)
        memory = max(stage.peak_memory_bytes for stage in stages)
        yield Figure(where, "memory", memory, max(process.peak_bytes for process in processes))
    step = Spread.of(record.step_s)
    yield Figure("run", "step", plan.step_time_s, step.median, step.spread)
    yield Figure("run", "simulated step", simulation.step_s, step.median, step.spread)
