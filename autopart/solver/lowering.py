"""From (Graph, Costs, Cluster, Workload) to a stage partition problem: which item is what, and where each byte goes.

Memory of a stage (measured for this engine with gloo, within 1 %: see docs/solver.md): states it holds with their
gradients and optimizer state, what autograd saves times the microbatches in flight, one receive buffer per microbatch
and direction at each boundary plus the one in use, sent values that autograd does not keep anyway, and the largest
workspace. A storage is charged where its owner is: a saver in a later stage has received a copy, which is a receive
buffer there, and the owner's stage keeps the sent value until its backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, takewhile

import numpy as np
from numpy.typing import NDArray
from torch import fx

from autopart.cluster import Cluster, Device, Link
from autopart.costs import Costs, NodeTime
from autopart.errors import UsageError
from autopart.graph import Graph
from autopart.runtime.schedules import processes_of_stages
from autopart.sharding import LocalGraph, alike
from autopart.solver.crossing import sliced_s, whole_s
from autopart.solver.offers import offered
from autopart.solver.pipeline import IN_FLIGHT, fill_time, repeats
from autopart.solver.problem import Floats, Net, Problem
from autopart.solver.stage_costs import memory_never_binds
from autopart.workload import OPTIMIZER_STATES, Workload, update_bytes

# Left free on each device for the runtime's context, communication buffers and the allocator's fragmentation.
RESERVE_SHARE = 0.06


@dataclass(frozen=True, eq=False)
class Lowered:
    """A problem whose items are the calls of the primary capture, one each, before any uniting.

    Attributes:
        calls: Item -> node.
        groups: Items that no cut may separate.
        sliced: Whether each rank of a group sends a slice of a value over a boundary, (stages - 1, nets).
        values: Net -> the node whose value it is.
        states: State of the problem -> key of `Graph.state`, or name of the model's input.
        blocks: Block of the problem -> its label.
        devices: Process -> number of its device in the cluster.
    """

    problem: Problem
    calls: tuple[fx.Node, ...]
    groups: tuple[tuple[int, ...], ...]
    values: tuple[fx.Node, ...]
    states: tuple[str, ...]
    sliced: NDArray[np.bool_]
    blocks: tuple[str, ...]
    devices: tuple[int, ...]


def usable_bytes(device: Device) -> int:
    """Memory that a plan may use on a device."""
    return int(device.memory_bytes * (1 - RESERVE_SHARE))


def lower(
    graph: Graph, costs: Costs, cluster: Cluster, workload: Workload, stages: int, order: Sequence[int] | None = None
) -> Lowered:
    """State the partition of `graph` into `stages` stages over the first devices of `cluster`, in an order of them.

    Raises:
        UsageError: A cost is no finite number, or below zero; the message names whose.
    """
    order = range(len(cluster)) if order is None else order
    cluster = cluster.reordered(order)
    calls = tuple(graph.primary.calls)
    item = {node: i for i, node in enumerate(calls)}
    process = processes_of_stages(workload.schedule, stages)
    devices = [cluster.devices[p] for p in process]
    microbatches = workload.microbatches
    training = graph.primary is graph.training

    times = [[costs.times[d.name][n.name] for n in calls] for d in devices]
    in_flight = [IN_FLIGHT[workload.schedule](microbatches, s, stages) if training else 0 for s in range(stages)]
    nets, values = _nets(graph, item)
    kept = {saved.owner for saved in costs.saved}
    forward = np.array([costs.memory[n.name].output_bytes for n in values], dtype=float)
    backward = np.array([costs.memory[n.name].gradient_bytes if training else 0 for n in values], dtype=float)
    unsaved = np.where([n.name in kept for n in values], 0.0, forward)
    boundaries = range(stages - 1)
    holders, state_bytes, trained_bytes = _states(graph, costs, item, workload, training)
    slowest = cluster.inter_node if len({cluster.nodes[p] for p in process}) > 1 else cluster.intra_node

    wholes, slices = _transfers(graph, cluster, process, values, forward, backward)
    repeat, fill_weight = repeats(workload.schedule, microbatches)
    problem = Problem(
        work=_table([[t.forward_s + t.backward_s * training for t in row] for row in times], len(calls)),
        fill=_table([[_fill(workload.schedule, t, training) for t in row] for row in times], len(calls)),
        saved=np.outer(in_flight, _saved(costs, item, len(calls)) * training),
        workspace=np.array([_workspace(costs, n, training) for n in calls], dtype=float),
        nets=nets,
        transfer=np.minimum(wholes, slices),
        send=_table([in_flight[b] * unsaved + microbatches * backward for b in boundaries], len(nets)),
        receive=_table([(microbatches + 1) * forward for b in boundaries], len(nets)),
        touch=np.zeros((stages, len(nets))),
        users=tuple(users for _, users in holders),
        state_bytes=state_bytes,
        update=np.stack([_updates_s(workload.optimizer, trained_bytes, d, costs) for d in devices]),
        sync=np.stack([np.where(trained_bytes > 0, _all_reduce(slowest, trained_bytes), 0.0) for _ in devices]),
        process=process,
        limits=np.array([usable_bytes(d) for d in cluster.devices[: max(process) + 1]], dtype=float),
        repeat=repeat,
        fill_weight=fill_weight,
    )
    _check(problem, [n.name for n in calls], [n.name for n in values], [key for key, _ in holders])
    labels: tuple[str, ...] = ()
    binds = training and not all(memory_never_binds(problem, p) for p in set(process))
    if workload.recomputable is not None and binds:
        reasons = workload.recomputable(graph, workload.schedule)
        offer = offered(graph, costs, {block for block, why in reasons.items() if why is None}, devices, in_flight)
        if offer is not None:
            labels, problem = offer[0], replace(problem, blocks=offer[1])
    states = tuple(key for key, _ in holders)
    groups, sliced = _groups(graph, item), slices < wholes
    return Lowered(problem, calls, groups, tuple(values), states, sliced, labels, tuple(order))


def _check(problem: Problem, calls: Sequence[str], values: Sequence[str], states: Sequence[str]) -> None:
    """Refuse costs that no plan could be valued with."""
    for what, names, tables in (
        ("time", calls, (problem.work, problem.fill)),
        ("memory", calls, (problem.saved, problem.workspace)),
        ("transfer", values, (problem.transfer, problem.send, problem.receive)),
        ("state", states, (problem.state_bytes, problem.update, problem.sync)),
    ):
        for table in map(np.atleast_2d, tables):
            for row, column in np.argwhere(~(np.isfinite(table) & (table >= 0))):
                raise UsageError(
                    f"{names[column]}: its {what} costs {table[row, column]}",
                    "Seconds and bytes are finite numbers, zero or more; look into the profile or the costs given.",
                )


def _table(rows: Sequence[Sequence[float] | Floats], columns: int) -> Floats:
    return np.array(rows, dtype=float).reshape(len(rows), columns)


def _fill(schedule: str, time: NodeTime, training: bool) -> float:
    return fill_time(schedule, time) if training else time.forward_s


def _nets(graph: Graph, item: dict[fx.Node, int]) -> tuple[tuple[Net, ...], list[fx.Node]]:
    """One net for each call that another call reads, or that is a result."""
    results = {n for node in graph.primary.graph.nodes if node.op == "output" for n in node.all_input_nodes}
    nets, values = [], []
    for node, producer in item.items():
        readers = tuple(sorted({item[user] for user in node.users if user in item}))
        if readers or node in results:
            nets.append(Net(producer, readers, node in results))
            values.append(node)
    return tuple(nets), values


def _transfers(
    graph: Graph, cluster: Cluster, process: tuple[int, ...], values: list[fx.Node], forward: Floats, backward: Floats
) -> tuple[Floats, Floats]:
    """Seconds of each value over each boundary: sent whole, and in slices (infinite where ranks do not hold it alike).

    Nothing is sent where one process has both stages.
    """
    wholes = np.zeros((len(process) - 1, len(values)))
    slices = np.full_like(wholes, np.inf)
    held = np.array([alike(node) for node in values], dtype=bool)
    for b, (source, target) in enumerate(pairwise(process)):
        if source == target:
            continue
        link = cluster.link(source, target)
        wholes[b] = whole_s(link, forward, backward)
        if isinstance(graph, LocalGraph) and cluster.inside is not None:
            slices[b, held] = sliced_s(link, cluster.inside, graph.tensor, forward, backward)[held]
    return wholes, slices


def _updates_s(optimizer: str, trained: Floats, device: Device, costs: Costs) -> Floats:
    """Seconds of the optimizer for each state, corrected if known how; only a CPU finds a parameter in its cache,
    for it takes one after the other."""
    cache = device.cache_bytes if device.kind == "cpu" else 0
    moved = np.array([update_bytes(optimizer, int(size), cache) for size in trained], dtype=float)
    correction = costs.updates.get(device.name, {}).get(optimizer, 1.0)
    return correction * moved / device.memory_bandwidth_bytes_per_s


def _all_reduce(link: Link, size: Floats) -> Floats:
    """Upper bound of a ring all-reduce over any number of holders: every byte is sent twice."""
    return link.latency_s + 2 * size / link.bandwidth_bytes_per_s


def _saved(costs: Costs, item: dict[fx.Node, int], items: int) -> Floats:
    """Bytes of the storages that each item owns and autograd keeps; those of inputs and states are held as such."""
    by_name = {node.name: i for node, i in item.items()}
    saved = np.zeros(items)
    for storage in costs.saved:
        if storage.owner in by_name:
            saved[by_name[storage.owner]] += storage.bytes
    return saved


def _workspace(costs: Costs, node: fx.Node, training: bool) -> float:
    """Bytes live only while the node runs: its temporaries, and gradients (in inference: values) at its two sides."""
    near = [node, *node.all_input_nodes]
    memory = [costs.memory[n.name] for n in near if n.name in costs.memory]
    ends = sum(m.gradient_bytes if training else m.output_bytes for m in memory)
    return float(costs.memory[node.name].temporary_bytes + ends)


def _states(
    graph: Graph, costs: Costs, item: dict[fx.Node, int], workload: Workload, training: bool
) -> tuple[list[tuple[str, tuple[int, ...]]], Floats, Floats]:
    """What is held by every stage that uses it: parameters, buffers, constants, and the batch's own tensors.

    Returns:
        (name, users) of each, the bytes held, and the bytes that are trained.
    """
    holders: list[tuple[str, tuple[int, ...]]] = []
    held, trains = [], []
    inputs = {spec.name: spec for spec in graph.inputs}
    used: set[str] = set()
    states = OPTIMIZER_STATES[workload.optimizer]
    for node in graph.primary.graph.nodes:
        users = tuple(sorted({item[user] for user in node.users if user in item}))
        if node.op not in ("placeholder", "get_attr") or not users:
            continue
        if node.op == "placeholder":
            spec = inputs[node.name]
            size = costs.memory[node.name].output_bytes
            holders.append((node.name, users))
            held.append(size * (workload.microbatches if spec.batch_dim is not None else 1))
            trains.append(0)
            continue
        entry = graph.state[str(node.target)]
        used.add(entry.key)
        trained = training and entry.requires_grad
        holders.append((entry.key, users))
        held.append(entry.bytes * (2 + states if trained else 1))
        trains.append(entry.bytes if trained else 0)
    paths = [_module_path(node) for node in item]
    for entry in graph.state.values():
        if entry.key not in used and paths:
            holders.append((entry.key, (_nearest(entry.name, paths),)))
            held.append(entry.bytes)
            trains.append(0)
    return holders, np.array(held, dtype=float), np.array(trains, dtype=float)


def _module_path(node: fx.Node) -> list[str]:
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    return stack[-1][0].split(".") if stack else []


def _nearest(name: str, paths: list[list[str]]) -> int:
    """The first call whose module shares the longest path with a state that no call uses."""
    parts = name.split(".")
    shared = [
        sum(a == b for a, b in takewhile(lambda p: p[0] == p[1], zip(parts, path, strict=False))) for path in paths
    ]
    return shared.index(max(shared))


def _groups(graph: Graph, item: dict[fx.Node, int]) -> tuple[tuple[int, ...], ...]:
    """The capture's co-located sets, and all users of a state that one of them writes."""
    by_name = {node.name: i for node, i in item.items()}
    groups = [tuple(sorted(by_name[name] for name in names if name in by_name)) for names in graph.primary.colocated]
    for node in graph.primary.graph.nodes:
        if node.op == "get_attr" and any(_writes(user, node) for user in node.users):
            groups.append(tuple(sorted(item[user] for user in node.users if user in item)))
    return tuple(group for group in groups if len(group) > 1)


def _writes(call: fx.Node, state: fx.Node) -> bool:
    schema = getattr(call.target, "_schema", None)
    if schema is None:
        return False
    given = dict(zip((a.name for a in schema.arguments), call.args, strict=False)) | call.kwargs
    return any(
        a.alias_info is not None and a.alias_info.is_write and given.get(a.name) is state for a in schema.arguments
    )
