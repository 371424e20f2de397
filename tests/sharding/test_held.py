"""What ranks may hold a part of, how heads that t does not divide are laid out, and what no cut may separate."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from autopart.blocks import find_blocks
from autopart.errors import AutopartError
from autopart.graph import Graph
from autopart.sharding import Choice, Program, S, following, random_choice, rewrite
from autopart.tracer import trace
from tests.sharding.models import build
from tests.sharding.running import in_double, run_split, run_whole, tensors_of, worst_error


class Holding(nn.Module):
    """A parameter, a persistent buffer, one that is not, and a constant, all of one shape."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(8, 8))
        self.register_buffer("kept", torch.ones(8, 8))
        self.register_buffer("lost", torch.ones(8, 8), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight + self.kept * self.lost + torch.tensor([[float(i) for i in range(8)]] * 8)


def test_only_what_a_state_dict_carries_is_split() -> None:
    graph = trace(Holding(), (torch.ones(8, 8),), check=False)
    program = Program.of(graph, 2)
    split = {}
    for node, layouts in program.layouts.items():
        if node.op == "get_attr":
            entry = graph.state[str(node.target)]
            split[entry.name if entry.kind != "constant" else "constant"] = len(layouts) > 1
    assert split == {"weight": True, "kept": True, "lost": False, "constant": False}
    lost = next(key for key, entry in graph.state.items() if entry.name == "lost")
    replicated = following(program, {})
    with pytest.raises(AutopartError, match="lost cannot be held as"):
        rewrite(graph, Choice({lost: S(0, 8)}, replicated.strategies), 2)


class Looking(nn.Module):
    """Cannot be captured: what it does depends on its values."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if float(x.detach().sum()) > 0 else self.inner(-x)


def test_what_a_module_holds_that_is_kept_whole_is_not_split() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), Looking(), nn.Linear(8, 8)).double()
    x = torch.randn(4, 8, dtype=torch.float64)
    graph = trace(model, (x,), check=False)
    assert graph.opaque
    program = Program.of(graph, 2)
    for seed in range(5):
        local = rewrite(graph, random_choice(program, random.Random(seed)), 2)
        assert all(split is None for key, split in local.shards.items() if "inner" in graph.state[key].name)


def test_queries_are_split_and_fewer_keys_and_values_than_ranks_are_whole() -> None:
    """Two heads of keys and values on four ranks: only whole numbers of heads may lie on a rank."""
    model, args, kwargs = build("llama")
    graph = in_double(trace(model, args, kwargs, check=False))
    program = Program.of(graph, 4)
    state = {key: S(0, 32) for key, entry in graph.state.items() if "q_proj" in entry.name}
    wanted = {
        node.name: next(s for s in program.strategies[node] if s.name == "heads")
        for node in program.operations
        if "scaled_dot_product" in str(node.target)
    }
    local = rewrite(graph, following(program, state, wanted), 4)
    attention = [n for n in local.primary.calls if "scaled_dot_product" in str(n.target)]
    assert [tuple(n.args[0].meta["val"].shape[1:3]) for n in attention] == [(2, 8)] * 2  # of 8 heads of queries
    inputs = tensors_of(list(args)) + tensors_of(kwargs)
    found, _ = run_split(local, inputs)
    assert max(worst_error(found, run_whole(graph, inputs)).values()) < 1e-9


class Changing(nn.Module):
    """Two parts; the first changes a buffer and a value in place after it was read."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        before = y * 2
        y.mul_(3)
        with torch.no_grad():
            self.seen.add_(before.mean(0))
        return self.second(y + before) + self.seen.sum()


@pytest.mark.parametrize("seed", range(8))
def test_conversions_stay_with_the_changes_that_they_precede(seed: int) -> None:
    graph: Graph = trace(Changing(), (torch.ones(4, 8),), check=False)
    local = rewrite(graph, random_choice(Program.of(graph, 2), random.Random(seed)), 2)
    capture = local.primary
    nodes = list(capture.graph.nodes)
    assert all(any(names <= whole for whole in capture.colocated) for names in graph.primary.colocated)
    assert {name for names in capture.colocated for name in names} <= {node.name for node in nodes}
    changes = [n for n in nodes if str(n.target) in ("aten.mul_.Tensor", "aten.add_.Tensor")]
    assert len(changes) == 2
    for change in changes:
        value = change.args[0]
        together = next((names for names in capture.colocated if change.name in names), {change.name})
        for reader in value.users:
            if value.op == "get_attr" or nodes.index(reader) < nodes.index(change):
                assert reader.name in together
    assert set(find_blocks(local, capture)) == {node.name for node in capture.calls}


def test_the_calls_of_one_operator_stay_together() -> None:
    """The mean of shards is a mean and a division."""
    graph = in_double(trace(*build("llama"), check=False))
    found = 0
    for seed in range(3):
        capture = rewrite(graph, random_choice(Program.of(graph, 2), random.Random(seed)), 2).primary
        for node in capture.calls:
            if node.name.endswith("_local"):
                found += 1
                assert any({node.name, node.name.removesuffix("_local")} <= names for names in capture.colocated)
    assert found


def test_conversions_lie_in_the_blocks_of_their_readers_or_producers() -> None:
    graph = in_double(trace(*build("llama"), check=False))
    layers = {f"model.layers.{i}" for i in range(2)}
    for seed in range(3):
        local = rewrite(graph, random_choice(Program.of(graph, 2), random.Random(seed)), 2)
        blocks = find_blocks(local, local.primary)
        whole = find_blocks(graph, graph.primary)
        new = [n for n in local.primary.calls if n.target.__module__ == "autopart.runtime.collectives"]
        assert new
        for node in new:
            near = {blocks.get(n.name) for n in (*node.users, *node.all_input_nodes)}
            if near <= layers and len(near) == 1:
                assert blocks[node.name] in near
        assert {name: block for name, block in blocks.items() if name in whole and block in layers} == {
            name: block for name, block in whole.items() if block in layers
        }
