"""Whether a schedule may split a stage's backward into input gradients and weight gradients.

`torch.distributed.pipelining` computes weight gradients from the places where a parameter's branch of the autograd
graph meets the path from the received tensors to what is sent on. Parameters that meet the path in a common place form
a group (`get_param_groups`, read in torch 2.14). A parameter that meets it in two places may bridge two groups that
were there before it, and then belongs to both: its gradient is counted twice, or torch stops on tensors that were
freed. A branch of parameters that is read twice (a decoder's start behind an encoder) does this, and a weight that is
used twice.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping

from autopart.codegen.conversions import settle
from autopart.codegen.placement import StageProgram, place, reaches_loss
from autopart.codegen.program import SELECT, Op, Value, build_program, is_mutating
from autopart.graph import Graph

# These run one autograd node for each time step, and their weights meet the path in all of them.
RECURRENT = frozenset({"lstm", "gru", "rnn_tanh", "rnn_relu"})


def may_split_backward(stage: StageProgram, reached: set[Value]) -> bool:
    """Whether every parameter of the stage meets the path in one place, and all of its code can be split.

    Args:
        reached: The values that the loss depends on through autograd.
    """
    operations = [op for op in stage.ops if op.mode != "evaluation"]
    if any(_is_users_code(op) or _name(op) in RECURRENT for op in operations):
        return False

    def tracked(values: list[Value]) -> list[Value]:
        return [v for v in values if v.requires_grad and v in reached]

    path = set(tracked([v for v in stage.takes if v.op is not None]))
    branch: dict[Value, set[Value]] = {}
    places: dict[Value, set[str]] = defaultdict(set)

    def meet(value: Value, place: str) -> None:
        for parameter in branch.get(value, {value}):
            places[parameter].add(place)

    for op in operations:
        read = tracked(op.values())
        results = [*op.results, *(op.values()[:1] if is_mutating(op.target) else ())]
        beside = [v for v in read if v not in path]
        if len(beside) < len(read):
            path.update(results)
            for value in beside:
                meet(value, op.name)
        else:
            parameters = {p for v in beside for p in branch.get(v, {v})}
            branch.update({value: branch.get(value, set()) | parameters for value in results})
    for value in tracked(stage.gives):
        if value not in path:
            meet(value, "what is sent on")
    return all(len(where) == 1 for where in places.values())


def stages_that_split(graph: Graph, assignment: Mapping[str, int], stages: int) -> tuple[bool, ...]:
    """For each stage whether its backward may be split; those that recompute something are not asked."""
    program = build_program(graph)
    settle(program)
    placement = place(program, graph, assignment, stages)
    reached = reaches_loss(program, program.outputs[graph.loss] if graph.loss is not None else None)
    return tuple(may_split_backward(stage, reached) for stage in placement.stages)


def _is_users_code(op: Op) -> bool:
    return isinstance(op.target, str) and op.target != SELECT


def _name(op: Op) -> str:
    return "" if isinstance(op.target, str) else str(getattr(op.target, "overloadpacket", op.target)).rpartition(".")[2]
