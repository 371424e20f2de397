"""Parameters that forward changes are captured, and the model that was given keeps its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import flat_tensors, run
from torch import nn

import autopart
from autopart.tracer import trace
from autopart.verification import verify

D = 4


def in_place(teacher: torch.Tensor, student: torch.Tensor) -> None:
    teacher.mul_(0.9).add_(student, alpha=0.1)


def by_lerp(teacher: torch.Tensor, student: torch.Tensor) -> None:
    torch.lerp(teacher, student, 0.1, out=teacher)


def past_data(teacher: torch.Tensor, student: torch.Tensor) -> None:
    teacher.data.mul_(0.9).add_(student.data, alpha=0.1)


def by_rows(teacher: torch.Tensor, student: torch.Tensor) -> None:
    for row in range(D):
        teacher[row] += 0.1 * student[row]


UPDATES: dict[str, Callable[[torch.Tensor, torch.Tensor], None]] = {
    "in place": in_place,
    "out": by_lerp,
    "data": past_data,
    "rows": by_rows,
}


class Teacher(nn.Module):
    """A student, and a teacher that is its moving average, updated in forward."""

    def __init__(self, update: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        super().__init__()
        self.student, self.teacher = nn.Linear(D, D), nn.Linear(D, D)
        self.teacher.requires_grad_(False)
        self.last = nn.Linear(D, D)
        self.update = update

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            for teacher, student in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                self.update(teacher, student)
            wanted = self.teacher(x)
        return self.last(self.student(x) - wanted)


def made(update: str) -> Teacher:
    torch.manual_seed(0)
    return Teacher(UPDATES[update])


def rows() -> torch.Tensor:
    return torch.linspace(-1, 1, 4 * D).reshape(4, D)


@pytest.mark.parametrize("update", UPDATES)
def test_a_moving_average_of_weights_is_captured(update: str) -> None:
    model, twin = made(update), made(update)
    graph = trace(model, (rows(),))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), twin.parameters(), strict=True))
    assert graph.training is not None
    for _ in range(2):
        (wanted,) = flat_tensors(twin(rows()))
        assert torch.allclose(wanted, run(graph, graph.training, [rows()])[0])
    for name, parameter in twin.named_parameters():
        assert torch.allclose(parameter, model.get_parameter(name)), name


def test_a_package_updates_it(tmp_path: Path) -> None:
    model = made("in place")
    options: Any = {"example_inputs": (rows(),), "stages": 2, "microbatches": 2, "granularity": "operator"}
    folder = autopart.partition(model, "2xCPU", **options).emit(tmp_path / "package")
    report = verify(folder, model, (rows(),), processes=1)
    assert report.passed, str(report)
