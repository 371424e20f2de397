"""The value of a placement from the input's file and the placement alone: shares nothing with the solver."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def max_load(data: Mapping[str, Any], device: Mapping[Any, int], devices: int, cpu: int | None) -> float:
    """Largest load in the file's unit.

    Args:
        device: Of each node, by id; accelerators and the CPU are numbered together.
        cpu: Which device is the CPU.

    Raises:
        ValueError: A group is torn, memory is exceeded, or a value flows backwards.
    """
    nodes = {node["id"]: node for node in data["nodes"]}
    groups: dict[Any, int] = {}
    for name, node in nodes.items():
        if node.get("group") is not None and groups.setdefault(node["group"], device[name]) != device[name]:
            raise ValueError(f"group {node['group']} is on two devices")
    loads = [0.0] * devices
    memory = [0.0] * devices
    for name, node in nodes.items():
        loads[device[name]] += node["time_cpu" if device[name] == cpu else "time"]
        memory[device[name]] += node["mem_bytes"]
    if any(memory[d] > data["mem_limit_bytes"] for d in range(devices) if d != cpu):
        raise ValueError("a device has too little memory")
    touched: dict[Any, tuple[float, set[int]]] = {}
    for edge in data["edges"]:
        source, target = nodes[edge["src"]], nodes[edge["dst"]]
        _, where = touched.setdefault(edge["src"], (edge["time"], {device[edge["src"]]}))
        where.add(device[edge["dst"]])
        if source["role"] == target["role"] == "fwd" and device[edge["src"]] > device[edge["dst"]]:
            raise ValueError(f"{edge['src']} -> {edge['dst']} flows backwards")
    for time, where in touched.values():
        for d in where if len(where) > 1 else ():
            loads[d] += 0.0 if d == cpu else time
    return max(loads)


def sum_load(data: Mapping[str, Any], device: Mapping[Any, int], devices: int, bytes_per_s: float) -> float:
    """Largest load, ms: forward and backward, and twice what a producer sends on every device that has it.

    Nodes that only feed the input take no time and send nothing.
    """
    fed = {edge["dst"] for edge in data["edges"]}
    loads = [0.0] * devices
    where = {node["id"]: {device[node["id"]]} for node in data["nodes"]}
    for node in data["nodes"]:
        if node["id"] in fed:
            loads[device[node["id"]]] += node["time_fwd"] + node["time_bwd"]
    for edge in data["edges"]:
        if device[edge["src"]] > device[edge["dst"]]:
            raise ValueError(f"{edge['src']} -> {edge['dst']} flows backwards")
        where[edge["src"]].add(device[edge["dst"]])
    for node in data["nodes"]:
        if node["id"] in fed and len(where[node["id"]]) > 1:
            for d in where[node["id"]]:
                loads[d] += 2e3 * node["act_bytes"] / bytes_per_s
    return max(loads)


def graph_load(
    time_s: Sequence[float],
    output_bytes: Sequence[float],
    inputs: Sequence[Sequence[int]],
    stage: Sequence[int],
    stages: int,
    bytes_per_s: float,
) -> float:
    """Largest load of a generated graph, s: work, and twice what is sent on every stage that has it."""
    loads = [0.0] * stages
    where = [{s} for s in stage]
    for item, before in enumerate(inputs):
        loads[stage[item]] += time_s[item]
        for source in before:
            if stage[source] > stage[item]:
                raise ValueError(f"{source} -> {item} flows backwards")
            where[source].add(stage[item])
    for source, having in enumerate(where):
        for s in having if len(having) > 1 else ():
            loads[s] += 2 * output_bytes[source] / bytes_per_s
    return max(loads)
