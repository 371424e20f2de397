"""A chosen assignment as a Plan: what each stage costs, what splits by hand would, and notes for people."""

from __future__ import annotations

import dataclasses
import platform
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np

from autopart.blocks import spans
from autopart.cluster import Cluster
from autopart.costs import Costs, added_up
from autopart.graph import Graph
from autopart.graph_signature import signature
from autopart.plan import Plan, StagePlan, Strategy
from autopart.sharding import LocalGraph
from autopart.solver.baselines import by_hand
from autopart.solver.granularity import Granularity
from autopart.solver.lowering import RESERVE_SHARE, Lowered
from autopart.solver.score import Score, score
from autopart.solver.search import Stop
from autopart.text import signed
from autopart.units import format_bytes
from autopart.workload import Workload

# Notes of the profiler that a plan repeats; the last ones sum up.
MOST_NOTES = 6
# A stage with less than this share of the worst stage's time is called nearly idle.
IDLE_SHARE = 0.05


@dataclasses.dataclass(frozen=True, eq=False)
class Choice:
    """The assignment that was chosen (call -> stage), and what is proven of it.

    Attributes:
        bound: Lower bound over every cut that the request allowed.
        best_of_granularity: Lower bound over the cuts of the chosen granularity.
        method: What proved the bound.
    """

    lowered: Lowered
    assignment: tuple[int, ...]
    value: float
    bound: float
    stopped_by: Stop
    granularity: Granularity
    alternatives: dict[str, float]
    best_of_granularity: float
    method: str
    notes: tuple[str, ...] = ()

    def noting(self, note: str) -> Choice:
        return dataclasses.replace(self, notes=(*self.notes, note))


def describe(
    choice: Choice,
    graph: Graph,
    costs: Costs,
    cluster: Cluster,
    workload: Workload,
    model: str | None,
    tolerance: float,
    seconds: float,
) -> Plan:
    """The plan of a choice, valued by the scorer from the assignment alone."""
    problem = choice.lowered.problem
    result = score(problem, choice.assignment)
    gap = max(0.0, (result.step_s - choice.bound) / result.step_s) if result.step_s else 0.0
    per_stage = _stages(choice, graph, costs, cluster, result)
    times = [s.forward_s + s.backward_s for s in per_stage]
    return Plan(
        model=model or graph.name,
        mode=graph.mode,
        strategy=Strategy(
            stages=problem.stages,
            tensor=1,
            replicas=1,
            zero=0,
            schedule=workload.schedule,
            microbatches=workload.microbatches,
            microbatch_size=workload.microbatch_size,
        ),
        status="optimal" if gap <= tolerance else "feasible",
        step_time_s=result.step_s,
        lower_bound_s=min(choice.bound, result.step_s),
        gap=gap,
        stopped_by=choice.stopped_by,
        per_stage=per_stage,
        balance=sum(times) / len(times) / max(times) if max(times) else 1.0,
        baselines=by_hand(choice.lowered, graph, costs, cluster, workload),
        assignment={node.name: s for node, s in zip(choice.lowered.calls, choice.assignment, strict=True)},
        signature=signature(graph),
        granularity=choice.granularity,
        optimizer=workload.optimizer,
        dtype=str(graph.dtype).removeprefix("torch."),
        cluster=cluster.to_data(),
        alternatives=choice.alternatives,
        times_from=costs.source,
        seconds={"solve": seconds},
        notes=(
            *graph.notes,
            *_shortened(costs.notes),
            *choice.notes,
            *_recomputed_notes(choice.lowered, per_stage, result),
            *_idle_notes(times),
            *_notes(choice, tolerance),
        ),
        versions={name: version(name) for name in ("torch", "ortools")} | {"python": platform.python_version()},
    )


def _stages(choice: Choice, graph: Graph, costs: Costs, cluster: Cluster, result: Score) -> tuple[StagePlan, ...]:
    problem, calls, values = choice.lowered.problem, choice.lowered.calls, choice.lowered.values
    sliced = result.crossing & choice.lowered.sliced
    training = graph.primary is graph.training
    busy = np.concatenate([[0.0], result.transfer_s]) + np.concatenate([result.transfer_s, [0.0]])
    shared = result.held & (result.held.sum(axis=0) > 1)
    ranks = graph.tensor if isinstance(graph, LocalGraph) else 1
    stages = []
    for s, process in enumerate(problem.process):
        own = [node for node, stage in zip(calls, choice.assignment, strict=True) if stage == s]
        device = choice.lowered.devices[process]
        times = [costs.times[cluster.devices[device].name][node.name] for node in own]
        held = [key for r, key in enumerate(choice.lowered.states) if result.held[s, r] and key in graph.state]
        parameters = [graph.state[key] for key in held if graph.state[key].kind == "parameter"]
        sent = np.flatnonzero(result.crossing[s]) if s < len(result.crossing) else ()
        messages = [(costs.memory[values[n].name], ranks if sliced[s, n] else 1) for n in sent]
        stages.append(
            StagePlan(
                devices=(device,),
                nodes=len(own),
                parameters=sum(p.tensor.numel() for p in parameters),
                parameter_bytes=sum(p.bytes for p in parameters),
                forward_s=sum(t.forward_s for t in times),
                backward_s=sum(t.backward_s for t in times) + float(result.again_s[s]) if training else 0.0,
                communication_s=float(busy[s]),
                peak_memory_bytes=int(result.memory[process]),
                memory_limit_bytes=int(problem.limits[process]),
                backward_weight_s=sum(t.backward_weight_s for t in times) if training else 0.0,
                operators=added_up(time.operators for time in times),
                update_s=float(problem.update[s] @ result.held[s]),
                sync_s=float(problem.sync[s] @ shared[s]),
                sent_bytes=tuple(-(-memory.output_bytes // share) for memory, share in messages),
                returned_bytes=tuple(
                    -(-memory.gradient_bytes // share)
                    for memory, share in messages
                    if training and memory.gradient_bytes
                ),
                sliced=tuple(values[n].name for n in np.flatnonzero(sliced[s])) if s < len(sliced) else (),
                recomputed=tuple(choice.lowered.blocks[b] for b in np.flatnonzero(result.recomputed[s])),
            )
        )
    return tuple(stages)


def _recomputed_notes(lowered: Lowered, per_stage: Sequence[StagePlan], result: Score) -> list[str]:
    """Which blocks are computed again, and what that costs and spares."""
    blocks = lowered.problem.blocks
    if blocks is None or not result.recomputed.any():
        return []
    spared = (blocks.spared * result.recomputed).sum(axis=1)
    notes = []
    for s, stage in enumerate(per_stage):
        if stage.recomputed:
            before = stage.forward_s + stage.backward_s - float(result.again_s[s])
            notes.append(
                f"stage {s} computes {spans(stage.recomputed)} again in backward: "
                f"{float(result.again_s[s]) / before:.0%} more time, {format_bytes(float(spared[s]))} less"
            )
    return notes


def _shortened(notes: Sequence[str]) -> list[str]:
    """The last of many notes, which sum the others up."""
    more = len(notes) - MOST_NOTES
    return list(notes) if more <= 0 else [*notes[-MOST_NOTES:], f"and {more} more operators were estimated"]


def _idle_notes(times: Sequence[float]) -> list[str]:
    """Why some stages have next to nothing to do, if some have."""
    idle = [s for s, time in enumerate(times) if time < IDLE_SHARE * max(times)]
    if not idle:
        return []
    worst = times.index(max(times))
    who = f"stage {idle[0]} is" if len(idle) == 1 else f"stages {', '.join(map(str, idle))} are"
    return [
        f"{who} nearly idle: stage {worst} decides the step time, "
        "and to share the rest out more evenly would cost more transfers than it saves"
    ]


def _notes(choice: Choice, tolerance: float) -> list[str]:
    notes = [f"{RESERVE_SHARE:.0%} of each device's memory is left free for the runtime and the allocator"]
    for other, value in choice.alternatives.items():
        change = (value - choice.value) / choice.value
        notes.append(
            f"cuts fall between {choice.granularity}s; {other} granularity: {value:.4g} s ({signed(change, 2)})"
        )
    if choice.granularity == "block" and choice.best_of_granularity > choice.bound:
        share = (choice.value - choice.best_of_granularity) / choice.value if choice.value else 0.0
        proven = "is the best" if share <= tolerance else f"is within {share:.2%} of the best"
        notes.append(f"among cuts between blocks this plan {proven}; the bound allows cuts inside blocks too")
    notes.append(f"the lower bound is proven by {choice.method}")
    return notes
