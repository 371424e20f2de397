"""Plan check: what types cannot say of a plan file; so that whoever reads a plan need not doubt it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import TYPE_CHECKING, Any, NoReturn

from autopart.cluster import Cluster
from autopart.errors import InputFileError
from autopart.runtime.schedules import SCHEDULES, processes_of_stages
from autopart.strict_json import short

if TYPE_CHECKING:
    from autopart.plan import Plan

LARGEST = 10**60
"""Of seconds, bytes and counts: sums and products of a few such numbers stay finite."""
MOST_MICROBATCHES = 2**20


def check_plan(plan: Plan, where: str) -> None:
    """Numbers are in their ranges, and the stages are those of the strategy.

    Args:
        where: How messages name the plan (its file).

    Raises:
        InputFileError: They are not; the message names the key.
    """

    def refuse(key: str, reason: str) -> NoReturn:
        raise InputFileError(f"{where}: key {short(key)}: {reason}")

    for key, value in _numbers("", {f.name: getattr(plan, f.name) for f in fields(plan) if f.name != "cluster"}):
        if not 0 <= value <= LARGEST:
            refuse(key, f"it must not be negative, nor more than {LARGEST:.0e}, and is {short(value)}")
    strategy = plan.strategy
    if strategy.schedule not in SCHEDULES:
        refuse("strategy.schedule", f"{short(strategy.schedule)} is not a schedule")
    if not 1 <= strategy.microbatches <= MOST_MICROBATCHES:
        refuse("strategy.microbatches", f"it must be from 1 to {MOST_MICROBATCHES}, and is {strategy.microbatches}")
    if strategy.stages < 1 or len(plan.per_stage) != strategy.stages:
        refuse("per_stage", f"it has {len(plan.per_stage)} stages, 'strategy.stages' is {strategy.stages}")
    again = [label for placed in plan.per_stage for label in placed.recomputed]
    if len(set(again)) < len(again):
        twice = next(label for i, label in enumerate(again) if label in again[:i])
        refuse("per_stage", f"block {short(twice)} stands twice under 'recomputed'")
    if again and plan.mode == "inference":
        refuse("per_stage", "blocks are recomputed in training only")
    try:
        devices = len(Cluster.from_data(plan.cluster))
    except InputFileError as error:
        refuse("cluster", error.message.removeprefix("cluster").lstrip(",: "))
    process = processes_of_stages(strategy.schedule, strategy.stages)
    of_process = {p: placed.devices for p, placed in zip(process, plan.per_stage, strict=True)}
    for number, placed in enumerate(plan.per_stage):
        key = f"per_stage.{number}"
        if placed.devices != of_process[process[number]]:
            refuse(f"{key}.devices", f"process {process[number]} has this stage and another one on other devices")
        if len(set(placed.devices)) != len(placed.devices) or len(placed.devices) != strategy.tensor:
            reason = f"it must be {strategy.tensor} different devices, one for each tensor rank, and is"
            refuse(f"{key}.devices", f"{reason} {list(placed.devices)}")
        if max(placed.devices) >= devices:
            refuse(f"{key}.devices", f"device {max(placed.devices)} is not one of the cluster's {devices}, from 0 on")
        if placed.backward_weight_s > placed.backward_s:
            refuse(f"{key}.backward_weight_s", "it is a part of 'backward_s', and must not be more")
        if placed.memory is not None and plan.mode == "inference":
            refuse(f"{key}.memory", "it is of a step of training, and the plan is for inference")
    if (strategy.tensor > 1) != (plan.layouts is not None):
        refuse("layouts", f"it does not fit 'strategy.tensor', {strategy.tensor}")
    for node, stage in plan.assignment.items():
        if stage >= strategy.stages:
            refuse(f"assignment.{node}", f"it is stage {stage} of {strategy.stages}")


def _numbers(key: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, (int, float)):
        yield key, value
    elif isinstance(value, Mapping):
        for name, child in value.items():
            yield from _numbers(f"{key}.{name}".lstrip("."), child)
    elif isinstance(value, tuple):
        for i, child in enumerate(value):
            yield from _numbers(f"{key}.{i}", child)
    elif is_dataclass(value):
        yield from _numbers(key, {f.name: getattr(value, f.name) for f in fields(value)})
