"""An operator of the graph as the rules see it, and a strategy: one legal way to run it on shards."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from autopart.effects import named
from autopart.sharding.layouts import Layout, local_shape

# Operator that changes running statistics, though its schema does not say so -> the argument by which it does.
UPDATES_STATISTICS = {"aten::batch_norm": "training", "aten::instance_norm": "use_input_stats"}


@dataclass(frozen=True)
class Operand:
    """Stands for the n-th tensor argument of an operator in a local call."""

    number: int


@dataclass(frozen=True)
class Result:
    """Stands for the result of the n-th local call."""

    number: int


@dataclass(frozen=True)
class Call:
    """One call of a rank's local program; tensors are `Operand` and `Result`."""

    target: Any
    args: tuple[Any, ...] = ()
    kwargs: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Strategy:
    """One legal way to run an operator on t ranks.

    Attributes:
        name: The label of what is cut ("n", "k", "heads"), "partial", "replicated" or "replicated*".
        inputs: Layout of each tensor argument.
        outputs: Layout of each result.
        calls: What a rank runs; the last call gives the results.
    """

    name: str
    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    calls: tuple[Call, ...]

    def __str__(self) -> str:
        return f"{self.name}: {', '.join(map(str, self.inputs))} -> {', '.join(map(str, self.outputs))}"

    @property
    def key(self) -> tuple[Any, ...]:
        """What makes two strategies of one operator the same."""
        return (self.inputs, self.outputs)


class Operation:
    """A call node with its tensor arguments numbered in order.

    Attributes:
        node: The node of the whole graph.
        t: Number of ranks.
        operands: The nodes of its tensor arguments, one for each place (a node may stand twice).
        twin: In an evaluation capture, the same operator of the training capture.
    """

    def __init__(self, node: fx.Node, t: int, twin: fx.Node | None = None) -> None:
        self.node = node
        self.t = t
        self.twin = twin
        self.operands: list[fx.Node] = []

        def number(arg: Any) -> Any:
            if isinstance(arg, fx.Node):
                self.operands.append(arg)
                return Operand(len(self.operands) - 1)
            return arg

        self.args: tuple[Any, ...] = tuple(map_aggregate(node.args, number))  # type: ignore[arg-type]
        self.kwargs: dict[str, Any] = dict(map_aggregate(node.kwargs, number))  # type: ignore[arg-type]

    @cached_property
    def inputs(self) -> list[torch.Tensor]:
        """Whole values (shapes and dtypes) of the tensor arguments."""
        return [node.meta["val"] for node in self.operands]

    @cached_property
    def outputs(self) -> list[Any]:
        """Whole values of the results; what is no tensor is None."""
        value = self.node.meta["val"]
        values = list(value) if isinstance(value, (list, tuple)) else [value]
        return [v if isinstance(v, torch.Tensor) else None for v in values]

    @cached_property
    def tracked_outputs(self) -> list[bool]:
        """Whether autograd tracks each result."""
        flag = self.node.meta.get("requires_grad", False)
        flags = list(flag) if isinstance(flag, (list, tuple)) else [flag] * len(self.outputs)
        return [bool(f) for f in flags] or [False]

    @cached_property
    def tracked_inputs(self) -> list[bool]:
        """Whether a gradient flows back to each tensor argument through this operator."""
        flows = any(self.tracked_outputs) or (self.mutates and self.node.meta.get("grad_enabled", True))
        return [flows and bool(node.meta.get("requires_grad", False)) for node in self.operands]

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Arguments by name, with the defaults of the schema; tensors are `Operand`."""
        return named(self.node.target._schema, self.args, self.kwargs)  # type: ignore[union-attr]

    def in_training(self, name: str) -> Any:
        """A constant argument as the training capture has it: both captures are then split by one computation."""
        return (self.arguments if self.twin is None else Operation(self.twin, self.t).arguments)[name]

    @cached_property
    def signature(self) -> Hashable:
        """What the rules read of an operator: all but the names of its tensors."""
        tensors = tuple(None if v is None else (tuple(v.shape), v.dtype) for v in (*self.inputs, *self.outputs))
        target = self.node.target if self.node.op == "call_function" else self.node.name
        own = _plain((self.args, self.kwargs))
        twin = None if self.twin is None else Operation(self.twin, self.t)
        other = own if twin is None else _plain((twin.args, twin.kwargs))
        context = bool(self.node.meta.get("autocast")), bool(self.node.meta.get("grad_enabled", True))
        flags = tuple(self.tracked_inputs), tuple(self.tracked_outputs)
        return target, own, other, tensors, flags, context

    @cached_property
    def mutated(self) -> frozenset[int]:
        """The tensor arguments that the operator writes to, or (a gradient hook) acts on in another way."""
        if self.node.meta["val"] is None:
            return frozenset(range(len(self.operands)))
        schema = getattr(self.node.target, "_schema", None)
        if schema is None:
            return frozenset()
        written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
        if schema.name in UPDATES_STATISTICS and self.arguments[UPDATES_STATISTICS[schema.name]]:
            written += ["running_mean", "running_var"]
        found = [self.arguments.get(name) for name in written]
        return frozenset(operand.number for operand in found if isinstance(operand, Operand))

    @property
    def mutates(self) -> bool:
        return bool(self.mutated)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor argument of that name."""
        return tuple(self.inputs[self.arguments[name].number].shape)

    def local_output_shape(self, layout: Layout, output: int = 0) -> list[int]:
        return list(local_shape(self.outputs[output].shape, layout, self.t))

    def call(self, **changes: Any) -> Call:
        """The operator itself, with some arguments (by name) replaced."""
        if not changes:
            return Call(self.node.target, self.args, self.kwargs)
        args, kwargs = list(self.args), dict(self.kwargs)
        names = [a.name for a in self.node.target._schema.arguments]  # type: ignore[union-attr]
        for name, value in changes.items():
            position = names.index(name)
            if position < len(args):
                args[position] = value
            else:
                kwargs[name] = value
        return Call(self.node.target, tuple(args), kwargs)


def _plain(arguments: Any) -> Hashable:
    """Arguments as text, tensors by number."""
    if isinstance(arguments, Operand):
        return f"%{arguments.number}"
    if isinstance(arguments, (list, tuple)):
        return tuple(_plain(item) for item in arguments)
    if isinstance(arguments, Mapping):
        return tuple((key, _plain(item)) for key, item in arguments.items())
    return repr(arguments)


def substitute(value: Any, look: Callable[[Operand | Result], Any]) -> Any:
    """Arguments of a call with every `Operand` and `Result` replaced."""
    if isinstance(value, (Operand, Result)):
        return look(value)
    if isinstance(value, (list, tuple)):
        return type(value)(substitute(item, look) for item in value)
    if isinstance(value, Mapping):
        return {key: substitute(item, look) for key, item in value.items()}
    return value
