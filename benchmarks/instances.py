"""Published partitioning inputs as problems of the solver: a folder of JSON files in the schema `autopart-bench/1`.

Rules of the inputs, each a function from an instance and a number of devices to problems:

    max_load_contiguous   placement for throughput (Tarnawski et al., NeurIPS 2020; github.com/msr-fiddle/
                          dnn-partitioning, throughput-dp): the load of an accelerator is its nodes' time, and the
                          transfer time of every producer once on each accelerator that holds it or a reader while
                          another device does too
    sum_load              the same load for training profiles without devices of their own (PipeDream's): forward and
                          backward time, twice the activation over a bandwidth

Times are in the milliseconds of the files.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from autopart.solver.problem import Floats, Net, Problem
from autopart.solver.reductions import condense

SCHEMA = "autopart-bench/1"
MAX_LOAD, SUM_LOAD = "max_load_contiguous", "sum_load"


@dataclass(frozen=True)
class Known:
    """A value that somebody else reached under a rule.

    Attributes:
        value: None where the one who looked found no plan that fits.
        exact: Whether its finder says that nothing less is possible; if not, `bound` is what was proven, if anything.
        bandwidth_bytes_per_s: Of `sum_load`.
    """

    rule: str
    accelerators: int
    cpus: int
    value: float | None
    exact: bool
    method: str
    bound: float | None = None
    bandwidth_bytes_per_s: float | None = None


@dataclass(frozen=True)
class Instance:
    """One file; `data` is its content."""

    name: str
    data: dict[str, Any]

    @property
    def known(self) -> list[Known]:
        """The recorded values of the rules above."""
        found = []
        for entry in (*self.data["published"], *self.data["reference"]):
            rule = next((r for r in (MAX_LOAD, SUM_LOAD) if entry["objective"].startswith(r)), None)
            if rule is None or "devices" not in entry:
                continue
            exact = entry.get("bound", entry["value"]) == entry["value"] and "upper bound only" not in entry["method"]
            devices, method = entry["devices"], entry["method"]
            found.append(
                Known(
                    rule=rule,
                    accelerators=devices["accelerators"],
                    cpus=devices.get("cpus", 0),
                    value=entry["value"],
                    exact=exact,
                    method=method,
                    bound=entry.get("bound"),
                    bandwidth_bytes_per_s=entry.get("bandwidth_Bps"),
                )
            )
        return found


def read(folder: Path, pattern: str = "*.json") -> list[Instance]:
    """The instances of a folder whose file names match, by name."""
    found = []
    for file in sorted(folder.glob(pattern)):
        data = json.loads(file.read_text())
        if data.get("schema") == SCHEMA:
            found.append(Instance(data["name"], data))
    return found


def max_load(instance: Instance, accelerators: int, cpus: int = 0) -> tuple[list[Problem], list[int]]:
    """Placement on accelerators with a memory limit and at most one CPU: one problem for each place of the CPU.

    Nodes of a group share a device. Forward nodes flow forwards along the edges between them, and nothing else asks for
    an order, but for groups without forward nodes: the authors give them one, which costs nothing and whose edges
    mirror the backward ones. A CPU takes its own times, pays no transfer and has no limit. A device may stay empty.

    Returns:
        The problems, and for each node, in the file's order, its item.
    """
    if cpus > 1:
        raise ValueError("at most one CPU")
    nodes, edges = instance.data["nodes"], instance.data["edges"]
    number = {node["id"]: i for i, node in enumerate(nodes)}
    forward = [node["role"] == "fwd" for node in nodes]
    members: dict[Any, list[int]] = {}
    for i, node in enumerate(nodes):
        members.setdefault(node.get("group", ("alone", node["id"])), []).append(i)
    headless = {i for group in members.values() if not any(forward[i] for i in group) for i in group}

    readers: dict[int, list[int]] = {}
    seconds, mirrored = {}, set()
    for edge in edges:
        source, target = number[edge["src"]], number[edge["dst"]]
        readers.setdefault(source, []).append(target)
        seconds[source] = edge["time"]
        if not forward[source] and not forward[target] and (source in headless or target in headless):
            mirrored.add((target, source))
    sent = [
        (Net(u, tuple(to), backward=not all(forward[v] for v in (u, *to))), seconds[u]) for u, to in readers.items()
    ]
    order = {(u, v) for u, to in readers.items() for v in to if forward[u] and forward[v]} | mirrored
    sent += [(Net(u, (v,)), 0.0) for u, v in sorted(order)]

    def shape(cpu: int | None) -> Problem:
        """With the CPU at one stage, or without."""
        stages = accelerators + (cpu is not None)
        own = [["time", "time_cpu"][s == cpu] for s in range(stages)]
        work = np.array([[node[key] for node in nodes] for key in own])
        touch = np.array([[0.0 if s == cpu else time for _, time in sent] for s in range(stages)])
        size = np.array([[node["mem_bytes"] for node in nodes]] * stages)
        limits = np.array([np.inf if s == cpu else instance.data["mem_limit_bytes"] for s in range(stages)])
        return _steady(work, touch, size, limits, [net for net, _ in sent])

    places = range(accelerators + 1) if cpus else (None,)
    condensed = [condense(shape(cpu), members.values()) for cpu in places]
    return [problem for problem, _ in condensed], condensed[0][1]


def sum_load(instance: Instance, accelerators: int, bandwidth_bytes_per_s: float) -> tuple[Problem, list[int]]:
    """A training profile on equal devices, no replicas, no memory limit; the inputs' own nodes take no time.

    Returns:
        The problem, and for each node, in the file's order, its item.
    """
    nodes, edges = instance.data["nodes"], instance.data["edges"]
    number = {node["id"]: i for i, node in enumerate(nodes)}
    readers: dict[int, list[int]] = {}
    for edge in edges:
        readers.setdefault(number[edge["src"]], []).append(number[edge["dst"]])
    inputs = set(range(len(nodes))) - {v for to in readers.values() for v in to}
    work = np.array([0.0 if i in inputs else node["time_fwd"] + node["time_bwd"] for i, node in enumerate(nodes)])
    transfer = [0.0 if u in inputs else 2e3 * nodes[u]["act_bytes"] / bandwidth_bytes_per_s for u in readers]
    return condense(
        _steady(
            np.tile(work, (accelerators, 1)),
            np.tile(transfer, (accelerators, 1)),
            np.zeros((accelerators, len(nodes))),
            np.full(accelerators, np.inf),
            [Net(u, tuple(to)) for u, to in readers.items()],
        ),
        [],
    )


def _steady(work: Floats, touch: Floats, size: Floats, limits: Floats, nets: Sequence[Net]) -> Problem:
    """Max load over stages of values that are sent directly."""
    stages, items = work.shape
    none = np.zeros((stages - 1, len(nets)))
    return Problem(
        work=work,
        fill=np.zeros((stages, items)),
        saved=size,
        workspace=np.zeros(items),
        nets=tuple(nets),
        transfer=none,
        send=none,
        receive=none,
        touch=touch.reshape(stages, len(nets)),
        users=(),
        state_bytes=np.zeros(0),
        update=np.zeros((stages, 0)),
        sync=np.zeros((stages, 0)),
        process=tuple(range(stages)),
        limits=limits,
        repeat=1.0,
        fill_weight=0.0,
        idle=True,
    )
