"""What only one mode computes: counters of modules that are called again, and results that are None in evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from emitted import Package, check_equal, legal, make_plan, named_inputs
from torch import nn

from autopart.codegen import emit
from autopart.graph import Graph
from autopart.runtime.structure import decode
from autopart.tracer import trace


class Siamese(nn.Module):
    """One BatchNorm for two branches, and once more behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        near, far = self.norm(self.inner(x)), self.norm(self.inner(y))
        return self.norm(self.last(near * far))


class Counting(nn.Module):
    """Counts its own calls in training, and hands what it made there to a module that both modes call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(6, 6), Scaling()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        extra = None
        if self.training:
            extra = self.first(x).mean(0)
            self.calls += 1
        return self.inner(self.inner(x, extra), extra) / (1 + self.calls)


class Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor, extra: torch.Tensor | None) -> torch.Tensor:
        x = self.linear(x)
        return x if extra is None else x * extra


class Auxiliary(nn.Module):
    """A second head that exists in training alone, as in GoogLeNet."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.head, self.other = nn.Linear(6, 6), nn.Linear(6, 3), nn.Linear(6, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = torch.tanh(self.trunk(x))
        extra = self.other(hidden).sum(1) if self.training else None
        return self.head(hidden), extra


def every_cut(graph: Graph) -> list[dict[str, int]]:
    calls = [n.name for n in graph.primary.calls]
    cuts = [legal(graph, {n: int(i >= c) for i, n in enumerate(calls)}) for c in range(1, len(calls))]
    return [dict(cut) for cut in {tuple(c.items()): None for c in cuts}]


@pytest.mark.parametrize("kind", [Siamese, Counting])
def test_what_one_mode_makes_is_not_missed_in_the_other_at_any_cut(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kind().double()
    args: tuple[Any, ...] = tuple(torch.rand(4, 6, dtype=torch.float64) for _ in range(2 if kind is Siamese else 1))
    graph = trace(model, args)
    for number, assignment in enumerate([{n.name: 0 for n in graph.primary.calls}, *every_cut(graph)]):
        check_equal(model, graph, assignment, max(assignment.values()) + 1, tmp_path / str(number), args)


def test_a_batch_norm_that_is_called_again_is_written_as_one_layer(tmp_path: Path) -> None:
    args = (torch.rand(4, 6), torch.rand(4, 6))
    graph = trace(Siamese(), args)
    emit(graph, make_plan(graph, {n.name: 0 for n in graph.primary.calls}, 1), tmp_path / "package")
    code = (tmp_path / "package" / "stage_0.py").read_text()
    assert "self.norm = nn.BatchNorm1d(6)" in code
    assert "num_batches_tracked" not in code


def test_a_result_that_is_none_in_evaluation_is_none_in_the_package(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, args = Auxiliary().double(), (torch.rand(4, 6, dtype=torch.float64),)
    graph = trace(model, args)
    for number, assignment in enumerate([{n.name: 0 for n in graph.primary.calls}, *every_cut(graph)]):
        folder = tmp_path / str(number)
        emit(graph, make_plan(graph, assignment, max(assignment.values()) + 1), folder)
        package = Package(folder)
        package.load(model.state_dict())
        for training in (True, False):
            model.train(training)
            package.train(training)
            values = package.run(named_inputs(graph, args, {}))
            given = [values[o.value] if training or o.in_evaluation else None for o in package.table.outputs]
            head, extra = decode(package.table.result, given)
            expected_head, expected_extra = model(*args)
            torch.testing.assert_close(head, expected_head)
            if training:
                torch.testing.assert_close(extra, expected_extra)
            else:
                assert extra is None and expected_extra is None
