"""Blocks that backward computes again instead of keeping their activations: which can be, and which calls they are.

A package writes such a block as `checkpoint(self.layers[3], x, use_reentrant=False)`. The block's forward then runs
twice, the second time on the tensors that the call was given. That is exact where the block is one call of a module
and changes nothing that outlives it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from autopart.blocks import find_blocks
from autopart.codegen.conversions import settle
from autopart.codegen.frames import Frame, build_frames
from autopart.codegen.placement import place
from autopart.codegen.program import SELECT, Op, Value, build_program, memory_of
from autopart.effects import HIDDEN_MUTATIONS
from autopart.errors import UsageError
from autopart.graph import Graph
from autopart.plan import Plan
from autopart.runtime import split_operators
from autopart.runtime.schedules import SCHEDULES

# Operators and functions that change arguments without saying so in a schema, as in `HIDDEN_MUTATIONS`.
_HIDDEN: Mapping[Any, tuple[str, tuple[str, ...]]] = {
    **HIDDEN_MUTATIONS,
    split_operators.batch_norm_of_split_batch: ("training", ("running_mean", "running_var")),
}


def recomputable(graph: Graph, schedule: str) -> dict[str, str | None]:
    """Label of each block (see `autopart.blocks`) -> why it cannot be recomputed under a schedule; None where it can.

    Args:
        graph: What a process runs: the whole graph, or a `LocalGraph`. Collectives inside a block run once more, on
            all ranks alike.
        schedule: Of those that split the backward none recomputes: torch would run a block again for the input
            gradients and once more for the weight gradients, and keep what the first of them made until then.
    """
    blocks = find_blocks(graph, graph.primary)
    everywhere = _without_blocks(graph, schedule)
    if everywhere is not None:
        return dict.fromkeys(blocks.values(), everywhere)
    program = build_program(graph)
    settle(program)
    stage = place(program, graph, dict.fromkeys((n.name for n in graph.primary.calls), 0), 1).stages[0]
    calls = {call.label: call for call in build_frames(stage, graph.state, "Model").frames() if call.path}
    ops: dict[str, list[Op]] = {}
    for op in filter(_trains, stage.ops):
        ops.setdefault(blocks[op.node.name], []).append(op)
    owner = memory_of(program)

    def obstacle(label: str) -> str | None:
        own = ops.get(label, [])
        if label not in calls or own != list(filter(_trains, calls[label].operations())):
            return "it is not one call of a module"
        if any(isinstance(op.target, str) for op in own):
            return "it runs code that was kept whole"
        if any(op.checkpoint is not None for op in own):
            return "the model recomputes it, or a part of it, by itself"
        if not any(value.requires_grad for op in own for value in op.results):
            return "nothing of it is kept for backward"
        # A value that changes is one block with everything that reads it before (`tracer.colocation`).
        changed = (owner.get(value, value) for op in own for value in _changed(op))
        outside = next((value for value in changed if value.op not in own), None)
        if outside is None:
            return None
        return f"it changes {graph.state[outside.name].name!r}" if outside.kind == "state" else "it changes its inputs"

    return {label: obstacle(label) for label in dict.fromkeys(blocks.values())}


def _trains(op: Op) -> bool:
    """Whether it is an operation of the training graph."""
    return op.mode != "evaluation" and op.target != SELECT


def _without_blocks(graph: Graph, schedule: str) -> str | None:
    if graph.primary is not graph.training:
        return "inference keeps nothing for a backward pass"
    if SCHEDULES[schedule].splits_backward:
        return f"the schedule {schedule} computes weight gradients apart, and would recompute it twice"
    return None


def _changed(op: Op) -> Iterator[Value]:
    """The values that an operation changes in place."""
    schema = getattr(op.target, "_schema", None)
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write] if schema else []
    condition, hidden = _HIDDEN.get(schema.name if schema else op.target, ("", ()))
    if op.args.get(condition, False) is not False:
        written += hidden
    for name in written:
        value = op.args.get(name)
        yield from (v for v in (value if isinstance(value, list) else [value]) if isinstance(v, Value))


def recomputed_calls(root: Frame, labels: Collection[str]) -> set[Frame]:
    """The calls of a stage that its plan recomputes."""
    return {call for call in root.frames() if call.path and call.label in labels}


def check_recomputed(graph: Graph, plan: Plan) -> None:
    """Refuse a plan that recomputes what a package cannot, or what its stage does not hold whole.

    Raises:
        UsageError: Naming the block and the reason.
    """
    wanted = {label: s for s, stage in enumerate(plan.per_stage) for label in stage.recomputed}
    if not wanted:
        return
    reasons = recomputable(graph, "1f1b")
    stages: dict[str, set[int]] = {}
    for node, label in find_blocks(graph, graph.primary).items():
        stages.setdefault(label, set()).add(plan.assignment[node])
    for label, stage in wanted.items():
        reason = reasons.get(label, "the model has no such block")
        if reason is None and stages[label] != {stage}:
            reason = f"it is not in stage {stage} as a whole"
        if reason is not None:
            raise UsageError(f"the plan recomputes {label!r} in stage {stage}: {reason}", "Plan this model anew.")
