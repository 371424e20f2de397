"""Which blocks a package can recompute, what the code of one that does looks like, and what it then keeps."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from emitted import Package, make_plan
from small_models import gpt2, llama
from torch import nn
from torch.utils.checkpoint import checkpoint

from autopart.blocks import spans
from autopart.codegen import emit
from autopart.codegen.recomputed import recomputable
from autopart.errors import InputFileError, UsageError
from autopart.graph import Graph
from autopart.plan import Plan
from autopart.tracer import trace


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * 2


class Block(nn.Module):
    """What its kind says, between two layers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, nn.Linear(8, 8), nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.kind == "frozen":
            with torch.no_grad():
                return self.second(self.first(x))
        if self.kind == "changes what it is given":
            x.mul_(0.5)
        if self.kind == "reads a value that the model changes":
            return x.tanh() * self.second.weight.sum()
        if self.kind == "reads a buffer that the model changes":
            x = x + self.seen
        x = self.first(x)
        if self.kind == "batch norm":
            x = self.norm(x)
        if self.kind == "counts":
            self.seen.add_(x.detach().mean(0))
        if self.kind == "a function of the user's":
            x = Twice.apply(x)
        if self.kind == "changes its own value":
            x = x.clone().mul_(3.0)
        if self.kind == "recomputes":
            return checkpoint(self.second, x, use_reentrant=False)
        return self.second(x)


class Model(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([Block("plain"), Block(kind), Block("plain")])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x) + 1.0
        y = self.blocks[1](x)
        if self.kind == "reads a value that the model changes":
            x.mul_(2.0)
            y = y + x
        if self.kind == "reads a buffer that the model changes":
            self.blocks[1].seen.add_(y.detach().mean(0))
        return self.blocks[2](y)


def traced(kind: str, **options: Any) -> tuple[nn.Module, Graph]:
    torch.manual_seed(0)
    model = Model(kind)
    return model, trace(model, (torch.randn(4, 8),), check=False, **options)


REASONS = {
    "batch norm": "changes 'blocks.1.norm",
    "counts": "changes 'blocks.1.seen'",
    "a function of the user's": "kept whole",
    "changes what it is given": "",
    "reads a value that the model changes": "",
    "reads a buffer that the model changes": "not one call of a module",
    "recomputes": "by itself",
    "frozen": "nothing of it is kept",
}


@pytest.mark.parametrize("kind", REASONS)
def test_what_cannot_be_recomputed_is_not_offered(kind: str) -> None:
    reasons = recomputable(traced(kind)[1], "1f1b")
    about = [reason for label, reason in reasons.items() if label == "blocks.1"]
    if REASONS[kind]:
        assert len(about) == 1 and about[0] is not None and REASONS[kind] in about[0]
    else:  # it is one block with what makes, and what changes, its value
        assert about == []
    assert reasons["blocks.2"] is None


@pytest.mark.parametrize("kind", ["plain", "changes its own value"])
def test_a_block_that_changes_nothing_outside_is_offered(kind: str) -> None:
    assert recomputable(traced(kind)[1], "1f1b")["blocks.1"] is None


def test_inference_and_split_backward_recompute_nothing() -> None:
    _, graph = traced("plain")
    assert all("zbv" in (reason or "") for reason in recomputable(graph, "zbv").values())
    _, graph = traced("plain", mode="inference")
    assert all("inference" in (reason or "") for reason in recomputable(graph, "1f1b").values())


def planned(graph: Graph, *recomputed: tuple[str, ...]) -> Plan:
    """A plan that recomputes these blocks in each stage; all nodes are in stage 0."""
    assignment = dict.fromkeys((node.name for node in graph.primary.calls), 0)
    plan = make_plan(graph, assignment, len(recomputed))
    each = tuple(dataclasses.replace(s, recomputed=r) for s, r in zip(plan.per_stage, recomputed, strict=True))
    return dataclasses.replace(plan, per_stage=each)


def test_plans_that_recompute_what_they_cannot_are_refused(tmp_path: Path) -> None:
    _, graph = traced("counts")
    with pytest.raises(UsageError, match=r"'blocks.1' in stage 0: it changes 'blocks.1.seen'"):
        emit(graph, planned(graph, ("blocks.0", "blocks.1")), tmp_path / "a")
    with pytest.raises(UsageError, match=r"'blocks.7' in stage 0: the model has no such block"):
        emit(graph, planned(graph, ("blocks.7",)), tmp_path / "b")
    _, graph = traced("plain")
    plan = planned(graph, ("blocks.0",), ("blocks.2",))
    calls = [node.name for node in graph.primary.calls]
    cut = {name: int(i >= len(calls) - 3) for i, name in enumerate(calls)}  # inside blocks.2
    with pytest.raises(UsageError, match=r"'blocks.2' in stage 1: it is not in stage 1 as a whole"):
        emit(graph, dataclasses.replace(plan, assignment=cut), tmp_path / "c")


def test_plans_name_each_block_once_and_in_training_only() -> None:
    _, graph = traced("plain")
    plan = planned(graph, ("blocks.0",), ("blocks.2",))
    assert Plan.from_json(plan.to_json()) == plan
    with pytest.raises(InputFileError, match=r"'blocks.0' stands twice"):
        Plan.from_json(planned(graph, ("blocks.0",), ("blocks.0",)).to_json())
    with pytest.raises(InputFileError, match="training only"):
        Plan.from_json(dataclasses.replace(plan, mode="inference").to_json())
    old = plan.to_json().replace('"recomputed"', '"again"')
    with pytest.raises(InputFileError, match="per_stage"):
        Plan.from_json(old)


def text_of(folder: Path) -> str:
    return "".join(path.read_text() for path in sorted(folder.glob("*.py")))


def test_code_says_what_is_recomputed(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, args, kwargs = llama()
    graph = trace(model, args, kwargs, check=False)
    layers = [f"model.layers.{i}" for i in range(4)]
    emit(graph, planned(graph, tuple(layers)), tmp_path / "all")
    text = text_of(tmp_path / "all")
    assert "from torch.utils.checkpoint import checkpoint" in text
    assert "for layer in self.layers:" in text
    assert "inputs_embeds = checkpoint(layer, inputs_embeds, cos, sin, causal_mask, use_reentrant=False)" in text
    assert "Backward computes again, instead of keeping what they save: model.layers.0-3." in text
    emit(graph, planned(graph, tuple(layers[:2])), tmp_path / "two")
    text = text_of(tmp_path / "two")
    assert "for layer in self.layers[:2]:" in text and "for layer in self.layers[2:]:" in text
    assert text.count("checkpoint(") == 1
    emit(graph, planned(graph, ()), tmp_path / "none")
    assert "checkpoint" not in text_of(tmp_path / "none")


def test_elements_of_a_sequential_are_recomputed_one_by_one(tmp_path: Path) -> None:
    torch.manual_seed(0)
    blocks = [nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4)]
    model, args = nn.Sequential(nn.Linear(8, 8), nn.Sequential(*blocks)), (torch.randn(4, 8),)
    graph = trace(model, args, check=False)
    emit(graph, planned(graph, ("1.0", "1.1", "1.3")), tmp_path / "out")
    text = text_of(tmp_path / "out")
    assert text.count("checkpoint(") == 2, text  # a loop over the first two, and the last one


def test_numbers_of_blocks_are_written_together() -> None:
    assert spans(["h.0", "h.1", "h.2", "h.4", "norm", "3", "4", "a.1@2"]) == "h.0-2, h.4, norm, 3-4, a.1@2"


def kept_bytes(package: Package, inputs: dict[str, torch.Tensor]) -> int:
    """Bytes that are alive after a forward pass in training and were not before it, by the allocator's own events."""
    package.train(True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as run:
        values = package.run(inputs)
    alive = sum(event.nbytes() for event in run.profiler.kineto_results.events() if event.name() == "[memory]")
    del values
    return alive


def test_what_is_kept_falls_with_every_block(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, args, kwargs = gpt2(dropout=0.0)
    graph = trace(model, args, kwargs, check=False)
    blocks = tuple(f"transformer.h.{i}" for i in range(3))
    kept = []
    for count in range(4):
        emit(graph, planned(graph, blocks[:count]), tmp_path / str(count))
        package = Package(tmp_path / str(count))
        inputs = {spec.name: kwargs[spec.path.split("'")[1]] for spec in graph.inputs}
        kept.append(kept_bytes(package, inputs))
    falls = [before - after for before, after in pairwise(kept)]
    assert min(falls) > 0.2 * kept[0] and max(falls) <= 1.05 * min(falls), kept
