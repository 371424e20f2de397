"""What surrounds a call of trace() or partition() is no part of the package."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.tracer import trace
from autopart.verification.reference import run_reference

SURROUNDINGS = {
    "no_grad": torch.no_grad,
    "inference_mode": torch.inference_mode,
    "autocast": lambda: torch.autocast("cpu", torch.bfloat16),
}


def model(device: str) -> nn.Module:
    with torch.device(device):
        return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))


def contexts(graph: Any) -> set[Any]:
    calls = graph.training.calls
    return {(n.meta["grad_enabled"], n.meta["autocast"]) for n in calls} | {n.meta["requires_grad"] for n in calls}


@pytest.mark.parametrize("surrounding", SURROUNDINGS)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_the_contexts_of_the_caller_are_not_captured(surrounding: str, device: str) -> None:
    around: AbstractContextManager[Any] = SURROUNDINGS[surrounding]()
    made = model(device)
    with around:
        graph = trace(made, (torch.ones(4, 4, device=device),))
    assert contexts(graph) == {(True, ()), True}


def test_partition_predicts_a_backward_inside_no_grad() -> None:
    made = model("cpu")
    options: Any = {"example_inputs": (torch.ones(4, 4),), "stages": 1, "microbatches": 2}
    usual = autopart.partition(made, "1xA100-80G", **options)
    with torch.inference_mode():
        inside = autopart.partition(made, "1xA100-80G", **options)
    assert contexts(inside.graph) == {(True, ()), True}
    assert inside.plan.signature == usual.plan.signature
    assert inside.costs == usual.costs


def test_verify_trains_the_model_whatever_surrounds_it() -> None:
    made = model("cpu")
    graph = trace(made, (torch.ones(4, 4),))
    pipeline: Any = type(
        "Pipeline", (), {n: getattr(graph, n) for n in ("inputs", "call", "dtype", "loss", "loss_name")}
    )
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        found = run_reference(made, pipeline, [{graph.inputs[0].name: torch.ones(4, 4)}], None, 2, "sgd")
    assert found.steps[0].gradients["0.weight"] is not None
    assert found.steps[0].outputs[0]["output"].dtype == torch.float32
