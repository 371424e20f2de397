"""Local graphs are profiled like any other: what a rank computes, keeps and sends."""

from __future__ import annotations

import functools
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from autopart.cluster import Cluster, Link
from autopart.costs import Costs, NodeTime
from autopart.graph import Graph
from autopart.graph_signature import signature
from autopart.profiler import LayoutPrices, analytic, profile
from autopart.profiler.isolated import Call, Outcome, Runner, TensorSpec
from autopart.profiler.kernels import Kernel
from autopart.profiler.ranks import Exchange
from autopart.runtime import collectives, split_operators
from autopart.runtime.shards import cut
from autopart.sharding import LocalGraph, Program, collectives_of, random_choice, replicated_choice, rewrite
from autopart.solver.layouts import choose_layouts
from autopart.tracer import trace
from benchmarks.tensor_splits import built
from tests.sharding.models import build
from tests.sharding.ranks import ThreadRanks
from tests.sharding.running import run_capture, tensors_of

aten = torch.ops.aten
MODELS = ("gpt2", "llama", "resnet")
GPUS = Cluster.parse("8xH100-80G")


@functools.cache
def traced(name: str) -> tuple[Graph, list[torch.Tensor]]:
    model, args, kwargs = build(name)
    return trace(model, args, kwargs, check=False), tensors_of(list(args)) + tensors_of(kwargs)


@functools.cache
def programmed(name: str, t: int) -> Program:
    return Program.of(traced(name)[0], t)


@functools.cache
def randomly_split(name: str, t: int) -> LocalGraph:
    return rewrite(traced(name)[0], random_choice(programmed(name, t), random.Random(t)), t)


def on_a_fast_link() -> Cluster:
    """A cluster on which even small models are worth splitting."""
    cluster, link = Cluster.parse("4xCPU"), Link("test", 1e-9, 1e10)
    device = replace(cluster.devices[0], launch_s=0.0)
    return replace(cluster, devices=(device,) * 4, intra_node=link, inter_node=link)


@functools.cache
def layer(name: str) -> tuple[Graph, Costs]:
    """One layer at its published width, and its costs on a GPU."""
    ids = torch.zeros(1, 2048, dtype=torch.long, device="meta")
    graph = trace(built(name, 1), (), {"ids": ids, "labels": ids}, check=False)
    return graph, profile(graph, GPUS)


@functools.cache
def chosen(name: str, t: int) -> LocalGraph:
    graph, _ = layer(name)
    return rewrite(graph, choose_layouts(graph, LayoutPrices(graph, GPUS), GPUS, t).choice, t)


def recorded(local: LocalGraph) -> dict[str, list[Exchange]]:
    """What the nodes exchange, by direction, by the profiler's account."""
    walk = analytic.Walk(local, "cpu")
    walk.run()
    assert walk.notes == []
    work = [walk.outcomes[node.name].work for node in local.primary.calls if node.name in walk.outcomes]
    return {
        way: [step for node in work for step in getattr(node, way) if isinstance(step, Exchange)]
        for way in ("forward", "backward")
    }


def sent(exchanges: list[Exchange]) -> int:
    return sum(exchange.bytes for exchange in exchanges)


# Local call -> number of all-reduces inside, forward and backward, and a tensor like each.
INSIDE: dict[Any, tuple[int, int, Callable[[torch.Tensor], torch.Tensor]]] = {
    split_operators.vocabulary_cross_entropy: (3, 0, lambda logits: logits.new_empty(logits.shape[:1])),
    split_operators.cross_entropy_of_rows: (1, 0, lambda logits: logits.new_empty(1, dtype=torch.int64)),
    split_operators.batch_norm_of_split_batch: (2, 2, lambda x: x.new_empty(x.shape[1:2])),
}


def inside(local: LocalGraph, program: Program, t: int) -> list[int]:
    """What operators exchange inside, forward and backward, by their table."""
    found = [0, 0]
    for node, operation in program.operations.items():
        for call in local.choice.strategies[node.name].calls:
            if call.target in INSIDE:
                forward, backward, like = INSIDE[call.target]
                reduced = 2 * like(operation.inputs[0]).nbytes * (t - 1) // t
                found[0] += forward * reduced
                found[1] += backward * reduced * any(operation.tracked_inputs)
    return found


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_nodes_exchange_what_the_graph_says(name: str, t: int) -> None:
    local = randomly_split(name, t)
    found, explicit = recorded(local), collectives_of(local.primary, t)
    forward, backward = inside(local, programmed(name, t), t)
    assert sent(found["forward"]) == sum(item.forward_bytes for item in explicit) + forward > 0
    assert sent(found["backward"]) == sum(item.backward_bytes for item in explicit) + backward


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_nodes_exchange_what_the_layout_program_priced(name: str, t: int) -> None:
    graph, cluster = traced(name)[0], on_a_fast_link()
    choice = choose_layouts(graph, LayoutPrices(graph, cluster), cluster, t)
    found = recorded(rewrite(graph, choice.choice, t))
    value = choice.value
    assert sent(found["forward"] + found["backward"]) == value.forward_bytes + value.backward_bytes + value.inside_bytes
    seconds = sum(exchange.seconds(cluster.intra_node) for way in found.values() for exchange in way)
    assert seconds == pytest.approx(value.communication_s)


def test_collectives_are_charged_to_their_nodes_on_the_link_of_the_group() -> None:
    local = randomly_split("llama", 2)
    fast, slow = (profile(local, GPUS, Link("test", 0.0, bandwidth)).times["H100-80G"] for bandwidth in (1e12, 1e6))
    extra = {name: _difference(slow[name], fast[name]) for name in slow}
    for item in collectives_of(local.primary, 2):
        forward, backward = (size / 1e6 - size / 1e12 for size in (item.forward_bytes, item.backward_bytes))
        assert extra[item.node].forward_s == pytest.approx(forward)
        assert extra[item.node].backward_s == pytest.approx(backward)
    weights = [node.name for node in local.primary.calls if _of_a_weight(node)]
    assert any(extra[name].backward_weight_s for name in weights)
    assert all(abs(extra[name].backward_input_s) < 1e-12 for name in weights)
    others = [extra[name] for name in extra if name not in weights]
    assert any(time.backward_input_s for time in others)
    assert all(abs(time.backward_weight_s) < 1e-12 for time in others)


def _difference(a: NodeTime, b: NodeTime) -> NodeTime:
    return NodeTime(*(getattr(a, f) - getattr(b, f) for f in ("forward_s", "backward_input_s", "backward_weight_s")))


def _of_a_weight(node: torch.fx.Node) -> bool:
    """A conversion of a parameter."""
    return not hasattr(node.target, "_schema") and [n.op for n in node.all_input_nodes] == ["get_attr"]


def kept_by_rank_0(local: LocalGraph, inputs: list[torch.Tensor]) -> list[int]:
    """Sizes of all storages but the state's that autograd keeps when the local graph runs on real tensors."""
    ranks = ThreadRanks(local.tensor)

    def program(rank: int) -> list[int]:
        state = {}
        for key, split in local.shards.items():
            full = local.whole.state[key].tensor
            mine = full.detach().clone()
            if split is not None:
                mine = cut(mine, split.dim, split.parts, rank, local.tensor)
            state[key] = mine.requires_grad_(full.requires_grad)
        own = {tensor.untyped_storage().data_ptr() for tensor in state.values()}
        kept: dict[int, torch.UntypedStorage] = {}

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in own:
                kept[storage.data_ptr()] = storage
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            outputs = run_capture(local, local.primary, state, [x.clone() for x in inputs])
        sizes = sorted(storage.nbytes() for storage in kept.values() if storage.nbytes())
        del outputs
        return sizes

    return ranks.run(program)[0]


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("name", MODELS)
def test_a_rank_keeps_what_autograd_keeps(name: str, t: int) -> None:
    local = randomly_split(name, t)
    predicted = profile(local, Cluster.parse("CPU")).saved
    assert sorted(saved.bytes for saved in predicted) == kept_by_rank_0(local, traced(name)[1])


def tensor(*shape: int, requires_grad: bool = True, dtype: Any = torch.float32) -> TensorSpec:
    return TensorSpec(shape, torch.empty(shape, device="meta").stride(), dtype, requires_grad)


def run(target: Any, *arguments: Any, kind: str = "cpu", t: int = 2, **options: Any) -> Outcome:
    return Runner(kind, t).run(Call(target, (arguments, options), True, ()))


def test_what_only_changes_the_gradient_is_a_view() -> None:
    for target in (collectives.copy_to, collectives.share_gradient):
        outcome = run(target, tensor(8, 16))
        assert outcome.work.forward == outcome.new_bytes == outcome.saved == ()
        assert [result.place.of for result in outcome.tensors] == ["input"] and outcome.work.backward


def test_a_conversion_keeps_nothing_of_what_it_makes() -> None:
    outcome = run(collectives.all_gather, tensor(8, 16), 1, t=4)
    assert outcome.new_bytes == (4 * 8 * 16 * 4,) and outcome.saved == ()
    assert outcome.work.forward[-1] == Exchange("all_gather", 3 * 8 * 16 * 4, 4)
    # The gathered shards beside their join, less what is the result.
    assert outcome.temporary_bytes >= 4 * 8 * 16 * 4


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_operators_on_shards_cost_what_the_plain_ones_cost(kind: str) -> None:
    query = tensor(2, 4, 256, 64, dtype=torch.bfloat16)
    whole = run(aten.scaled_dot_product_attention.default, query, query, query, None, 0.1, True, kind=kind)
    split = run(split_operators.attention, query, query, query, None, 0.1, is_causal=True, kind=kind)
    assert split == whole
    assert run(split_operators.dropout, tensor(8, 16), 0.1, True, kind=kind) == run(
        aten.dropout.default, tensor(8, 16), 0.1, True, kind=kind
    )


def test_attention_on_shards_never_keeps_the_matrix_of_scores_on_a_gpu() -> None:
    query = tensor(2, 4, 1024, 64, dtype=torch.bfloat16)
    outcome = run(split_operators.attention, query, query, query, None, 0.1, kind="cuda")
    assert sum(outcome.new_bytes) < 2 * query.bytes


def test_the_loss_on_split_classes_keeps_its_probabilities() -> None:
    rows, classes = 64, 500
    target = tensor(rows, requires_grad=False, dtype=torch.int64)
    outcome = run(split_operators.vocabulary_cross_entropy, tensor(rows, classes), target, 2 * classes)
    kept = sorted(outcome.new_bytes[place.index] for place in outcome.saved if place.of == "new")
    # Probabilities and own classes of the rows; two booleans a row; the number of rows by which the sum is divided.
    assert [size for size in kept if size > rows] == [8 * rows, 4 * rows * classes]
    assert Exchange("all_reduce", 4 * rows, 2) in outcome.work.forward


@pytest.mark.parametrize("name", MODELS)
def test_replicated_ranks_cost_what_the_whole_costs(name: str) -> None:
    graph = traced(name)[0]
    local = rewrite(graph, replicated_choice(programmed(name, 2)), 2)
    assert profile(local, GPUS) == profile(graph, GPUS)


@pytest.mark.parametrize("t", [2, 4, 8])
@pytest.mark.parametrize("name", ["GPT-2", "Llama-3-8B"])
def test_a_rank_computes_at_least_its_share_and_at_most_the_whole(name: str, t: int) -> None:
    graph, costs = layer(name)
    local = chosen(name, t)
    free = Link("test", 0.0, float("inf"))
    times = profile(local, GPUS.grouped(t), free).times["H100-80G"].values()
    whole = sum(time.forward_s + time.backward_s for time in costs.times["H100-80G"].values())
    assert whole / t <= sum(time.forward_s + time.backward_s for time in times) <= whole
    # So does every operator: its operations, for its bytes may be fewer where a shard needs no copy.
    alone, shared = flops(graph), flops(local)
    for operator, count in alone.items():
        assert count / t <= shared[operator] <= count, operator


def flops(graph: Graph) -> dict[str, float]:
    """Operations of each operator, both ways."""
    walk = analytic.Walk(graph, "cpu")
    walk.run()
    return {
        name: sum(step.flops for step in (*outcome.work.forward, *outcome.work.backward) if isinstance(step, Kernel))
        for name, outcome in walk.outcomes.items()
    }


class Cast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight.double()
        return (x @ weight).square().mean() + (x @ weight.t()).square().mean()


def test_the_gradient_of_a_parameter_is_added_once() -> None:
    graph = trace(Cast(), (torch.randn(8, 64, dtype=torch.float64),), check=False)
    walk = analytic.Walk(graph, "cpu")
    walk.run()
    added = {name: [3 * spec.bytes for spec in specs] for name, specs in walk.weight_sums.items() if specs}
    # The two gradients of the cast weight are summed; their sum is cast and added to that of the parameter.
    (cast,) = [node.name for node in graph.primary.calls if "to" in str(node.target)]
    assert added == {cast: [3 * 64 * 64 * 4, 3 * 64 * 64 * 8]}


def test_the_signature_of_a_local_graph_is_the_same_in_every_process() -> None:
    code = "import test_local_graphs as here\nprint(here.signature(here.randomly_split('gpt2', 2)))"
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    run_there = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True
    )
    local = randomly_split("gpt2", 2)
    assert run_there.stdout.split() == [signature(local)], run_there.stderr
    assert signature(local) != signature(local.whole)
