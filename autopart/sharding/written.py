"""A choice of layouts as text, as a plan holds it: written, and read back against the strategies of the graph."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TypeVar

from autopart.errors import UsageError
from autopart.graph import Graph
from autopart.sharding.choice import Choice
from autopart.sharding.layouts import Layout, R
from autopart.sharding.operation import Strategy
from autopart.sharding.program import Program

T = TypeVar("T")

_REMEDY = "the plan was made for another graph or by another version of autopart; plan anew"


def written(graph: Graph, choice: Choice) -> tuple[dict[str, str], dict[str, str]]:
    """The layouts of a choice as text: what is held (only what is not replicated), and each operator's strategy.

    Returns:
        Name in the `state_dict` -> layout, and name of a call node -> strategy.
    """
    state = {graph.state[key].name: str(layout) for key, layout in choice.state.items() if layout != R}
    return state, {name: str(strategy) for name, strategy in choice.strategies.items()}


def chosen(
    graph: Graph, t: int, state: Mapping[str, str], strategies: Mapping[str, str], again: Collection[str] = ()
) -> Choice:
    """The choice that `written` wrote.

    Args:
        t: Number of ranks.
        state: Name in the `state_dict` (`StateEntry.name`) -> layout; what is not named is replicated.
        strategies: Name of a call node of the primary capture (getitems are no such) -> strategy.
        again: See `Choice.again`.

    Raises:
        UsageError: A text names nothing that this graph allows, or an operator has none.
    """
    program = Program.of(graph, t)
    held: dict[str, Layout] = {}
    by_name = {graph.state[str(node.target)].name: node for node in program.layouts if node.op == "get_attr"}
    for name, text in state.items():
        if name not in by_name:
            raise UsageError(f"the plan splits {name}, which the graph does not read: {_REMEDY}")
        node = by_name[name]
        layouts = {str(layout): layout for layout in program.layouts[node]}
        held[str(node.target)] = _found(layouts, text, name)
    taken: dict[str, Strategy] = {}
    for node, legal in program.strategies.items():
        if node.name not in strategies:
            raise UsageError(f"the plan has no layouts for {node.name} ({node.target}): {_REMEDY}")
        taken[node.name] = _found({str(s): s for s in legal}, strategies[node.name], node.name)
    unknown = next((name for name in strategies if name not in taken), None)
    if unknown is not None:
        raise UsageError(f"the plan has layouts for {unknown}, which is no operator of the graph: {_REMEDY}")
    values = {node.name for node in graph.primary.graph.nodes}
    stranger = next((name for name in again if name not in values), None)
    if stranger is not None:
        raise UsageError(f"the plan gathers {stranger} again, which is no value of the graph: {_REMEDY}")
    return Choice(held, taken, program, frozenset(again))


def _found(options: Mapping[str, T], text: str, name: str) -> T:
    if text not in options:
        raise UsageError(f"the plan lays {name} out as {text!r}, which is not possible: {_REMEDY}")
    return options[text]
