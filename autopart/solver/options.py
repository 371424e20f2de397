"""Stages with a tensor degree, a data degree, and an option for each node: the problem, and what a plan is worth.

The rule is Piper's (Tarnawski et al., NeurIPS 2021, section 4). A stage of nodes S, with t tensor ranks in each of d
data replicas, which divide the microbatches m, takes for one microbatch

    sum_v seconds_v / d  +  (2 sum_e (bytes_e + ranks_e) / d  +  4 (d - 1) / d  sum_v parameters_v / m) / bandwidth

over the nodes v in S with the options chosen for t, and the edges e into S and out of it; ranks_e are the bytes that
the option of the end in S adds. It keeps sum_v (in_flight_v y + fixed_v) bytes, y = ceil(D / d), where D sums the data
degrees of this stage and those after it; D is at most min(m, devices). The time per microbatch is that of the slowest
stage.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from autopart.solver.problem import Net, Problem


@dataclass(frozen=True)
class Option:
    """A way to run a node on some number of tensor ranks.

    Attributes:
        seconds: Of a microbatch, forward and backward.
        parameter_bytes: Of one rank, summed over the data replicas once in a step.
        in_flight_bytes: Of one rank, for each microbatch in flight; `fixed_bytes` whatever is in flight.
        receive_bytes: What the ranks exchange for an input from another stage, by its producer.
        send_bytes: What they exchange for an output to another stage, by its reader.
    """

    seconds: float
    parameter_bytes: float
    in_flight_bytes: float
    fixed_bytes: float
    receive_bytes: Mapping[int, float]
    send_bytes: Mapping[int, float]


@dataclass(frozen=True)
class Edge:
    """A value sent from a node to another."""

    producer: int
    reader: int
    bytes: float


@dataclass(frozen=True)
class OptionProblem:
    """Nodes with options, in topological order.

    Attributes:
        options: For each node, the options on each number of tensor ranks that it supports.
        limit_bytes: Of each device.
    """

    options: tuple[Mapping[int, tuple[Option, ...]], ...]
    edges: tuple[Edge, ...]
    devices: int
    microbatches: int
    bandwidth_bytes_per_s: float
    limit_bytes: float

    @cached_property
    def order(self) -> Problem:
        """The nodes and edges alone, as a problem of one stage."""
        nodes, edges = len(self.options), len(self.edges)
        return Problem(
            work=np.zeros((1, nodes)),
            fill=np.zeros((1, nodes)),
            saved=np.zeros((1, nodes)),
            workspace=np.zeros(nodes),
            nets=tuple(Net(edge.producer, (edge.reader,)) for edge in self.edges),
            transfer=np.zeros((0, edges)),
            send=np.zeros((0, edges)),
            receive=np.zeros((0, edges)),
            touch=np.zeros((1, edges)),
            users=(),
            state_bytes=np.zeros(0),
            update=np.zeros((1, 0)),
            sync=np.zeros((1, 0)),
            process=(0,),
            limits=np.full(1, np.inf),
            repeat=0.0,
            fill_weight=0.0,
        )


@dataclass(frozen=True)
class OptionStage:
    """A stage of a plan: its nodes, the tensor ranks and data replicas, and the option of each node."""

    nodes: tuple[int, ...]
    tensor: int
    data: int
    option: tuple[int, ...]


def seconds_per_microbatch(problem: OptionProblem, stages: Sequence[OptionStage]) -> float:
    """The time of the slowest stage; infinite if one does not fit."""
    slowest, replicas = 0.0, 0
    for stage in reversed(stages):
        replicas += stage.data
        if bytes_kept(problem, stage, replicas) > problem.limit_bytes:
            return np.inf
        slowest = max(slowest, stage_seconds(problem, stage))
    return slowest


def stage_seconds(problem: OptionProblem, stage: OptionStage) -> float:
    chosen = _chosen(problem, stage)
    crossing = 0.0
    for edge in problem.edges:
        if (edge.producer in chosen) != (edge.reader in chosen):
            ranks = (
                chosen[edge.reader].receive_bytes[edge.producer]
                if edge.reader in chosen
                else chosen[edge.producer].send_bytes[edge.reader]
            )
            crossing += 2 * (edge.bytes + ranks)
    shared = sum(option.parameter_bytes for option in chosen.values()) / problem.microbatches
    exchanged = crossing / stage.data + 4 * (stage.data - 1) / stage.data * shared
    work = sum(option.seconds for option in chosen.values())
    return work / stage.data + exchanged / problem.bandwidth_bytes_per_s


def bytes_kept(problem: OptionProblem, stage: OptionStage, replicas: int) -> float:
    """Bytes on each device of a stage, if so many data replicas are in it and after it."""
    in_flight = -(-replicas // stage.data)
    return sum(o.in_flight_bytes * in_flight + o.fixed_bytes for o in _chosen(problem, stage).values())


def _chosen(problem: OptionProblem, stage: OptionStage) -> dict[int, Option]:
    picked = zip(stage.nodes, stage.option, strict=True)
    return {v: problem.options[v][stage.tensor][index] for v, index in picked}
