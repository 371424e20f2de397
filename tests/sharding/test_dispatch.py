"""Tokens sent to the ranks that hold their experts: exact for every routing, offered where it fits, priced."""

from __future__ import annotations

import dataclasses
import functools

import pytest
import torch
import transformers.integrations.moe  # noqa: F401 (registers its operators)
from torch import fx, nn

from autopart.cluster import Cluster, Link
from autopart.graph import Graph
from autopart.profiler import LayoutPrices, profile
from autopart.runtime import dispatch
from autopart.sharding import Program, Strategy, choose, collectives_of, describe, rewrite
from autopart.solver.layouts import LayoutChoice, choose_layouts
from autopart.tracer import trace
from tests.sharding.dispatching import (
    EXPERTS,
    LENGTH,
    ROUTINGS,
    ROWS,
    TOP,
    WIDTH,
    GivenRouting,
    by_loops,
    by_plain_products,
    dispatching,
    routed,
)
from tests.sharding.ranks import ThreadRanks
from tests.sharding.running import in_double, run_split, run_whole, worst_error


@functools.cache
def traced(experts: int = EXPERTS, length: int = LENGTH, top: int = TOP) -> tuple[GivenRouting, torch.Tensor, Graph]:
    torch.manual_seed(0)
    model = GivenRouting(experts).double()
    x = torch.randn(ROWS, length, WIDTH, dtype=torch.float64)
    ids = torch.randint(experts, (ROWS * length, top))
    with by_plain_products():
        return model, x, in_double(trace(model, (x, ids), {}, check=False))


@pytest.mark.parametrize("t", [2, 4])
@pytest.mark.parametrize("routing", ROUTINGS)
def test_experts_reached_by_all_to_all_compute_what_loops_over_tokens_compute(routing: str, t: int) -> None:
    model, x, graph = traced()
    ids = ROUTINGS[routing](torch.Generator().manual_seed(1), ROWS * LENGTH, TOP)
    loss = by_loops(model, x, ids)
    model.zero_grad()
    loss.backward()
    program = Program.of(graph, t)
    ways = set()
    for seed in range(3):
        choice = dispatching(program, seed)
        products = [s for name, s in choice.strategies.items() if name.startswith("grouped_mm")]
        assert [s.name for s in products] == ["all-to-all", "all-to-all"]
        ways.add(tuple(map(str, products)))
        local = rewrite(graph, choice, t)
        assert {n.target for n in local.primary.calls} >= {dispatch.send_to_experts, dispatch.return_from_experts}
        found, _ = run_split(local, [x, ids])
        torch.testing.assert_close(found["outputs"][graph.loss], loss.detach(), rtol=1e-12, atol=1e-12)
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(found["gradients"][name], parameter.grad, rtol=1e-10, atol=1e-12)
    assert len(ways) > 1  # there and back twice, or once; rows of the batch, or of the sequences


@pytest.mark.parametrize(("experts", "length", "t"), [(6, 8, 4), (8, 3, 4)])
def test_what_does_not_divide_is_not_sent(experts: int, length: int, t: int) -> None:
    """Experts that ranks cannot share, tokens that they cannot share."""
    _, _, graph = traced(experts, length)
    assert not any(routed(s) for found in Program.of(graph, t).strategies.values() for s in found)


class CountsOthers(nn.Module):
    """A grouped product whose groups are not those by which rows are sorted, and one of rows sorted downwards."""

    def __init__(self, descending: bool) -> None:
        super().__init__()
        self.descending = descending
        self.weight = nn.Parameter(torch.randn(4, 4, 4))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        keys, places = ids.sort(descending=self.descending)
        groups = keys if self.descending else 3 - keys
        ends = torch.histc(groups.float(), 4, 0, 3).cumsum(0, dtype=torch.int32)
        back = torch.empty_like(places)
        back[places] = torch.arange(8)
        return torch.ops.transformers.grouped_mm_fallback(x[places], self.weight, ends)[back]


@pytest.mark.parametrize("descending", [True, False])
def test_only_rows_that_are_sorted_by_what_is_counted_are_sent(descending: bool) -> None:
    graph = trace(CountsOthers(descending), (torch.randn(8, 4), torch.randint(4, (8,))), {}, check=False)
    strategies = Program.of(graph, 2).strategies
    assert any("grouped_mm" in node.name for node in strategies)
    assert not any(routed(s) for found in strategies.values() for s in found)


class CountsFrom(nn.Module):
    """Groups are numbered from `first`; rows of a smaller number stand before them all."""

    def __init__(self, first: int) -> None:
        super().__init__()
        self.first = first
        self.weight = nn.Parameter(torch.randn(4, 4, 4, dtype=torch.float64))

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        keys, places = ids.sort()
        ends = torch.histc(keys.double(), 4, self.first, self.first + 3).cumsum(0, dtype=torch.int32)
        back = torch.empty_like(places)
        back[places] = torch.arange(8)
        return torch.ops.transformers.grouped_mm_fallback(x[places], self.weight, ends)[back].square().sum()


@pytest.mark.parametrize("first", [0, 1])
def test_a_number_below_the_first_that_is_counted_is_refused(first: int) -> None:
    """It would shift the rows of all experts, on each rank by another number."""
    x, ids = torch.randn(8, 4, dtype=torch.float64), torch.tensor([5, 1, 3, 2, 4, 4, 1, 6])
    graph = trace(CountsFrom(first), (x, ids), {}, check=False)
    local = rewrite(graph, dispatching(Program.of(graph, 2), 0), 2)
    assert dispatch.counts_of_sorted in {node.target for node in local.primary.calls}
    found, _ = run_split(local, [x, ids])
    assert max(worst_error(found, run_whole(graph, [x, ids])).values()) < 1e-12  # larger numbers are no group's
    with pytest.raises(RuntimeError, match="below"):
        run_split(local, [x, ids - 2])


def chosen(graph: Graph, t: int, *ways: str) -> LayoutChoice:
    """The fastest layouts on a link that is slower than all else, with experts split in one of these ways."""
    cluster = Cluster.parse("4xCPU")
    devices = tuple(dataclasses.replace(device, launch_s=0.0) for device in cluster.devices)
    link = Link("slow", 0.0, 1e4)
    cluster = dataclasses.replace(cluster, devices=devices, intra_node=link, inter_node=link)

    def allow(node: fx.Node, strategy: Strategy) -> bool:
        return "grouped_mm" not in node.name or strategy.name in ways or any(v.owned for v in strategy.inputs)

    return choose_layouts(graph, LayoutPrices(graph, cluster), cluster, t, allow=allow)


@pytest.mark.parametrize(
    ("t", "top", "way", "other"), [(4, 1, "all-to-all", "experts"), (2, 4, "experts", "all-to-all")]
)
def test_the_cheaper_of_sending_tokens_and_selecting_them_is_chosen(t: int, top: int, way: str, other: str) -> None:
    """Sending k rows of each token takes k / t of the bytes of gathering all tokens and of summing their results."""
    _, _, graph = traced(top=top)
    found = chosen(graph, t, way, other)
    products = {s.name for name, s in found.strategies.items() if "grouped_mm" in name}
    assert products == {way}
    assert chosen(graph, t, way).time_s == pytest.approx(found.time_s)
    assert chosen(graph, t, other).time_s > 1.001 * found.time_s
    words = describe(graph, found.choice, t)["experts"]
    assert words.startswith("experts, all-to-all:" if way == "all-to-all" else "experts:")


@pytest.mark.parametrize("t", [2, 4])
def test_an_even_routing_sends_what_was_priced(t: int) -> None:
    _, x, graph = traced()
    found = chosen(graph, t, "all-to-all")
    local = rewrite(graph, found.choice, t)
    even = torch.arange(ROWS * LENGTH * TOP).view(-1, TOP) % EXPERTS
    _, ranks = run_split(local, [x, even])
    sent = collectives_of(local.primary, t)
    moved = sum(size for name, size in ranks.counts if name == "all_to_all")
    ways = [(s.forward, s.forward_bytes) for s in sent] + [(s.backward, s.backward_bytes) for s in sent]
    assert moved == sum(size for name, size in ways if name == "all_to_all") > 0
    assert sum(block.bytes_sent for block in found.blocks) == sum(size for _, size in ways)
    cost = profile(local, Cluster.parse(["CPU"] * t), Link("test", 0.0, 1.0))
    value = found.value
    everything = value.forward_bytes + value.backward_bytes + value.inside_bytes
    times = cost.times["CPU"].values()
    seconds = sum(time.forward_s + time.backward_input_s + time.backward_weight_s for time in times)
    assert seconds == pytest.approx(everything, rel=1e-3)


def test_rows_that_were_sent_stay_with_their_readers() -> None:
    """Stages exchange values of known sizes."""
    _, _, graph = traced()
    found = 0
    for seed in range(4):
        local = rewrite(graph, dispatching(Program.of(graph, 2), seed), 2)
        sent = [n for n in local.primary.calls if (held := n.meta.get("layout")) and "sent" in str(held)]
        for node in sent:
            for user in node.users:
                found += 1
                assert any({node.name, user.name} <= names for names in local.primary.colocated), node.name
    assert found


def test_rows_behind_the_last_group_are_zeros_and_are_not_sent() -> None:
    """As in the grouped product itself."""
    ranks, ends = ThreadRanks(2), torch.tensor([[1, 3], [0, 2]])
    x = torch.randn(2, 5, 3, dtype=torch.float64)

    def program(rank: int) -> tuple[torch.Tensor, torch.Tensor]:
        mine = x[rank].clone().requires_grad_()
        back = dispatch.return_from_experts(dispatch.send_to_experts(mine, ends), ends, 5)
        return back.detach(), torch.autograd.grad(back.square().sum(), mine)[0]

    for rank, (back, gradient) in enumerate(ranks.run(program)):
        kept = x[rank] * (torch.arange(5) < ends[rank, -1]).unsqueeze(1)
        assert torch.equal(back, kept) and torch.equal(gradient, 2 * kept)


class TorchProducts(nn.Module):
    """Experts of one matrix each, by torch's own grouped product, for half precision; numbers so small that sums are
    exact."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.weight = (nn.Parameter(_small(*shape)) for shape in ((16, 32), (EXPERTS, 32, 64)))

    def forward(self, signs: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        keys, places = ids.sort()
        ends = torch.histc(keys.float(), EXPERTS, 0, EXPERTS - 1).cumsum(0, dtype=torch.int32)
        back = torch.empty_like(places)
        back[places] = torch.arange(16)
        return (nn.functional.grouped_mm(self.rows[places], self.weight, offs=ends)[back] * signs).float().sum()


def _small(*shape: int) -> torch.Tensor:
    return torch.randint(-1, 2, shape).bfloat16()


@pytest.mark.parametrize("t", [2, 4])
def test_the_grouped_product_of_torch_is_split_as_that_of_the_library(t: int) -> None:
    torch.manual_seed(0)
    inputs = [_small(16, 64), torch.randint(EXPERTS, (16,))]
    graph = trace(TorchProducts(), tuple(inputs), {}, check=False)
    program = Program.of(graph, t)
    (node,) = [n for n in program.strategies if n.target == torch.ops.aten._grouped_mm.default]
    names = {s.name for s in program.strategies[node]}
    assert names == {"replicated", "replicated*", "partial", "k", "n", "experts", "all-to-all"}
    whole = run_whole(graph, inputs)
    for name in names:

        def pick(node: fx.Node, legal: list[Strategy], _: object, name: str = name) -> Strategy:
            sent = [s for s in legal if routed(s)] if name == "all-to-all" else []
            return next((s for s in legal if s.name == name and "grouped" in node.name), (sent or legal)[0])

        choice = choose(program, {}, pick)
        assert choice.strategies[node.name].name == name
        found, _ = run_split(rewrite(graph, choice, t), inputs)
        assert max(worst_error(found, whole).values()) == 0, name
