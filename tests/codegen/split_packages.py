"""Emit the package of a tensor split, run its stages on every rank (threads), and compare with the unsplit graph."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from emitted import Package, make_plan
from torch import nn

from autopart.codegen import emit
from autopart.graph import Graph
from autopart.plan import Layouts
from autopart.runtime.interface import Shard
from autopart.runtime.shards import cut, join
from autopart.sharding import Choice, written
from tests.sharding.ranks import ThreadRanks
from tests.sharding.running import own_copy, run_capture

TOLERANCE = 1e-9


class SplitPackage:
    """One emitted package, as every rank has it.

    Args:
        folder: Where it was emitted.
    """

    def __init__(self, folder: Path) -> None:
        self.package = Package(folder, build=False)
        self.table = self.package.table
        self.ranks = ThreadRanks(self.table.tensor)
        # The package's own copy of the runtime, which its stages call.
        self.package.collectives.use(self.ranks)

    def run(self, weights: Mapping[str, torch.Tensor], inputs: Mapping[str, torch.Tensor], training: bool) -> list[Any]:
        """Values, gradients and state of each rank, by original names."""

        def program(rank: int) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
            mine = self.package.anew()
            mine.load({name: self._own(name, tensor, rank) for name, tensor in weights.items()})
            mine.train(training)
            values = mine.run(inputs)
            if self.table.loss is not None:
                values[self.table.loss].backward()
            state = {k: v.detach() for stage in mine.stages for k, v in stage.state_dict().items()}
            results = {o.path: values[o.value] for o in self.table.outputs if training or o.in_evaluation}
            return results, mine.gradients(), state

        return self.ranks.run(program)

    def _own(self, name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
        shard = self.table.shards.get(name)
        return tensor if shard is None else cut(tensor, shard.dim, shard.parts, rank, self.table.tensor)


def joined(values: list[torch.Tensor | None], shard: Shard | None, what: str) -> torch.Tensor | None:
    """The whole tensor from all ranks; what is whole on every rank must be equal there."""
    if any(v is None for v in values):
        assert all(v is None for v in values), what
        return None
    if shard is not None:
        return join(values, shard.dim, shard.parts)
    for other in values[1:]:
        torch.testing.assert_close(other, values[0], rtol=TOLERANCE, atol=TOLERANCE, msg=f"{what} differs among ranks")
    return values[0]


def whole(graph: Graph, inputs: Mapping[str, torch.Tensor], training: bool) -> tuple[dict, dict, dict]:
    """Results by path, gradients and state by name, of the graph that was not split."""
    state = {key: own_copy(entry.tensor) for key, entry in graph.state.items()}
    capture = graph.training if training else graph.evaluation
    found = run_capture(graph, capture, state, [x.clone() for x in inputs.values()])
    if graph.loss is not None:
        found[graph.loss].backward()
    results = {spec.path: v for spec, v in zip(graph.outputs, found, strict=True) if v is not None}
    names = {n: state[e.key] for e in graph.state.values() if e.persistent and e.kind != "constant" for n in e.names}
    gradients = {n: t.grad for n, t in names.items() if t.requires_grad}
    return results, gradients, {n: t.detach() for n, t in names.items()}


def emit_split(
    graph: Graph, choice: Choice, t: int, assignment: Mapping[str, int], stages: int, folder: Path, **strategy: Any
) -> None:
    """Emit the package of a choice, from a plan that holds it as text.

    Args:
        assignment: Of the local graph's nodes.
        strategy: Further fields of the plan's strategy.
    """
    plan = make_plan(graph, assignment, stages)
    layouts = Layouts(*written(graph, choice), (), 0.0, 0.0, 0)
    strategy = dataclasses.replace(plan.strategy, tensor=t, **strategy)
    emit(graph, dataclasses.replace(plan, strategy=strategy, layouts=layouts), folder)


def check_split(
    model: nn.Module,
    graph: Graph,
    choice: Choice,
    t: int,
    assignment: Mapping[str, int],
    stages: int,
    folder: Path,
    inputs: Mapping[str, torch.Tensor],
) -> SplitPackage:
    """Emit the package of a choice, run it, and compare results, every gradient and all state, in both modes."""
    emit_split(graph, choice, t, assignment, stages, folder)
    package = SplitPackage(folder)
    weights = {k: v.detach().clone() for k, v in model.state_dict().items()}
    for training in (True, False) if graph.training is not None else (False,):
        found = package.run(weights, inputs, training)
        results, gradients, state = whole(graph, inputs, training)
        for output in package.table.outputs:
            if output.path in results:
                shard = output.shard if training else None
                value = joined([r[0][output.path] for r in found], shard, output.path)
                close({output.path: value}, {output.path: results[output.path]})
        close(_joined(package, [r[2] for r in found]), state)
        if graph.loss is not None:
            compare_gradients(package, [r[1] for r in found], model, gradients)
    return package


def compare_gradients(
    package: SplitPackage, ranks: list[dict[str, Any]], model: nn.Module, wanted: dict[str, torch.Tensor | None]
) -> None:
    """Every parameter of the model, under whichever of its names the package counts it."""
    found = _joined(package, ranks)
    aliases: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        aliases.setdefault(id(parameter), []).append(name)
    mine: dict[str, torch.Tensor | None] = {}
    for names in aliases.values():
        (name,) = [n for n in names if n in found]
        mine[names[0]] = found[name]
    assert len(mine) == len(list(model.parameters()))
    close(mine, {name: wanted[name] for name in mine})


def _joined(package: SplitPackage, ranks: list[dict[str, Any]]) -> dict[str, torch.Tensor | None]:
    assert all(r.keys() == ranks[0].keys() for r in ranks)
    return {n: joined([r[n] for r in ranks], package.table.shards.get(n), n) for n in ranks[0]}


def close(found: Mapping[str, torch.Tensor | None], wanted: Mapping[str, torch.Tensor | None]) -> None:
    """Every tensor equal, measured against the largest of its kind where it is zero but for rounding."""
    assert found.keys() == wanted.keys()
    floats = (v.detach() for v in wanted.values() if v is not None and v.is_floating_point())
    largest = max((float(v.abs().max()) for v in floats), default=0.0)
    for name, b in wanted.items():
        a = found[name]
        if a is None or b is None:
            assert all(x is None or not x.any() for x in (a, b)), name
            continue
        assert a.shape == b.shape and a.dtype == b.dtype, name
        a, b = a.detach().double(), b.detach().double()
        error, size = float((a - b).abs().max()), max(float(b.abs().max()), 1e-6 * largest)
        assert error <= TOLERANCE * size, f"{name}: off by {error / max(size, 1e-30):.3g}"
