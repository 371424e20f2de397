"""Corrections: what a record found to take longer or shorter than its plan predicted, and by how much."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean

from autopart.cluster import Cluster
from autopart.plan import Plan
from autopart.records import Record, Spread
from autopart.runtime.schedules import processes_of_stages
from autopart.sharding.conversions import SHARES

REST = "(in no operator)"
"""What a stage took beyond its operators: Python, autograd, and on a GPU the gaps between kernels."""

MEASURABLE_SHARE = 0.005
"""Of a device's computing: an operator that takes less is not corrected."""
MOST_CORRECTION = 50.0
"""An operator that is further off than this is taken for two that share a name, and not corrected; an optimizer that is
does something else than move bytes, by which its time could be shared out over parameters."""


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
class Corrections:
    """What to multiply predicted seconds on a device with.

    Attributes:
        operators: ATen name -> measured over predicted, of those that take long enough to be measured.
        overall: For every kernel, those of `operators` included: what operators do not account for.
        updates: Optimizer -> measured over predicted, of the one that was recorded.
    """

    operators: Mapping[str, float]
    overall: float
    updates: Mapping[str, float] = field(default_factory=dict)

    def factor(self, operator: str) -> float:
        """For a kernel's predicted seconds, by its name."""
        return self.operators.get(operator, 1.0) * self.overall


def operators(plan: Plan, record: Record) -> Iterator[OperatorFigure]:
    """Every operator of every stage, of each stage those first that are furthest off."""
    for number, stage in enumerate(plan.per_stage):
        predicted = dict(stage.operators)
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


def corrections(record: Record) -> Mapping[str, Corrections]:
    """Device, as the cluster of the record's plan calls it -> its corrections.

    With them, the plan's stages and optimizers are predicted to take as long as was measured, on the whole of each
    device: collectives keep the formula of their link, and everything else that computes is corrected.
    """
    predicted: dict[str, dict[str, float]] = {}
    measured: dict[str, dict[str, float]] = {}
    devices = Cluster.from_data(record.plan.cluster).devices
    for figure in operators(record.plan, record):
        device = devices[record.plan.per_stage[figure.stage].devices[0]].name
        for table, seconds in ((predicted, figure.predicted_s), (measured, figure.measured_s)):
            of_device = table.setdefault(device, {})
            of_device[figure.name] = of_device.get(figure.name, 0.0) + seconds
    updates = _updates(record)
    return {
        device: replace(_corrections(predicted[device], measured[device]), updates=updates.get(device, {}))
        for device in predicted
    }


def _updates(record: Record) -> dict[str, dict[str, float]]:
    """Device -> optimizer -> measured over predicted, of the processes of each device.

    None where the run was not the plan's: with another optimizer, or in one process, where a state that several stages
    hold is updated once.
    """
    plan = record.plan
    planned = set(processes_of_stages(plan.strategy.schedule, plan.strategy.stages))
    if record.optimizer != plan.optimizer or record.places != len(planned):
        return {}
    devices = Cluster.from_data(plan.cluster).devices
    predicted: dict[str, float] = defaultdict(float)
    measured: dict[str, float] = defaultdict(float)
    for process in (process for process in record.processes if process.stages):
        stages = [plan.per_stage[found.stage] for found in process.stages]
        device = devices[stages[0].devices[0]].name
        predicted[device] += sum(stage.update_s for stage in stages)
        measured[device] += Spread.of(process.optimizer_s).median
    return {
        device: {plan.optimizer: measured[device] / seconds}
        for device, seconds in predicted.items()
        if 0 < seconds <= MOST_CORRECTION * measured[device] <= MOST_CORRECTION**2 * seconds
    }


def _corrections(predicted: Mapping[str, float], measured: Mapping[str, float]) -> Corrections:
    whole = sum(measured.values())
    exchanged = sum(predicted.get(collective, 0.0) for collective in SHARES)
    kernels = {name: seconds for name, seconds in predicted.items() if name not in SHARES}
    factors = {}
    for name, seconds in sorted(kernels.items()):
        large = max(seconds, measured[name]) >= MEASURABLE_SHARE * whole
        if name != REST and large and 0 < seconds <= MOST_CORRECTION * measured[name] <= MOST_CORRECTION**2 * seconds:
            factors[name] = measured[name] / seconds
    corrected = sum(seconds * factors.get(name, 1.0) for name, seconds in kernels.items())
    # Collectives that were predicted to take longer than all of it leave the operators what they took themselves.
    left = max(whole - exchanged, whole - measured[REST])
    return Corrections(factors, left / corrected if corrected else 1.0)
