"""Random legal layouts of whole models against the models themselves, in float64: loss, every gradient, buffers."""

from __future__ import annotations

import functools
import random
from collections import Counter

import pytest
import torch

from autopart.graph import Graph
from autopart.sharding import Program, collectives_of, local_shape, random_choice, rewrite
from autopart.tracer import trace
from tests.sharding.models import MODELS, build
from tests.sharding.running import in_double, run_split, run_whole, tensors_of, worst_error

LAYOUTS = 5  # for each tensor degree
TOLERANCE = 1e-9


@functools.cache
def traced(name: str) -> tuple[Graph, list[torch.Tensor], dict, set[str]]:
    """The graph, its inputs, what the unsplit model computes, and the names of all its parameters."""
    model, args, kwargs = build(name)
    graph = in_double(trace(model, args, kwargs, check=False))
    inputs = tensors_of(list(args)) + tensors_of(kwargs)
    return graph, inputs, run_whole(graph, inputs), {name for name, _ in model.named_parameters()}


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_random_layouts_compute_what_the_model_computes(name: str, t: int) -> None:
    graph, inputs, wanted, parameters = traced(name)
    assert set(wanted["gradients"]) == parameters
    assert any(g is not None and g.any() for g in wanted["gradients"].values())
    program = Program.of(graph, t)
    used: Counter[tuple[str, str]] = Counter()
    for seed in range(LAYOUTS):
        choice = random_choice(program, random.Random(seed), used)
        local = rewrite(graph, choice, t)
        found, ranks = run_split(local, inputs)
        assert set(found["gradients"]) == parameters
        errors = worst_error(found, wanted)
        assert max(errors.values()) < TOLERANCE, (seed, errors)
        assert ranks.counts, "nothing is sent: nothing was split"
        for key, layout in choice.state.items():
            assert tuple(local.state[key].tensor.shape) == local_shape(graph.state[key].tensor.shape, layout, t)
        assert collectives_of(local.primary, t)
