"""Packages of tensor splits compute what the model computes, on all ranks, wherever they are cut into stages."""

from __future__ import annotations

import functools
import random
from pathlib import Path

import pytest
import torch
from emitted import random_cuts
from split_packages import check_split
from torch import nn

from autopart.graph import Graph
from autopart.sharding import Program, random_choice, rewrite
from autopart.tracer import trace
from tests.sharding.models import build
from tests.sharding.running import in_double


@functools.cache
def traced(name: str) -> tuple[nn.Module, Graph, dict[str, torch.Tensor]]:
    model, args, kwargs = build(name)
    graph = in_double(trace(model, args, kwargs, check=False))
    inputs = {spec.name: eval(spec.path, {"args": args, "kwargs": kwargs}) for spec in graph.inputs}
    return model, graph, inputs


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral"])
def test_packages_of_random_layouts_equal_the_model(name: str, seed: int, tmp_path: Path) -> None:
    model, graph, inputs = traced(name)
    t, stages = (2, 4)[seed % 2], 1 + seed % 3
    choice = random_choice(Program.of(graph, t), random.Random(seed))
    cuts = random_cuts(rewrite(graph, choice, t), stages, seed)
    check_split(model, graph, choice, t, cuts, stages, tmp_path / "out", inputs)
