"""Smaller problems with the same optimum: united groups, merged cycles, merged nets and states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import networkx as nx
import numpy as np

from autopart.solver.problem import Floats, Net, Problem


def condense(problem: Problem, groups: Iterable[Sequence[int]]) -> tuple[Problem, list[int]]:
    """Unite the items of each group, and whatever then lies on a cycle; number the result in topological order.

    Items of one stage may be united without changing the optimum when they must share a stage anyway: a group by
    decree, a cycle because no net may flow backwards. Nets with the same pins, and states with the same users, are
    cut and held together, so their costs add.

    Args:
        problem: Its items need not be in topological order, and its nets may form cycles.
        groups: Items that share a stage.

    Returns:
        The smaller problem, and for each old item the new one.
    """
    union = nx.utils.UnionFind(range(problem.items))
    for group in groups:
        union.union(*group)
    edges = {(union[net.producer], union[r]) for net in problem.forward_nets for r in net.readers}
    graph = nx.DiGraph()
    graph.add_nodes_from(sorted({union[v] for v in range(problem.items)}))
    graph.add_edges_from(sorted(e for e in edges if e[0] != e[1]))
    for component in nx.strongly_connected_components(graph):
        union.union(*component)

    first: dict[int, int] = {}
    for item in range(problem.items):
        first.setdefault(union[item], item)
    quotient = nx.DiGraph()
    quotient.add_nodes_from(first.values())
    quotient.add_edges_from((first[union[a]], first[union[b]]) for a, b in graph.edges if union[a] != union[b])
    number = {item: i for i, item in enumerate(nx.lexicographical_topological_sort(quotient))}
    new = [number[first[union[item]]] for item in range(problem.items)]
    return _project(problem, new, len(number)), new


def _project(problem: Problem, new: list[int], items: int) -> Problem:
    target = np.asarray(new)
    workspace = np.zeros(items)
    np.maximum.at(workspace, target, problem.workspace)

    pins: dict[Net, list[int]] = {}
    for n, net in enumerate(problem.nets):
        producer = new[net.producer]
        readers = tuple(sorted({new[r] for r in net.readers} - {producer}))
        if readers or net.to_end:
            pins.setdefault(Net(producer, readers, net.to_end, net.backward), []).append(n)
    users: dict[tuple[int, ...], list[int]] = {}
    for r, old in enumerate(problem.users):
        users.setdefault(tuple(sorted({new[v] for v in old})), []).append(r)
    nets, states = list(pins.values()), list(users.values())
    return Problem(
        work=_scatter(problem.work, target, items),
        fill=_scatter(problem.fill, target, items),
        saved=_scatter(problem.saved, target, items),
        workspace=workspace,
        nets=tuple(pins),
        transfer=_sum_columns(problem.transfer, nets),
        send=_sum_columns(problem.send, nets),
        receive=_sum_columns(problem.receive, nets),
        touch=_sum_columns(problem.touch, nets),
        users=tuple(users),
        state_bytes=_sum_columns(problem.state_bytes[None], states)[0],
        update=_sum_columns(problem.update, states),
        sync=_sum_columns(problem.sync, states),
        process=problem.process,
        limits=problem.limits,
        repeat=problem.repeat,
        fill_weight=problem.fill_weight,
        hidden=problem.hidden,
        idle=problem.idle,
    )


def _scatter(table: Floats, target: np.ndarray, items: int) -> Floats:
    return np.stack([np.bincount(target, weights=row, minlength=items) for row in table])


def _sum_columns(table: Floats, groups: list[list[int]]) -> Floats:
    if not groups:
        return np.zeros((table.shape[0], 0))
    return np.stack([table[:, group].sum(axis=1) for group in groups], axis=1)
