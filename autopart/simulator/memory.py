"""Memory of every process over a whole training step, action by action of the schedule that runs.

A process holds, all the time, its parameters, buffers and optimizer state, the batch, and a receive buffer for each
microbatch and direction at its boundaries. A forward adds what its stage keeps; a backward takes that away again; the
first one leaves the gradients of the parameters. What is sent outlives its use: torch's schedules keep the handles of
their sends, and a handle keeps its tensor (see `Handles`). At the end tied gradients are summed and the optimizer runs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from autopart.codegen.split_backward import stages_that_split
from autopart.costs import Allocations, Costs
from autopart.graph import Graph, StateEntry
from autopart.plan import Plan, StageMemory, Strategy
from autopart.runtime.schedules import SCHEDULES, processes_of_stages
from autopart.simulator.actions import actions
from autopart.simulator.memory_pass import split_pass, stage_pass
from autopart.simulator.memory_program import StageProgram
from autopart.simulator.memory_stages import stage_programs
from autopart.simulator.memory_trace import ActionMemory, trace
from autopart.simulator.memory_update import tie_bytes, update_bytes
from autopart.workload import OPTIMIZER_STATES


@dataclass(frozen=True)
class ProcessMemory:
    """Bytes of one process over a step.

    Attributes:
        stages: Index of each stage that it holds -> its memory.
        trace: Every action in its order, and the end of the step.
    """

    stages: Mapping[int, StageMemory]
    trace: tuple[ActionMemory, ...]

    @property
    def peak_bytes(self) -> int:
        return max(action.peak_bytes for action in self.trace)


def plan_memory(
    graph: Graph,
    costs: Costs,
    assignment: Mapping[str, int],
    strategy: Strategy,
    recomputed: Collection[str] = (),
    optimizer: str = "adamw",
) -> tuple[ProcessMemory, ...]:
    """Memory of each process of the pipeline (of a local graph: of each rank there) over a training step.

    Args:
        graph: What the costs are of.
        costs: With `allocations`.
        assignment: Call -> stage.
        recomputed: Labels of the blocks that backward runs again, of all stages.
        optimizer: A key of `OPTIMIZER_STATES`.

    Raises:
        ValueError: The costs have no allocations, or the schedule cannot run so many stages or microbatches.
    """
    allocations = costs.allocations
    if allocations is None:
        raise ValueError("these costs are estimates without allocations")
    programs = stage_programs(graph, allocations, assignment, strategy.stages, recomputed)
    passes = [stage_pass(allocations, program) for program in programs]
    splits = strategy.stages > 1 and SCHEDULES[strategy.schedule].splits_backward
    whole = _whole_backwards(graph, programs, assignment) if splits else [False] * len(programs)
    states = _states(graph, assignment, strategy.stages)
    batch = _batch_bytes(graph, allocations, strategy.microbatches)
    updates = _updates(graph, allocations, strategy, states, optimizer)
    stages = []
    for s, (program, done) in enumerate(zip(programs, passes, strict=True)):
        following = programs[s + 1] if s + 1 < strategy.stages else None
        crossing = following.received if following else ()
        trained = _bytes(allocations, [e for e in states[s] if e.requires_grad])
        stages.append(
            StageMemory(
                parameters=_bytes(allocations, [e for e in states[s] if e.kind == "parameter"]),
                buffers=_bytes(allocations, [e for e in states[s] if e.kind != "parameter"]),
                gradients=done.gradients,
                optimizer_state=OPTIMIZER_STATES[optimizer] * min(trained, done.gradients),
                received=_sum(allocations, program.received),
                received_gradients=_sum(allocations, [t for t in crossing if t in program.targets]),
                batch=batch,
                update=updates[s],
                microbatch=done,
                whole_backward=whole[s],
                split=split_pass(allocations, program) if splits and s and not whole[s] else None,
            )
        )
    return of_processes(strategy, stages)


def _whole_backwards(graph: Graph, programs: Sequence[StageProgram], assignment: Mapping[str, int]) -> list[bool]:
    """For each stage whether its backward cannot be split, as in the package."""
    able = stages_that_split(graph, assignment, len(programs))
    return [bool(program.regions) or not splits for splits, program in zip(able, programs, strict=True)]


def of_processes(strategy: Strategy, stages: Sequence[StageMemory]) -> tuple[ProcessMemory, ...]:
    """Memory of each process, from that of its stages."""
    orders = actions(strategy.schedule, strategy.stages, strategy.microbatches)
    homes = processes_of_stages(strategy.schedule, strategy.stages)
    found = []
    for process, order in enumerate(orders):
        own = {s: stages[s] for s, home in enumerate(homes) if home == process}
        found.append(ProcessMemory(own, trace(strategy, own, order)))
    return tuple(found)


def memory_of_plan(plan: Plan) -> tuple[ProcessMemory, ...]:
    """Memory of each process, from what a plan says of its stages; nothing where it does not."""
    stages = [stage.memory for stage in plan.per_stage if stage.memory is not None]
    return of_processes(plan.strategy, stages) if len(stages) == len(plan.per_stage) else ()


def _batch_bytes(graph: Graph, allocations: Allocations, microbatches: int) -> int:
    return sum(
        allocations.tensor_bytes[allocations.values[spec.name][0]] * (1 if spec.batch_dim is None else microbatches)
        for spec in graph.inputs
        if spec.name in allocations.values
    )


def _updates(
    graph: Graph,
    allocations: Allocations,
    strategy: Strategy,
    states: Sequence[Sequence[StateEntry]],
    optimizer: str,
) -> list[int]:
    """For each stage, what its process takes at once at the end of a step."""
    homes = processes_of_stages(strategy.schedule, strategy.stages)
    sizes = {entry.key: allocations.rounded(entry.bytes) for entry in graph.state.values()}
    read = {str(node.target) for node in graph.primary.graph.nodes if node.op == "get_attr" and node.users}
    found = []
    for home in homes:
        own = [s for s, other in enumerate(homes) if other == home]
        trained = [sizes[e.key] for s in own for e in states[s] if e.requires_grad and e.key in read]
        tied = [[e.key for e in states[s] if e.requires_grad and _copies(e, states) > 1] for s in own]
        found.append(max(tie_bytes(tied, sizes), update_bytes(optimizer, trained, allocations.block_bytes > 1)))
    return found


def _states(graph: Graph, assignment: Mapping[str, int], stages: int) -> list[list[StateEntry]]:
    """What each stage holds; what no call reads is in the first."""
    users: dict[str, set[int]] = {}
    for node in graph.primary.graph.nodes:
        if node.op == "get_attr":
            users.setdefault(str(node.target), set()).update(
                assignment[user.name] for user in node.users if user.name in assignment
            )
    held: list[list[StateEntry]] = [[] for _ in range(stages)]
    for entry in graph.state.values():
        for s in users.get(entry.key) or {0}:
            held[s].append(entry)
    return held


def _copies(entry: StateEntry, states: Sequence[Sequence[StateEntry]]) -> int:
    return sum(entry in held for held in states)


def _bytes(allocations: Allocations, entries: Sequence[StateEntry]) -> int:
    return sum(allocations.rounded(entry.bytes) for entry in entries)


def _sum(allocations: Allocations, tensors: Sequence[int]) -> int:
    return sum(allocations.rounded(allocations.tensor_bytes[t]) for t in tensors)
