"""Hints: what the user's source calls a value at each level of calls, and where it was written."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Set
from typing import Any

import torch

from autopart.codegen.frames import Frame
from autopart.codegen.functions import is_collective, is_function
from autopart.codegen.loops import Loop
from autopart.codegen.names import RESERVED, assigned_name, assigned_names, identifier, is_identifier, source_lines
from autopart.codegen.program import SELECT, Op, Value
from autopart.graph import StateEntry

Item = Op | Frame | Loop


class Hints:
    """Names and comments for the values of a graph.

    Args:
        state: The graph's state table.
        modules: Module path -> class, as in the graph.
        dtype: The captured dtype; comments leave it out.
        reserved: Names that values may not have.
    """

    def __init__(
        self, state: Mapping[str, StateEntry], modules: Mapping[str, type], dtype: torch.dtype, reserved: Set[str]
    ) -> None:
        self.state, self.modules, self.dtype = state, modules, dtype
        self.quiet = False
        self.reserved = RESERVED | reserved
        self.fixed: Mapping[Value, str] = {}

    def place(self, item: Item, call: Frame) -> str | None:
        """File and line, in the code of the module that `call` calls, that the item came from."""
        line = self._line(_last_op(item), call)
        return line[0] if line else None

    def name(self, value: Value, call: Frame, item: Item | None = None) -> str:
        """What the code of the module that `call` calls names a value."""
        if value.kind == "input":
            return identifier(value.name)
        if value.kind == "state":
            return identifier(self.state[value.name].name.rsplit(".", 1)[-1])
        if not call.path and value in self.fixed:
            return self.fixed[value]
        op = value.op
        assert op is not None
        while op.target == SELECT or is_collective(op.target):
            source = op.values()[0]
            if source.op is None:
                return self.name(source, call)
            value, op = source, source.op
        line = self._line(op, call)
        if isinstance(item, Frame):
            return self._result_name(value, op, item, line)
        found = assigned_name(line[1], value.index) if line else None
        if found is not None:
            return found
        if isinstance(item, Loop):
            return self.parameters(item.frames[0])[next(iter(item.carried))]
        target = op.target
        if isinstance(target, torch._ops.OpOverload):
            return identifier(target._schema.name.partition("::")[2].strip("_"))
        return identifier(target.__name__) if is_function(target) else "output"

    def _result_name(self, value: Value, op: Op, call: Frame, line: tuple[str, str] | None) -> str:
        """What to call a result of a call.

        The caller's name, unless the call has several results here: which name is whose cannot be told.
        """
        own = self._line(op, call)
        inner = assigned_name(own[1], value.index) if own else None
        outer = assigned_names(line[1]) if line else []
        if len(call.outputs) > 1 and len(outer) != 1 and inner is not None:
            return inner
        if len(call.outputs) == 1 and outer:
            return inner if inner in outer else outer[0]
        return inner or (outer[0] if len(outer) == 1 else identifier(call.path.rsplit(".", 1)[-1], "output"))

    def boundary_name(self, value: Value) -> str:
        """What the innermost piece of source that assigns a value calls it."""
        op = value.op
        while op is not None and (op.target == SELECT or is_collective(op.target)):
            value = op.values()[0]
            op = value.op
        if op is not None and op.node.op == "get_attr":  # a copy of state
            return identifier(self.state[str(op.node.target)].name.rsplit(".", 1)[-1])
        if op is not None:
            for _, source in reversed(source_lines(op.node.meta.get("stack_trace") or "")):
                found = assigned_name(source, value.index)
                if found is not None:
                    return found
        return self.name(value, Frame("", "", ""))

    def parameters(self, call: Frame) -> list[str]:
        """Names for the inputs of a call: the parameters of the user's own `forward` where they can be told."""
        known = _parameters(self.modules.get(call.path)) if call.path else []
        names: list[str] = []
        tensors = [v for v in call.inputs if v.kind != "state"]
        for value in call.inputs:
            name = self._outer_name(value, call) if call.path else self.fixed[value]
            own = any(path == call.path for _, path, _ in value.op.module_calls) if value.op else False
            if (
                call.path
                and not own
                and value.kind != "state"
                and name not in known
                and (len(tensors) == 1 or value is tensors[0])
                and known
            ):
                name = known[0]
            base, number = name, 1
            while name in names or name in self.reserved:
                number += 1
                name = f"{base}_{number}"
            names.append(name)
        return names

    def _outer_name(self, value: Value, call: Frame) -> str:
        """The name in the innermost enclosing call that the value comes from."""
        if value.op is None:
            return self.name(value, call)
        outer = Frame("", "", "")
        inside = {path for _, path, _ in value.op.module_calls}
        parts = call.path.split(".")
        for length in range(len(parts), -1, -1):
            path = ".".join(parts[:length])
            if path in inside or path == "":
                key = next((k for k, p, _ in value.op.module_calls if p == path), "")
                outer = Frame(key, path, "")
                break
        return self.name(value, outer)

    def _line(self, op: Op | None, call: Frame) -> tuple[str, str] | None:
        if op is None:
            return None
        calls = op.module_calls
        lines = source_lines(op.node.meta.get("stack_trace") or "")
        traced = op.traced_calls
        if not calls or len(lines) < traced:
            return None
        depth = next((i for i, (key, path, _) in enumerate(calls) if key == call.key or path == call.path), None)
        return lines[len(lines) - traced + depth] if depth is not None else None

    def comment(self, values: list[Value]) -> str | None:
        """Shape, and dtype where it is not the captured one."""
        if self.quiet or len(values) != 1 or not values[0].has_one_shape:
            return None
        tensor = values[0].tensor
        if not isinstance(tensor, torch.Tensor):
            return None
        dtype = "" if tensor.dtype == self.dtype else " " + str(tensor.dtype).removeprefix("torch.")
        return f"{list(tensor.shape)}{dtype}"


def _last_op(item: Item) -> Op | None:
    if isinstance(item, Op):
        return item
    frame = item.frames[-1] if isinstance(item, Loop) else item
    return next((op for op in reversed(list(frame.operations())) if op.target != SELECT), None)


def _parameters(kind: type | None) -> list[str]:
    forward: Any = getattr(kind, "forward", None)
    if forward is None:
        return []
    try:
        parameters = list(inspect.signature(forward).parameters.values())[1:]
    except (TypeError, ValueError):
        return []
    plain = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [p.name for p in parameters if p.kind in plain and is_identifier(p.name) and p.name not in RESERVED]
