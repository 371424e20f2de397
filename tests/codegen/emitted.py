"""Run an emitted package by hand, stage after stage in this process, and compare it with the model it came from."""

from __future__ import annotations

import copy
import importlib
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from autopart.cluster import Cluster
from autopart.codegen import emit
from autopart.graph import Graph
from autopart.plan import Plan, StagePlan, Strategy
from autopart.runtime.structure import decode


def make_plan(graph: Graph, assignment: Mapping[str, int], stages: int) -> Plan:
    """A plan as the solver would give it, with made-up figures."""
    each = StagePlan((0,), 10, 1000, 4000, 1e-3, 2e-3, 1e-4, 2**30, 2**34)
    return Plan(
        model=graph.name,
        mode=graph.mode,
        strategy=Strategy(stages, 1, 1, 0, "gpipe", 1, graph.microbatch_size),
        status="optimal",
        step_time_s=0.01,
        lower_bound_s=0.01,
        gap=0.0,
        stopped_by="proof",
        per_stage=(each,) * stages,
        balance=1.0,
        baselines=(),
        assignment=dict(assignment),
        signature="0" * 64,
        granularity="operator",
        optimizer="sgd",
        dtype="float32",
        cluster=Cluster.parse("CPU").to_data(),
    )


def random_cuts(graph: Graph, stages: int, seed: int) -> dict[str, int]:
    """A legal assignment with its cuts at random places of the program, inside blocks too."""
    calls = [n.name for n in graph.primary.calls]
    cuts = sorted(random.Random(seed).sample(range(1, len(calls)), stages - 1))
    return legal(graph, {name: sum(cut <= i for cut in cuts) for i, name in enumerate(calls)})


def scattered(graph: Graph, stages: int, seed: int) -> dict[str, int]:
    """A legal assignment that does not follow the program: each node goes anywhere its inputs allow."""
    generator = random.Random(seed)
    assignment: dict[str, int] = {}
    for node in graph.primary.calls:
        first = max((assignment[i.name] for i in node.all_input_nodes if i.name in assignment), default=0)
        assignment[node.name] = min(stages - 1, first + (generator.random() < 0.03))
    return legal(graph, assignment)


def legal(graph: Graph, wanted: Mapping[str, int]) -> dict[str, int]:
    """The nearest later assignment that keeps inseparable nodes together and lets no value flow back."""
    assignment = dict(wanted)
    changed = True
    while changed:
        changed = False
        for group in graph.primary.colocated:
            members = [name for name in group if name in assignment]
            last = max((assignment[name] for name in members), default=0)
            for name in members:
                changed |= assignment[name] != last
                assignment[name] = last
        for node in graph.primary.calls:
            first = max((assignment[i.name] for i in node.all_input_nodes if i.name in assignment), default=0)
            if assignment[node.name] < first:
                assignment[node.name] = first
                changed = True
    return assignment


class Package:
    """The stages of an emitted package, in this process.

    Args:
        folder: Where it was emitted.
        build: Whether to build the stages; else `anew` does, where the tensor ranks are known.
    """

    def __init__(self, folder: Path, build: bool = True) -> None:
        with _importing(folder):
            self.table = importlib.import_module("pipeline").PIPELINE
            self.collectives = importlib.import_module("runtime.collectives")
            self.stages: list[nn.Module] = [stage.module() for stage in self.table.stages if build]

    def anew(self) -> Package:
        """The same package with stages of its own."""
        other = copy.copy(self)
        other.stages = [stage.module() for stage in self.table.stages]
        return other

    def load(self, original: Mapping[str, torch.Tensor]) -> None:
        """Give every stage the model's weights, strictly, and check that no key is lost or invented."""
        own = [set(stage.state_dict()) for stage in self.stages]
        assert set().union(*own) == set(original), set().union(*own) ^ set(original)
        assert set(self.table.names) == set(original)
        for name, (stage, local) in self.table.names.items():
            assert local in own[stage], name
        for stage, keys in zip(self.stages, own, strict=True):
            stage.load_state_dict({k: original[k] for k in keys}, strict=True)

    def train(self, mode: bool) -> None:
        for stage in self.stages:
            stage.train(mode)

    def run(self, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """All values after the last stage; each boundary passes on only what the table says."""
        known: dict[str, torch.Tensor] = {}
        for index, (stage, spec) in enumerate(zip(self.stages, self.table.stages, strict=True)):
            arguments = [known[n] if n in known else inputs[n].clone() for n in spec.takes]
            results = stage(*arguments)
            assert len(results) == len(spec.gives)
            known |= dict(zip(spec.gives, results, strict=True))
            if index < len(self.table.boundaries):
                for value in self.table.boundaries[index]:
                    assert tuple(known[value.name].shape) == value.shape, value
                    assert known[value.name].dtype == value.dtype, value
                known = {v.name: known[v.name] for v in self.table.boundaries[index]}
        return {**inputs, **known}

    def gradients(self) -> dict[str, torch.Tensor | None]:
        """Original name -> gradient, summed over the stages that hold the weight."""
        place = {at: name for name, at in self.table.names.items()}
        total: dict[str, torch.Tensor | None] = {}
        for tie in self.table.ties:
            names = [place.get((s, local), local) for s, local in tie.copies]
            for s, local in tie.copies:
                place[s, local] = names[0]
        for index, stage in enumerate(self.stages):
            for name, parameter in stage.named_parameters():
                key = place.get((index, name), name)
                if parameter.grad is None:
                    total.setdefault(key, None)
                else:
                    seen = total.get(key)
                    total[key] = parameter.grad.clone() if seen is None else seen + parameter.grad
        return total


@contextmanager
def _importing(folder: Path) -> Iterator[None]:
    def forget() -> None:
        for name in list(sys.modules):
            if name in ("pipeline", "blocks", "constants", "runtime", "opaque") or name.startswith(
                ("stage_", "runtime.", "user_code")
            ):
                del sys.modules[name]

    forget()
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        sys.path.remove(str(folder))
        forget()


def check_equal(
    model: nn.Module,
    graph: Graph,
    assignment: Mapping[str, int],
    stages: int,
    folder: Path,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_of: Callable[[Any], torch.Tensor] | None = None,
    edit: Callable[[Path], None] | None = None,
    tolerance: float | None = None,
) -> Package:
    """Emit, load, run, and compare outputs, loss, every gradient and every buffer, in training and in evaluation.

    Args:
        loss_of: The scalar of the model's result that is trained on; `own_loss` by default.
        tolerance: Relative; 1e-5 by default, 1e-10 for a model in float64.
        edit: Changes the emitted files before they are read.
    """
    emit(graph, make_plan(graph, assignment, stages), folder)
    if tolerance is None:
        tolerance = 1e-10 if graph.dtype == torch.float64 else 1e-5
    if edit is not None:
        edit(folder)
    package = Package(folder)
    kwargs = dict(kwargs or {})
    reference = copy.deepcopy(model)
    inputs = named_inputs(graph, args, kwargs)
    for training in (True, False) if graph.training is not None else (False,):
        reference.train(training)
        package.load(reference.state_dict())
        package.train(training)
        for module in (reference, *package.stages):
            module.zero_grad(set_to_none=True)
        torch.manual_seed(0)
        expected = reference(*copy.deepcopy(args), **copy.deepcopy(kwargs))
        torch.manual_seed(0)
        values = package.run(inputs)
        actual = decode(package.table.result, [values[o.value] for o in package.table.outputs])
        compare(tensors_of(actual), tensors_of(expected), tolerance, "output")
        if graph.loss is not None:
            (loss_of or own_loss)(expected).backward()
            values[package.table.loss].backward()
            compare_gradients(package, reference, tolerance)
        buffers = {k: b for stage in package.stages for k, b in stage.named_buffers()}
        for name, buffer in reference.named_buffers():
            if name in buffers:
                compare([buffers[name]], [buffer], tolerance, name)
    return package


def compare_gradients(package: Package, reference: nn.Module, tolerance: float) -> None:
    found = package.gradients()
    aliases: dict[int, list[str]] = {}
    for name, parameter in reference.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    compared = 0
    # A gradient that is zero but for rounding is compared with the largest one, not with itself.
    floor = 1e-3 * max((p.grad.abs().max().item() for p in reference.parameters() if p.grad is not None), default=0.0)
    for parameter in reference.parameters():
        mine = [found[n] for n in aliases[id(parameter)] if n in found]
        assert mine, aliases[id(parameter)]
        given = [g for g in mine if g is not None]
        name = aliases[id(parameter)][0]
        if parameter.grad is None:
            assert not given or all(not g.any() for g in given), f"{name} has a gradient, the model's has none"
        else:
            assert given, f"{name} has no gradient"
            compare([sum(given[1:], given[0])], [parameter.grad], tolerance, f"gradient of {name}", floor)
        compared += 1
    assert compared == len(list(reference.parameters()))


def compare(
    actual: list[torch.Tensor], expected: list[torch.Tensor], tolerance: float, what: str, floor: float = 1e-12
) -> None:
    assert len(actual) == len(expected), what
    for a, b in zip(actual, expected, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype, f"{what}: {a.shape} {a.dtype}, expected {b.shape} {b.dtype}"
        if not b.numel():
            continue
        a, b = (t.detach().to(torch.complex128 if t.is_complex() else torch.float64) for t in (a, b))
        assert not a.isnan().any() and not b.isnan().any(), f"{what}: NaN"
        infinite = b.isinf()
        assert torch.equal(a[infinite], b[infinite]), what
        error = (a - b)[~infinite].abs().max().item() if (~infinite).any() else 0.0
        scale = b[~infinite].abs().max().item() if (~infinite).any() else 0.0
        assert error <= tolerance * max(scale, floor), f"{what}: off by {error / max(scale, 1e-30):.3g}"


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of a nested result, in order."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, Mapping):
        return [t for item in result.values() for t in tensors_of(item)]
    if isinstance(result, list | tuple):
        return [t for item in result for t in tensors_of(item)]
    if hasattr(result, "__dataclass_fields__"):
        return [t for name in result.__dataclass_fields__ for t in tensors_of(getattr(result, name))]
    return []


def stand_in(result: Any) -> torch.Tensor:
    """The sum over floating outputs of the mean of their squares."""
    found = [t.square().mean() for t in tensors_of(result) if t.is_floating_point()]
    return sum(found[1:], found[0])


def own_loss(result: Any) -> torch.Tensor:
    """The loss that the model returns, where it does: its `loss`, or a scalar that comes first; else the stand-in."""
    loss = result.get("loss") if isinstance(result, Mapping) else getattr(result, "loss", None)
    if loss is not None:
        return loss
    first = tensors_of(result)[0]
    return first if first.dim() == 0 and first.is_floating_point() else stand_in(result)


def named_inputs(graph: Graph, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, torch.Tensor]:
    roots = {"args": args, "kwargs": kwargs}
    return {spec.name: eval(spec.path, roots) for spec in graph.inputs}
