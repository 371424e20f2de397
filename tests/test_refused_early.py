"""What cannot be trained is refused, and what cannot be emitted is said, when the plan is made and not after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import autopart
from autopart.errors import CaptureError, UsageError


class Arithmetic(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x).relu() * 2


class Unread(nn.Module):
    """Its layer does not reach the result."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.layer(x)
        return (x * 2).sin()


def two_layers() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))


def plan(model: nn.Module, **options: Any) -> Any:
    options = {"microbatches": 2, "time_limit_s": 5, **options}
    return autopart.partition(model, "2xCPU", example_inputs=(torch.randn(4, 6),), **options)


@pytest.mark.parametrize(
    "model, reason",
    [
        (Arithmetic(), "Arithmetic has no parameters"),
        (two_layers().requires_grad_(False), "every parameter of Sequential is frozen"),
        (Unread(), "no parameter of Unread reaches the loss"),
    ],
)
def test_training_with_nothing_to_train_is_refused_by_name(model: nn.Module, reason: str) -> None:
    with pytest.raises(UsageError, match=reason) as refusal:
        plan(model)
    assert "inference" in str(refusal.value.hint)
    assert plan(model, mode="inference").mode == "inference"


def hook(module: nn.Module, given: Any, gradient: Any) -> None:
    """Leaves the gradient as it is."""


def test_a_plan_says_that_a_module_with_hooks_cannot_be_emitted(tmp_path: Path) -> None:
    model = two_layers()
    model[1].register_full_backward_hook(hook)
    planned = plan(model)
    assert any("no package can be written" in note and "module 1 has hooks" in note for note in planned.notes)
    with pytest.raises(CaptureError, match="module 1 has hooks"):
        planned.emit(tmp_path / "package")
    assert not any("no package can be written" in note for note in plan(two_layers()).notes)


def five_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(6, 6) for _ in range(5)))


@pytest.mark.parametrize(
    ("schedule", "stages", "microbatches", "reason"),
    [
        ("1f1b", 4, 3, "1f1b needs a microbatch for each of 4 stages, not 3"),
        ("interleaved1f1b", 8, 9, "8 stages cannot run 9 microbatches"),
    ],
)
def test_microbatches_that_a_schedule_cannot_run_are_refused(
    schedule: str, stages: int, microbatches: int, reason: str
) -> None:
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(8)))
    options: dict[str, Any] = {"schedule": schedule, "stages": stages, "microbatches": microbatches}
    with pytest.raises(UsageError, match=reason) as refusal:
        autopart.partition(layers, "4xCPU", example_inputs=(torch.randn(9, 6),), time_limit_s=5, **options)
    assert "microbatches" in str(refusal.value.hint)


def test_stages_are_as_many_as_the_schedule_can_fill() -> None:
    layers = nn.Sequential(*(nn.Linear(6, 6) for _ in range(8)))
    planned = autopart.partition(
        layers, "4xCPU", example_inputs=(torch.randn(9, 6),), schedule="1f1b", microbatches=3, time_limit_s=5
    )
    assert planned.strategy.stages <= 3


class Undone(nn.Module):
    """Its backward needs what it changed in place."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.sigmoid(self.layer(x))
        hidden.mul_(2)
        return hidden


def test_a_model_whose_own_backward_fails_is_told_so() -> None:
    with pytest.raises(UsageError, match="Undone fails in a step of its own: RuntimeError: one of"):
        plan(Undone())
