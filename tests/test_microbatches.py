"""The number of microbatches: estimates against captures of the same size, and the choice against trying each."""

import pytest
import torch
import torchvision
import transformers
from torch import nn

import autopart
from autopart import partition
from autopart.cluster import Cluster
from autopart.profiler import profile, profile_rows
from autopart.tracer import trace

CLUSTER = Cluster.parse("4xA100-80G")


def gpt2():
    config = transformers.GPT2Config(n_layer=4, n_embd=256, n_head=4, vocab_size=512, n_positions=128)
    with torch.device("meta"):
        return transformers.GPT2LMHeadModel(config)


def ids(rows):
    batch = torch.zeros(rows, 128, dtype=torch.long, device="meta")
    return {"input_ids": batch, "labels": batch}


def resnet():
    with torch.device("meta"):
        return torchvision.models.resnet18()


def images(rows):
    return {"x": torch.zeros(rows, 3, 64, 64, device="meta")}


@pytest.mark.parametrize(("make", "inputs"), [(gpt2, ids), (resnet, images)])
@pytest.mark.parametrize(("captured", "wanted"), [(2, 16), (16, 2)])
def test_costs_of_other_rows_are_those_of_a_capture_with_these_rows(make, inputs, captured, wanted):
    graphs = {
        rows: trace(make(), (), inputs(rows), microbatches=1, global_batch=rows, check=False)
        for rows in (captured, wanted)
    }
    estimated = next(profile_rows(graphs[captured], CLUSTER, [wanted / captured]))
    truth = profile(graphs[wanted], CLUSTER)
    (of_estimated,), (of_truth,) = estimated.times.values(), truth.times.values()
    for part in ("forward_s", "backward_s"):
        total = sum(getattr(time, part) for time in of_truth.values())
        assert sum(getattr(time, part) for time in of_estimated.values()) == pytest.approx(total, rel=0.02)
    kept = sum(saved.bytes for saved in truth.saved)
    assert sum(saved.bytes for saved in estimated.saved) == pytest.approx(kept, rel=0.02)
    outputs = sum(memory.output_bytes for memory in truth.memory.values())
    assert sum(memory.output_bytes for memory in estimated.memory.values()) == pytest.approx(outputs, rel=0.02)


def test_no_other_number_of_microbatches_makes_a_faster_plan():
    options = {"example_kwargs": ids(16), "tensor": 1, "check": False}
    chosen = partition(gpt2(), CLUSTER, **options)
    tried = [partition(gpt2(), CLUSTER, microbatches=m, **options).step_time_s for m in (1, 2, 4, 8, 16)]
    assert chosen.step_time_s <= min(tried) * 1.03  # a count that is captured already is kept if it is nearly as fast
    assert max(tried) > 1.1 * min(tried)
    assert any("is estimated to be within" in note for note in chosen.notes)


def test_a_schedule_that_wants_a_microbatch_for_each_stage_gets_them():
    plan = partition(gpt2(), "4xA100-80G", example_kwargs=ids(16), tensor=1, stages=4, schedule="1f1b", check=False)
    assert plan.strategy.microbatches >= 4


def test_a_profile_decides_the_rows_of_a_microbatch() -> None:
    model, rows = nn.Sequential(*(nn.Linear(8, 8) for _ in range(4))), torch.randn(12, 8)
    measured = autopart.profile(autopart.trace(model, (rows,), microbatches=4), "cpu", how="analytic")
    planned = autopart.partition(model, "2xCPU", example_inputs=(rows,), stages=2, profile=measured, time_limit_s=5)
    assert planned.strategy.microbatch_size == 3
    assert any("3 rows" in note for note in planned.notes)
    assert not any("extrapolated" in note for note in planned.notes)
    named = {"stages": 2, "profile": measured, "microbatches": 2, "time_limit_s": 5}
    other = autopart.partition(model, "2xCPU", example_inputs=(rows,), **named)
    assert other.strategy.microbatch_size == 6
    (note,) = (note for note in other.notes if "extrapolated from microbatches of 3 rows" in note)
    assert "--microbatches 4 takes as many" in note
