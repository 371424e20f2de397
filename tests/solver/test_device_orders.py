"""The order of unequal devices along the pipeline is chosen: against planning every order by itself."""

import dataclasses
import itertools

import pytest
import torch
import transformers

from autopart import partition
from autopart.cluster import Cluster
from autopart.codegen.table import ranks_of
from autopart.profiler import profile
from autopart.runtime.process import number_of
from autopart.solver.device_orders import device_orders
from autopart.solver.lowering import lower
from autopart.solver.score import score
from autopart.workload import Workload


def gpt2():
    config = transformers.GPT2Config(n_layer=6, n_embd=128, n_head=4, vocab_size=256, n_positions=64)
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(config)


def planned(cluster, **options):
    batch = torch.zeros(12, 64, dtype=torch.long, device="meta")
    inputs = {"input_ids": batch, "labels": batch}
    options = {"microbatches": 6, "stages": len(cluster), "tensor": 1, "check": False} | options
    return partition(gpt2(), cluster, example_kwargs=inputs, **options)


def test_equal_devices_have_one_order_and_machines_stay_together():
    assert device_orders(Cluster.parse("8xA100-80G")) == [tuple(range(8))]
    assert device_orders(Cluster.parse("2x4xA100-80G")) == [tuple(range(8))]
    mixed = Cluster.parse("A100-80G,T4,T4")
    kinds = {tuple(mixed.devices[d].name for d in order) for order in device_orders(mixed)}
    assert kinds == set(itertools.permutations(d.name for d in mixed.devices))
    uneven = dataclasses.replace(Cluster.parse("6xA100-80G"), nodes=(0, 0, 1, 1, 1, 1))
    assert device_orders(uneven) == [(0, 1, 2, 3, 4, 5), (5, 4, 3, 2, 1, 0)]
    assert len(device_orders(Cluster.parse("A100-80G,T4,V100-32G,L4,H100-80G"))) == 24


def test_orders_that_differ_only_behind_the_devices_used_are_one():
    mixed = Cluster.parse("A100-80G,T4,V100-32G,L4,H100-80G,T4,T4,T4,A100-40G")
    assert {mixed.devices[order[0]].name for order in device_orders(mixed, 1)} == {d.name for d in mixed.devices}
    assert len(device_orders(mixed, 1)) == 6
    assert all(sorted(order) == list(range(9)) for order in device_orders(mixed, 2))


def test_one_fast_device_is_used_alone_wherever_it_stands():
    cluster = Cluster.parse("A100-80G,T4,H100-80G")
    slow = dataclasses.replace(cluster.inter_node, latency_s=1e-2, bandwidth_bytes_per_s=1e8)
    apart = dataclasses.replace(cluster, nodes=(0, 1, 2), inter_node=slow)
    plan = planned(apart, stages="auto", microbatches=1)
    alone = planned(Cluster.parse("H100-80G"), microbatches=1)
    assert plan.strategy.stages == 1 and plan.per_stage[0].devices == (2,)
    assert plan.step_time_s == pytest.approx(alone.step_time_s)


@pytest.mark.parametrize("gpus", ["T4,A100-80G,T4", "T4,A100-80G"])
def test_the_best_order_is_found(gpus):
    cluster = Cluster.parse(gpus)
    plan = planned(cluster)
    costs = profile(plan.graph, cluster)
    values = {}
    for order in itertools.permutations(range(len(cluster))):
        # Every order by itself, with its boundaries where the plan for that order alone puts them.
        own = planned(cluster.reordered(order), microbatches=6)
        values[order] = own.step_time_s
    assert plan.step_time_s <= min(values.values()) * 1.001
    assert plan.lower_bound_s <= min(values.values()) * (1 + 1e-9)
    order = [device for stage in plan.per_stage for device in stage.devices]
    assert sorted(order) == list(range(len(cluster)))
    workload = Workload("training", 6, 2, plan.strategy.schedule, plan.optimizer)
    lowered = lower(plan.graph, costs, cluster, workload, len(cluster), order)
    value = score(lowered.problem, [plan.assignment[node.name] for node in lowered.calls])
    assert value.step_s == pytest.approx(plan.step_time_s, rel=1e-9)
    limits = [stage.memory_limit_bytes for stage in plan.per_stage]
    assert limits == [int(cluster.devices[d].memory_bytes * 0.94) for d in order]


def test_torchruns_ranks_take_their_places_in_the_pipeline():
    plan = planned(Cluster.parse("T4,A100-80G"))
    swapped = dataclasses.replace(
        plan, per_stage=tuple(dataclasses.replace(stage, devices=(1 - s,)) for s, stage in enumerate(plan.per_stage))
    )
    straight = dataclasses.replace(
        plan, per_stage=tuple(dataclasses.replace(stage, devices=(s,)) for s, stage in enumerate(plan.per_stage))
    )
    assert ranks_of(straight) == () and ranks_of(swapped) == (1, 0)
    assert [number_of(rank, 2, (1, 0)) for rank in (0, 1)] == [1, 0]
    assert [number_of(rank, 3, (2, 0, 1)) for rank in (2, 0, 1)] == [0, 1, 2]
    assert number_of(0, 1, (1, 0)) == 0  # one process has all stages
