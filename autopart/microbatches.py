"""How many microbatches the batch is cut into: every count is estimated from one capture, and the fastest is taken.

The captured one is kept if it is as fast, as far as the estimates can tell. Many small microbatches keep the pipeline
full; few large ones keep the kernels long. One capture tells what both are worth (`profiler.growth`); what is chosen is
captured and planned anew, so that the plan does not rest on the estimate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import inf

from autopart.cluster import Cluster
from autopart.costs import Costs, NodeTime
from autopart.errors import UsageError
from autopart.graph import Graph
from autopart.profiler import Known, Outcomes, profile_rows
from autopart.runtime.schedules import SCHEDULES
from autopart.solver import first_value
from autopart.text import counted, signed
from autopart.workload import Workload

# A count has to be faster by this share to be taken instead of the one that is captured already: estimates of other
# numbers of rows are up to 1.4 % off (`growth`), and a capture takes seconds.
WORTH = 0.02
# Schedules that run any number of microbatches; torch's others want one for each stage.
ANY_COUNT = ("auto", "gpipe", "loopedbfs")


@dataclass(frozen=True)
class Count:
    """A number of microbatches, and what people should know about it."""

    count: int
    notes: tuple[str, ...]


def choose_count(
    graph: Graph,
    cluster: Cluster,
    workload: Workload,
    *,
    tensor: int | str,
    stages: int | str,
    outcomes: Outcomes,
    known: Known | None = None,
) -> Count:
    """The count that is estimated to be fastest; the captured one, if that is nearly as fast.

    Args:
        workload: As captured; its schedule may be "auto".
        tensor: The degree, or "auto": the smallest at which something fits.
        outcomes, known: See `profiler.profile`.
    """
    growths = {m: workload.global_batch / m / workload.microbatch_size for m in _divisors(workload.global_batch)}
    costs = dict(zip(growths, profile_rows(graph, cluster, list(growths.values()), outcomes, known), strict=True))
    values = _estimates(graph, cluster, workload, tensor, stages, costs)
    captured, best = workload.microbatches, min(values, key=lambda m: (values[m], m))
    if values[best] >= values[captured] * (1 - WORTH) or values[best] == inf:
        best = captured
    others = ", ".join(f"{m}: {signed(values[m] / values[best] - 1)}" for m in values if m != best and values[m] < inf)
    if not others:
        return Count(best, ())
    what = counted(best, "microbatch")
    return Count(best, (f"a step of {what} is estimated to be within {WORTH:.0%} of the fastest (with {others})",))


def _estimates(
    graph: Graph,
    cluster: Cluster,
    workload: Workload,
    tensor: int | str,
    stages: int | str,
    costs: Mapping[int, Costs],
) -> dict[int, float]:
    """Estimated step time of each count; infinite where no plan is found."""
    rows = workload.global_batch
    found = dict.fromkeys(costs, inf)
    for t in [tensor] if isinstance(tensor, int) else _degrees(cluster):
        places = _together(cluster, t)
        asked = [stages] if isinstance(stages, int) else _stage_counts(len(places), workload.schedule)
        for m in costs:
            own = replace(workload, microbatches=m, microbatch_size=rows // m)
            found[m] = min(_value(graph, _shared(costs[m], t), places, own, s) for s in asked)
        if min(found.values()) < inf:
            break
    return found


def _divisors(rows: int) -> list[int]:
    return [m for m in range(1, rows + 1) if rows % m == 0]


def schedule_for(schedule: str, microbatches: int, stages: int) -> str:
    """The schedule asked for; "auto": 1F1B where the microbatches suffice.

    torch's 1F1B needs a microbatch for every stage; with fewer, GPipe is the same schedule.
    """
    if schedule != "auto":
        return schedule
    return "1f1b" if microbatches >= stages else "gpipe"


def _value(graph: Graph, costs: Costs, places: Cluster, workload: Workload, stages: int) -> float:
    if stages > len(places) * stages_per_process(workload.schedule):
        return inf
    if workload.microbatches < stages and workload.schedule not in ANY_COUNT:
        return inf
    name = schedule_for(workload.schedule, workload.microbatches, stages)
    return first_value(graph, costs, places, replace(workload, schedule=name), stages)


def _degrees(cluster: Cluster) -> list[int]:
    """1, and the powers of two that divide the devices."""
    return [t for t in (1, 2, 4, 8, 16) if len(cluster) % t == 0]


def _stage_counts(places: int, schedule: str) -> list[int]:
    """A stage for each place, half as many, and one."""
    return [count * stages_per_process(schedule) for count in sorted({places, max(1, places // 2), 1}, reverse=True)]


def stages_per_process(schedule: str) -> int:
    """Of a schedule that is asked for; "auto" takes one with one."""
    return 1 if schedule == "auto" else SCHEDULES[schedule].stages_per_process


def _together(cluster: Cluster, t: int) -> Cluster:
    """Groups of t devices as one with the memory of all."""
    if t == 1:
        return cluster
    try:
        grouped = cluster.grouped(t)
    except UsageError:
        return cluster
    devices = tuple(replace(device, memory_bytes=device.memory_bytes * t) for device in grouped.devices)
    return replace(grouped, devices=devices, inside=None)


def _shared(costs: Costs, t: int) -> Costs:
    """Costs when a group shares the work, were its exchanges free: they are about the same for every count."""
    if t == 1:
        return costs

    def part(time: NodeTime) -> NodeTime:
        return NodeTime(time.forward_s / t, time.backward_input_s / t, time.backward_weight_s / t)

    times = {name: {node: part(time) for node, time in row.items()} for name, row in costs.times.items()}
    return replace(costs, times=times)
