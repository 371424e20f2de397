"""Submodules that the user put in evaluation mode stay so; a model that is in it as a whole trains as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from oracle import flat_tensors, run
from torch import nn

import autopart
from autopart.errors import CaptureError
from autopart.tracer import trace
from autopart.verification import verify

D = 4


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.frozen, self.drop = nn.Linear(D, D), nn.BatchNorm1d(D), nn.Dropout(0.5)
        self.b, self.bn = nn.Linear(D, D), nn.BatchNorm1d(D)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bn(self.b(self.drop(self.frozen(self.a(x)))))


def net() -> Net:
    torch.manual_seed(0)
    model = Net()
    model.frozen.running_mean.copy_(torch.arange(D))
    model.frozen.eval()
    return model


def rows() -> torch.Tensor:
    return torch.linspace(-1, 1, 8 * D).reshape(8, D) ** 3


def test_a_frozen_batch_norm_stays_frozen_and_is_noted() -> None:
    model, twin = net(), net()
    graph = trace(model, (rows(),))
    (note,) = (n for n in graph.notes if "evaluation mode" in n)
    assert note.startswith("frozen stays") and "model.train()" in note
    torch.manual_seed(1)
    wanted = flat_tensors(twin(rows()))
    torch.manual_seed(1)
    assert graph.training is not None
    got = run(graph, graph.training, [rows()])
    assert torch.allclose(wanted[0], got[0])
    for name, buffer in twin.named_buffers():
        assert torch.allclose(buffer, model.get_buffer(name)), name
    assert not model.frozen.training and model.bn.training and model.training


def test_a_package_keeps_it_frozen(tmp_path: Path) -> None:
    model = net()
    options: Any = {"example_inputs": (rows(),), "stages": 2, "microbatches": 2, "granularity": "operator"}
    folder = autopart.partition(model, "2xCPU", **options).emit(tmp_path / "package")
    report = verify(folder, model, (rows(),), processes=1)
    assert report.passed, str(report)
    # The comparison can fail: a model that trains all of it is another one.
    assert not verify(folder, model.train(), (rows(),), processes=1).passed


def test_a_model_in_evaluation_mode_trains_as_a_whole() -> None:
    model = net().eval()
    graph = trace(model, (rows(),))
    assert graph.training is not None
    flags = [n.args[5] for n in graph.training.calls if "batch_norm" in str(n.target)]
    assert flags == [True, True]
    assert not any("evaluation mode" in n for n in graph.notes)
    assert not any(m.training for m in model.modules())


def test_what_a_models_own_train_keeps_needs_no_note() -> None:
    class Own(Net):
        def train(self, mode: bool = True) -> Own:
            super().train(mode)
            self.frozen.eval()
            return self

    graph = trace(Own().train(), (rows(),))
    assert graph.training is not None
    assert [n.args[5] for n in graph.training.calls if "batch_norm" in str(n.target)] == [False, True]
    assert not any("evaluation mode" in n for n in graph.notes)


def test_a_frozen_part_of_what_is_kept_whole_is_refused() -> None:
    class Branch(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(D)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.norm(x) if x.sum() > 0 else x

    model = nn.Sequential(nn.Linear(D, D), Branch())
    model[1].norm.eval()
    with pytest.raises(CaptureError, match=r"1\.norm in it is in evaluation mode"):
        trace(model, (rows(),))
