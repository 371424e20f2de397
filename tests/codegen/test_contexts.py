"""Grad mode, autocast, recomputation, in-place changes and the user's own code come through every cut."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emitted import check_equal, random_cuts
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopart.errors import CaptureError
from autopart.tracer import trace


class FrozenTower(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tower = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))
        self.head = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.tower(x) * 2.0
        return self.head(x).tanh()


class Autocast(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.b(self.a(x).relu())
        return self.c(x.float())


class Recomputed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(3)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x)))


class InPlace(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        before = y * 3
        y[:, 1:3] = y[:, 5:7] * 2
        y.mul_(0.5).add_(before)
        self.seen.add_(y.detach().mean(0))
        return self.b(y) + y[:, :1]


class ByMode(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.a(x)
        y = torch.tanh(y) * 2 if self.training else torch.sigmoid(y).cumsum(0)
        return self.b(y) * (1 if self.training else 3)


@pytest.mark.parametrize("kind", [FrozenTower, Autocast, Recomputed, InPlace, ByMode])
def test_contexts_hold_on_both_sides_of_every_cut(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, args = kind(), (torch.randn(4, 8),)
    graph = trace(model, args, check=False)
    for seed in range(5):
        check_equal(model, graph, random_cuts(graph, 2, seed), 2, tmp_path / f"cut{seed}", args)


def test_contexts_are_written_as_people_write_them(tmp_path: Path) -> None:
    for kind, words in (
        (FrozenTower, "with torch.no_grad():"),
        (Autocast, "with torch.autocast('cpu', dtype=torch.bfloat16):"),
        (Recomputed, "checkpoint("),
    ):
        model, args = kind(), (torch.randn(4, 8),)
        graph = trace(model, args, check=False)
        check_equal(model, graph, random_cuts(graph, 1, 0), 1, tmp_path / kind.__name__, args)
        assert words.replace("'", '"') in (tmp_path / kind.__name__ / "stage_0.py").read_text().replace("'", '"')


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: object, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x.sign() * scale

    @staticmethod
    def backward(ctx: object, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # type: ignore[override]
        return grad * 0.5, None


class WithFunction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(Straight.apply(self.a(x), 0.1))


class Branching(nn.Module):
    """Cannot be captured: its control flow depends on data."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width, self.inner = width, nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) if x.sum().item() > 0 else self.inner(-x) * self.width


class WithBranch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.branch, self.b = nn.Linear(8, 8), Branching(8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.branch(self.a(x)))


@pytest.mark.parametrize("kind", [WithFunction, WithBranch])
def test_the_users_own_code_runs_in_the_package(kind: type[nn.Module], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, args = kind(), (torch.randn(4, 8),)
    graph = trace(model, args, check=False)
    assert graph.opaque
    for seed in range(3):
        check_equal(model, graph, random_cuts(graph, 2, seed), 2, tmp_path / f"cut{seed}", args)
    copied = (tmp_path / "cut0" / "user_code" / f"{Path(__file__).stem}.py").read_text()
    assert copied == Path(__file__).read_text().replace("\nfrom emitted import", "\nfrom user_code.emitted import")


def test_code_that_no_package_can_import_is_refused_by_name(tmp_path: Path) -> None:
    class Local(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: object, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return grad

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return Local.apply(self.a(x))

    model, args = Model(), (torch.randn(4, 8),)
    graph = trace(model, args, check=False)
    with pytest.raises(CaptureError, match="Local"):
        check_equal(model, graph, random_cuts(graph, 2, 0), 2, tmp_path / "out", args)
