"""Why no plan fits, and which change would make one fit.

What is named is constructive: a change is only proposed after a plan that fits with it has been found.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable

import numpy as np

from autopart.cluster import Cluster
from autopart.costs import Costs
from autopart.errors import InfeasibleError
from autopart.graph import Graph
from autopart.runtime.schedules import SCHEDULES
from autopart.solver.granularity import block_groups
from autopart.solver.lowering import RESERVE_SHARE, Lowered, lower
from autopart.solver.pipeline import IN_FLIGHT
from autopart.solver.problem import Problem
from autopart.solver.reductions import condense
from autopart.solver.score import score
from autopart.solver.search import first_plan
from autopart.units import format_bytes
from autopart.workload import Workload

# How far the proposals go: memory up to this many times what there is, and as many devices.
MOST = 64
# The proposed memory is within this factor of the least that was found to suffice.
PRECISION = 1.02


def explain(
    graph: Graph, costs: Costs, cluster: Cluster, workload: Workload, lowered: Lowered, time_limit_s: float
) -> InfeasibleError:
    """The error to raise when it is proven that `lowered` has no assignment that fits."""
    deadline = time.monotonic() + time_limit_s
    problem = _between_blocks(graph, lowered)
    factor = _least(lambda f: _fits(_with_memory(problem, f), deadline), 1.0, float(MOST), PRECISION)
    devices = f"{problem.processes} x {cluster.devices[0].name}" if _alike(cluster) else f"{problem.processes} devices"
    message = f"{graph.name} does not fit on {devices} in {problem.stages} stages"
    changes = []
    if factor is not None:
        message += "; " + _worst(problem, factor, deadline)
        memory = max(d.memory_bytes for d in cluster.devices[: problem.processes])
        changes.append(
            f"{_rounded_up(memory * factor)} of memory on each device (of which {RESERVE_SHARE:.0%} is kept free)"
        )
    count = _devices_needed(graph, costs, cluster, workload, deadline)
    if count is not None:
        per_process = SCHEDULES[workload.schedule].stages_per_process
        changes.append(f"{count} devices of this kind, in {count * per_process} stages")
    rows = _rows_that_fit(problem, workload, deadline)
    if rows is not None:
        changes.append(f"microbatches of {rows} rows instead of {workload.microbatch_size}")
    hint = f"It fits with {', or with '.join(changes)}." if changes else _states(problem)
    return InfeasibleError(message, hint)


def _between_blocks(graph: Graph, lowered: Lowered) -> Problem:
    """Cuts between blocks where those suffice: proposals for a person need not be exact to the operator."""
    blocks = map(tuple, block_groups(graph, lowered.calls).values())
    united = condense(lowered.problem, [*lowered.groups, *blocks])[0]
    return united if united.items >= united.stages else condense(lowered.problem, lowered.groups)[0]


def _fits(problem: Problem, deadline: float) -> bool:
    return problem.items >= problem.stages and first_plan(problem, np.inf, deadline)[0] is not None


def _with_memory(problem: Problem, factor: float) -> Problem:
    return dataclasses.replace(problem, limits=problem.limits * factor)


def _least(enough: Callable[[float], bool], low: float, high: float, precision: float) -> float | None:
    """A factor that is enough, within `precision` of one that is not; None if `high` is not enough."""
    if not enough(high):
        return None
    while high > low * precision:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high


def _worst(problem: Problem, factor: float, deadline: float) -> str:
    """The device that lacks most in the least demanding plan found."""
    larger = _with_memory(problem, factor)
    plan, _ = first_plan(larger, np.inf, deadline)
    if plan is None:
        return "the time limit was reached before the least demanding split was found"
    result = score(larger, plan)
    worst = int((result.memory - problem.limits).argmax())
    need, limit = result.memory[worst], problem.limits[worst]
    stages = ", ".join(str(s) for s in problem.stages_of_process[worst])
    return (
        f"in the least demanding split found, device {worst} (stage {stages}) needs {format_bytes(need)} "
        f"and has {format_bytes(limit)} usable: {format_bytes(need - limit)} too little"
    )


def _devices_needed(graph: Graph, costs: Costs, cluster: Cluster, workload: Workload, deadline: float) -> int | None:
    """The fewest devices, all like the first, found to be enough."""
    if not _alike(cluster):
        return None
    per_process = SCHEDULES[workload.schedule].stages_per_process
    # torch's 1F1B fills the pipeline with a microbatch for each stage.
    filled = workload.schedule == "1f1b" and workload.mode == "training"
    most = min(MOST, workload.microbatches) if filled else MOST
    count = len(cluster.devices)
    while count < most:
        count = min(most, max(count + 1, count * 5 // 4))
        more = Cluster((cluster.devices[0],) * count, (0,) * count, cluster.inter_node, cluster.inter_node)
        lowered = lower(graph, costs, more, workload, count * per_process)
        problem = _between_blocks(graph, lowered)
        if problem.items < problem.stages:
            return None
        if _fits(problem, deadline):
            return count
    return None


def _rows_that_fit(problem: Problem, workload: Workload, deadline: float) -> int | None:
    """Half the rows, a quarter, ... in more microbatches of the same batch."""
    rows = workload.microbatch_size
    while rows % 2 == 0:
        rows //= 2
        if _fits(_with_rows(problem, workload, rows), deadline):
            return rows
    return None


def _with_rows(problem: Problem, workload: Workload, rows: int) -> Problem:
    """The problem with the batch in microbatches of so many rows: all that a microbatch keeps shrinks with them.

    But there are more of them, and more in flight: what is sent is kept for as many as before, in all, at most.
    """
    share, flying = rows / workload.microbatch_size, IN_FLIGHT[workload.schedule]
    before, after, stages = workload.microbatches, workload.global_batch // rows, problem.stages
    kept = np.array([[share * flying(after, s, stages) / flying(before, s, stages)] for s in range(stages)])
    blocks = problem.blocks
    if blocks is not None:
        blocks = dataclasses.replace(blocks, spared=blocks.spared * kept, peak=blocks.peak * share)
    return dataclasses.replace(
        problem,
        saved=problem.saved * kept,
        workspace=problem.workspace * share,
        receive=problem.receive * share * (after + 1) / (before + 1),
        blocks=blocks,
    )


def _rounded_up(size: float) -> str:
    """With two digits, and no less than the size."""
    return format_bytes(math.ceil(size / 2**30 * 100) / 100 * 2**30)


def _states(problem: Problem) -> str:
    total = format_bytes(float(problem.state_bytes.sum()))
    return f"Its state (parameters, gradients, optimizer) takes {total} in all; use larger devices, or a smaller model."


def _alike(cluster: Cluster) -> bool:
    return len({device.name for device in cluster.devices}) == 1
