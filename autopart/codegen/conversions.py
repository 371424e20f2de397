"""Where changes of layout stand among the module calls, so that modules keep their shape in code.

A local graph puts the sum of a row-parallel layer into the layer, and a conversion that several modules need in front
of the first operation that reads it, wherever that is. Here

- collectives at the edges of a call that else is one layer of `torch.nn` move out into its caller, so that the layer
  stays an `nn.Linear`: `x = all_reduce(self.o_proj(x))`;
- a collective that belongs to a caller, but stands amid a call, moves in front of that call.
"""

from __future__ import annotations

from itertools import groupby

from autopart.codegen.functions import is_collective
from autopart.codegen.leaves import is_leaf_operator
from autopart.codegen.program import Op, Program, Value, is_mutating, memory_of


def settle(program: Program) -> None:
    """Move the collectives of a program; the order in which values are computed from one another stays."""
    for _, run in groupby(program.ops, key=_innermost):
        _lift(list(run))
    memory = memory_of(program)
    ops: list[Op] = []
    for at, op in enumerate(program.ops):
        place = len(ops)
        if is_collective(op.target) and at + 1 < len(program.ops):
            place = _in_front(ops, op, program.ops[at + 1], memory)
        ops.insert(place, op)
    program.ops[:] = ops


def _innermost(op: Op) -> str:
    calls = op.module_calls
    return calls[-1][0] if calls and calls[-1][1] else ""


def _lift(run: list[Op]) -> None:
    """Move collectives on what goes into one call, and on what comes out of it, into the caller."""
    own = [op for op in run if not is_collective(op.target)]
    if not _innermost(run[0]) or len(own) == len(run) or not _is_layer(own):
        return
    made = {v for op in own for v in op.results}
    read = {v for op in own for v in op.values()}
    edges = [op for op in run if op not in own]
    for op in edges:
        (source,) = op.values()
        if source.kind == "state" or (source in made and any(v in read for v in op.results)):
            return
    for op in edges:
        op.lifted = 1


def _is_layer(ops: list[Op]) -> bool:
    """Whether the operations are one layer of `torch.nn`, perhaps with the counter of a batch norm before it."""
    return bool(ops) and is_leaf_operator(ops[-1]) and all(is_mutating(op.target) for op in ops[:-1])


def _in_front(before: list[Op], op: Op, after: Op, memory: dict[Value, Value]) -> int:
    """Where in `before` the collective stands so that it tears no call apart; its end where it does not or must not."""
    calls = op.module_calls
    depth = len(calls)

    def amid(other: Op) -> bool:
        return other.module_calls[: depth + 1] == torn

    torn = after.module_calls[: depth + 1]
    if len(torn) <= depth or torn[:depth] != calls or not before or not amid(before[-1]):
        return len(before)
    (source,) = op.values()
    place = len(before)
    while place and amid(before[place - 1]):
        other = before[place - 1]
        changes = is_mutating(other.target) and any(
            memory.get(v, v) is memory.get(source, source) for v in other.values()
        )
        if source in other.results or changes:
            return len(before)
        place -= 1
    return place
