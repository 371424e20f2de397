"""The memory of a plan is counted action by action, and a plan that does not fit so is made again."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart import fitting
from autopart.errors import InfeasibleError
from autopart.plan import Plan
from autopart.simulator.memory import memory_of_plan


def partition(**options: Any) -> Any:
    layers = nn.Sequential(*(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64)) for _ in range(6)))
    given = {"stages": 2, "tensor": 1, "microbatches": 4, "schedule": "1f1b", "recompute": "none", "time_limit_s": 5}
    return autopart.partition(layers, "2xCPU", example_inputs=(torch.randn(64, 64),), **(given | options))


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", 2), ("zbv", 4)])
def test_a_plan_tells_what_its_peak_is_made_of(schedule: str, stages: int) -> None:
    planned = partition(schedule=schedule, stages=stages)
    processes = memory_of_plan(Plan.from_json(planned.plan.to_json()))
    for process in processes:
        for number in process.stages:
            assert planned.per_stage[number].peak_memory_bytes == process.peak_bytes
    for stage in planned.per_stage:
        assert stage.memory is not None and stage.memory.parameters == stage.parameter_bytes
        assert stage.memory.optimizer_state == 2 * stage.parameter_bytes
    assert autopart.simulate(planned).peak_memory_bytes(0) == planned.per_stage[0].peak_memory_bytes


def test_inference_keeps_the_memory_of_the_solver() -> None:
    assert all(stage.memory is None for stage in partition(mode="inference").per_stage)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The memory of a device in each request to the solver."""
    found: list[int] = []
    solve = fitting.solve

    def spying(graph: Any, costs: Any, cluster: Any, *arguments: Any, **options: Any) -> Plan:
        found.append(cluster.devices[0].memory_bytes)
        return solve(graph, costs, cluster, *arguments, **options)

    monkeypatch.setattr(fitting, "solve", spying)
    return found


def holding(monkeypatch: pytest.MonkeyPatch, excess: list[int]) -> None:
    """Stage 0 holds so many bytes more than its limit, in each plan in turn."""
    counted, rest = fitting.counted, iter(excess)

    def more(*arguments: Any) -> Plan:
        plan = counted(*arguments)
        first = plan.per_stage[0]
        changed = replace(first, peak_memory_bytes=first.memory_limit_bytes + next(rest))
        return replace(plan, per_stage=(changed, *plan.per_stage[1:]))

    monkeypatch.setattr(fitting, "counted", more)


def test_all_tries_have_one_deadline_and_the_same_limits_in_work(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, solve = [], fitting.solve

    def spying(*arguments: Any, time_limit_s: float, deadline: float, **options: Any) -> Plan:
        asked.append((time_limit_s, deadline))
        return solve(*arguments, time_limit_s=time_limit_s, deadline=deadline, **options)

    monkeypatch.setattr(fitting, "solve", spying)
    holding(monkeypatch, [1_000_000, 1_000_000, 0])
    start = time.monotonic()
    partition(time_limit_s=5.0)
    assert len(asked) == 3 and len(set(asked)) == 1
    assert asked[0][0] == 5.0 and start < asked[0][1] <= time.monotonic() + 5.0


def test_a_plan_that_does_not_fit_is_made_again_with_less(monkeypatch: pytest.MonkeyPatch, asked: list[int]) -> None:
    holding(monkeypatch, [1_000_000, 0])
    planned = partition()
    assert len(asked) == 2 and asked[0] - asked[1] >= 1_000_000
    # The plan still speaks of the whole device.
    assert planned.cluster["kinds"]["CPU"]["memory_bytes"] == asked[0]


def test_a_plan_that_never_fits_is_refused(monkeypatch: pytest.MonkeyPatch, asked: list[int]) -> None:
    holding(monkeypatch, [1_000_000] * 2 * fitting.TRIES)
    with pytest.raises(InfeasibleError, match="counted by action"):
        partition()
    # Asked for a plan, and then for what would fit.
    assert len(asked) == 2 * fitting.TRIES and len(set(asked)) == fitting.TRIES
