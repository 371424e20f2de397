"""Two captures, one program: the training and the evaluation graph merged into one sequence of operations.

Operations that both graphs share are written once; a constant that differs becomes a `Switch`, a tensor that differs a
`select` operation (`a if self.training else b`), and an operation that only one graph has keeps its mode.
"""

from __future__ import annotations

import difflib
import operator
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import fx

from autopart.codegen.defaults import made_of_nothing, promoted_to
from autopart.codegen.functions import IMPURE, argument_names, called, is_collective, is_function
from autopart.errors import CaptureError
from autopart.graph import Capture, Graph

OpMode = Literal["both", "training", "evaluation"]
SELECT = "select"
Context = tuple[bool, tuple[tuple[str, torch.dtype], ...]]


@dataclass(eq=False)
class Value:
    """One tensor of the program: an input, an entry of the state table, or a result of an operation.

    Attributes:
        name: Placeholder name, state key, or a unique result name.
        index: Which of several results; None for the only one.
    """

    kind: Literal["input", "state", "result"]
    name: str
    node: fx.Node
    op: Op | None = None
    index: int | None = None

    @property
    def tensor(self) -> torch.Tensor:
        val = self.node.meta["val"]
        return val if self.index is None else val[self.index]

    @property
    def has_one_shape(self) -> bool:
        """Whether it has the same shape and dtype in both modes."""
        if self.op is None:
            return True
        if self.op.target == SELECT:
            one, other = (v.tensor for v in self.op.values())
        elif self.op.evaluation is not None:
            one, other = self.tensor, Value("result", "", self.op.evaluation, None, self.index).tensor
        else:
            return True
        return one.shape == other.shape and one.dtype == other.dtype

    @property
    def requires_grad(self) -> bool:
        if self.op is not None and self.op.target == SELECT:
            return any(v.requires_grad for v in self.op.values())
        tracked = self.node.meta.get("requires_grad", False)
        return bool(tracked if self.index is None else tracked[self.index])


@dataclass(frozen=True)
class Switch:
    """A constant that depends on the mode."""

    training: Any
    evaluation: Any


@dataclass(eq=False)
class Op:
    """One operation.

    Attributes:
        target: An operator overload, a function of the runtime, `SELECT`, or the key of an opaque call.
        args: Argument name (of the operator's schema, or of the function) -> value, constant, switch, or list of them.
        multiple: Whether it gives several results.
        evaluation: Its node in the evaluation graph, where `node` is the one in the training graph.
        lifted: How many of the innermost calls it was captured in it has left (see `conversions`).
        within: For a call of an opaque module, the module's path: the call belongs to the modules around it.
    """

    name: str
    target: Any
    args: dict[str, Any]
    mode: OpMode
    node: fx.Node
    results: list[Value] = field(default_factory=list)
    multiple: bool = False
    stage: int = -1
    within: str | None = None
    evaluation: fx.Node | None = None
    lifted: int = 0

    def values(self) -> list[Value]:
        return list(values_in(self.args))

    @property
    def context(self) -> Context:
        if self.target == SELECT:
            return True, ()
        return bool(self.node.meta.get("grad_enabled", True)), tuple(map(tuple, self.node.meta.get("autocast") or ()))

    @property
    def checkpoint(self) -> Any:
        return self.node.meta.get("checkpoint")

    @property
    def module_calls(self) -> list[tuple[str, str, str]]:
        """(call key, module path, class name), outermost first."""
        stack = self.node.meta.get("nn_module_stack") or {}
        calls = [(key, path, class_name(kind)) for key, (path, kind) in stack.items()]
        if self.within is None:
            return calls[: len(calls) - self.lifted]
        return [c for c in calls if not c[1] or self.within.startswith(c[1] + ".")]

    @property
    def traced_calls(self) -> int:
        """How many module calls its stack trace goes through; a conversion has the trace of the node that it is for."""
        if not is_collective(self.target):
            return len(self.module_calls)
        trace = self.node.meta.get("stack_trace")
        alike = (n.meta for n in (*self.node.users, self.node) if n.meta.get("stack_trace") == trace)
        return len(next(alike).get("nn_module_stack") or {})


@dataclass
class Program:
    """The merged program: operations in order, inputs and state by name, and the outputs.

    Attributes:
        evaluated: For each output, whether the model returns it in evaluation mode too.
    """

    ops: list[Op]
    inputs: dict[str, Value]
    state: dict[str, Value]
    outputs: list[Value]
    evaluated: list[bool]


def values_in(argument: Any) -> Iterator[Value]:
    """Every value inside a nested argument, in order."""
    if isinstance(argument, Value):
        yield argument
    elif isinstance(argument, dict):
        for item in argument.values():
            yield from values_in(item)
    elif isinstance(argument, list | tuple):
        for item in argument:
            yield from values_in(item)


def class_name(kind: Any) -> str:
    return kind.__name__ if isinstance(kind, type) else str(kind).rsplit(".", 1)[-1]


def is_mutating(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and target._schema.is_mutable


def is_random(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def is_pure(op: Op) -> bool:
    """Whether it can move among other pure operations: it changes nothing and draws no random numbers."""
    if op.target == SELECT:
        return True
    if is_function(op.target):
        return op.target not in IMPURE
    return isinstance(op.target, torch._ops.OpOverload) and not is_mutating(op.target) and not is_random(op.target)


def memory_of(program: Program) -> dict[Value, Value]:
    """View, in-place result or choice between modes -> the value whose memory it is."""
    owner: dict[Value, Value] = {}
    for op in program.ops:
        schema = getattr(op.target, "_schema", None)
        source = next(iter(op.values()), None)
        aliases = op.target == SELECT or any(r.alias_info is not None for r in getattr(schema, "returns", ()))
        if aliases and source is not None:
            for value in op.results:
                owner[value] = owner.get(source, source)
    return owner


def build_program(graph: Graph) -> Program:
    """Merge the captures of `graph` (or take the only one)."""
    return _Merger(graph).run()


class _Mismatch(Exception):
    """Two operations that looked alike are not."""


class _Merger:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.inputs: dict[str, Value] = {}
        self.state: dict[str, Value] = {}
        self.ops: list[Op] = []
        self.of_node: dict[fx.Node, Value | Op] = {}
        self.selects: dict[tuple[Value, Value], Value] = {}
        self.names: set[str] = set()

    def run(self) -> Program:
        evaluation, training = self.graph.evaluation, self.graph.training
        self._leaves(training or evaluation)
        self._leaves(evaluation)
        if training is None:
            for node in _operations(evaluation):
                self._append(node, "both", self._arguments(node))
            outputs = [self._output(n, None) for n in _returned(evaluation)]
        else:
            self._align(_operations(training), _operations(evaluation))
            outputs = [self._output(*nodes) for nodes in zip(_returned(training), _returned(evaluation), strict=True)]
        evaluated = [node is not None for node in _returned(evaluation)]
        return Program(self._live(outputs), self.inputs, self.state, outputs, evaluated)

    def _leaves(self, capture: Capture) -> None:
        for node in capture.graph.nodes:
            if node.op == "placeholder":
                self.of_node[node] = self.inputs.setdefault(node.name, Value("input", node.name, node))
            elif node.op == "get_attr":
                self.of_node[node] = self.state.setdefault(node.target, Value("state", node.target, node))

    def _align(self, training: list[fx.Node], evaluation: list[fx.Node]) -> None:
        first, second = [_kind(n) for n in training], [_kind(n) for n in evaluation]
        if first == second:
            blocks: Sequence[tuple[str, int, int, int, int]] = [("equal", 0, len(first), 0, len(second))]
        else:
            blocks = difflib.SequenceMatcher(None, first, second, autojunk=False).get_opcodes()
        for tag, i1, i2, j1, j2 in blocks:
            if tag == "equal":
                for one, two in zip(training[i1:i2], evaluation[j1:j2], strict=True):
                    self._pair(one, two)
                continue
            for node in training[i1:i2]:
                self._append(node, "training", self._arguments(node))
            for node in evaluation[j1:j2]:
                self._append(node, "evaluation", self._arguments(node))

    def _pair(self, training: fx.Node, evaluation: fx.Node) -> None:
        try:
            first, second = self._arguments(training), self._arguments(evaluation)
            if first.keys() != second.keys():
                first, second = (_with_defaults(training.target, a, first | second) for a in (first, second))
            arguments = self._merge(first, second)
        except _Mismatch:
            self._append(training, "training", self._arguments(training))
            self._append(evaluation, "evaluation", self._arguments(evaluation))
            return
        self._append(training, "both", arguments, also=evaluation)

    def _append(self, node: fx.Node, mode: OpMode, arguments: dict[str, Any], also: fx.Node | None = None) -> None:
        nodes = [n for n in (node, also) if n is not None]
        if (same := _unchanged(node, arguments)) is not None:
            self.of_node.update(dict.fromkeys(nodes, same))
            return
        values = list(values_in(arguments))
        if (dtype := promoted_to(node, arguments, [v.tensor for v in values])) is not None:
            casts = {v: self._cast(v, dtype, mode, node, also) for v in values}
            arguments = {k: casts[v] if isinstance(v, Value) else v for k, v in arguments.items()}
        op = Op(self._unique(node.name), called(node), arguments, mode, node, evaluation=also)
        call = self.graph.opaque.get(str(node.target)) if node.op == "call_module" else None
        if call is not None and call.kind == "module":
            op.within = call.path
        val = node.meta["val"]
        op.multiple = isinstance(val, list | tuple)
        if op.multiple:
            op.results = [Value("result", f"{op.name}[{i}]", node, op, i) for i in range(len(val))]
        else:
            op.results = [Value("result", op.name, node, op)]
        self.ops.append(op)
        self.of_node.update(dict.fromkeys(nodes, _changed_state(node, arguments) or op))

    def _cast(self, value: Value, dtype: torch.dtype, mode: OpMode, node: fx.Node, also: fx.Node | None) -> Value:
        """The value in the dtype that an operation on it computes in."""
        op = Op(self._unique(f"{node.name}_cast"), torch.ops.aten.to.dtype, {}, mode, node, evaluation=also)
        op.args = {"self": value, "dtype": dtype}
        op.results = [Value("result", op.name, node, op)]
        self.ops.append(op)
        return op.results[0]

    def _unique(self, name: str) -> str:
        while name in self.names:
            name += "_"
        self.names.add(name)
        return name

    def _value(self, node: fx.Node) -> Value | list[Value]:
        if node.target is getattr and node.op == "call_function":
            raise CaptureError(f"{node.name}: an attribute read is left in the captured graph")
        if _is_getitem(node):
            source = self._value(node.args[0])  # type: ignore[arg-type]
            assert isinstance(source, list)
            return source[node.args[1]]  # type: ignore[index]
        known = self.of_node[node]
        if isinstance(known, Value):
            return known
        return known.results if known.multiple else known.results[0]

    def _arguments(self, node: fx.Node) -> dict[str, Any]:
        def convert(argument: Any) -> Any:
            if isinstance(argument, fx.Node):
                return self._value(argument)
            if isinstance(argument, list | tuple):
                return [convert(a) for a in argument]
            return argument

        given = {n: convert(a) for n, a in zip(argument_names(node), node.args, strict=False)}
        return given | {k: convert(v) for k, v in node.kwargs.items()} | made_of_nothing(node)

    def _merge(self, training: Any, evaluation: Any) -> Any:
        if isinstance(training, Value) and isinstance(evaluation, Value):
            return training if training is evaluation else self._select(training, evaluation)
        if isinstance(training, dict) and isinstance(evaluation, dict):
            if training.keys() != evaluation.keys():
                raise _Mismatch
            return {k: self._merge(training[k], evaluation[k]) for k in training}
        if isinstance(training, list) and isinstance(evaluation, list):
            if len(training) != len(evaluation):
                raise _Mismatch
            return [self._merge(a, b) for a, b in zip(training, evaluation, strict=True)]
        if isinstance(training, Value | list | dict) or isinstance(evaluation, Value | list | dict):
            raise _Mismatch
        if type(training) is type(evaluation) and training == evaluation:
            return training
        return Switch(training, evaluation)

    def _select(self, training: Value, evaluation: Value) -> Value:
        for one, other, mode in ((training, evaluation, "training"), (evaluation, training, "evaluation")):
            if one.op and one.op.mode == mode and _is_contiguous_copy(one.op) and one.op.args["self"] is other:
                one.op.mode = "both"
                return one
        if (training, evaluation) in self.selects:
            return self.selects[training, evaluation]
        sources = [v.op for v in (training, evaluation) if v.op is not None]
        later = max(sources, key=self.ops.index) if sources else None
        args = {"training": training, "evaluation": evaluation}
        node = training.node if training.op is None or training.op is later else (later or training.op).node
        op = Op(self._unique(f"select_{len(self.selects)}"), SELECT, args, "both", node)
        value = Value("result", op.name, training.node, op, training.index)
        op.results = [value]
        self.ops.insert(self.ops.index(later) + 1 if later else 0, op)
        self.selects[training, evaluation] = value
        return value

    def _output(self, training: fx.Node, evaluation: fx.Node | None) -> Value:
        value: Any = self._value(training)
        return value if evaluation is None else self._merge(value, self._value(evaluation))

    def _live(self, outputs: list[Value]) -> list[Op]:
        needed = {v.op for v in outputs}
        for op in reversed(self.ops):
            if op in needed or not is_pure(op):
                needed.add(op)
                needed.update(v.op for v in op.values())
        return [op for op in self.ops if op in needed]


def _with_defaults(target: Any, arguments: dict[str, Any], names: Collection[str]) -> dict[str, Any]:
    """The arguments called `names`, in the order of the schema; those that were left out get their defaults."""
    if not isinstance(target, torch._ops.OpOverload):
        return arguments
    return {a.name: arguments.get(a.name, a.default_value) for a in target._schema.arguments if a.name in names}


def _operations(capture: Capture) -> list[fx.Node]:
    return [n for n in capture.calls if not _is_getitem(n) and not _is_check(n)]


def _returned(capture: Capture) -> list[Any]:
    """The nodes that a capture gives back; None where only the other mode has one."""
    return list(list(capture.graph.nodes)[-1].args[0])


def _is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def _is_check(node: fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and not node.target._schema.returns
        and not is_mutating(node.target)
    )


def _kind(node: fx.Node) -> tuple[str, str]:
    stack = node.meta.get("nn_module_stack") or {}
    return str(node.target), next(reversed(stack), "") if stack else ""


_CASTS: dict[str, Callable[[dict[str, Any]], bool]] = {
    "aten::to": lambda args: not args.get("copy") and args.get("memory_format") in (None, torch.preserve_format),
    "aten::alias": lambda args: True,
}


def _unchanged(node: fx.Node, arguments: dict[str, Any]) -> Value | None:
    """The argument itself, when the operation gives it back untouched (a cast to the dtype it has)."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.name not in _CASTS:
        return None
    source = arguments.get("self")
    if not isinstance(source, Value) or not _CASTS[target._schema.name](arguments):
        return None
    result = node.meta["val"]
    same = result.dtype == source.tensor.dtype and result.device == source.tensor.device
    return source if same else None


def _changed_state(node: fx.Node, arguments: dict[str, Any]) -> Value | None:
    """The state that the operation changes in place and gives back: what reads the result can read the state.

    So a counter that one mode counts up is no value that this mode has to hand on from call to call.
    """
    target = node.target
    if not is_mutating(target) or len(target._schema.returns) != 1:  # type: ignore[union-attr]
        return None
    given = target._schema.returns[0].alias_info  # type: ignore[union-attr]
    for argument in target._schema.arguments:  # type: ignore[union-attr]
        value = arguments.get(argument.name)
        same = (
            given is not None and argument.alias_info is not None and given.before_set == argument.alias_info.before_set
        )
        if same and isinstance(value, Value) and value.kind == "state":
            return value if value.requires_grad == bool(node.meta.get("requires_grad", False)) else None
    return None


def _is_contiguous_copy(op: Op) -> bool:
    return isinstance(op.target, torch._ops.OpOverload) and op.target._schema.name == "aten::contiguous"
