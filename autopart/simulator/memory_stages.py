"""From a graph and its assignment to what each stage runs and what crosses its boundaries, as tensors."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from torch import fx

from autopart.blocks import find_blocks
from autopart.costs import Allocations
from autopart.graph import Graph
from autopart.simulator.memory_program import StageProgram


def stage_programs(
    graph: Graph, allocations: Allocations, assignment: Mapping[str, int], stages: int, recomputed: Collection[str] = ()
) -> tuple[StageProgram, ...]:
    """The part of each stage.

    Args:
        assignment: Call -> stage.
        recomputed: Labels of blocks that backward runs again (see `StagePlan.recomputed`).
    """
    calls = graph.primary.calls
    home = {node: assignment[node.name] for node in calls}
    loss = _loss(graph, allocations)
    carrying = with_gradient(allocations, [node.name for node in calls], loss)
    crossing = _crossing(graph, allocations, home, stages)
    state = frozenset(
        tensor
        for node in graph.primary.graph.nodes
        if node.op == "get_attr"
        for tensor in allocations.values[node.name]
    )
    inputs = {node: allocations.values[node.name][0] for node in graph.primary.graph.nodes if node.op == "placeholder"}
    names: list[list[str]] = [[] for _ in range(stages)]
    for node in calls:
        names[home[node]].append(node.name)
    regions = [*allocations.regions, *_blocks(graph, recomputed)]
    programs = []
    for s in range(stages):
        own = set(names[s])
        sent = crossing[s] if s < stages - 1 else ()
        targets = tuple(t for t in sent if t in carrying) if s < stages - 1 else loss
        programs.append(
            StageProgram(
                nodes=tuple(names[s]),
                state=state,
                inputs=tuple(t for node, t in inputs.items() if any(home.get(user) == s for user in node.users)),
                received=crossing[s - 1] if s else (),
                sent=sent,
                targets=targets,
                regions=tuple(region for region in regions if own.issuperset(region)),
            )
        )
    return tuple(programs)


def with_gradient(allocations: Allocations, calls: list[str], targets: Collection[int]) -> set[int]:
    """The tensors to which a gradient comes from `targets`."""
    found = set(targets)
    for name in reversed(calls):
        node = allocations.nodes.get(name)
        if node is not None and not found.isdisjoint(node.results):
            found.update(gradient.tensor for gradient in node.gradients)
    return found


def _loss(graph: Graph, allocations: Allocations) -> tuple[int, ...]:
    if graph.training is None or graph.loss is None:
        return ()
    loss = _outputs(graph)[graph.loss]
    return allocations.values[loss.name]


def _outputs(graph: Graph) -> tuple[fx.Node, ...]:
    return tuple(next(iter(reversed(graph.primary.graph.nodes))).args[0])  # type: ignore[arg-type]


def _crossing(
    graph: Graph, allocations: Allocations, home: Mapping[fx.Node, int], stages: int
) -> list[tuple[int, ...]]:
    """The tensors that cross from stage s to s + 1: those made up to s and read after it; results go to the last."""
    outputs = set(_outputs(graph))
    found: list[dict[int, None]] = [{} for _ in range(stages - 1)]
    for node, made in home.items():
        tensors = allocations.values[node.name]
        if len(tensors) != 1 or isinstance(node.meta["val"], list | tuple):
            continue
        readers = [home[user] for user in node.users if user in home]
        last = max([*readers, stages - 1 if node in outputs else made])
        for s in range(made, last):
            found[s][tensors[0]] = None
    return [tuple(tensors) for tensors in found]


def _blocks(graph: Graph, labels: Collection[str]) -> list[tuple[str, ...]]:
    if not labels:
        return []
    members: dict[str, list[str]] = {label: [] for label in labels}
    for name, label in find_blocks(graph, graph.primary).items():
        if label in members:
            members[label].append(name)
    return [tuple(names) for names in members.values()]
