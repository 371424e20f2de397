"""The choice of layouts as data: which decisions there are, what each costs, and which conversions lie between them.

Nodes at the same place of identical blocks (`autopart.blocks`) share one decision, a *site*; so a model of 32 equal
layers has about as many decisions as one of one layer. Values and edges between tied nodes are tied with them, and
count as often as they occur.

What options and conversions cost is asked of `Prices`; the profiler has them (`profiler.pricing`), as it counts them in
the local graph.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Protocol

from torch import fx

from autopart.blocks import find_blocks
from autopart.cluster import Cluster, Link
from autopart.costs import SavedTensor, StrategyCost
from autopart.errors import UsageError
from autopart.graph import Graph
from autopart.sharding import (
    Edge,
    Layout,
    Operation,
    Price,
    Program,
    Strategy,
    conversions,
    local_shape,
    producer_of,
    renamed,
)
from autopart.workload import OPTIMIZER_STATES

Allow = Callable[[fx.Node, Strategy], bool]


class Prices(Protocol):
    """What layouts of one graph cost, forward and backward, whatever the number of ranks.

    Attributes:
        saved: Every storage that autograd keeps of the whole graph for one microbatch.
    """

    @property
    def saved(self) -> Sequence[SavedTensor]: ...

    def strategy(self, operation: Operation, strategy: Strategy, link: Link) -> StrategyCost:
        """Of an operator's local calls, with that link between the ranks."""
        ...

    def conversion(self, value: fx.Node, a: Layout, b: Layout, t: int, differentiable: bool, read: bool) -> float:
        """Seconds that a conversion takes beside its collectives.

        Args:
            differentiable: Whether a gradient flows back to its readers.
            read: Whether an operator reads its result, not the model's caller alone.
        """
        ...


@dataclass(frozen=True, eq=False)
class Site:
    """One decision, for one node or for the nodes at one place of identical blocks.

    Attributes:
        nodes: The call nodes, or the `get_attr` or placeholder nodes, that it decides.
        picks: Option -> strategy (or held layout) of each node.
        inputs, outputs: Option -> layouts of tensor arguments and results (of held values: the one layout).
        compute_s: Option -> seconds of computing, forward and backward, over all nodes. Its gradients' sums are paid by
            readers, so it may be below zero.
        inside_s: Option -> seconds of exchange inside the operators.
        inside_bytes: Option -> bytes that a rank sends inside the operators.
        state_bytes: Option -> bytes of state, its gradients and optimizer state on a rank, over all nodes.
    """

    nodes: tuple[fx.Node, ...]
    picks: tuple[tuple[Strategy | Layout, ...], ...]
    inputs: tuple[tuple[Layout, ...], ...]
    outputs: tuple[tuple[Layout, ...], ...]
    compute_s: tuple[float, ...]
    inside_s: tuple[float, ...]
    inside_bytes: tuple[int, ...]
    state_bytes: tuple[int, ...]


@dataclass(frozen=True)
class Reading:
    """Edges that are alike: result `output` of site `source` is read as argument `number` of site `user`.

    Attributes:
        user: None for results of the model (see `Program.result`).
        number: Of the argument; of the result, where `user` is None and it is the loss, else -1.
        differentiable: Whether a gradient flows back.
        fixed: Whether the value must be read in the layout that it has.
    """

    source: int
    output: int
    user: int | None
    number: int
    differentiable: bool
    fixed: bool


@dataclass(frozen=True)
class Value:
    """Values that are alike, and who reads them.

    Attributes:
        nodes: The values.
        partial: Groups of readings that share one conversion from partial results, which stands behind the producer.
        plain: Groups of readings that share one conversion from any other layout.
    """

    nodes: tuple[fx.Node, ...]
    partial: tuple[tuple[int, ...], ...]
    plain: tuple[tuple[int, ...], ...]

    def groups(self, layout: Layout) -> tuple[tuple[int, ...], ...]:
        return self.partial if layout.partial else self.plain


@dataclass(frozen=True)
class Saved:
    """Storages that are alike, kept from forward to backward.

    Attributes:
        bytes: Of all of them, whole, for the microbatches in flight.
        savers: (site, number of the argument that is kept, or None for the result).
    """

    bytes: int
    savers: tuple[tuple[int, int | None], ...]


class LayoutProblem:
    """All decisions of a graph for one tensor degree.

    Attributes:
        sites, readings, values: See the classes.
        program: The legal strategies.
        link: Between the ranks.
    """

    def __init__(
        self,
        graph: Graph,
        prices: Prices,
        cluster: Cluster,
        t: int,
        *,
        optimizer: str = "adamw",
        in_flight: int = 1,
        allow: Allow | None = None,
        tie: bool = True,
    ) -> None:
        if t < 2 or t > len(cluster):
            raise UsageError(f"tensor degree {t} needs that many devices, at least 2; the cluster has {len(cluster)}")
        self.graph, self.prices, self.cluster, self.t = graph, prices, cluster, t
        self.in_flight = in_flight
        self.program = Program.of(graph, t)
        self._position = _positions(self.program)
        self.link = cluster.group_link(t)
        self._optimizer_states = OPTIMIZER_STATES[optimizer]
        self._allow = allow
        self._sent: dict[Hashable, Price] = {}
        self._keeping: dict[tuple[int, int], int | None] = {}
        classes = _tied(graph, self.program) if tie else [(node,) for node in self._decided()]
        self.site_of = {node: i for i, nodes in enumerate(classes) for node in nodes}
        self.sites = tuple(
            self._held(nodes) if nodes[0] in self.program.layouts else self._run(nodes) for nodes in classes
        )
        self._find_readings()

    def price(self, value: fx.Node, a: Layout, b: Layout, differentiable: bool) -> Price:
        """What one conversion of one value sends."""
        tensor = value.meta["val"]
        key = (tuple(tensor.shape), tensor.dtype, a, b, differentiable)
        if key not in self._sent:
            self._sent[key] = conversions(a, b, tensor, self.t, self.link, differentiable)
        return self._sent[key]

    def copies_s(self, value: fx.Node, a: Layout, b: Layout, group: Sequence[int]) -> float:
        """Seconds that a conversion of one value takes beside what it sends, for a group of readings."""
        readings = [self.readings[r] for r in group]
        read = any(reading.user is not None for reading in readings)
        return self.prices.conversion(value, a, b, self.t, readings[0].differentiable, read)

    def sources(self, reading: Reading) -> list[Layout]:
        """For each option of the source: the layout from which the reading converts."""
        return [_seen(outputs[reading.output], reading) for outputs in self.sites[reading.source].outputs]

    def targets(self, reading: Reading) -> list[Layout]:
        """For each option of the user (of the source, for results): the layout to which the reading converts."""
        if reading.user is None:
            return [_seen(self.program.result(reading.number, layout), reading) for layout in self.sources(reading)]
        return [_seen(inputs[reading.number], reading) for inputs in self.sites[reading.user].inputs]

    @cached_property
    def saved(self) -> tuple[Saved, ...]:
        """Every storage that autograd keeps, by who keeps it."""
        names = {node.name: node for node in self.program.capture.graph.nodes}
        total: dict[tuple[tuple[int, int | None], ...], int] = defaultdict(int)
        for storage in self.prices.saved:
            owner, _ = producer_of(names[storage.owner])
            savers = [producer_of(names[name])[0] for name in storage.savers]
            kept = {self._kept(saver, owner) for saver in savers if saver in self.program.operations}
            total[tuple(sorted(kept, key=str))] += storage.bytes * self.in_flight
        return tuple(Saved(size, savers) for savers, size in total.items())

    def _kept(self, saver: fx.Node, owner: fx.Node) -> tuple[int, int | None]:
        """The saver's site, and which of its arguments shares the owner's storage; None: it keeps its result."""
        key = self.site_of[owner], self.site_of[saver]
        if key not in self._keeping:
            aliases = self.program.aliases
            operands = self.program.operations[saver].operands
            read = (n for n, operand in enumerate(operands) if aliases.root(operand) is aliases.root(owner))
            self._keeping[key] = None if saver == owner else next(read, None)
        return key[1], self._keeping[key]

    # Options and what they cost.

    def _decided(self) -> list[fx.Node]:
        nodes = self.program.capture.graph.nodes
        return [node for node in nodes if node in self.program.layouts or node in self.program.operations]

    def _held(self, nodes: tuple[fx.Node, ...]) -> Site:
        options = self.program.layouts[nodes[0]]
        zeros = (0.0,) * len(options)
        return Site(
            nodes,
            tuple((layout,) * len(nodes) for layout in options),
            ((),) * len(options),
            tuple((layout,) for layout in options),
            zeros,
            zeros,
            (0,) * len(options),
            tuple(sum(self._state_bytes(node, layout) for node in nodes) for layout in options),
        )

    def _state_bytes(self, node: fx.Node, layout: Layout) -> int:
        if node.op != "get_attr":
            return 0
        entry = self.graph.state[str(node.target)]
        trained = self.graph.mode == "training" and entry.requires_grad
        copies = 2 + self._optimizer_states if trained else 1
        return prod(local_shape(entry.tensor.shape, layout, self.t)) * entry.tensor.element_size() * copies

    def _run(self, nodes: tuple[fx.Node, ...]) -> Site:
        by_key = [
            {_relative(strategy, node, self._position): strategy for strategy in self.program.strategies[node]}
            for node in nodes
        ]
        options = [tuple(found[key] for found in by_key) for key in by_key[0]]
        if self._allow is not None:
            legal = [o for o in options if all(map(self._allow, nodes, o))]
            if not legal:
                names = ", ".join(str(strategy) for strategy in self.program.strategies[nodes[0]])
                raise UsageError(f"no strategy of {nodes[0].name} is allowed on {self.t} ranks (it has {names})")
            options = legal
        costs = [list(map(self._cost, nodes, option)) for option in options]
        return Site(
            nodes,
            tuple(options),
            tuple(option[0].inputs for option in options),
            tuple(option[0].outputs for option in options),
            tuple(sum(cost.compute_s for cost in option) for option in costs),
            tuple(sum(cost.exchange_s for cost in option) for option in costs),
            tuple(sum(cost.exchange_bytes for cost in option) for option in costs),
            (0,) * len(options),
        )

    def _cost(self, node: fx.Node, strategy: Strategy) -> StrategyCost:
        return self.prices.strategy(self.program.operations[node], strategy, self.link)

    # Who reads what.

    def _find_readings(self) -> None:
        found: dict[Reading, int] = {}
        groups: dict[fx.Node, list[tuple[int, Hashable, Hashable]]] = defaultdict(list)
        for edge in self.program.edges():
            reading = self._reading(edge)
            number = found.setdefault(reading, len(found))
            groups[edge.source].append((number, *self._sharing(edge)))
        self.readings = tuple(found)
        alike: dict[Hashable, list[fx.Node]] = defaultdict(list)
        for source, readers in groups.items():
            alike[_grouped(readers, 1), _grouped(readers, 2)].append(source)
        self.values = tuple(Value(tuple(nodes), *key) for key, nodes in alike.items())  # type: ignore[misc]

    def _reading(self, edge: Edge) -> Reading:
        producer, output = producer_of(edge.source)
        user = None if edge.user.op == "output" else self.site_of[edge.user]
        number = edge.number if user is not None or edge.number == self.graph.loss else -1
        differentiable, fixed = self.program.differentiable(edge), self.program.fixed(edge)
        return Reading(self.site_of[producer], output, user, number, differentiable, fixed)

    def _sharing(self, edge: Edge) -> tuple[Hashable, Hashable]:
        """What readers of one value must have in common to share a conversion: of partial results, and of others.

        As `sharding.rewrite` does it: partial results are converted behind their producer, if nothing has changed the
        value in place since; every other conversion stands with its reader.
        """
        aliases = self.program.aliases
        version = aliases.version(edge.source, edge.user)
        behind = version == aliases.version(edge.source, edge.source.next)
        differentiable = self.program.differentiable(edge)

        def context(place: fx.Node) -> Hashable:
            return version, differentiable, bool(place.meta.get("grad_enabled", True)), place.meta.get("checkpoint")

        return context(edge.source if behind else edge.user), context(edge.user)


def _seen(layout: Layout, reading: Reading) -> Layout:
    return layout if reading.differentiable else layout.without_gradient()


def _grouped(readers: Sequence[tuple[int, Hashable, Hashable]], by: int) -> tuple[tuple[int, ...], ...]:
    groups: dict[Hashable, dict[int, None]] = defaultdict(dict)
    for reader in readers:
        groups[reader[by]][reader[0]] = None
    return tuple(tuple(group) for group in groups.values())


# Which nodes share a decision.


def _tied(graph: Graph, program: Program) -> list[tuple[fx.Node, ...]]:
    """Classes of nodes (calls and held values) that share a decision, in program order."""
    labels = find_blocks(graph, program.capture)
    names = {node.name for node in program.capture.graph.nodes}
    blocks: dict[str, list[fx.Node]] = defaultdict(list)
    for node in program.operations:
        blocks[labels[node.name]].append(node)
    block_of = {node: label for label, nodes in blocks.items() for node in nodes}
    alike: dict[Hashable, list[str]] = defaultdict(list)
    position = _positions(program)
    places = {label: _places(nodes, block_of, label) for label, nodes in blocks.items()}
    for label, nodes in blocks.items():
        kind = label if label in names else re.sub(r"\d+", "#", label)
        alike[kind, tuple(_form(node, places[label], position, program, graph) for node in nodes)].append(label)
    classes: dict[fx.Node, tuple[fx.Node, ...]] = {}
    for group in alike.values():
        for members in zip(*(places[label] for label in group), strict=True):
            for member in members:
                classes.setdefault(member, members)
    held = {node: (node,) for node in program.layouts}
    classes = {**held, **classes}
    order = [node for node in program.capture.graph.nodes if node in classes]
    return list(dict.fromkeys(classes[node] for node in order))


def _places(nodes: Sequence[fx.Node], block_of: Mapping[fx.Node, str], label: str) -> dict[fx.Node, int]:
    """The block's own nodes: the state that no other block reads, in the order of use, and its calls."""
    own: dict[fx.Node, int] = {}
    for node in nodes:
        for operand in node.all_input_nodes:
            if operand.op == "get_attr" and all(block_of.get(user) == label for user in operand.users):
                own.setdefault(operand, len(own))
        own[node] = len(own)
    return own


def _form(
    node: fx.Node, places: Mapping[fx.Node, int], position: Mapping[str, int], program: Program, graph: Graph
) -> Hashable:
    """What a node must have in common with another to be tied to it: all but the values that come from outside."""
    operation = program.operations[node]

    def place(operand: fx.Node) -> Hashable:
        producer, output = producer_of(operand)
        if producer in places:
            return places[producer], output
        return str(operand.target) if operand.op == "get_attr" else "outside"

    def described(operand: fx.Node) -> Hashable:
        held = frozenset(program.layouts[operand]) if operand.op == "get_attr" else None
        return bool(operand.meta.get("requires_grad", False)), held, place(operand)

    # Operators that are alike share strategies, but for those that name a node.
    strategies = frozenset(
        _relative(strategy, node, position) if _names(strategy) else id(strategy)
        for strategy in program.strategies[node]
    )
    return program.rules.kind(operation), tuple(described(operand) for operand in operation.operands), strategies


def _positions(program: Program) -> dict[str, int]:
    return {node.name: i for i, node in enumerate(program.capture.graph.nodes)}


def _names(strategy: Strategy) -> bool:
    """Whether some layout of a strategy names a node."""
    return any(layout.owned or layout.routed for layout in (*strategy.inputs, *strategy.outputs))


def _relative(strategy: Strategy, node: fx.Node, position: Mapping[str, int]) -> Hashable:
    """A strategy's key; nodes that it names by how far before its own they stand, as in every block that is alike."""

    def name(other: str) -> str:
        return str(position[node.name] - position[other])

    return tuple(tuple(renamed(layout, name) for layout in layouts) for layouts in strategy.key)
