"""Experts split by expert: each rank runs its own, and one all-reduce a block each way brings them together."""

from __future__ import annotations

import pytest
import torch

from autopart.sharding import Program, S, collectives_of, following, rewrite
from autopart.tracer import trace
from tests.sharding.models import build, mixtral
from tests.sharding.running import in_double, run_split, run_whole, tensors_of, worst_error


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize(("implementation", "tolerance"), [("batched_mm", 1e-9), ("grouped_mm", 1e-4)])
def test_split_experts_compute_what_all_of_them_compute(implementation: str, tolerance: float, t: int) -> None:
    # The grouped product exists in single precision only.
    double = implementation == "batched_mm"
    model, args, kwargs = build("mixtral") if double else mixtral(implementation, torch.float32)
    graph = trace(model, args, kwargs, check=False)
    graph = in_double(graph) if double else graph
    program = Program.of(graph, t)
    experts = [key for key, entry in graph.state.items() if "experts" in entry.name]
    assert len(experts) == 4
    wanted = {
        node.name: strategy
        for node, strategies in program.strategies.items()
        for strategy in strategies
        if strategy.name == "experts"
        or (strategy.name == "rows" and len(program.operations[node].inputs[0].shape) == 3)
    }
    choice = following(program, dict.fromkeys(experts, S(0, 4)), wanted)
    local = rewrite(graph, choice, t)
    assert all(local.state[key].tensor.shape[0] == 4 // t for key in experts)
    inputs = tensors_of(list(args)) + tensors_of(kwargs)
    found, _ = run_split(local, inputs, rtol=tolerance)
    assert max(worst_error(found, run_whole(graph, inputs)).values()) < tolerance
    sent = [s for s in collectives_of(local.primary, t) if s.forward_bytes + s.backward_bytes]
    assert [s.forward for s in sent].count("all_reduce") == 2, sent
    # Backward: for what the experts read, and for the routing weights.
    assert [s.backward for s in sent].count("all_reduce") == 4, sent
    assert len(sent) == 6
