"""Tensor degrees: which are tried, which wins, and what the plan then says."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopart import degrees, partition
from autopart.cluster import Cluster
from autopart.errors import InfeasibleError, UsageError
from autopart.model_spec import load
from autopart.plan import Plan, StagePlan
from autopart.report.plan import format_plan

GPT = "zoo:gpt?layers=2&width=64&heads=4"
WIDE = "zoo:gpt?layers=4&width=512&heads=8"


def planned(gpus, spec=GPT, **options):
    loaded = load(spec)
    return partition(
        loaded.model, gpus, example_inputs=loaded.args, example_kwargs=loaded.kwargs, time_limit_s=8.0, **options
    )


def test_every_degree_that_divides_the_devices_is_tried_and_the_fastest_wins() -> None:
    plan = planned("4xA100-80G")
    assert set(plan.degrees) == {"1", "2", "4"}
    assert plan.step_time_s == min(plan.degrees.values()) == plan.degrees[str(plan.strategy.tensor)]
    assert plan.lower_bound_s <= plan.step_time_s


@pytest.mark.parametrize(
    ("gpus", "degrees"),
    [
        ("6xA100-80G", {"1", "2", "3", "6"}),
        ("2x3xA100-80G", {"1", "3"}),  # a group stays within a machine
        ("A100-80G,A100-80G,T4,T4", {"1", "2"}),  # and has equal devices
        ("A100-80G,T4,A100-80G,T4", {"1"}),
        ("5xT4", {"1", "5"}),
    ],
)
def test_groups_stay_within_a_machine_and_have_equal_devices(gpus: str, degrees: set[str]) -> None:
    plan = planned(gpus)
    named = {note.split()[3] for note in plan.notes if note.startswith("splitting tensors over")}
    assert set(plan.degrees) | named == degrees


def test_stages_times_ranks_are_at_most_the_devices() -> None:
    assert set(planned("4xA100-80G", stages=2).degrees) == {"1", "2"}
    assert set(planned("4xA100-80G", stages=4).degrees) == {"1"}
    with pytest.raises(UsageError, match="3 stages of 2 tensor ranks need 6 devices"):
        planned("4xA100-80G", stages=3, tensor=2)


@pytest.mark.parametrize(
    ("tensor", "message"),
    [(3, "4 devices cannot be put into groups of 3"), (0, "tensor must be"), ("2", "tensor must be"), (True, "tensor")],
)
def test_a_degree_that_cannot_be_is_refused(tensor: object, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        planned("4xA100-80G", tensor=tensor)
    with pytest.raises(UsageError, match="equal devices"):
        planned("A100-80G,T4", tensor=2)


def test_the_plan_names_every_rank_and_what_is_split(tmp_path: Path) -> None:
    plan = planned("4xA100-80G", WIDE, stages=2, tensor=2)
    assert [stage.devices for stage in plan.per_stage] == [(0, 1), (2, 3)]
    assert plan.layouts is not None and plan.layouts.lower_bound_s <= plan.layouts.time_s
    assert any("column" in words for block in plan.layouts.blocks for words in block.splits.values())
    assert Cluster.from_data(plan.cluster) == Cluster.parse("4xA100-80G")
    assert plan.layouts.state and all("S(" in layout for layout in plan.layouts.state.values())
    for words in ("2 stages x 2 tensor ranks", "split over 2 ranks", "column", "all-reduce"):
        assert words in format_plan(plan)
    assert Plan.from_json(plan.plan.to_json()) == plan.plan


def test_a_layer_too_large_for_a_device_is_split_over_several() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(2**16, 2**16, bias=False), nn.ReLU(), nn.Linear(2**16, 2**16, bias=False))
    inputs = torch.zeros(16, 2**16, device="meta")
    with pytest.raises(InfeasibleError, match="does not fit"):
        partition(model, "4xA100-80G", example_inputs=inputs, tensor=1, optimizer="adamw", microbatches=1)
    wider = nn.Sequential(nn.Linear(2**16, 2**19, bias=False, device="meta"))
    with pytest.raises(InfeasibleError, match="fits with"):
        partition(wider, "2xA100-80G", example_inputs=inputs, microbatches=1)
    plan = partition(model, "4xA100-80G", example_inputs=inputs, microbatches=1)
    assert plan.strategy.tensor > 1
    assert all(stage.peak_memory_bytes <= stage.memory_limit_bytes for stage in plan.per_stage)


def test_over_a_slow_network_each_rank_sends_a_slice_of_what_all_hold() -> None:
    def first_stage(gpus: str) -> tuple[StagePlan, int]:
        plan = planned(gpus, WIDE, stages=2, tensor=2, granularity="block")
        return plan.per_stage[0], plan.strategy.microbatch_size

    assert not first_stage("4xA100-80G")[0].sliced
    stage, rows = first_stage("2x2xA100-80G")
    assert len(stage.sliced) == 1
    cluster = Cluster.parse("2x2xA100-80G")
    sent = 2 * rows * 512 * 512 * 4  # tokens x width of the residual stream, in float32, and its gradient
    slow, fast = cluster.inter_node, cluster.intra_node
    over_the_network = 2 * slow.latency_s + sent / 2 / slow.bandwidth_bytes_per_s
    inside = 2 * fast.latency_s + sent / 2 / fast.bandwidth_bytes_per_s
    assert stage.communication_s == pytest.approx(over_the_network + inside, rel=1e-6)


def test_all_degrees_have_one_deadline_and_equal_shares_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    asked, solve = [], degrees.solve_fitting

    def spying(*arguments: Any, **options: Any) -> Plan:
        asked.append((options["time_limit_s"], options["deadline"]))
        return solve(*arguments, **options)

    monkeypatch.setattr(degrees, "solve_fitting", spying)
    plan = planned("4xA100-80G", stages=1)
    end = time.monotonic() + 8.0
    assert len(asked) >= 3 and set(plan.degrees) == {"1", "2", "4"}
    limits, deadlines = zip(*asked, strict=True)
    assert set(limits) == {8.0 / 3}
    assert list(deadlines) == sorted(deadlines) and deadlines[-1] < end
