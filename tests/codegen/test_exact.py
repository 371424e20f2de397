"""A package computes what the model computes, wherever it is cut."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from emitted import check_equal, random_cuts, scattered
from small_models import DETERMINISTIC, MODELS, in_double
from torch import nn

from autopart.tracer import trace

CASES = sorted((Path(__file__).parents[3] / "shared" / "cases").glob("h*.py"))


@pytest.mark.parametrize("name", MODELS)
def test_packages_equal_the_model_when_cut_at_random_places(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    # torch has no grouped matrix product in float64.
    model, args, kwargs = MODELS[name]() if name == "mixtral" else in_double(MODELS[name]())
    graph = trace(model, args, kwargs, check=False)
    for stages, seed in ((1, 0), (2, 1), (3, 2), (4, 3)):
        check_equal(model, graph, random_cuts(graph, stages, seed), stages, tmp_path / f"cut{seed}", args, kwargs)


@pytest.mark.parametrize("name", DETERMINISTIC)
def test_packages_equal_the_model_when_operations_are_scattered(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, args, kwargs = in_double(DETERMINISTIC[name]())
    graph = trace(model, args, kwargs, check=False)
    for stages, seed in ((2, 0), (4, 1)):
        check_equal(model, graph, scattered(graph, stages, seed), stages, tmp_path / f"cut{seed}", args, kwargs)


@pytest.mark.parametrize("name", ["llama", "unet"])
def test_inference_packages_equal_the_model(name: str, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, args, kwargs = in_double(MODELS[name]())
    kwargs.pop("labels", None)
    graph = trace(model, args, kwargs, mode="inference", check=False)
    check_equal(model, graph, random_cuts(graph, 3, 0), 3, tmp_path / "out", args, kwargs)


@pytest.mark.parametrize("case", CASES, ids=lambda path: path.stem)
def test_hard_models_are_exact_at_two_cuts(case: Path, tmp_path: Path) -> None:
    model, args, kwargs = _load(case).make()[:3]
    graph = trace(model, args, kwargs, check=False)
    for stages, seed in ((2, 1), (3, 2)):
        check_equal(model, graph, random_cuts(graph, stages, seed), stages, tmp_path / f"cut{seed}", args, kwargs)


def _load(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


class Constants(nn.Module):
    """Each layer is followed by tensors of the code: all stages number them in the same module."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, layer in enumerate(self.layers):
            y = layer(x)
            x = y * torch.tensor([1.5, -0.5])[i % 2] + y[:, torch.tensor([i, 7 - i])].sum(1, keepdim=True) + 0.1 * i
        return x


@pytest.mark.parametrize("stages", [2, 4])
def test_stages_keep_their_own_constants_apart(stages: int, tmp_path: Path) -> None:
    torch.manual_seed(1)
    model, args, kwargs = in_double((Constants(), (torch.randn(4, 8),), {}))
    graph = trace(model, args, kwargs, check=False)
    for seed in range(2):
        check_equal(model, graph, random_cuts(graph, stages, seed), stages, tmp_path / f"out{seed}", args, kwargs)
