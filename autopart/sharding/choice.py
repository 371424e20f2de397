"""A choice of layouts: one strategy for each operator, one layout for each tensor that the model holds."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field

from torch import fx

from autopart.cluster import Link
from autopart.errors import AutopartError
from autopart.sharding.conversions import conversions
from autopart.sharding.layouts import Kind, Layout, R, convertible
from autopart.sharding.operation import Strategy
from autopart.sharding.program import Edge, Program, layout_of, producer_of


@dataclass(frozen=True)
class Choice:
    """Layouts for the primary capture of a graph.

    Attributes:
        state: State key -> layout; state that is not named is replicated.
        strategies: Name of a call node -> strategy.
        again: Names of nodes whose shards, where they are gathered, are what backward keeps: it gathers them again.
        program: What it was chosen from, so that nobody need explore the graph again.
    """

    state: Mapping[str, Layout]
    strategies: Mapping[str, Strategy]
    program: Program | None = field(default=None, compare=False, repr=False)
    again: frozenset[str] = frozenset()


def of_nodes(program: Program, choice: Choice) -> tuple[dict[fx.Node, Strategy], dict[fx.Node, Layout]]:
    """Strategy of each call node and layout of each held value; inputs are replicated."""
    strategies = {node: choice.strategies[node.name] for node in program.operations}
    held = {node: choice.state.get(str(node.target), R) if node.op == "get_attr" else R for node in program.layouts}
    return strategies, held


Pick = Callable[[fx.Node, list[Strategy], Callable[[int], Layout]], Strategy]


def choose(program: Program, state: Mapping[str, Layout], pick: Pick) -> Choice:
    """A legal choice, made operator by operator in program order.

    Args:
        state: Layouts of the model's tensors; those that an operator changes in place may be replicated instead.
        pick: Chooses among the legal strategies of a node; the third argument gives the layout that the node's n-th
            tensor argument has so far.
    """
    whole: set[fx.Node] = set()  # values that share changed memory and found no common layout
    barred: set[tuple[fx.Node, Hashable]] = set()  # routed values that one reader could not take
    while True:
        chosen, stuck = _attempt(program, state, pick, whole, barred)
        if stuck is None:
            keys = {str(node.target): _held(node, state, whole) for node in program.layouts if node.op == "get_attr"}
            return Choice({**state, **keys}, {node.name: strategy for node, strategy in chosen.items()}, program)
        makers = {producer_of(operand)[0] for operand in program.operations[stuck].operands}
        routing = {(n, chosen[n].key) for n in makers if n in chosen and any(v.routed for v in chosen[n].outputs)}
        if routing:
            barred.add(max(routing, key=lambda made: list(chosen).index(made[0])))
            continue
        before = len(whole)
        whole |= program.aliases.group(stuck)
        for number, operand in enumerate(program.operations[stuck].operands):
            if program.fixed(Edge(operand, stuck, number)):
                whole |= program.aliases.group(operand)
        if len(whole) == before:
            raise AutopartError(f"no layout of {stuck.name} suits the tensors that it changes in place")


def _held(node: fx.Node, state: Mapping[str, Layout], whole: set[fx.Node]) -> Layout:
    return R if node in whole or node.op == "placeholder" else state.get(str(node.target), R)


def _attempt(
    program: Program,
    state: Mapping[str, Layout],
    pick: Pick,
    whole: set[fx.Node],
    barred: set[tuple[fx.Node, Hashable]],
) -> tuple[dict[fx.Node, Strategy], fx.Node | None]:
    """Strategies in program order, and the node at which no legal one was left."""
    held = {node: _held(node, state, whole) for node in program.layouts}
    chosen: dict[fx.Node, Strategy] = {}
    for node, op in program.operations.items():
        if node in whole:
            chosen[node] = program.strategies[node][0]
            continue

        def layout(number: int, operands: list[fx.Node] = op.operands) -> Layout:
            return layout_of(operands[number], chosen, held)

        fixed = [i for i, v in enumerate(op.operands) if program.fixed(Edge(v, node, i))]
        legal = [
            s
            for s in program.strategies[node]
            if all(s.inputs[i] == layout(i) for i in fixed)
            and all(convertible(layout(i), after) for i, after in enumerate(s.inputs))
            and (node, s.key) not in barred
        ]
        if not legal:
            return chosen, node
        chosen[node] = pick(node, legal, layout)
    return chosen, None


def random_choice(program: Program, generator: random.Random, used: Counter[tuple[str, str]] | None = None) -> Choice:
    """A random legal choice.

    Args:
        used: How often each (operator, strategy) was chosen before; the rarer ones are preferred, and it is kept up.
    """
    used = Counter() if used is None else used

    def pick(node: fx.Node, legal: list[Strategy], layout: Callable[[int], Layout]) -> Strategy:
        weights = [1.0 / (1 + used[(str(node.target), str(s))]) for s in legal]
        (strategy,) = generator.choices(legal, weights)
        used[(str(node.target), str(strategy))] += 1
        return strategy

    state = {
        str(node.target): generator.choice(layouts)
        for node, layouts in program.layouts.items()
        if node.op == "get_attr"
    }
    return choose(program, state, pick)


def following(program: Program, state: Mapping[str, Layout], wanted: Mapping[str, Strategy] | None = None) -> Choice:
    """What follows from the layouts of the model's tensors: each operator, in order, runs where least is sent.

    Among strategies that send equally little, the one that changes and splits least. Summands are summed where they are
    first read. Not the best choice: it does not look ahead.

    Args:
        wanted: Name of a call node -> strategy to take instead, where it is legal.
    """
    wanted = wanted or {}

    def pick(node: fx.Node, legal: list[Strategy], layout: Callable[[int], Layout]) -> Strategy:
        op = program.operations[node]
        preferred = wanted.get(node.name)
        if preferred is not None:
            for strategy in legal:
                if strategy.name == preferred.name and _forward(strategy) == _forward(preferred):
                    return strategy

        def price(strategy: Strategy) -> tuple[int, int, int]:
            sent = changes = 0
            for number, after in enumerate(strategy.inputs):
                before = layout(number)
                tracked = op.tracked_inputs[number]
                price = conversions(before, after, op.inputs[number], program.t, _ANY_LINK, tracked)
                sent += price.forward_bytes + price.backward_bytes
                changes += before.forward != after.forward
            return sent, changes, sum(held.split is not None for held in (*strategy.inputs, *strategy.outputs))

        return min([s for s in legal if s.name != "partial"] or legal, key=price)

    return choose(program, state, pick)


_ANY_LINK = Link("any", 0.0, 1.0)  # only bytes are compared


def _forward(strategy: Strategy) -> list[Kind]:
    return [layout.forward for layout in (*strategy.inputs, *strategy.outputs)]


def replicated_choice(program: Program) -> Choice:
    """Nothing is split."""
    return choose(program, {}, lambda node, legal, layout: legal[0])
