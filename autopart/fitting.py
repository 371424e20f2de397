"""Stages that fit: the solver counts memory by linear rules, here every process is counted action by action.

Where a process would hold more than its device has, the solver is asked again with that much less to spend.
"""

from __future__ import annotations

import time
from dataclasses import replace
from math import inf
from typing import Any

from autopart.cluster import Cluster
from autopart.costs import Costs
from autopart.errors import InfeasibleError, UsageError
from autopart.graph import Graph
from autopart.plan import Plan
from autopart.simulator.actions import programs
from autopart.simulator.memory import plan_memory
from autopart.solver import RESERVE_SHARE, solve, usable_bytes
from autopart.workload import Workload

TRIES = 4
# What is held back beyond the bytes that were too many: another cut has other bytes.
MARGIN = 1.05
# Of `solver.solve`, by default.
TIME_LIMIT_S = 30.0


def solve_fitting(graph: Graph, costs: Costs, cluster: Cluster, workload: Workload, **options: Any) -> Plan:
    """As `solver.solve`, with the memory of each process as the simulator counts it.

    Args:
        options: Further arguments of `solver.solve`; all tries have one deadline. After it another try is a first plan.

    Raises:
        UsageError: Also where torch's schedule does not run so many microbatches.
        InfeasibleError: Also where plans by the linear rules still do not fit after some tries.
    """
    limit = options.get("time_limit_s", TIME_LIMIT_S)
    options["deadline"] = min(options.get("deadline", inf), time.monotonic() + limit)
    withheld = 0.0
    for _ in range(TRIES):
        plan = solve(graph, costs, _with_less(cluster, withheld), workload, **options)
        _check_runs(plan)
        plan = counted(replace(plan, cluster=cluster.to_data()), graph, costs, cluster)
        excess = max(stage.peak_memory_bytes - stage.memory_limit_bytes for stage in plan.per_stage)
        if excess <= 0:
            return plan
        withheld += MARGIN * excess
    raise InfeasibleError(
        f"{graph.name}: no plan in {plan.strategy.stages} stages was found that fits when memory is counted by action",
        "Name more or larger devices, or give smaller microbatches.",
    )


def _check_runs(plan: Plan) -> None:
    """Refuse what torch's schedule will not run."""
    strategy = plan.strategy
    if plan.mode == "inference":
        return
    try:
        programs(strategy.schedule, strategy.stages, strategy.microbatches)
    except ValueError as error:
        raise UsageError(
            f"{strategy.stages} stages cannot run {strategy.microbatches} microbatches under schedule "
            f"{strategy.schedule}: {error}",
            "Ask for another number of microbatches, or for another schedule.",
        ) from error


def counted(plan: Plan, graph: Graph, costs: Costs, cluster: Cluster) -> Plan:
    """The plan with the memory of its processes in training; in inference it stays as the solver counts it."""
    if plan.mode == "inference":
        return plan
    recomputed = [label for stage in plan.per_stage for label in stage.recomputed]
    processes = plan_memory(graph, costs, plan.assignment, plan.strategy, recomputed, plan.optimizer)
    of_stage = {number: process for process in processes for number in process.stages}
    per_stage = tuple(
        replace(
            stage,
            peak_memory_bytes=of_stage[number].peak_bytes,
            memory_limit_bytes=usable_bytes(cluster.devices[stage.devices[0]]),
            memory=of_stage[number].stages[number],
        )
        for number, stage in enumerate(plan.per_stage)
    )
    return replace(plan, per_stage=per_stage)


def _with_less(cluster: Cluster, withheld: float) -> Cluster:
    """The cluster whose devices let plans use so many bytes less."""
    if not withheld:
        return cluster
    less = int(withheld / (1 - RESERVE_SHARE))
    devices = tuple(replace(device, memory_bytes=max(0, device.memory_bytes - less)) for device in cluster.devices)
    return replace(cluster, devices=devices)
