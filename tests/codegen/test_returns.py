"""Whatever a model returns, its package returns: the same tensor twice, inputs, weights, views, buffers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from emitted import check_equal, legal
from torch import nn

from autopart.graph import Graph
from autopart.tracer import trace

Parts = dict[str, torch.Tensor]


class Returns(nn.Module):
    """Three layers, a weight that only the result holds, buffers that training changes, and an input nobody reads."""

    def __init__(self, give: Callable[[Parts], Any]) -> None:
        super().__init__()
        self.give = give
        self.first, self.second, self.third = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.rand(6))
        self.register_buffer("table", torch.rand(6))

    def forward(self, x: torch.Tensor, unused: torch.Tensor) -> Any:
        early = self.norm(self.first(x))
        middle = torch.tanh(self.second(early))
        late = self.third(middle)
        return self.give(
            {
                "x": x,
                "unused": unused,
                "early": early,
                "middle": middle,
                "late": late,
                "scale": self.scale,
                "weight": self.first.weight,
                "table": self.table,
                "mean": self.norm.running_mean,
                "steps": self.norm.num_batches_tracked,
            }
        )


class Pair(NamedTuple):
    left: Any
    right: Any


RETURNS: dict[str, Callable[[Parts], Any]] = {
    "one tensor twice": lambda p: (p["late"], p["late"], p["early"], p["early"]),
    "an input": lambda p: (p["x"], p["late"]),
    "inputs, one of them unread": lambda p: {
        "a": p["x"],
        "b": p["late"],
        "c": p["unused"],
        "d": p["x"],
    },
    "a weight that nothing reads": lambda p: (p["scale"], p["late"]),
    "a weight of the first stage, twice": lambda p: [p["weight"], p["late"], p["weight"]],
    "a buffer": lambda p: (p["late"], p["table"]),
    "buffers that training changes": lambda p: (p["late"], p["mean"], p["steps"]),
    "buffers that an early stage changes": lambda p: (p["late"].mean(), p["mean"], p["steps"], p["mean"].view(2, 3)),
    "views of another output": lambda p: (p["early"], (p["early"].view(-1, 3, 2), p["early"][:, 0]), p["late"].t()),
    "views of an input and of a weight": lambda p: (p["late"], p["x"].view(-1, 2, 3), p["scale"].view(2, 3)),
    "constants among them": lambda p: (None, p["late"], 3, "text", [p["unused"].shape[1]]),
    "only what the first layers made": lambda p: [p["middle"]],
    "all of it": lambda p: Pair({k: v for k, v in p.items()}, [p["late"], p["scale"], p["x"], (p["middle"].T,)]),
}


@pytest.mark.parametrize("mode", ["training", "inference"])
@pytest.mark.parametrize("stages", [1, 2, 3])
@pytest.mark.parametrize("give", RETURNS.values(), ids=RETURNS.keys())
def test_packages_return_what_the_model_returns(
    give: Callable[[Parts], Any], stages: int, mode: Any, tmp_path: Path
) -> None:
    torch.manual_seed(stages)
    model, args = Returns(give).double(), (torch.randn(4, 6).double(), torch.randn(4, 3).double())
    graph = trace(model, args, mode=mode, check=False)
    assignment = _by_layer(graph, stages)
    check_equal(model, graph, legal(graph, assignment), stages, tmp_path / "out", args)


def _by_layer(graph: Graph, stages: int) -> dict[str, int]:
    """A layer for each stage; what stands outside of all layers goes where its inputs are."""
    layers = {"first": 0, "norm": 0, "second": 1, "third": 2}
    found: dict[str, int] = {}
    for node in graph.primary.calls:
        path = [path for path, _ in (node.meta.get("nn_module_stack") or {}).values()][-1:]
        inputs = max((found.get(i.name, 0) for i in node.all_input_nodes), default=0)
        found[node.name] = min(layers.get("".join(path), inputs), stages - 1)
    return found


def test_returned_buffers_cross_as_copies(tmp_path: Path) -> None:
    """The next microbatch changes a buffer while the value of this one is on its way to the last stage."""
    model = Returns(RETURNS["buffers that an early stage changes"]).double()
    args = (torch.randn(4, 6).double(), torch.randn(4, 3).double())
    graph = trace(model, args, check=False)
    package = check_equal(model, graph, legal(graph, _by_layer(graph, 3)), 3, tmp_path / "out", args)
    given = package.stages[0].train()(args[0])
    held = {buffer.untyped_storage().data_ptr() for buffer in package.stages[0].buffers()}
    assert len(given) == 4 and held.isdisjoint(t.untyped_storage().data_ptr() for t in given)
