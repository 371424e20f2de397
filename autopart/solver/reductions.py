"""Smaller problems with the same optimum: united groups, merged cycles, merged nets and states."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import networkx as nx
import numpy as np

from autopart.solver.problem import Blocks, Floats, Net, Problem


def condense(problem: Problem, groups: Iterable[Sequence[int]]) -> tuple[Problem, list[int]]:
    """Unite the items of each group, and whatever then lies on a cycle; number the result in topological order.

    Items of one stage may be united without changing the optimum when they must share a stage anyway: a group by
    decree, a cycle because no net may flow backwards. Nets with the same pins, and states with the same users, are
    cut and held together, so their costs add; orders that follow from others are dropped.

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

    merged = _merged_nets(problem, new)
    users: dict[tuple[int, ...], list[int]] = {}
    for r, old in enumerate(problem.users):
        users.setdefault(tuple(sorted({new[v] for v in old})), []).append(r)
    nets, states = list(merged.values()), list(users.values())
    return Problem(
        work=_scatter(problem.work, target, items),
        fill=_scatter(problem.fill, target, items),
        saved=_scatter(problem.saved, target, items),
        workspace=workspace,
        nets=tuple(merged),
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
        blocks=_blocks(problem.blocks, new),
    )


def _blocks(blocks: Blocks | None, new: list[int]) -> Blocks | None:
    if blocks is None:
        return None
    return replace(blocks, items=tuple(tuple(sorted({new[v] for v in items})) for items in blocks.items))


def _merged_nets(problem: Problem, new: list[int]) -> dict[Net, list[int]]:
    """The nets between united items, and the old nets whose costs each has.

    A net that costs nothing on any boundary is the set of its pins, whoever the producer, and whether it is a result:
    such nets merge, and one that asks for an order stands for all. What costs nothing at all is only an order, and kept
    only as far as no other net asks for it.
    """
    costly = (problem.transfer.sum(axis=0) + problem.send.sum(axis=0) + problem.receive.sum(axis=0)) > 0
    merged: dict[Net, list[int]] = {}
    direct: dict[tuple[int, ...], tuple[Net, list[int]]] = {}
    orders: set[tuple[int, int]] = set()
    for n, old in enumerate(problem.nets):
        producer = new[old.producer]
        readers = tuple(sorted({new[r] for r in old.readers} - {producer}))
        pins = tuple(sorted((producer, *readers)))
        if costly[n] and (readers or old.to_end):
            merged.setdefault(Net(producer, readers, old.to_end, old.backward), []).append(n)
        elif readers and problem.touch[:, n].any():
            net, group = direct.get(pins, (Net(pins[0], pins[1:], backward=True), []))
            direct[pins] = (net if old.backward else Net(producer, readers), [*group, n])
        elif readers and not old.backward:
            orders |= {(producer, r) for r in readers}
    for pins in sorted(orders & direct.keys()):
        orders.remove(pins)
        direct[pins] = (Net(pins[0], pins[1:]), direct[pins][1])
    for net, group in direct.values():
        merged.setdefault(net, []).extend(group)  # a relayed net may have the same pins
    for producer, later in _unimplied(orders, merged, max(new, default=-1) + 1).items():
        merged[Net(producer, tuple(later))] = []
    return merged


def _unimplied(orders: set[tuple[int, int]], nets: Iterable[Net], items: int) -> dict[int, list[int]]:
    """The orders that follow from no other and from no net, as readers of each producer."""
    asked = {(net.producer, r) for net in nets if not net.backward for r in net.readers}
    before: list[set[int]] = [set() for _ in range(items)]
    for producer, reader in orders | asked:
        before[reader].add(producer)
    ancestors: list[int] = []
    for item in range(items):
        bits = 1 << item
        for producer in before[item]:
            bits |= ancestors[producer]
        ancestors.append(bits)
    found: dict[int, list[int]] = {}
    for producer, reader in sorted(orders - asked):
        if not any(ancestors[other] >> producer & 1 for other in before[reader] - {producer}):
            found.setdefault(producer, []).append(reader)
    return found


def _scatter(table: Floats, target: np.ndarray, items: int) -> Floats:
    return np.stack([np.bincount(target, weights=row, minlength=items) for row in table])


def _sum_columns(table: Floats, groups: list[list[int]]) -> Floats:
    if not groups:
        return np.zeros((table.shape[0], 0))
    return np.stack([table[:, group].sum(axis=1) for group in groups], axis=1)
