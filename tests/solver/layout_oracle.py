"""Layouts valued and enumerated without the solver: every choice of a small graph, at given prices of its parts; what
is sent is priced by formulas written anew."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import inf, log2
from typing import Any

from autopart.cluster import Cluster
from autopart.graph import Graph
from autopart.sharding import Layout, Program, Strategy

# (from, to) -> bytes sent as a multiple of whole tensor x (t - 1) / t, and rounds in units of log2(t).
SENDS = {
    ("P", "R"): (2.0, 2),
    ("P", "S"): (1.0, 1),
    ("S", "R"): (1.0, 1),
}
ILLEGAL = None


@dataclass(frozen=True)
class Kept:
    """A storage of `bytes` that some nodes keep: (name of the node, number of its argument, or None for its result)."""

    bytes: int
    by: tuple[tuple[str, int | None], ...]


@dataclass(frozen=True)
class Whole:
    """One complete choice: layouts of results and arguments by node name."""

    picks: dict[str, Strategy | Layout]
    time_s: float
    memory_bytes: float


def every_choice(
    graph: Graph, prices: Any, cluster: Cluster, t: int, kept: tuple[Kept, ...] = (), copies: int = 4
) -> Iterator[Whole]:
    """Every legal choice: its seconds, and its bytes of state (`copies` of each weight), kept and converted values."""
    program = Program.of(graph, t)
    link = cluster.intra_node
    options: dict[str, list[Any]] = {node.name: list(found) for node, found in program.layouts.items()}
    options |= {node.name: list(found) for node, found in program.strategies.items()}
    compute = {
        (node.name, id(strategy)): prices.strategy(program.operations[node], strategy, link).compute_s
        for node, strategies in program.strategies.items()
        for strategy in strategies
    }
    names = [node.name for node in program.strategies]
    state = {node.name: graph.state[node.target].bytes * copies for node in program.layouts if node.op == "get_attr"}
    tables = [_changes(program, prices, edge, options, t, link, graph.loss) for edge in program.edges()]
    for combination in itertools.product(*options.values()):
        picks = dict(zip(options, combination, strict=True))
        made: dict[Any, tuple[float, float]] = {}
        for source, user, table in tables:
            change = table[id(picks[source]), id(picks[user]) if user else None]
            if change is ILLEGAL:
                break
            made.update(change)
        else:
            time_s = sum(seconds for seconds, _ in made.values())
            time_s += sum(compute[name, id(picks[name])] for name in names)
            memory = max((size for _, size in made.values()), default=0.0)
            memory += sum(size * (1 / t if picks[name].split else 1) for name, size in state.items())
            for item in kept:
                layouts = [picks[n].outputs[0] if i is None else picks[n].inputs[i] for n, i in item.by]
                memory += item.bytes * sum({1 / t if layout.split else 1.0 for layout in layouts})
            yield Whole(picks, time_s, memory)


def _changes(
    program: Program, prices: Any, edge: Any, options: dict[str, list[Any]], t: int, link: Any, loss: int | None
) -> tuple[str, Any, Any]:
    """Source, user, and (option of source, option of user) -> the change of layout, its seconds and its new bytes."""
    producer, number = edge.source.args if edge.source.target is operator.getitem else (edge.source, 0)
    value, flows = edge.source.meta["val"], program.differentiable(edge)
    size = value.numel() * value.element_size()
    last = edge.user.op == "output"
    table: dict[Any, Any] = {}
    for source in options[producer.name]:
        given = source.outputs[number] if isinstance(source, Strategy) else source
        for user in [None] if last else options[edge.user.name]:
            a = _kinds(given, flows)
            if user is not None:
                b = _kinds(user.inputs[edge.number], flows)
            else:  # in training, only the loss and what is summed must become whole
                b = ("R", "R") if edge.number == loss or a[0] == "P" else a
            key = (id(source), None if user is None else id(user))
            if a == b:
                table[key] = {}
            elif program.fixed(edge):
                table[key] = ILLEGAL
            else:
                seconds = _send(a[0], b[0], size, t, link) + (_send(b[1], a[1], size, t, link) if flows else 0.0)
                seconds += prices.conversion(edge.source, Layout(*a), Layout(*b), t, flows, not last)
                new = size * (1 / t if _split(b[0]) else 1) if a[0] != b[0] else 0.0
                table[key] = {(edge.source.name, a, b, flows): (seconds, new)}
    return producer.name, None if last else edge.user.name, table


def fastest(choices: Iterator[Whole], wanted: Callable[[Whole], bool] = lambda choice: True) -> float:
    """Seconds of the best of some choices."""
    return min((choice.time_s for choice in choices if wanted(choice)), default=inf)


def _kinds(layout: Layout, flows: bool) -> tuple[Any, Any]:
    if not flows and layout.forward == "R":
        return ("R", "R")
    return (layout.forward, layout.gradient)


def _split(kind: Any) -> bool:
    return kind not in ("R", "P")


def _send(before: Any, after: Any, size: int, t: int, link: Any) -> float:
    if before == after:
        return 0.0
    if _split(before) and _split(after):
        share, rounds = (1 / t, 1) if before.dim != after.dim else (1.0, 1)
    else:
        key = tuple("S" if _split(kind) else kind for kind in (before, after))
        if key not in SENDS:
            return 0.0
        share, rounds = SENDS[key]
    return rounds * log2(t) * link.latency_s + size * share * (t - 1) / t / link.bandwidth_bytes_per_s
