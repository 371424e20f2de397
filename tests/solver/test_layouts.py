"""Chosen layouts are the best there are, cost what they say, and compute what the model computes."""

from __future__ import annotations

import dataclasses
import functools
import random
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from autopart.cluster import Cluster, Link
from autopart.costs import SavedTensor, StrategyCost
from autopart.errors import InfeasibleError, UsageError
from autopart.graph import Graph
from autopart.profiler import LayoutPrices, profile
from autopart.sharding import Choice, Program, collectives_of, random_choice, rewrite
from autopart.solver import choose_layouts
from autopart.solver import priced as price_of
from autopart.solver.megatron import megatron
from autopart.tracer import trace
from tests.sharding.models import build
from tests.sharding.running import in_double, run_split, run_whole, tensors_of, worst_error
from tests.solver.layout_oracle import Kept, Whole, every_choice, fastest

# What the tie-break may cost, as a share of the time (it is 1e-5 of the unsplit computing time over t).
TIE = 1e-4


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32, bias=False), nn.Linear(32, 16, bias=False)

    def forward(self, x):
        return self.down(torch.relu(self.up(x))).square().mean()


class FanOut(nn.Module):
    """One value with two readers."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16, bias=False), nn.Linear(8, 16, bias=False)

    def forward(self, x):
        return (self.a(x) * self.b(x)).sum()


class Tied(nn.Module):
    """One weight that looks words up and scores them."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(32, 8)

    def forward(self, ids):
        return F.linear(self.words(ids), self.words.weight).sum()


class InPlace(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x):
        return self.b(self.a(x).relu_()).sum()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Linear(8, 8, bias=False)

    def forward(self, x):
        return self.weight(x)


class TwoBlocks(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.layers = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return x.sum()


SMALL = {
    "mlp": (Mlp, lambda: torch.zeros(8, 16)),
    "fan out": (FanOut, lambda: torch.zeros(4, 8)),
    "tied": (Tied, lambda: torch.zeros(8, dtype=torch.long)),
    "in place": (InPlace, lambda: torch.zeros(4, 8)),
    "two blocks": (TwoBlocks, lambda: torch.zeros(8, 8)),
}


@functools.cache
def small(name: str) -> Graph:
    model, batch = SMALL[name]
    return trace(model(), (batch(),), check=False)


@dataclasses.dataclass
class RandomPrices:
    """Prices drawn by name: of a node's strategy; of a conversion of values of one shape, which may be below zero."""

    seed: int
    same: dict[str, str] = dataclasses.field(default_factory=dict)
    saved: tuple[SavedTensor, ...] = ()

    def strategy(self, operation, strategy, link):
        name = self.same.get(operation.node.name, operation.node.name)
        return StrategyCost(10 ** self.draw(name, strategy).uniform(-6, -3.5), 0.0, 0)

    def conversion(self, value, a, b, t, differentiable, read):
        return self.draw(tuple(value.meta["val"].shape), a, b, differentiable).uniform(-2e-6, 1e-5)

    def draw(self, *what):
        return random.Random(" ".join(map(str, (self.seed, *what))))


def priced(graph: Graph, seed: int) -> tuple[RandomPrices, Cluster]:
    """A graph at random prices, near those at which it is worth splitting."""
    draw = random.Random(seed)
    cluster = Cluster.parse("4xCPU")
    link = Link("test", 10 ** draw.uniform(-7, -3.5), 10 ** draw.uniform(5.5, 8))
    return RandomPrices(seed), dataclasses.replace(cluster, intra_node=link, inter_node=link)


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", SMALL)
def test_no_choice_of_layouts_is_faster(name: str, seed: int, t: int) -> None:
    graph = small(name)
    prices, cluster = priced(graph, seed)
    found = choose_layouts(graph, prices, cluster, t, tie=False)
    best = fastest(every_choice(graph, prices, cluster, t))
    assert found.lower_bound_s <= best * (1 + 1e-9)
    assert best * (1 - 1e-6) <= found.time_s <= best * (1 + TIE)
    assert found.status == "optimal" and found.gap <= TIE


def test_random_prices_make_different_layouts_best() -> None:
    graph = small("mlp")
    found = [choose_layouts(graph, *priced(graph, seed), 2) for seed in range(8)]
    assert len({tuple(map(str, choice.strategies.values())) for choice in found}) > 2


@pytest.mark.parametrize("seed", range(3))
def test_identical_blocks_are_laid_out_alike_and_best_so(seed: int) -> None:
    graph = small("two blocks")
    prices, cluster = priced(graph, seed)
    prices.same["linear_2"] = "linear_1"
    found = choose_layouts(graph, prices, cluster, 2)
    weights = [node.name for node in graph.primary.graph.nodes if node.op == "get_attr"]

    def alike(choice: Whole) -> bool:
        pairs = [("linear_1", "linear_2"), tuple(weights[1:])]
        return all(str(choice.picks[a]) == str(choice.picks[b]) for a, b in pairs)

    assert str(found.strategies["linear_1"]) == str(found.strategies["linear_2"])
    assert fastest(every_choice(graph, prices, cluster, 2)) <= found.time_s * (1 + 1e-6)
    best = fastest(every_choice(graph, prices, cluster, 2), alike)
    assert best * (1 - 1e-6) <= found.time_s <= best * (1 + TIE)


@pytest.mark.parametrize("share", [0.55, 0.7, 0.9])
@pytest.mark.parametrize("seed", range(2))
def test_the_memory_of_a_rank_is_kept(seed: int, share: float) -> None:
    graph = small("mlp")
    prices, cluster = priced(graph, seed)
    prices.saved = (SavedTensor(4096, "relu", ("relu", "linear_1")),)
    kept = (Kept(4096, (("relu", None), ("linear_1", 0))),)
    choices = list(every_choice(graph, prices, cluster, 2, kept))
    limit = share * (sum(entry.bytes * 4 for entry in graph.state.values()) + 4096)
    best = fastest(iter(choices), lambda choice: choice.memory_bytes <= limit)
    found = choose_layouts(graph, prices, cluster, 2, memory_bytes=limit, tie=False)
    assert found.value.memory_bytes <= limit + 1
    assert best * (1 - 1e-6) <= found.time_s <= best * (1 + TIE)
    assert found.lower_bound_s <= best * (1 + 1e-9)


def test_memory_that_suffices_is_named() -> None:
    graph = small("mlp")
    prices, cluster = priced(graph, 0)
    least = min(choice.memory_bytes for choice in every_choice(graph, prices, cluster, 2))
    with pytest.raises(InfeasibleError, match="It fits into"):
        choose_layouts(graph, prices, cluster, 2, memory_bytes=least - 16)
    assert choose_layouts(graph, prices, cluster, 2, memory_bytes=least + 1).value.memory_bytes <= least + 1


def test_more_ranks_than_devices_are_refused() -> None:
    graph = small("mlp")
    with pytest.raises(UsageError, match="tensor degree 8"):
        choose_layouts(graph, *priced(graph, 0), 8)


WHOLE = ("gpt2", "llama", "bert", "mixtral", "phi3", "vit", "resnet", "mobilenet", "recommender")


@functools.cache
def traced(name: str) -> tuple[Graph, list[torch.Tensor], dict]:
    model, args, kwargs = build(name)
    graph = in_double(trace(model, args, kwargs, check=False))
    inputs = tensors_of(list(args)) + tensors_of(kwargs)
    return graph, inputs, run_whole(graph, inputs)


def on_a_fast_link(graph: Graph) -> tuple[LayoutPrices, Cluster]:
    """Prices at which even small models are worth splitting: kernels are slow, not late."""
    cluster = Cluster.parse("4xCPU")
    link = Link("test", 1e-9, 1e10)
    device = cluster.devices[0]
    rates = {dtype: rate / 1000 for dtype, rate in device.flops_per_s.items()}
    bandwidth = device.memory_bandwidth_bytes_per_s / 1000
    device = dataclasses.replace(device, launch_s=0.0, flops_per_s=rates, memory_bandwidth_bytes_per_s=bandwidth)
    cluster = dataclasses.replace(cluster, devices=(device,) * 4, intra_node=link, inter_node=link)
    return LayoutPrices(graph, cluster), cluster


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("name", WHOLE)
def test_the_local_graph_sends_what_was_priced_and_computes_what_the_model_computes(name: str, t: int) -> None:
    graph, inputs, wanted = traced(name)
    found = choose_layouts(graph, *on_a_fast_link(graph), t)
    local = rewrite(graph, found.choice, t)
    sent = collectives_of(local.primary, t)
    counts = Counter(
        (way, what)
        for item in sent
        for way, what in (("forward", item.forward), ("backward", item.backward))
        if what is not None
    )
    assert counts == found.value.collectives and counts
    assert sum(item.forward_bytes for item in sent) == found.value.forward_bytes
    assert sum(item.backward_bytes for item in sent) == found.value.backward_bytes
    blocks = Counter()
    for block in found.blocks:
        blocks.update(block.collectives)
    assert blocks == Counter({f"{way} {name}": count for (way, name), count in counts.items()})
    assert sum(block.bytes_sent for block in found.blocks) == found.value.forward_bytes + found.value.backward_bytes
    split, _ = run_split(local, inputs)
    assert max(worst_error(split, wanted).values()) < 1e-9


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_megatron_is_never_faster_at_the_same_prices(name: str, t: int) -> None:
    graph, _, _ = traced(name)
    prices, cluster = on_a_fast_link(graph)
    ours = choose_layouts(graph, prices, cluster, t)
    for between in ("replicated", "sequence"):
        forced = choose_layouts(graph, prices, cluster, t, allow=megatron(graph, between))
        assert ours.lower_bound_s <= ours.time_s <= forced.time_s * (1 + 1e-5)
        linears = {forced.strategies[node.name].name for node in graph.primary.calls if "linear" in str(node.target)}
        assert linears <= {"n", "k"}


def test_megatron_is_refused_where_the_ranks_do_not_divide_the_heads() -> None:
    model, args, kwargs = build("gpt2")
    graph = trace(model, args, kwargs, check=False)
    prices, cluster = on_a_fast_link(graph)
    cluster = dataclasses.replace(cluster, devices=cluster.devices * 2, nodes=cluster.nodes * 2)
    with pytest.raises(UsageError, match="no strategy of"):
        choose_layouts(graph, prices, cluster, 8, allow=megatron(graph, "sequence"))


def test_the_same_question_has_the_same_answer() -> None:
    graph, _, _ = traced("llama")
    prices, cluster = on_a_fast_link(graph)
    first, second = (choose_layouts(graph, prices, cluster, 2) for _ in range(2))
    assert first.state == second.state
    assert {k: str(v) for k, v in first.strategies.items()} == {k: str(v) for k, v in second.strategies.items()}


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama", "resnet", "mixtral"])
def test_layouts_cost_what_the_profile_of_their_local_graph_says(name: str, t: int) -> None:
    model, args, kwargs = build(name)
    graph = trace(model, args, kwargs, check=False)
    program = Program.of(graph, t)
    drawn = [random_choice(program, random.Random(seed)) for seed in range(3)]
    prices, cluster = on_a_fast_link(graph)
    # Prices are for values laid out in memory as the whole ones are; what a conversion changes there is not followed.
    chosen = choose_layouts(graph, prices, cluster, t).choice
    assert max(off(graph, prices, cluster, choice, t) for choice in (chosen, *drawn)) < 0.01
    cluster = Cluster.parse("8xH100-80G")
    prices = LayoutPrices(graph, cluster)
    assert off(graph, prices, cluster, choose_layouts(graph, prices, cluster, t).choice, t) < 1e-9


def off(graph: Graph, prices: LayoutPrices, cluster: Cluster, choice: Choice, t: int) -> float:
    """Relative difference of what layouts cost by the layout program and by the profile."""
    times = profile(rewrite(graph, choice, t), cluster, cluster.group_link(t)).times[cluster.devices[0].name]
    total = sum(time.forward_s + time.backward_s for time in times.values())
    return abs(price_of(graph, prices, cluster, t, choice).time_s / total - 1)
