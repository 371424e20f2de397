"""What people split by hand, valued by the same scorer: one device, equal numbers of layers, equal parameters."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from autopart.cluster import Cluster
from autopart.costs import Costs
from autopart.graph import Graph
from autopart.plan import Baseline
from autopart.solver.granularity import block_groups, is_layer
from autopart.solver.lowering import Lowered, lower
from autopart.solver.prefixes import cut_order
from autopart.solver.problem import Problem
from autopart.solver.reductions import condense
from autopart.solver.score import score
from autopart.units import format_bytes
from autopart.workload import Workload

ONE_DEVICE = "one device"
UNIFORM_LAYERS = "uniform layers"
BALANCED_PARAMETERS = "balanced parameters"


def by_hand(lowered: Lowered, graph: Graph, costs: Costs, cluster: Cluster, workload: Workload) -> tuple[Baseline, ...]:
    """One device; blocks by count; parameters in equal shares. A split by hand is made between blocks.

    Args:
        lowered: The graph in as many stages as the splits by hand shall have.
    """
    stages = lowered.problem.stages
    blocks = block_groups(graph, lowered.calls)
    problem, united = condense(lowered.problem, [*lowered.groups, *map(tuple, blocks.values())])
    items = list(dict.fromkeys(united[calls[0]] for label, calls in blocks.items() if is_layer(label)))
    alone = dataclasses.replace(workload, schedule="gpipe")
    single = lower(graph, costs, cluster, alone, 1).problem
    layers = uniform_layers(problem, items) if items else None
    few = f"{len(items)} layers are not enough for {stages} stages"
    return (
        valued(ONE_DEVICE, single, [0] * single.items),
        valued(UNIFORM_LAYERS, problem, layers, few),
        valued(BALANCED_PARAMETERS, problem, balanced_parameters(problem), "too few places to cut"),
    )


def valued(name: str, problem: Problem, assignment: Sequence[int] | None, reason: str | None = None) -> Baseline:
    """Score a split by hand; without one, the reason why there is none."""
    if assignment is None:
        return Baseline(name, None, False, reason)
    result = score(problem, assignment)
    over = result.memory - problem.limits
    if result.fits(problem):
        return Baseline(name, result.step_s, True)
    worst = int(over.argmax())
    need, limit = format_bytes(result.memory[worst]), format_bytes(problem.limits[worst])
    return Baseline(name, result.step_s, False, f"device {worst} would need {need} of {limit}")


def uniform_layers(problem: Problem, blocks: Sequence[int]) -> list[int] | None:
    """Blocks by count: block i of n goes to stage i K // n; what is before, between and after goes with its inputs.

    Args:
        problem: With each block united to one item.
        blocks: Those items, in the order of the model.
    """
    if len(blocks) < problem.stages:
        return None
    asked = {item: i * problem.stages // len(blocks) for i, item in enumerate(blocks)}
    stage = [0] * problem.items
    for item in range(problem.items):
        stage[item] = max([asked.get(item, 0), *(stage[p] for p in problem.predecessors[item])])
    # A call between blocks that only later blocks read (a mask, say) belongs to its first reader.
    for item in reversed(range(problem.items)):
        if item not in asked and not problem.predecessors[item] and problem.successors[item]:
            stage[item] = min(stage[s] for s in problem.successors[item])
    return stage if len(set(stage)) == problem.stages else None


def balanced_parameters(problem: Problem) -> list[int] | None:
    """Program order cut so that the largest stage's state is least, as DeepSpeed's and accelerate's splits do."""
    size = np.zeros(problem.items)
    for users, held in zip(problem.users, problem.state_bytes, strict=True):
        size[users[0]] += held
    work = np.broadcast_to(size, problem.work.shape)
    by_size = dataclasses.replace(
        problem,
        work=work,
        fill=np.zeros_like(work),
        transfer=np.zeros_like(problem.transfer),
        update=np.zeros_like(problem.update),
        sync=np.zeros_like(problem.sync),
        limits=np.full(problem.processes, np.inf),
        repeat=1.0,
    )
    return next(cut_order(by_size, list(range(problem.items))), None)
