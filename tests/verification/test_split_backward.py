"""Schedules that split the backward are exact where torch would count a parameter's gradient twice."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from launching import in_pool
from pool import Pool
from torch import nn

import autopart
from autopart.verification import verify


class LateStart(nn.Module):
    """A branch of parameters is read twice behind the first layers, and the last layer is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))
        self.table = nn.Parameter(torch.randn(8))
        self.start = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.middle = nn.Linear(8, 8)
        self.last = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.first:
            x = layer(x).tanh()
        start = self.start(self.table)
        x = self.middle(x * start).tanh() + start
        return self.last(self.last(x).tanh())


# One package, cut where the fault shows, run under each schedule.
SCHEDULES = ["interleavedzerobubble", "zbv", "dualpipev"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_parameters_that_are_read_twice_get_their_gradient_once(schedule: str, pool: Pool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = LateStart().double()
    inputs = torch.randn(8, 8, dtype=torch.float64)
    plan = autopart.partition(
        model, ["CPU", "CPU"], example_inputs=inputs, stages=4, schedule=SCHEDULES[0], granularity="operator"
    )
    folder = plan.emit(tmp_path / "package")
    table = (folder / "pipeline.py").read_text()
    assert "whole_backward=True" in table
    report = verify(folder, model, inputs, schedule=schedule, launch=in_pool(pool))
    assert report.passed, str(report)

    # Without the mark, the package is wrong or fails: the mark is what makes it right.
    changed = table.replace(", whole_backward=True", "")
    (folder / "pipeline.py").write_text(changed)
    assert not verify(folder, model, inputs, schedule=schedule, launch=in_pool(pool)).passed
