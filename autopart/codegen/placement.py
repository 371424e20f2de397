"""Which stage runs each operation of the merged program, and what crosses each boundary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from autopart.codegen.functions import is_collective
from autopart.codegen.program import SELECT, Op, OpMode, Program, Value, is_mutating, memory_of
from autopart.errors import CaptureError
from autopart.graph import Graph


@dataclass(frozen=True)
class StageProgram:
    """The part of the program that one stage runs.

    Attributes:
        takes: Values it reads from other stages, then inputs of the model, each in order of first use.
        gives: Values it makes for later stages or as outputs.
    """

    index: int
    ops: list[Op]
    takes: list[Value]
    gives: list[Value]


@dataclass(frozen=True)
class Placement:
    """Every stage, and the values that cross from stage s to stage s + 1."""

    stages: list[StageProgram]
    boundaries: list[list[Value]]


def place(program: Program, graph: Graph, assignment: Mapping[str, int], stages: int) -> Placement:
    """Split `program` as `assignment` (node of the primary capture -> stage) says."""
    _assign(program, graph, assignment)
    _gather_last(program, stages)
    _fill_other_mode(program)
    _copy_returned_state(program, stages)
    outputs = {v for v in program.outputs if v.kind == "result"}
    last_reader: dict[Value, int] = {v: stages - 1 for v in outputs}
    for op in program.ops:
        for value in op.values():
            if value.kind == "result":
                last_reader[value] = max(last_reader.get(value, 0), op.stage)
    made = [v for op in program.ops for v in op.results if v in last_reader]
    found = []
    for stage in range(stages):
        ops = [op for op in program.ops if op.stage == stage]
        used = dict.fromkeys(v for op in ops for v in op.values())
        takes = [v for v in used if v.op is not None and v.op.stage < stage]
        takes += [v for v in used if v.kind == "input"]
        gives = [v for v in made if v.op.stage == stage and (last_reader[v] > stage or v in outputs)]  # type: ignore[union-attr]
        if stage == stages - 1:
            gives += [v for v in dict.fromkeys(program.outputs) if v.kind == "state"]
        found.append(StageProgram(stage, ops, takes, gives))
    boundaries = [[v for v in made if v.op.stage <= s < last_reader[v]] for s in range(stages - 1)]  # type: ignore[union-attr]
    for boundary in boundaries:
        for value in boundary:
            if not value.has_one_shape:
                raise CaptureError(
                    f"{value.name} crosses to another stage, and its shape or dtype depends on the mode",
                    "Plan with fewer stages, or with granularity='block'.",
                )
    return Placement(found, boundaries)


def _gather_last(program: Program, stages: int) -> None:
    """Let the last stage choose between the shards of a result (training) and the whole (evaluation).

    Shards cross in both modes then: what crosses has one shape.
    """
    readers = Counter(value for op in program.ops for value in op.values())
    for op in program.ops:
        if op.target != SELECT or any(readers[v] for v in op.results) or op.results[0].has_one_shape:
            continue
        op.stage = stages - 1
        for value in op.values():
            made = value.op
            if made is not None and made.mode != "both" and is_collective(made.target) and readers[value] == 1:
                made.stage = stages - 1


def _fill_other_mode(program: Program) -> None:
    """Give a value that only one mode computes zeros in the other, where it leaves its stage."""
    crossing: dict[Value, Value] = {}
    reads = [(value, reader.stage) for reader in program.ops for value in reader.values()]
    for value, stage in [*reads, *((value, None) for value in program.outputs)]:
        made = value.op
        if made is not None and made.mode != "both" and made.stage != stage and value not in crossing:
            tensor = value.tensor
            arguments = {"size": [int(n) for n in tensor.shape], "dtype": tensor.dtype, "device": tensor.device}
            other: OpMode = "evaluation" if made.mode == "training" else "training"
            zeros = Op(
                f"{made.name}_absent", torch.ops.aten.zeros.default, arguments, other, made.node, stage=made.stage
            )
            zeros.results = [Value("result", zeros.name, made.node, zeros, value.index)]
            pair = {made.mode: value, other: zeros.results[0]}
            select = Op(
                f"{made.name}_or_zeros",
                SELECT,
                {k: pair[k] for k in ("training", "evaluation")},
                "both",
                made.node,
                stage=made.stage,
            )
            select.results = [Value("result", select.name, made.node, select, value.index)]
            crossing[value] = select.results[0]
    if not crossing:
        return
    ops = []
    for op in program.ops:
        op.args = {k: _replace(v, op, crossing) for k, v in op.args.items()}
        ops.append(op)
        for value in op.results:
            if value in crossing:
                chosen = crossing[value].op
                assert chosen is not None
                ops += [*(v.op for v in chosen.values() if v is not value and v.op is not None), chosen]
    program.ops[:] = ops
    program.outputs[:] = [crossing.get(value, value) for value in program.outputs]


def _copy_returned_state(program: Program, stages: int) -> None:
    """Let state that the model returns, or a view of it, come from the stage that uses it, where that is not the last.

    Training may change it there, and the copy that another stage holds would stay as it was: what touches a buffer that
    changes is never cut, so one stage knows its value. It crosses as a copy, because the next microbatch changes the
    buffer while this one's value is on its way.
    """
    users: dict[Value, set[int]] = {}
    for op in program.ops:
        for value in op.values():
            users.setdefault(value, set()).add(op.stage)
    memory = memory_of(program)
    copies: dict[Value, Value] = {}
    for value in dict.fromkeys(program.outputs):
        owner = memory.get(value, value)
        holders = users.get(value, set()) if value.op is None else {value.op.stage}
        if owner.kind != "state" or len(holders) != 1 or stages - 1 in holders:
            continue
        copy = Op(f"{value.name}_returned", torch.ops.aten.clone.default, {"self": value}, "both", owner.node)
        copy.stage = min(holders)
        copy.results = [Value("result", copy.name, value.node, copy)]
        copies[value] = copy.results[0]
        program.ops.append(copy)
    program.outputs[:] = [copies.get(value, value) for value in program.outputs]


def _replace(argument: Any, reader: Op, crossing: Mapping[Value, Value]) -> Any:
    if isinstance(argument, Value):
        crosses = argument in crossing and argument.op is not None and argument.op.stage != reader.stage
        return crossing[argument] if crosses else argument
    return [_replace(item, reader, crossing) for item in argument] if isinstance(argument, list) else argument


def reaches_loss(program: Program, loss: Value | None) -> set[Value]:
    """The values that the loss depends on through autograd.

    An in-place operation counts when the loss reads the memory that it changes, under any name: `x[:, 0].copy_(y)`
    puts y into x, though nothing reads its result.
    """
    if loss is None:
        return set()
    memory = memory_of(program)
    reached = {loss}
    read = {memory.get(loss, loss)}
    for op in reversed(program.ops):
        changed = next(iter(op.values()), None) if is_mutating(op.target) else None
        if any(v in reached for v in op.results) or (changed is not None and memory.get(changed, changed) in read):
            reached.update(v for v in op.values() if v.requires_grad)
            read.update(memory.get(v, v) for v in op.values())
    return reached


def _assign(program: Program, graph: Graph, assignment: Mapping[str, int]) -> None:
    primary = set(graph.primary.graph.nodes)
    for op in program.ops:
        op.stage = assignment[op.node.name] if op.node in primary and op.target != SELECT else -1
    readers: dict[Op, list[Op]] = {}
    for op in program.ops:
        for value in op.values():
            if value.op is not None:
                readers.setdefault(value.op, []).append(op)
    # State that changes is known where it is changed alone.
    changed_in = {
        v: op.stage for op in program.ops if is_mutating(op.target) for v in op.values()[:1] if v.kind == "state"
    }
    for op in program.ops:
        if op.stage < 0:
            stages = [v.op.stage if v.op is not None else changed_in.get(v, -1) for v in op.values()]
            op.stage = max(stages, default=-1)
    # What is left reads no other operation (it makes a tensor from nothing): it goes where it is needed first.
    for op in reversed(program.ops):
        if op.stage < 0:
            op.stage = min((r.stage for r in readers.get(op, ()) if r.stage >= 0), default=0)
    for op in program.ops:
        for value in op.values():
            if value.op is not None and value.op.stage > op.stage:
                raise CaptureError(
                    f"{op.name} (stage {op.stage}) would need {value.name} from stage {value.op.stage}: in evaluation "
                    "mode the model uses values in another order than in training mode",
                    "Plan with fewer stages, or with granularity='block'.",
                )
