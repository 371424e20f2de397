"""What people split by hand, or by the tools they use, valued by the same scorer.

    uniform layers        layers by count
    balanced parameters   the largest stage's parameters are least: DeepSpeed's and accelerate's way
    balanced times        the largest stage's time is least, transfers unseen: what torchgpipe's block partition of
                          layer times comes near to (after Barany and Grolmusz, "Block partitions of sequences", 2015)
    PipeDream             the slowest of stages and transfers is fastest: PipeDream's dynamic program (Narayanan et al.,
                          SOSP 2019, section 3.1), without replicas

Each cuts the model between blocks, in program order; memory is seen by none of them, and reported.
"""

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
from autopart.solver.problem import Floats, Problem
from autopart.solver.reductions import condense
from autopart.solver.score import score
from autopart.units import format_bytes
from autopart.workload import Workload

ONE_DEVICE = "one device"
UNIFORM_LAYERS = "uniform layers"
BALANCED_PARAMETERS = "balanced parameters"
BALANCED_TIMES = "balanced times"
PIPEDREAM = "PipeDream"


def by_hand(lowered: Lowered, graph: Graph, costs: Costs, cluster: Cluster, workload: Workload) -> tuple[Baseline, ...]:
    """One device, and each of the ways above.

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
    none = "too few places to cut"
    return (
        valued(ONE_DEVICE, single, [0] * single.items),
        valued(UNIFORM_LAYERS, problem, layers, few),
        valued(BALANCED_PARAMETERS, problem, balanced_parameters(problem), none),
        valued(BALANCED_TIMES, problem, balanced_times(problem), none),
        valued(PIPEDREAM, problem, pipedream(problem), none),
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
    """Program order cut so that the largest stage's state is least."""
    size = np.zeros(problem.items)
    for users, held in zip(problem.users, problem.state_bytes, strict=True):
        size[users[0]] += held
    return _least_load(problem, np.broadcast_to(size, problem.work.shape), np.zeros_like(problem.transfer))


def balanced_times(problem: Problem) -> list[int] | None:
    """Program order cut so that the largest stage's time is least."""
    return _least_load(problem, problem.work, np.zeros_like(problem.transfer))


def pipedream(problem: Problem) -> list[int] | None:
    """Program order cut so that the slowest stage or transfer is fastest."""
    return _least_load(problem, problem.work, problem.transfer)


def _least_load(problem: Problem, work: Floats, transfer: Floats) -> list[int] | None:
    """Program order cut so that the largest of all stages' work and boundaries' transfers is least."""
    stages = problem.stages
    rule = dataclasses.replace(
        problem,
        work=work,
        fill=np.zeros_like(work),
        transfer=transfer,
        update=np.zeros_like(problem.update),
        sync=np.zeros_like(problem.sync),
        process=tuple(range(stages)),
        limits=np.full(stages, np.inf),
        repeat=1.0,
        fill_weight=0.0,
        hidden=True,
        idle=False,
        blocks=None,
    )
    return next(cut_order(rule, list(range(problem.items))), None)
