"""How many ranks split the tensors of a stage: each tensor degree is planned by itself, and the fastest plan wins.

At a degree t the layouts are chosen first, for the whole graph (`solver.layouts`), at the profiler's prices; they give
the local graph that t ranks run; and its stages are chosen with groups of t ranks as devices. What choosing one after
the other loses against choosing both at once is measured by `python -m benchmarks.joint_optimum`.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from torch import fx

from autopart.cluster import Cluster
from autopart.costs import Costs
from autopart.errors import AutopartError, CaptureError, InfeasibleError, LimitError, UsageError
from autopart.fitting import TIME_LIMIT_S, solve_fitting
from autopart.graph import Graph
from autopart.graph_signature import signature
from autopart.plan import BlockLayout, Layouts, Plan, StagePlan
from autopart.profiler import Known, LayoutPrices, Outcomes, profile
from autopart.runtime.collectives import all_gather
from autopart.runtime.schedules import SCHEDULES
from autopart.sharding import LocalGraph, collectives_of, rewrite, written
from autopart.solver import LayoutChoice, by_hand, choose_layouts, lower, usable_bytes
from autopart.solver.budget import fair
from autopart.solver.pipeline import IN_FLIGHT
from autopart.workload import Workload

# The largest degree that is tried unasked: a group has to stay within a machine.
MOST_RANKS = 16
# Where no stages of the fastest layouts fit, layouts are asked for that take this share of their memory, so many times.
LESS_MEMORY, TRIES = 0.85, 4


@dataclass(frozen=True)
class Planned:
    """A plan for one tensor degree, and the predicted costs that it rests on."""

    plan: Plan
    costs: Costs


def plan_degrees(
    graph: Graph,
    costs: Costs,
    cluster: Cluster,
    workload: Workload,
    *,
    tensor: int | str = "auto",
    outcomes: Outcomes | None = None,
    known: Known | None = None,
    **options: Any,
) -> Planned:
    """The fastest plan over tensor degrees.

    Args:
        costs: Of the whole graph.
        tensor: The degree, or "auto": every one that divides the devices into groups within a machine. Who names a
            degree wants its memory: then what ranks gather is kept as shards, and gathered again in backward, even
            where it would fit whole.
        outcomes, known: What profiling the whole graph has found, and what was measured (see `profiler.profile`).
        options: Further arguments of `solver.solve`; of its time limit each degree gets an equal share, and of the
            clock's what is left over those still to come.

    Raises:
        UsageError: The devices cannot be grouped as asked.
        InfeasibleError, LimitError, CaptureError: There is no plan at any degree; the message is that of the smallest.
    """
    stages = options.get("stages", "auto")
    if isinstance(tensor, int):
        _check_devices(cluster, workload, tensor, stages)
    degrees = [tensor] if isinstance(tensor, int) else list(_degrees(cluster, workload, stages))
    limit = options.pop("time_limit_s", TIME_LIMIT_S)
    deadline, limit = time.monotonic() + limit, limit / len(degrees)
    found: dict[int, Planned] = {}
    reasons: dict[int, AutopartError] = {}
    outcomes = {} if outcomes is None else outcomes
    prices = LayoutPrices(graph, cluster, outcomes, known) if max(degrees) > 1 else None
    for i, t in enumerate(degrees):
        fastest = min((planned.plan.step_time_s for planned in found.values()), default=inf)
        own = {**options, "time_limit_s": limit, "explain_s": 0.0, "enough": fastest}
        own["deadline"] = fair(deadline, len(degrees) - i)
        try:
            if t == 1 or prices is None:
                found[t] = Planned(solve_fitting(graph, costs, cluster, workload, **own), costs)
            else:
                named = isinstance(tensor, int)
                found[t] = _at_degree(graph, prices, outcomes, known, cluster, workload, t, own, named)
                if tensor == "auto" and not _splits(found[t].plan):
                    del found[t]
                    reasons[t] = CaptureError("all ranks would do the same work, for nothing gains from being split")
        except (InfeasibleError, LimitError, CaptureError) as error:
            reasons[t] = error
    if not found:
        if isinstance(reasons.get(1), InfeasibleError):
            # It raises, and says what would fit.
            solve_fitting(graph, costs, cluster, workload, time_limit_s=limit, **options)
        raise _nothing(graph, cluster, degrees[0], reasons[degrees[0]])
    best = min(found, key=lambda t: found[t].plan.step_time_s)
    plan = _compared(best, found, reasons, len(cluster))
    if best > 1:
        # By hand people split the model into stages, one on each device.
        stages = len(cluster) * SCHEDULES[workload.schedule].stages_per_process
        hand = by_hand(lower(graph, costs, cluster, workload, stages), graph, costs, cluster, workload)
        plan = replace(plan, baselines=hand)
    return replace(found[best], plan=plan)


def _check_devices(cluster: Cluster, workload: Workload, t: int, stages: int | str) -> None:
    per_process = SCHEDULES[workload.schedule].stages_per_process
    if isinstance(stages, int) and stages > len(cluster) // t * per_process:
        raise UsageError(
            f"{stages} stages of {t} tensor ranks need {-(-stages // per_process) * t} devices, "
            f"and the cluster has {len(cluster)}"
        )


def _splits(plan: Plan) -> bool:
    """Whether ranks share out any work: a tensor that is held in shards, or a value that is one."""
    assert plan.layouts is not None
    return bool(plan.layouts.state) or any("S(" in strategy for strategy in plan.layouts.strategies.values())


def _nothing(graph: Graph, cluster: Cluster, t: int, error: AutopartError) -> AutopartError:
    if not isinstance(error, InfeasibleError) or t == 1:
        return error
    return InfeasibleError(
        f"{graph.name} does not fit on {cluster} with its tensors split over {t} ranks",
        "Split over more ranks, name more or larger devices, or give smaller microbatches.",
    )


def _degrees(cluster: Cluster, workload: Workload, stages: int | str) -> Iterator[int]:
    """Every degree worth trying; 1 is always one."""
    yield 1
    per_process = SCHEDULES[workload.schedule].stages_per_process
    needed = per_process if stages == "auto" else int(stages)
    for t in range(2, min(len(cluster), MOST_RANKS) + 1):
        if len(cluster) % t or needed > len(cluster) // t * per_process:
            continue
        machines = {cluster.nodes[first : first + t] for first in range(0, len(cluster), t)}
        if any(len(set(group)) > 1 for group in machines):
            continue
        try:
            cluster.grouped(t)
        except UsageError:
            continue
        yield t


def _at_degree(
    graph: Graph,
    prices: LayoutPrices,
    outcomes: Outcomes,
    known: Known | None,
    cluster: Cluster,
    workload: Workload,
    t: int,
    options: dict[str, Any],
    as_shards: bool,
) -> Planned:
    """The fastest layouts for which some stages fit, and the best stages for them.

    The layout program limits what all stages hold together, not each of them; so layouts that take ever less are tried.
    Each time they are given half of the time that is left, and the stages the other half.
    """
    places = cluster.grouped(t)
    stages = len(places) * SCHEDULES[workload.schedule].stages_per_process
    if options.get("stages", "auto") != "auto":
        stages = options["stages"]
    budget: float | None = None
    least, most = 0.0, float(sum(map(usable_bytes, places.devices)))
    reason: InfeasibleError
    for _ in range(TRIES):
        left = fair(options["deadline"], 2) - time.monotonic()
        try:
            chosen = choose_layouts(
                graph,
                prices,
                cluster,
                t,
                optimizer=workload.optimizer,
                in_flight=IN_FLIGHT[workload.schedule](workload.microbatches, stages // 2, stages),
                memory_bytes=budget,
                time_limit_s=min(options["time_limit_s"], left),
            )
        except InfeasibleError as error:
            least, reason = float(budget or 0), error
        else:
            try:
                return plan_layouts(graph, chosen, cluster, workload, options, outcomes, as_shards, known)
            except InfeasibleError as error:
                most, reason = min(most, float(chosen.value.memory_bytes)), error
        budget = max(LESS_MEMORY * most, (least + most) / 2)
    raise reason


def plan_layouts(
    graph: Graph,
    chosen: LayoutChoice,
    cluster: Cluster,
    workload: Workload,
    options: dict[str, Any],
    outcomes: Outcomes | None = None,
    as_shards: bool = False,
    known: Known | None = None,
) -> Planned:
    """The best stages for given layouts; splits by hand are those of the local graph.

    Args:
        options: Further arguments of `solver.solve`.
        outcomes, known: See `profiler.profile`.
        as_shards: Keep what ranks gather as shards for backward, which takes time; otherwise only where nothing fits.
    """
    t = chosen.tensor
    places = cluster.grouped(t)

    def rewritten(again: frozenset[str]) -> tuple[LocalGraph, Costs]:
        local = rewrite(graph, replace(chosen.choice, again=again), t)
        return local, profile(local, places, places.inside, outcomes, known)

    local, local_costs = rewritten(frozenset())
    again = _kept_whole(local, local_costs)
    if as_shards and again:
        local, local_costs = rewritten(again)
    try:
        plan = solve_fitting(local, local_costs, places, workload, **options)
        short = any(stage.recomputed for stage in plan.per_stage)
    except InfeasibleError:
        if as_shards or not again:
            raise
        plan, short = None, True
    if short and again and not as_shards:
        # Memory is short: shards are the other way to keep less, and may cost less than computing blocks again.
        other, other_costs = rewritten(again)
        try:
            gathering = solve_fitting(other, other_costs, places, workload, **options)
        except (InfeasibleError, LimitError):
            if plan is None:
                raise
        else:
            if plan is None or gathering.step_time_s < plan.step_time_s:
                plan, local, local_costs = gathering, other, other_costs
    assert plan is not None
    plan = replace(
        plan,
        strategy=replace(plan.strategy, tensor=t),
        per_stage=tuple(_ranks(stage, t) for stage in plan.per_stage),
        signature=signature(graph),
        cluster=cluster.to_data(),
        layouts=_layouts(graph, local, chosen),
    )
    return Planned(plan, local_costs)


def _kept_whole(local: LocalGraph, costs: Costs) -> frozenset[str]:
    """The values that backward keeps whole though each rank has only gathered them."""
    kept = {saved.owner for saved in costs.saved}
    gathers = [node for node in local.primary.calls if node.target is all_gather and node.name in kept]
    return frozenset(node.all_input_nodes[0].name for node in gathers)


def _ranks(stage: StagePlan, t: int) -> StagePlan:
    """A stage on groups as a stage on their ranks."""
    return replace(stage, devices=tuple(rank for place in stage.devices for rank in range(place * t, place * t + t)))


def _layouts(graph: Graph, local: LocalGraph, chosen: LayoutChoice) -> Layouts:
    state, strategies = written(graph, local.choice)
    padding = 0
    for key, split in local.shards.items():
        if split is not None and split.padded(chosen.tensor):
            padding += local.state[key].bytes - graph.state[key].bytes // chosen.tensor
    blocks = tuple(_block(block, local) for block in chosen.blocks)
    return Layouts(
        state,
        strategies,
        blocks,
        chosen.time_s,
        chosen.lower_bound_s,
        padding,
        tuple(sorted(local.choice.again)),
    )


def _block(block: BlockLayout, local: LocalGraph) -> BlockLayout:
    """A block's layouts, with the gathers that backward makes again."""
    collectives, sent = Counter(block.collectives), block.bytes_sent
    modules = {node.name: _module(node) for node in local.primary.calls}
    for made in collectives_of(local.primary, local.tensor):
        path = modules[made.node]
        if made.again and (path == block.block or path.startswith(f"{block.block}.")):
            collectives["backward all_gather"] += 1
            sent += made.backward_bytes
    return replace(block, collectives=dict(collectives), bytes_sent=sent)


def _module(node: fx.Node) -> str:
    """Path of the innermost module that a node runs in."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0] if stack else ""


def _compared(best: int, found: dict[int, Planned], reasons: dict[int, AutopartError], devices: int) -> Plan:
    """The winner's plan, with what the other degrees reach; its bound holds for all of them."""
    plan = found[best].plan
    bound = min(planned.plan.lower_bound_s for planned in found.values())
    gap = max(0.0, (plan.step_time_s - bound) / plan.step_time_s) if plan.step_time_s else 0.0
    notes = [
        f"splitting tensors over {t} ranks was not planned: {str(error).partition(chr(10))[0]}"
        if t > 1
        else f"stages alone were not planned: {str(error).partition(chr(10))[0]}"
        for t, error in reasons.items()
    ]
    used = len({device for stage in plan.per_stage for device in stage.devices})
    if used < devices and plan.strategy.tensor > 1:
        notes.append(f"{used} of {devices} devices are used")
    if plan.layouts is not None:
        layouts = plan.layouts
        short = (layouts.time_s - layouts.lower_bound_s) / layouts.time_s if layouts.time_s else 0.0
        notes.append(
            f"layouts were chosen before stages; by themselves they are within {short:.2%} of the fastest. The lower "
            "bound is that of the stages, for the layouts chosen at each tensor degree"
        )
        if not _splits(plan):
            notes.append("nothing gains from being split: all ranks of a group do the same work")
        if layouts.again:
            notes.append(
                f"{len(layouts.again)} gathered values are kept as shards, and gathered again in backward: that takes "
                "less memory and more time"
            )
        if layouts.padding_bytes:
            notes.append(f"sizes that do not divide are padded: {layouts.padding_bytes:,} bytes of zeros on each rank")
    return replace(
        plan,
        lower_bound_s=min(bound, plan.step_time_s),
        gap=gap,
        status=plan.status if gap <= max(plan.gap, 0.001) else "feasible",
        degrees={str(t): planned.plan.step_time_s for t, planned in found.items()},
        notes=(*plan.notes, *notes),
    )
