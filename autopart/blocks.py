"""Blocks: the atoms between which cuts fall, so that a cut does not tear a repeated module apart.

A block is one call of a repeated module (`model.layers.3`, `layer2.0`), or one call of another child, or a single
operator that stands between them. Blocks that a cut could not order (a cycle between them, or a set of nodes that must
stay together) are one block.

Rules, outermost call first; the call of the root is always opened:

- a call whose module stands in a container (or is called again) beside others of its class, and that calls modules
  itself, is an element of a repetition: a block. It is opened all the same if it is a bare Sequential that repeats
  something inside, or if it does so and the elements hold very different numbers of nodes (stages of Swin, DenseNet);
- any other call that has a repetition inside is opened;
- a Sequential with more than a quarter of all nodes, and any call with more than half of them, is opened;
- every other call is a block.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import networkx as nx
from networkx.utils import UnionFind
from torch import fx, nn

from autopart.graph import Capture, Graph

CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass
class _Call:
    """One call of a module, with the calls it makes."""

    key: str
    path: str
    kind: str
    nodes: int = 0
    children: dict[str, _Call] = field(default_factory=dict)

    @property
    def label(self) -> str:
        return self.path + (f"@{self.key.rpartition('@')[2]}" if "@" in self.key else "")


def find_blocks(graph: Graph, capture: Capture) -> dict[str, str]:
    """Node name -> label of its block, for every call node; nodes in program order.

    The label is the module path of the call ("model.layers.3", with "@1" for a second call of the same module) or the
    name of the node. The order of blocks is acyclic: no value flows from a later block back into an earlier one.
    """
    calls = capture.calls
    root = _call_tree(calls)
    opened = _opened(root, graph.modules)
    atom = {node: _atom(node, opened) for node in calls}
    atom_of_name = {node.name: atom[node] for node in calls}
    together = UnionFind(atom.values())
    for names in capture.colocated:
        together.union(*(atom_of_name[name] for name in names if name in atom_of_name))
    _contract_cycles(calls, atom, together)
    label: dict[str, str] = {}
    for node in calls:
        label.setdefault(together[atom[node]], atom[node])
    return {node.name: label[together[atom[node]]] for node in calls}


def spans(labels: Iterable[str]) -> str:
    """Labels of blocks for people, runs of numbers together: "h.0-3, h.7, norm"."""
    runs: list[tuple[str, int | None, int | None]] = []
    for label in labels:
        path, _, last = label.rpartition(".")
        number = int(last) if last.isdecimal() else None
        if number is not None and runs and runs[-1][0] == path and runs[-1][2] == number - 1:
            runs[-1] = (path, runs[-1][1], number)
        else:
            runs.append((path if number is not None else label, number, number))
    return ", ".join(
        path if first is None else f"{path}.{first}".lstrip(".") + (f"-{last}" if last != first else "")
        for path, first, last in runs
    )


def _call_tree(calls: Iterable[fx.Node]) -> _Call:
    root = _Call("", "", "")
    for node in calls:
        call = root
        call.nodes += 1
        for key, (path, kind) in node.meta["nn_module_stack"].items():
            call = call.children.setdefault(key, _Call(key, path, kind))
            call.nodes += 1
    return root


def _opened(root: _Call, modules: Mapping[str, type]) -> dict[str, _Call]:
    """The calls that are not blocks themselves, by key."""
    opened: dict[str, _Call] = {}

    def is_sequential(call: _Call) -> bool:
        return issubclass(modules.get(call.path, object), CONTAINERS)

    def open_call(call: _Call) -> None:
        opened[call.key] = call
        groups = _repetitions(call, modules)
        for child in call.children.values():
            siblings = groups.get(_group(child, modules), [])
            repeats = _repeats_inside(child, modules)
            if len(siblings) > 1 and child.children:
                sizes = [s.nodes for s in siblings]
                inside = repeats and (is_sequential(child) or max(sizes) > 2 * min(sizes))
            else:
                inside = (
                    repeats or (child.nodes * 4 > root.nodes and is_sequential(child)) or child.nodes * 2 > root.nodes
                )
            if inside and child.children:
                open_call(child)

    open_call(root)
    return opened


def _group(call: _Call, modules: Mapping[str, type]) -> tuple[str, str]:
    """What makes two calls elements of one repetition: the same container, or the same module, and the same class."""
    parent = call.path.rpartition(".")[0]
    in_container = call.path and issubclass(modules.get(parent, object), CONTAINERS)
    return (parent if in_container else call.path, call.kind)


def _repetitions(call: _Call, modules: Mapping[str, type]) -> dict[tuple[str, str], list[_Call]]:
    groups: dict[tuple[str, str], list[_Call]] = defaultdict(list)
    for child in call.children.values():
        if child.children:
            groups[_group(child, modules)].append(child)
    return groups


def _repeats_inside(call: _Call, modules: Mapping[str, type]) -> bool:
    if any(len(group) > 1 for group in _repetitions(call, modules).values()):
        return True
    return any(_repeats_inside(child, modules) for child in call.children.values())


def _atom(node: fx.Node, opened: Mapping[str, _Call]) -> str:
    for key, (path, kind) in node.meta["nn_module_stack"].items():
        if key not in opened:
            return _Call(key, path, kind).label
    return node.name


def _contract_cycles(calls: Iterable[fx.Node], atom: Mapping[fx.Node, str], together: UnionFind) -> None:
    """Unite the blocks of every strongly connected component."""
    flow = nx.DiGraph()
    for node in calls:
        for source in node.all_input_nodes:
            if source in atom:
                flow.add_edge(together[atom[source]], together[atom[node]])
    for component in nx.strongly_connected_components(flow):
        together.union(*component)
