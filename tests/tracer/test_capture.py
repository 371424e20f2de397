"""A captured graph computes what the model computes, in both modes, over two steps."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from capture_hazards import HAZARDS
from oracle import differences

from autopart.errors import CaptureError
from autopart.tracer import trace
from autopart.tracer.interpreter import run_capture

CASES = sorted((Path(__file__).parents[3] / "shared" / "cases").glob("h*.py"))
# Weights used twice under autocast: eager sums their two gradients in bfloat16.
COARSE = {"context_autocast_switched_off_inside", "context_no_grad_inside_autocast", "h16_mixed_dtype_boundary"}
# Only running the graph tells that these took another road while they were exported.
NEEDS_CHECK = {"another_value_when_exported"}


def load(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("path", CASES, ids=lambda p: p.stem)
def test_hard_small_models_equal_eager(path: Path) -> None:
    assert differences(load(path).make, coarse=path.stem in COARSE) == []


@pytest.mark.parametrize("name", HAZARDS)
def test_no_hazard_is_lost(name: str) -> None:
    assert differences(HAZARDS[name], coarse=name in COARSE, check=name in NEEDS_CHECK) == []


@pytest.mark.parametrize("name", sorted(HAZARDS)[::6])
def test_tracing_leaves_the_model_as_it_was(name: str) -> None:
    model, args, kwargs = HAZARDS[name]()
    model.eval()
    next(model.children()).train()
    state = {n: t.detach().clone() for n, t in [*model.named_parameters(), *model.named_buffers()]}
    flags = {n: m.training for n, m in model.named_modules()}
    attributes = {n: {k: id(v) for k, v in vars(m).items()} for n, m in model.named_modules()}
    torch.manual_seed(3)
    random_before = torch.random.get_rng_state()
    trace(model, args, kwargs)
    assert {n: m.training for n, m in model.named_modules()} == flags
    assert {n: {k: id(v) for k, v in vars(m).items()} for n, m in model.named_modules()} == attributes
    assert all(torch.equal(t, state[n]) for n, t in [*model.named_parameters(), *model.named_buffers()])
    assert torch.equal(torch.random.get_rng_state(), random_before)
    assert all(p.grad is None for p in model.parameters())


def test_what_cannot_be_captured_is_refused_with_its_reason_and_line() -> None:
    class Branch(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.a(x).sum() > 0:  # the line that is named
                return x
            return -x

    with pytest.raises(CaptureError) as error:
        trace(Branch(), (torch.ones(2, 4),))
    assert error.value.exit_status == 6
    assert "the line that is named" in str(error.value) and "submodule" in str(error.value)


def test_what_is_kept_whole_is_noted_with_its_reason() -> None:
    model, args, kwargs = HAZARDS["item_as_a_factor"]()
    graph = trace(model, args, kwargs)
    (note,) = (n for n in graph.notes if n.startswith("inner"))
    assert "kept whole" in note and "hazards.py" in note
    (call,) = {(c.kind, c.path) for c in graph.opaque.values()}
    assert call == ("module", "inner")


class Counting(torch.nn.Module):
    """Counts whole numbers as transformers does: as such where there is a GPU or no data, in float32 on a CPU."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = (x > 0).sum(-1)
        numbers = numbers.float() if x.device.type == "cpu" else numbers.int()
        return torch.histc(numbers, bins=4, min=0, max=3).cumsum(0, dtype=torch.int32)


def test_what_counts_whole_numbers_on_meta_runs_on_a_cpu() -> None:
    x = torch.randn(8, 3)
    graph = trace(Counting(), (x.to("meta"),), mode="inference", batch_dims={"x": None})
    (found,) = run_capture(graph, graph.evaluation, [x])
    assert torch.equal(found, Counting()(x))
