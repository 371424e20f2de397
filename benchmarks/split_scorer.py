"""What a plan with replicated stages is worth, from the input file and the plan alone.

It shares no code with the solver or with the reader of the inputs: it raises ValueError on a plan that is not legal.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any


@dataclass(frozen=True)
class Stage:
    """Nodes by the file's ids, each with the place of its option in the file (0 without options)."""

    option: Mapping[Any, int]
    data: int
    tensor: int = 1


def _check(instance: Mapping[str, Any], stages: Sequence[Stage], devices: int) -> dict[Any, int]:
    """The stage of each node."""
    where: dict[Any, int] = {}
    for number, stage in enumerate(stages):
        for node in stage.option:
            if node in where:
                raise ValueError(f"node {node} is in two stages")
            where[node] = number
    expected = {node["id"] for node in instance["nodes"] if not node.get("input")}
    if set(where) != expected:
        raise ValueError("a node is in no stage")
    for edge in instance["edges"]:
        if edge["src"] in where and where[edge["src"]] > where[edge["dst"]]:
            raise ValueError(f"edge {edge['src']} -> {edge['dst']} flows back")
    if sum(stage.data * stage.tensor for stage in stages) > devices:
        raise ValueError("more devices than there are")
    return where


def pipedream_seconds(
    instance: Mapping[str, Any], stages: Sequence[Stage], devices: int, bandwidth: float, antichain: bool
) -> float:
    """Seconds of the slowest stage by PipeDream's rule.

    Args:
        antichain: Whether a boundary is sized as PipeDream does; else by the producers that have a reader outside.
    """
    where = _check(instance, stages, devices)
    nodes = {node["id"]: node for node in instance["nodes"] if node["id"] in where}
    after: dict[Any, set[Any]] = {node: set() for node in nodes}
    for edge in instance["edges"]:
        if edge["src"] in nodes:
            after[edge["src"]].add(edge["dst"])

    boundary = [0.0]
    for last_stage in range(len(stages) - 1):
        inside = {node for node in nodes if where[node] <= last_stage}
        sent = _antichain(inside, after) if antichain else {node for node in inside if after[node] - inside}
        boundary.append(sum(nodes[node]["act_bytes"] for node in sent))
    boundary.append(0.0)

    slowest = 0.0
    for number, stage in enumerate(stages):
        r = stage.data
        compute = sum(nodes[node]["time_fwd"] + nodes[node]["time_bwd"] for node in stage.option) / 1000
        gradients = sum(nodes[node]["param_bytes"] for node in stage.option)
        busy = (compute + 4 * (r - 1) / r * gradients / bandwidth) / r
        for size in boundary[number : number + 2]:
            busy = max(busy, 2 * size / (bandwidth * r))
        slowest = max(slowest, busy)
    return slowest


def _antichain(inside: set[Any], after: Mapping[Any, set[Any]]) -> set[Any]:
    """The last nodes, and for each what comes before it and is read by something that does not."""
    ends = {node for node in inside if not after[node] & inside}
    sent = set(ends)
    for end in ends:
        leads_to_end = {end}
        grown = True
        while grown:
            more = {node for node in inside if after[node] & leads_to_end} - leads_to_end
            leads_to_end |= more
            grown = bool(more)
        sent |= {node for node in leads_to_end if node != end and after[node] - leads_to_end}
    return sent


def piper_time(instance: Mapping[str, Any], stages: Sequence[Stage], entry: Mapping[str, Any]) -> float:
    """Time per sample of the slowest stage by Piper's rule, in the file's unit, for an entry of `published`."""
    microbatches = entry.get("microbatches", instance["microbatches"])
    devices, bandwidth = entry["devices"]["accelerators"], entry["bandwidth_Bps"]
    where = _check(instance, stages, devices)
    if sum(stage.data for stage in stages) > min(microbatches, devices):
        raise ValueError("more data replicas than microbatches")
    nodes = {node["id"]: node for node in instance["nodes"]}

    slowest = 0.0
    for number, stage in enumerate(stages):
        if microbatches % stage.data:
            raise ValueError(f"{stage.data} data replicas do not divide {microbatches} microbatches")
        in_flight = -(-sum(later.data for later in stages[number:]) // stage.data)
        chosen = {node: nodes[node]["options"][place] for node, place in stage.option.items()}
        kept = Fraction(0)
        for node, option in chosen.items():
            if option["tensor_degree"] != stage.tensor:
                raise ValueError(f"node {node} has an option of another tensor degree")
            kept += Fraction(option["mem_per_inflight"]) * in_flight + Fraction(option["mem_fixed"])
        if kept > Fraction(entry["mem_limit_bytes"]):
            raise ValueError(f"stage {number} keeps {float(kept)} bytes of {entry['mem_limit_bytes']}")
        exchanged = 0.0
        for edge in instance["edges"]:
            if where[edge["src"]] != number and where[edge["dst"]] == number:
                exchanged += 2 * (edge["bytes"] + chosen[edge["dst"]]["sync_fwd"][str(edge["src"])])
            if where[edge["src"]] == number and where[edge["dst"]] != number:
                exchanged += 2 * (edge["bytes"] + chosen[edge["src"]]["sync_bwd"][str(edge["dst"])])
        d = stage.data
        parameters = sum(option["param_bytes"] for option in chosen.values())
        sent = exchanged / d + 4 * (d - 1) / d * parameters / microbatches
        slowest = max(slowest, sum(option["time"] for option in chosen.values()) / d + sent / bandwidth)
    return slowest
