"""The activations that autograd keeps are predicted to the byte, without running the model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from examples import EXAMPLES, eager_saved_bytes, gpt2, traced
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from autopart.cluster import Cluster
from autopart.costs import Costs
from autopart.graph import Graph
from autopart.profiler import profile
from autopart.tracer import trace

CPU = Cluster.parse("CPU")
GPU = Cluster.parse("H100-80G")


def sizes(costs: Costs) -> list[int]:
    return sorted(saved.bytes for saved in costs.saved)


def costs_of(
    forward: Callable[[nn.Module, Tensor], Tensor], cluster: Cluster = CPU, rows: int = 4, **options: Any
) -> tuple[Costs, Graph]:
    graph = trace(Small(forward), (torch.randn(rows, 8),), check=False, **options)
    return profile(graph, cluster), graph


class Small(nn.Module):
    """A model around one function of (model, x)."""

    def __init__(self, forward: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self._forward = forward

    def forward(self, x: Tensor) -> Tensor:
        return self._forward(self, x)


@pytest.mark.parametrize("name", EXAMPLES)
def test_saved_bytes_equal_those_of_eager_training(name: str) -> None:
    model, kwargs, graph = traced(name)
    costs = profile(graph, CPU)
    assert sizes(costs) == eager_saved_bytes(model, kwargs)
    assert costs.notes == ()


def _detached(model: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        scale = (model.first(x) * 2).exp()
    return model.second(x) * scale


def _autocast(model: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return model.second(torch.relu(model.first(x))).float()


def _in_place(model: Any, x: Tensor) -> Tensor:
    y = model.first(x)
    y = torch.nn.functional.relu(y, inplace=True)
    return model.second(y.mul_(2.0))


def _written_rows(model: Any, x: Tensor) -> Tensor:
    y = torch.zeros(4, 8)
    y[:, :4] = model.first(x)[:, :4]
    return y.exp() + model.second(x)  # exp keeps its result only if what was written into y is tracked


def _views(model: Any, x: Tensor) -> Tensor:
    left, right = model.first(x).chunk(2, dim=-1)
    return model.second(torch.cat([left * right, right.exp()], dim=-1))


def _frozen_first(model: Any, x: Tensor) -> Tensor:
    model.first.requires_grad_(False)
    return model.second(torch.sigmoid(model.first(x)) * 3.0)


def _twice(model: Any, x: Tensor) -> Tensor:
    y = model.first(x)
    return model.second(y * y) + y


@pytest.mark.parametrize(
    "forward", [_detached, _autocast, _in_place, _written_rows, _views, _frozen_first, _twice], ids=lambda f: f.__name__
)
def test_contexts_views_and_in_place_changes_are_as_in_eager(forward: Callable[[Any, Tensor], Tensor]) -> None:
    model, x = Small(forward), torch.randn(4, 8)
    forward(model, x)  # a function may freeze parameters
    assert sizes(profile(trace(model, (x,), check=False), CPU)) == eager_saved_bytes(model, {"x": x})


def test_every_saved_storage_has_its_owner_and_its_savers() -> None:
    costs, graph = costs_of(lambda m, x: m.second(torch.exp(m.first(x)).mul(2.0)))
    names = {node.name: str(node.target) for node in graph.primary.graph.nodes}
    exp = next(saved for saved in costs.saved if names[saved.owner] == "aten.exp.default")
    assert [names[saver] for saver in exp.savers] == ["aten.exp.default"]
    mul = next(saved for saved in costs.saved if names[saved.owner] == "aten.mul.Tensor")
    assert [names[saver] for saver in mul.savers] == ["aten.linear.default"]


@pytest.mark.parametrize("sizes_of", [(5, 4, 8, 16), (32, 8, 64, 64), (7, 3, 12, 20)])
def test_the_hidden_workspace_of_an_lstm_is_counted(sizes_of: tuple[int, int, int, int]) -> None:
    """Its size is an estimate: oneDNN pads rows whose size is no multiple of its vectors."""
    steps, rows, inputs, hidden = sizes_of
    model = nn.LSTM(inputs, hidden)
    x = torch.randn(steps, rows, inputs)

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = model

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x)[0]

    costs = profile(trace(First(), (x,), check=False, batch_dims={"x": 1}), CPU)
    assert sum(sizes(costs)) == pytest.approx(sum(eager_saved_bytes(First(), {"x": x})), rel=0.3)


def test_state_is_never_counted_as_saved() -> None:
    costs, graph = costs_of(lambda m, x: m.second(m.first(x)))
    state = {node.name for node in graph.primary.graph.nodes if node.op == "get_attr"}
    assert state and not state & {saved.owner for saved in costs.saved}


def test_inference_saves_nothing_and_has_no_backward() -> None:
    costs, _ = costs_of(lambda m, x: m.second(torch.relu(m.first(x))), mode="inference")
    assert costs.saved == ()
    times = costs.times["CPU"].values()
    assert all(time.backward_s == 0 for time in times) and sum(time.forward_s for time in times) > 0
    assert all(memory.gradient_bytes == 0 for memory in costs.memory.values())


def test_a_gpu_keeps_a_dropout_mask_of_one_byte_and_a_cpu_of_four() -> None:
    def forward(model: Any, x: Tensor) -> Tensor:
        return torch.nn.functional.dropout(model.first(x), 0.5, training=True)

    def mask_bytes(cluster: Cluster) -> list[int]:
        costs, graph = costs_of(forward, cluster, rows=512)
        dropout = next(node.name for node in graph.primary.calls if "dropout" in str(node.target))
        return [saved.bytes for saved in costs.saved if saved.owner == dropout and dropout in saved.savers]

    assert mask_bytes(GPU) == [512 * 8]
    assert mask_bytes(CPU) == [512 * 8 * 4]


class Attention(nn.Module):
    """Attention over heads of size 64 in the dtype of its input."""

    def __init__(self, causal: bool = True) -> None:
        super().__init__()
        self.causal = causal

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, mask, is_causal=self.causal)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("masked", [False, True])
def test_attention_on_a_gpu_never_keeps_the_matrix_of_scores(dtype: torch.dtype, masked: bool) -> None:
    """The unfused path would keep 2 x S x S for each head: 16 times a query at S = 512, head size 64."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.project = nn.Linear(64, 64)
            self.attention = Attention(causal=not masked)

        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            y = self.project(x)
            return self.attention(y, y, y, mask)

    model = Model().to(dtype)
    x = torch.randn(2, 4, 512, 64, dtype=dtype)
    kwargs = {"mask": torch.ones(2, 1, 512, 512, dtype=torch.bool)} if masked else {}
    graph = trace(model, (x,), kwargs, check=False)
    costs = profile(graph, GPU)
    attention = next(n.name for n in graph.primary.graph.nodes if "scaled_dot_product" in str(n.target))
    query = x.numel() * x.element_size()
    own = sum(saved.bytes for saved in costs.saved if saved.owner == attention and attention in saved.savers)
    bias = 2 * 512 * 512 * x.element_size() if masked else 0  # the mask as numbers
    rows = 2 * 4 * 512 * 4  # a float32 log-sum for each row of scores
    assert query + rows <= own <= query + rows + bias + 4 * 512
    assert costs.notes == ()


def test_equal_numbers_of_other_types_are_other_signatures() -> None:
    """To Python 2 == 2.0; to an operator on integers they are not."""
    costs, graph = costs_of(
        lambda m, x: m.first(x) + (x.long() * 2).sum() + (x.long() * 2.5).sum() + (x.long() * 2.0).sum()
    )
    sizes = [
        costs.memory[node.name].output_bytes for node in graph.primary.calls if node.target is torch.ops.aten.mul.Tensor
    ]
    assert sizes == [4 * 8 * 8, 4 * 8 * 4, 4 * 8 * 4]


def test_a_mixed_cluster_says_whose_activations_it_counts() -> None:
    costs, _ = costs_of(lambda m, x: m.second(m.first(x)), Cluster.parse("T4,CPU"))
    assert set(costs.times) == {"T4", "CPU"} and "cuda" in costs.notes[0]


class Recomputed(nn.Module):
    """A chain of blocks, each recomputed in backward."""

    def __init__(self, again: bool = True) -> None:
        super().__init__()
        self.again = again
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Dropout(0.1), nn.Linear(64, 16), nn.Tanh()) for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False) if self.again else block(x)
        return x.exp()


def test_checkpointed_regions_keep_what_eager_training_keeps() -> None:
    model, kwargs = Recomputed().train(), {"x": torch.randn(8, 16)}
    assert sizes(profile(trace(model, (), kwargs, check=False), CPU)) == eager_saved_bytes(model, kwargs)


def test_checkpointed_layers_keep_what_they_are_given_by_keyword_too() -> None:
    model, kwargs = gpt2()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    mask = 2 * 24 * 24  # kept by a closure, which hooks do not see
    kept = sorted([*eager_saved_bytes(model, kwargs), mask])
    assert sizes(profile(trace(model, (), kwargs, check=False), CPU)) == kept


def test_a_checkpointed_region_holds_what_it_saves_while_it_runs_again() -> None:
    x = torch.randn(8, 16)
    graphs = {again: trace(Recomputed(again), (x,), check=False) for again in (False, True)}
    memory = {again: profile(graph, CPU).memory for again, graph in graphs.items()}
    own = sum(eager_saved_bytes(Recomputed().blocks[0], {"input": x})) - x.nbytes
    for node in graphs[True].primary.calls:
        if node.target is torch.ops.aten.tanh.default:  # the last of its region
            held = memory[True][node.name].temporary_bytes - memory[False][node.name].temporary_bytes
            assert held == own
