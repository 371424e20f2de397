"""From a graph and a choice of layouts to the local graph that every rank runs.

The local graph keeps the names of all nodes. New nodes are conversions, calls of `autopart.runtime.collectives`. What
turns summands into a value stands right behind its producer, as part of the producer's module; every other conversion
stands before its first reader, in the innermost module call that holds all its readers. A value is converted once for
all readers that see it alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopart.errors import AutopartError
from autopart.graph import Capture, Graph, OpaqueCall
from autopart.runtime import collectives
from autopart.sharding.choice import Choice, following, of_nodes
from autopart.sharding.colocation import colocated_sets
from autopart.sharding.conversions import conversion
from autopart.sharding.layouts import Layout, R, Split, local_shape
from autopart.sharding.local_values import LocalValues
from autopart.sharding.operation import Call, Operand, Result, Strategy, substitute
from autopart.sharding.program import Program, is_getitem, layout_of


@dataclass(frozen=True, eq=False)
class LocalGraph(Graph):
    """The graph that each rank of a tensor-parallel group runs; a `Graph` like any other.

    The `meta` of a node that holds a value has `layout`, what its ranks hold of it.

    State has local shapes (on `meta`); inputs are whole on every rank, and results too but for `output_splits`, in
    training. `inputs` and `outputs` speak of whole tensors.

    Attributes:
        tensor: Number of ranks.
        shards: State key -> how a rank's tensor is cut from the whole (`runtime.shards.cut`); None: whole.
        output_splits: For each result, how the training capture leaves it in shards; None: whole on every rank.
        whole: The graph it was made from.
        choice: The layouts it was made with.
    """

    tensor: int = 1
    shards: Mapping[str, Split | None] = None  # type: ignore[assignment]
    output_splits: tuple[Split | None, ...] = ()
    whole: Graph = None  # type: ignore[assignment]
    choice: Choice = None  # type: ignore[assignment]


def rewrite(graph: Graph, choice: Choice, t: int) -> LocalGraph:
    """The local graph of a choice.

    The other capture (evaluation, when the choice is for training) gets the same layouts of state, the same strategies
    where they are legal there, and else the strategies that convert least.

    Raises:
        AutopartError: The choice is not legal: it names the node.
    """
    program = choice.program
    if program is None or program.t != t or program.capture is not graph.primary:
        program = Program.of(graph, t)
    for node, layouts in program.layouts.items():
        if node.op == "get_attr" and choice.state.get(str(node.target), R) not in layouts:
            name = graph.state[str(node.target)].name
            raise AutopartError(f"{name} cannot be held as {choice.state[str(node.target)]}")
    values = LocalValues(program.capture.graph, t)
    primary = _Rewriter(program, choice, values, graph.opaque).run()
    if graph.training is None:
        captures = {"training": None, "evaluation": primary}
    else:
        other = Program.of(graph, t, evaluation=True, rules=program.rules)
        captures = {
            "training": primary,
            "evaluation": _Rewriter(other, _evaluation(other, choice), values, graph.opaque).run(),
        }
    splits = {key: choice.state.get(key, R).split for key in graph.state}
    state = {
        key: replace(entry, tensor=_local_state(entry.tensor, choice.state.get(key, R), t))
        for key, entry in graph.state.items()
    }
    fields = {name: getattr(graph, name) for name in Graph.__dataclass_fields__}
    return LocalGraph(
        **{**fields, **captures, "state": state},
        tensor=t,
        shards=splits,
        output_splits=_output_splits(program, choice),
        whole=graph,
        choice=choice,
    )


def _output_splits(program: Program, choice: Choice) -> tuple[Split | None, ...]:
    strategies, held = of_nodes(program, choice)
    results = program.capture.graph.output_node().args[0]
    return tuple(
        program.result(number, layout_of(value, strategies, held)).split if isinstance(value, fx.Node) else None
        for number, value in enumerate(results)  # type: ignore[arg-type]
    )


def _local_state(tensor: torch.Tensor, layout: Layout, t: int) -> torch.Tensor:
    if layout.split is None:
        return tensor
    shape = local_shape(tensor.shape, layout, t)
    return torch.empty(shape, dtype=tensor.dtype, device="meta").requires_grad_(tensor.requires_grad)


def _evaluation(program: Program, choice: Choice) -> Choice:
    """A choice for the evaluation capture: the same layouts of state, and the same strategies of the same operators.

    Raises:
        AutopartError: A tensor that this capture changes in place cannot keep its layout.
    """
    wanted = {node.name: choice.strategies[twin.name] for node, twin in program.twins.items() if not is_getitem(twin)}
    made = following(program, choice.state, wanted)
    for key, layout in choice.state.items():
        if made.state.get(key, layout) != layout:
            raise AutopartError(f"the evaluation capture cannot hold state {key} as {layout}")
    again = {node.name for node, twin in program.twins.items() if twin.name in choice.again}
    return replace(made, again=frozenset(again) | choice.again)


@dataclass(frozen=True)
class _Wanted:
    """What tells conversions of one value apart."""

    source: fx.Node
    before: Layout
    after: Layout
    version: int
    differentiable: bool
    grad_enabled: bool
    checkpoint: Any


class _Rewriter:
    """One walk over the whole graph that builds the local one."""

    def __init__(self, program: Program, choice: Choice, values: LocalValues, opaque: Mapping[str, OpaqueCall]) -> None:
        self.program = program
        self.strategies, self.held = of_nodes(program, choice)
        self.again = choice.again
        self.opaque = opaque
        self.graph = fx.Graph()
        self.local: dict[fx.Node, fx.Node] = {}
        self.converted: dict[_Wanted, fx.Node] = {}
        self.readers: dict[_Wanted, list[fx.Node]] = {}
        self.wanted: dict[tuple[fx.Node, int], _Wanted] = {}
        self.behind: dict[fx.Node, list[_Wanted]] = {}
        self.values = values
        self.calls: dict[Any, Call] = {}  # conversions
        self.parts: list[list[str]] = []  # names of the calls of operators that have several

    def run(self) -> Capture:
        self._collect()
        for node in self.program.capture.graph.nodes:
            self._node(node)
            for wanted in self.behind.get(node, ()):
                self._convert(wanted, node.meta)
        made = ((wanted.source, wanted.version, node) for wanted, node in self.converted.items())
        return Capture(self.graph, colocated_sets(self.program, self.graph, self.parts, made))

    def _collect(self) -> None:
        """Which conversions are needed, who reads them, and which stand behind their producer."""
        aliases = self.program.aliases
        for edge in self.program.edges():
            source, user = edge.source, edge.user
            before = layout_of(source, self.strategies, self.held)
            if user.op == "output":
                after = self.program.result(edge.number, before)
            else:
                after = self.strategies[user].inputs[edge.number]
            differentiable = self.program.differentiable(edge)
            if not differentiable:
                before, after = before.without_gradient(), after.without_gradient()
            if conversion(before, after, (), self.program.t).target is None:
                continue
            if self.program.fixed(edge):
                raise AutopartError(f"{user.name} shares memory with {source.name}, which is changed in place")
            made_here = before.partial and aliases.version(source, user) == self._version_behind(source)
            place = source if made_here else user
            wanted = _Wanted(
                source,
                before,
                after,
                aliases.version(source, user),
                differentiable,
                bool(place.meta.get("grad_enabled", True)),
                place.meta.get("checkpoint"),
            )
            self.wanted[user, edge.number] = wanted
            self.readers.setdefault(wanted, []).append(user)
            if made_here and wanted not in self.behind.setdefault(source, []):
                self.behind[source].append(wanted)

    def _version_behind(self, source: fx.Node) -> int:
        """The version of a value right behind the node that makes it."""
        return self.program.aliases.version(source, source.next)

    def _node(self, node: fx.Node) -> None:
        if node.op in ("placeholder", "get_attr"):
            shape = local_shape(node.meta["val"].shape, self.held[node], self.program.t)
            value = self.values.empty(node.meta["val"], shape)
            meta = {**node.meta, "val": value, "layout": self.held[node]}
            self.local[node] = self._add(node.op, node.target, (), {}, node.name, meta)
        elif node.op == "output":
            results = tuple(
                self._read(node, number) if isinstance(value, fx.Node) else value
                for number, value in enumerate(node.args[0])  # type: ignore[arg-type]
            )
            self.graph.output(results).meta = dict(node.meta)
        elif is_getitem(node):
            source, number = node.args
            assert isinstance(source, fx.Node)
            made = self.local[source]
            meta = {**node.meta, "val": made.meta["val"][number], "layout": self._layout(node)}
            self.local[node] = self._add(node.op, node.target, (made, number), {}, node.name, meta)
        else:
            self._operator(node)

    def _operator(self, node: fx.Node) -> None:
        strategy = self.strategies[node]
        operands = [self._read(node, number) for number in range(len(strategy.inputs))]
        results: list[fx.Node] = []

        def look(item: Operand | Result) -> fx.Node:
            return operands[item.number] if isinstance(item, Operand) else results[item.number]

        for number, call in enumerate(strategy.calls):
            args, kwargs = substitute(call.args, look), substitute(call.kwargs or {}, look)
            last = number == len(strategy.calls) - 1
            name = node.name if last else f"{node.name}_local"
            meta = dict(node.meta)
            if node.op == "call_function":
                given, made = ([n.meta["val"] for n in nodes] for nodes in (operands, results))
                meta["val"] = self.values.value(call, given, made, meta)
            if last and isinstance(node.meta["val"], torch.Tensor):
                meta["layout"] = self._layout(node)
            results.append(self._add(node.op, call.target, args, kwargs, name, meta))
        self._check(node, strategy, results[-1].meta["val"])
        if len(results) > 1:
            self.parts.append([result.name for result in results])
        self.local[node] = results[-1]

    def _layout(self, node: fx.Node) -> Layout:
        return layout_of(node, self.strategies, self.held)

    def _check(self, node: fx.Node, strategy: Strategy, value: Any) -> None:
        """Local results have the shapes that their layouts say: a rule that is wrong about a shape stops here."""
        whole, local = node.meta["val"], value
        if not isinstance(whole, (list, tuple)):
            whole, local = [whole], [value]
        for before, after, layout in zip(whole, local, strategy.outputs, strict=True):
            if isinstance(before, torch.Tensor):
                expected = local_shape(before.shape, layout, self.program.t)
                if tuple(after.shape) != expected or after.dtype != before.dtype:
                    raise AutopartError(
                        f"the split of {node.name} ({strategy}) gives {tuple(after.shape)} {after.dtype} where "
                        f"{expected} {before.dtype} was expected"
                    )

    def _read(self, user: fx.Node, number: int) -> fx.Node:
        """The operand as the user reads it, converted where that is needed."""
        wanted = self.wanted.get((user, number))
        if wanted is None:
            sources = user.args[0] if user.op == "output" else self.program.operations[user].operands
            return self.local[sources[number]]  # type: ignore[index]
        if wanted not in self.converted:
            readers = [reader for reader in self.readers[wanted] if reader.op != "output"]
            stacks = [self._callers(reader) for reader in readers] or [{}]
            first = user if user.op != "output" else wanted.source
            self._convert(wanted, {**first.meta, "nn_module_stack": _common(stacks)})
        return self.converted[wanted]

    def _callers(self, reader: fx.Node) -> Mapping[str, Any]:
        """The module calls in which a value is made ready for its reader: outside of a module that is kept whole."""
        stack = dict(reader.meta.get("nn_module_stack") or {})
        if reader.op != "call_module" or self.opaque[str(reader.target)].kind != "module":
            return stack
        whole = self.opaque[str(reader.target)].path
        return {key: call for key, call in stack.items() if not call[0] or whole.startswith(f"{call[0]}.")}

    def _convert(self, wanted: _Wanted, place: Mapping[str, Any]) -> None:
        source = self.local[wanted.source]
        shape = tuple(wanted.source.meta["val"].shape)
        key = wanted.before, wanted.after, shape, wanted.differentiable
        if key not in self.calls:
            made = conversion(wanted.before, wanted.after, shape, self.program.t, wanted.differentiable)
            self.calls[key] = Call(made.target, (Operand(0), *made.args), dict(made.kwargs))
        call = self.calls[key]
        tracked = bool(wanted.source.meta.get("requires_grad", False)) and wanted.grad_enabled
        meta = {
            "val": self.values.value(call, [source.meta["val"]], (), {}),
            "requires_grad": tracked,
            "layout": wanted.after,
            "nn_module_stack": dict(place.get("nn_module_stack") or {}),
            "stack_trace": place.get("stack_trace"),
            "grad_enabled": wanted.grad_enabled,
            "autocast": place.get("autocast", ()),
            "checkpoint": wanted.checkpoint,
        }
        name = f"{wanted.source.name}_{call.target.__name__}"
        args, kwargs = (source, *call.args[1:]), dict(call.kwargs or {})
        if call.target is collectives.all_gather and wanted.differentiable and wanted.source.name in self.again:
            kwargs["again"] = True
        self.converted[wanted] = self._add("call_function", call.target, args, kwargs, name, meta)

    def _add(self, op: str, target: Any, args: Any, kwargs: Any, name: str, meta: dict[str, Any]) -> fx.Node:
        node = self.graph.create_node(op, target, tuple(args), dict(kwargs), name)
        node.meta = meta
        return node


def _common(stacks: list[Mapping[str, Any]]) -> dict[str, Any]:
    """The module calls that all stacks share, outermost first."""
    common = list(stacks[0].items())
    for stack in stacks[1:]:
        keys = list(stack)
        length = 0
        while length < min(len(common), len(keys)) and common[length][0] == keys[length]:
            length += 1
        common = common[:length]
    return dict(common)
