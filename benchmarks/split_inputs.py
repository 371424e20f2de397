"""Published inputs with replicated stages (see `published_splits`), as problems of the solver.

Read from `pipedream_*.json` and `piper_*.json` in schema `autopart-bench/1`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import networkx as nx
import numpy as np

from autopart.solver.options import Edge, Option, OptionProblem
from autopart.solver.problem import Floats, Net, Problem
from autopart.solver.replicas import PIPEDREAM, Replication
from autopart.solver.stage_costs import Members

ANTICHAIN = "pipedream augmented antichain"


@dataclass(frozen=True)
class Nodes:
    """The nodes of an input in topological order; those that only feed it (`input`) are left out.

    Attributes:
        ids: Their names in the file.
        data: What the file says of each.
        edges: Producer, reader (both by position) and bytes.
    """

    ids: tuple[Any, ...]
    data: tuple[Mapping[str, Any], ...]
    edges: tuple[tuple[int, int, float], ...]

    @classmethod
    def of(cls, instance: Mapping[str, Any]) -> Nodes:
        known = {node["id"]: node for node in instance["nodes"] if not node.get("input")}
        edges = [e for e in instance["edges"] if e["src"] in known and e["dst"] in known]
        graph = nx.DiGraph()
        graph.add_nodes_from(known)
        graph.add_edges_from((e["src"], e["dst"]) for e in edges)
        ids = tuple(nx.lexicographical_topological_sort(graph))
        position = {name: i for i, name in enumerate(ids)}
        placed = tuple((position[e["src"]], position[e["dst"]], e["bytes"]) for e in edges)
        return cls(ids, tuple(known[name] for name in ids), placed)

    @property
    def readers(self) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in self.ids]
        for producer, reader, _ in self.edges:
            found[producer].append(reader)
        return found


def pipedream(nodes: Nodes, entry: Mapping[str, Any]) -> Replication:
    """An entry of `published` or `reference` whose objective is `pipedream_stage_time_s`."""
    bandwidth, devices = entry["bandwidth_Bps"], entry["devices"]["accelerators"]
    count = len(nodes.ids)
    seconds = np.array([(node["time_fwd"] + node["time_bwd"]) / 1e3 for node in nodes.data])
    activation = np.array([node["act_bytes"] for node in nodes.data])
    parameters = np.array([node["param_bytes"] for node in nodes.data])
    holders = np.flatnonzero(parameters)
    read = [(v, tuple(readers)) for v, readers in enumerate(nodes.readers) if readers]
    by_antichain = entry.get("boundary", ANTICHAIN) == ANTICHAIN
    sent = np.zeros(len(read)) if by_antichain else 2 * activation[[v for v, _ in read]] / bandwidth
    problem = Problem(
        work=np.tile(seconds, (2, 1)),
        fill=np.zeros((2, count)),
        saved=np.zeros((2, count)),
        workspace=np.zeros(count),
        nets=tuple(Net(v, readers) for v, readers in read),
        transfer=sent[None, :],
        send=np.zeros((1, len(read))),
        receive=np.zeros((1, len(read))),
        touch=np.zeros((2, len(read))),
        users=tuple((int(v),) for v in holders),
        state_bytes=parameters[holders],
        update=np.zeros((2, len(holders))),
        sync=np.zeros((2, len(holders))),
        process=(0, 1),
        limits=np.full(2, np.inf),
        repeat=1.0,
        fill_weight=0.0,
        hidden=True,
    )
    return Replication(
        problem,
        devices,
        gradient=4 * parameters[holders] / bandwidth,
        microbatches=devices,
        degrees=tuple(range(1, devices + 1)) if entry["replication"] else (1,),
        rule=PIPEDREAM,
        boundary=Antichain(problem, 2 * activation / bandwidth) if by_antichain else None,
    )


@dataclass(frozen=True, eq=False)
class Antichain:
    """Seconds over a boundary as PipeDream counts them, for each down-set.

    The last nodes of the down-set are sent; and for each of them a the nodes before it that something other than a and
    the nodes before a reads, even where that something is in the down-set too.
    """

    problem: Problem
    seconds: Floats

    def __call__(self, inside: Members) -> Floats:
        problem = self.problem
        successors, above = problem.successors, problem.ancestors
        sent_with = []
        for last in range(problem.items):
            before = [p for p in range(last) if above[last] >> p & 1]
            elsewhere = [p for p in before if any(not above[last] >> r & 1 for r in successors[p])]
            sent_with.append([last, *elsewhere])
        total = np.zeros(len(inside))
        for row, members in enumerate(inside):
            if members.all():
                continue
            last_ones = [v for v in np.flatnonzero(members) if not any(members[r] for r in successors[v])]
            total[row] = self.seconds[sorted({p for v in last_ones for p in sent_with[v]})].sum()
        return total


def piper(instance: Mapping[str, Any], nodes: Nodes, entry: Mapping[str, Any]) -> OptionProblem:
    """An entry of `published` of a `piper_*` input; options of one degree stay in the file's order."""
    position = {name: i for i, name in enumerate(nodes.ids)}

    def option(data: Mapping[str, Any]) -> Option:
        received = {position[int(name)]: extra for name, extra in data["sync_fwd"].items()}
        sent = {position[int(name)]: extra for name, extra in data["sync_bwd"].items()}
        memory = data["mem_per_inflight"], data["mem_fixed"]
        return Option(data["time"], data["param_bytes"], *memory, received, sent)

    options = []
    for node in nodes.data:
        by_degree: dict[int, list[Option]] = {}
        for data in node["options"]:
            by_degree.setdefault(data["tensor_degree"], []).append(option(data))
        options.append({t: tuple(found) for t, found in by_degree.items()})
    return OptionProblem(
        options=tuple(options),
        edges=tuple(Edge(*edge) for edge in nodes.edges),
        devices=entry["devices"]["accelerators"],
        microbatches=entry.get("microbatches", instance["microbatches"]),
        bandwidth_bytes_per_s=entry["bandwidth_Bps"],
        limit_bytes=entry["mem_limit_bytes"],
    )
