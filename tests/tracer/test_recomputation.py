"""A checkpointed region that changes state is refused by name, with and without values."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from oracle import differences
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopart.errors import CaptureError
from autopart.tracer import trace

D = 4


class Checkpointed(nn.Module):
    """One linear layer, then a region that changes a buffer."""

    def __init__(self, region: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.a, self.bn = nn.Linear(D, D), nn.BatchNorm1d(D)
        self.register_buffer("mean", torch.zeros(D))
        self.region = region

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda h: self.region(self, h), self.a(x), use_reentrant=False)


def reassigned(self: Any, h: torch.Tensor) -> torch.Tensor:
    self.mean = self.mean * 0.9 + h.detach().mean(0) * 0.1
    return (h - self.mean).tanh()


REGIONS: dict[str, tuple[Callable[[Any, torch.Tensor], torch.Tensor], str]] = {
    "batch norm": (lambda self, h: self.bn(h), r"'1\.bn\.\w+' is changed by 1\.bn"),
    "batch norm and more": (lambda self, h: self.bn(h).tanh() + 1, r"'1\.bn\.\w+' is changed by 1\.bn"),
    "a reassigned buffer": (reassigned, r"'1\.mean' is changed by 1"),
}


def made(region: str, device: str = "cpu") -> tuple[nn.Module, tuple[torch.Tensor], dict[str, Any]]:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(D, D), Checkpointed(REGIONS[region][0]))
        return model, (torch.linspace(-1, 1, 4 * D).reshape(4, D) if device == "cpu" else torch.empty(4, D),), {}


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("region", REGIONS)
def test_a_change_that_backward_repeats_is_refused_by_name(region: str, device: str) -> None:
    model, args, _ = made(region, device)
    with pytest.raises(CaptureError, match=REGIONS[region][1]) as error:
        trace(model, args)
    assert "checkpointing off" in str(error.value)


@pytest.mark.parametrize("region", REGIONS)
def test_eager_repeats_the_change(region: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules["autopart.tracer.trace"], "refuse_repeated_changes", lambda *_: None)
    assert any("buffer" in text for text in differences(lambda: made(region), modes=(True,)))


def test_a_region_that_nothing_trains_changes_state_once() -> None:
    def frozen() -> Any:
        model, args, kwargs = made("batch norm")
        return nn.Sequential(model.requires_grad_(False), nn.Linear(D, D)), args, kwargs

    assert differences(frozen, check=True) == []
