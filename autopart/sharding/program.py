"""Every legal strategy of every node of a capture, for one tensor degree.

Which splits of a dimension are worth naming comes from the graph itself: every dimension as one part, and the part
lists at which slices, chunks, joins and views cut it. They are carried from operator to operator, in both directions,
until nothing new is found.
"""

from __future__ import annotations

import operator
from collections import defaultdict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import fx

from autopart.graph import Capture, Graph, StateEntry
from autopart.sharding.aliases import Aliases
from autopart.sharding.layouts import Layout, Owned, R, Routed, Split, shards
from autopart.sharding.operation import Operation, Strategy
from autopart.sharding.rulebook import Rulebook
from autopart.sharding.rules.labels import Place
from autopart.sharding.twins import twins

MOST_PARTS = 64
MOST_SPLITS = 24  # of one value


@dataclass(frozen=True)
class Edge:
    """A value and one place where it is read: `user`'s tensor argument `number` (of the output node: its n-th
    result)."""

    source: fx.Node
    user: fx.Node
    number: int


class Program:
    """A capture with its strategies.

    Attributes:
        capture: What is split.
        t: Tensor degree.
        operations: Call node -> the operator as the rules see it (getitems are parts of their producer).
        strategies: Call node -> its legal strategies, "replicated" first.
        layouts: Placeholder or `get_attr` node -> the layouts it may have.
        aliases: Which values share memory and which of them are changed in place.
        twins: Of an evaluation capture: call node -> the same operator of the training capture.
        rules: What the rules say of its operators.

    Args:
        whole: Keys of state that no rank may hold a part of.
        loss: The result that is trained on.
        training: Whether results may stay in shards (see `result`).
    """

    def __init__(
        self,
        capture: Capture,
        t: int,
        *,
        whole: Collection[str] = (),
        loss: int | None = None,
        training: bool = False,
        twins: Mapping[fx.Node, fx.Node] | None = None,
        rules: Rulebook | None = None,
    ) -> None:
        self.capture = capture
        self.t = t
        self.twins = twins or {}
        self.rules = rules or Rulebook()
        self._loss, self._training = loss, training
        self.operations = {
            node: Operation(node, t, self.twins.get(node)) for node in capture.calls if not is_getitem(node)
        }
        self.aliases = Aliases(capture, self.operations)
        self._splits: dict[fx.Node, dict[Split, None]] = defaultdict(dict)
        self._named: dict[fx.Node, set[Owned | Routed]] = defaultdict(set)
        self._found: dict[fx.Node, dict[object, Strategy]] = {node: {} for node in self.operations}
        self._queue: deque[tuple[fx.Node, Split | Owned | Routed]] = deque()
        self._users: dict[fx.Node, list[tuple[fx.Node, int]]] = defaultdict(list)
        for node, op in self.operations.items():
            for number, operand in enumerate(op.operands):
                self._users[operand].append((node, number))
        self._explore()
        self._drop_dead_ends()
        self.strategies = {node: list(found.values()) for node, found in self._found.items()}
        self.layouts = {
            node: [R, *(shards(split) for split in self._splits[node])]
            if node.op == "get_attr" and node.target not in whole
            else [R]
            for node in capture.graph.nodes
            if node.op in ("placeholder", "get_attr")
        }

    @classmethod
    def of(cls, graph: Graph, t: int, *, evaluation: bool = False, rules: Rulebook | None = None) -> Program:
        """The strategies of a graph's primary capture, or of its evaluation capture."""
        trained = graph.training is not None
        second = evaluation and trained
        return cls(
            graph.evaluation if evaluation else graph.primary,
            t,
            whole={key for key, entry in graph.state.items() if not _may_split(graph, entry)},
            loss=graph.loss,
            training=trained and not evaluation,
            twins=twins(graph.training, graph.evaluation) if second else None,  # type: ignore[arg-type]
            rules=rules,
        )

    def edges(self) -> Iterator[Edge]:
        """Every place where a value is read, in program order."""
        for node in self.capture.graph.nodes:
            if node in self.operations:
                for number, operand in enumerate(self.operations[node].operands):
                    yield Edge(operand, node, number)
            elif node.op == "output":
                for number, value in enumerate(node.args[0]):
                    if isinstance(value, fx.Node):
                        yield Edge(value, node, number)

    def differentiable(self, edge: Edge) -> bool:
        """Whether a gradient flows back over the edge."""
        if edge.user.op == "output":
            return bool(edge.source.meta.get("requires_grad", False))
        return self.operations[edge.user].tracked_inputs[edge.number]

    def result(self, number: int, layout: Layout) -> Layout:
        """The layout in which result `number` of the model is given back when it is computed in `layout`.

        The loss and what is summed is whole on every rank. Other shards stay shards in training: nobody reads them
        there, and gathering the logits of a large vocabulary would take more memory than its loss does.
        """
        if number == self._loss or layout.partial:
            return R
        return layout if layout.split is None or self._training else R

    def fixed(self, edge: Edge) -> bool:
        """Whether the value must be read in the very layout it has: it shares memory that is changed in place."""
        return edge.user.op != "output" and self.aliases.fixed(edge.user, edge.number)

    # Exploration.

    def _explore(self) -> None:
        values = [n for n in self.capture.graph.nodes if isinstance(n.meta.get("val"), torch.Tensor)]
        for node, op in self.operations.items():
            for strategy in self.rules.at_once(op):
                self._keep(node, strategy)
        for node in values:
            for dim, size in enumerate(node.meta["val"].shape):
                if size > self.t or size == self.t:
                    self._add_split(node, Split(dim, (size,)))
        while self._queue:
            node, split = self._queue.popleft()
            for user, number in self._users[node]:
                self._propose(user, Place("in", number), split)
            if not isinstance(split, Split):
                continue
            producer, number = producer_of(node)
            if producer in self.operations:
                self._propose(producer, Place("out", number), split)

    def _propose(self, node: fx.Node, place: Place, split: Split | Owned | Routed) -> None:
        op = self.operations[node]
        if isinstance(split, Owned):
            found = self.rules.from_owned(op, place.number, split)
        elif isinstance(split, Routed):
            found = self.rules.from_routed(op, place.number, split)
        else:
            found = self.rules.from_split(op, place, split)
        for strategy in found:
            self._keep(node, strategy)

    def _keep(self, node: fx.Node, strategy: Strategy) -> None:
        op = self.operations[node]
        if any(strategy.inputs[i] != strategy.outputs[0] for i in op.mutated if i == 0 and op.outputs[0] is not None):
            return
        if strategy.key in self._found[node]:
            return
        self._found[node][strategy.key] = strategy
        for operand, layout in zip(op.operands, strategy.inputs, strict=True):
            if layout.split is not None:
                self._add_split(operand, layout.split)
        for number, layout in enumerate(strategy.outputs):
            for value in results_of(node, number):
                if layout.split is not None:
                    self._add_split(value, layout.split)
                else:
                    named = layout.owned or layout.routed
                    if named is not None and named not in self._named[value]:
                        self._named[value].add(named)
                        self._queue.append((value, named))

    def _drop_dead_ends(self) -> None:
        """Routed values are read as they are: without the strategies that make what no reader takes, or take what
        nobody makes."""
        values = [value for value, kinds in self._named.items() if any(isinstance(kind, Routed) for kind in kinds)]
        dropped = True
        while dropped:
            dropped = False
            for value in values:
                producer, result = producer_of(value)
                made = {s.outputs[result] for s in self._found[producer].values()}
                taken = made
                for user, number in self._users[value]:
                    dropped |= self._drop(user, Place("in", number), made)
                    taken = taken & {s.inputs[number] for s in self._found[user].values()}
                if any(user.op == "output" for user in value.users):
                    taken = set()
                dropped |= self._drop(producer, Place("out", result), taken)

    def _drop(self, node: fx.Node, place: Place, but: set[Layout]) -> bool:
        """Drop a node's strategies that have a routed layout at that place, but for some layouts."""
        found = self._found[node]

        def layout(strategy: Strategy) -> Layout:
            return (strategy.inputs if place.kind == "in" else strategy.outputs)[place.number]

        self._found[node] = {k: s for k, s in found.items() if layout(s).routed is None or layout(s) in but}
        return len(self._found[node]) < len(found)

    def _add_split(self, node: fx.Node, split: Split) -> None:
        known = self._splits[node]
        if split in known or len(split.parts) > MOST_PARTS or len(known) >= MOST_SPLITS:
            return
        if any(part < self.t for part in split.parts):
            return
        known[split] = None
        self._queue.append((node, split))


def _may_split(graph: Graph, entry: StateEntry) -> bool:
    """Parameters and persistent buffers may be split: the others are written into a package as they are. What a module
    holds that is kept whole may not: its code reads it whole."""
    opaque = [call.path for call in graph.opaque.values() if call.kind == "module"]
    below = any(not path or name.startswith(f"{path}.") for path in opaque for name in entry.names)
    return entry.kind != "constant" and entry.persistent and not below


def is_getitem(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is operator.getitem


def producer_of(node: fx.Node) -> tuple[fx.Node, int]:
    """The operator that makes a value, and which of its results it is."""
    if is_getitem(node):
        source, number = node.args
        assert isinstance(source, fx.Node) and isinstance(number, int)
        return source, number
    return node, 0


def results_of(node: fx.Node, number: int) -> list[fx.Node]:
    """The values that are result `number` of an operator."""
    if isinstance(node.meta.get("val"), torch.Tensor):
        return [node]
    return [user for user in node.users if is_getitem(user) and user.args[1] == number]


def layout_of(node: fx.Node, strategies: dict[fx.Node, Strategy], held: dict[fx.Node, Layout]) -> Layout:
    """Layout of a value under a choice."""
    producer, number = producer_of(node)
    return held[producer] if producer in held else strategies[producer].outputs[number]
