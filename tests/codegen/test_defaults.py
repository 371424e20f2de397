"""The default dtype of the process that planned is written out: that of the process that trains does not matter."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emitted import Package, make_plan, named_inputs
from torch import nn

from autopart.codegen import emit
from autopart.errors import CaptureError
from autopart.tracer import trace


class Constants(nn.Module):
    """Adds what torch makes from numbers alone, and integers that become floating numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x) + torch.ones(6) / 3 + torch.arange(0, 0.55, 0.1) + torch.linspace(0, 1, 6)
        x = x + torch.full((6,), 0.1) + torch.eye(6)[0] / 7 + torch.tensor(0.1) + torch.zeros(6).add(0.3)
        whole = torch.arange(6)
        return self.last(x + whole / 7 + whole * 0.1 + torch.sqrt(whole) + (x > 0) * 0.7)


class Chosen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + torch.where(x > 0, 0.1, 0.2)


@pytest.fixture
def float64_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_a_model_that_was_captured_in_float64_by_default_computes_in_float64(
    float64_default: None, tmp_path: Path
) -> None:
    torch.manual_seed(0)
    model, args = Constants(), (torch.rand(4, 6),)
    graph = trace(model, args)
    emit(graph, make_plan(graph, {n.name: 0 for n in graph.primary.calls}, 1), tmp_path / "plain")
    expected = model(*args)
    torch.set_default_dtype(torch.float32)
    package = Package(tmp_path / "plain")
    package.load(model.state_dict())
    package.train(True)
    values = package.run(named_inputs(graph, args, {}))
    torch.testing.assert_close(values[package.table.outputs[0].value], expected, rtol=1e-14, atol=1e-14)


def test_a_default_dtype_that_no_cast_stands_for_is_refused(float64_default: None, tmp_path: Path) -> None:
    graph = trace(Chosen(), (torch.rand(4, 6),))
    with pytest.raises(CaptureError, match="default dtype"):
        emit(graph, make_plan(graph, {n.name: 0 for n in graph.primary.calls}, 1), tmp_path / "package")


def test_a_package_of_float32_does_not_follow_the_default_dtype(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, args = Constants(), (torch.rand(4, 6),)
    graph = trace(model, args)
    emit(graph, make_plan(graph, {n.name: 0 for n in graph.primary.calls}, 1), tmp_path / "package")
    code = (tmp_path / "package" / "stage_0.py").read_text().partition("def forward")[2]
    makers = re.findall(r"torch\.(?:ones|linspace|full|eye|zeros)\([^\n]*|torch\.arange\(0, [^\n]*", code)
    assert len(makers) == 6, code
    assert all("dtype=torch.float32" in call for call in makers), makers
