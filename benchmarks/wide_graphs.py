"""Generators of wide graphs as partition problems: parallel branches, experts side by side, skips over the whole net.

They have the shapes of nets that make exact methods over orders or down-sets hopeless: HRNet's branches of several
resolutions that exchange values (Sun et al., 2019), mixtures of experts (Shazeer et al., 2017), U-Net's skips from
every block of the way down to its mirror image on the way up (Ronneberger et al., 2015). Times and sizes follow the
shapes, with noise from a seeded generator; they are no measurements.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autopart.solver.problem import Net, Problem

BYTES_PER_S = 10e9


@dataclass
class Graph:
    """Operators in topological order: forward and backward seconds, bytes of parameters and of the output, inputs."""

    random: random.Random
    time_s: list[float] = field(default_factory=list)
    parameter_bytes: list[float] = field(default_factory=list)
    output_bytes: list[float] = field(default_factory=list)
    inputs: list[tuple[int, ...]] = field(default_factory=list)

    def add(self, time_ms: float, megabytes: float, *inputs: int, parameters: float = 0.0) -> int:
        """One operator with 20 % of noise on its time; megabytes of its output and of its parameters."""
        self.time_s.append(time_ms * 1e-3 * self.random.uniform(0.8, 1.2))
        self.output_bytes.append(megabytes * 1e6)
        self.parameter_bytes.append(parameters * 1e6)
        self.inputs.append(inputs)
        return len(self.inputs) - 1

    def chain(self, times_ms: tuple[float, ...], megabytes: float, start: int, parameters: float = 0.0) -> int:
        """Operators one after the other; the parameters are the first one's."""
        for position, time_ms in enumerate(times_ms):
            start = self.add(time_ms, megabytes, start, parameters=0.0 if position else parameters)
        return start

    def residual(self, times_ms: tuple[float, ...], megabytes: float, start: int, parameters: float = 0.0) -> int:
        """A chain and the sum of both its ends."""
        return self.add(0.05 * times_ms[0], megabytes, self.chain(times_ms, megabytes, start, parameters), start)


def hrnet_like(size: int, seed: int) -> Graph:
    """Two, three, then four branches, each at half the resolution of the one before; `size` modules with four."""
    graph = Graph(random.Random(seed))
    branches = [graph.chain((2.0, 0.2, 2.0, 0.2), 12.0, graph.add(0.1, 1.0), parameters=0.1)]
    for width in [2] + [3] * max(1, size // 2) + [4] * size:
        if len(branches) < width:
            last = len(branches) - 1
            branches.append(graph.chain((1.2, 0.2), 12.0 / 2 ** (last + 1), branches[last], parameters=0.3 * 4**last))
        for b in range(width):
            for _ in range(2):
                branches[b] = graph.residual((1.5, 0.2, 1.5, 0.2), 12.0 / 2**b, branches[b], parameters=0.2 * 4**b)
        branches = [_exchanged(graph, branches, b) for b in range(width)]
    pooled = [graph.chain((0.8, 0.1), 0.5, b) for b in branches]
    graph.add(0.5, 0.01, *pooled, parameters=4.0)
    return graph


def _exchanged(graph: Graph, branches: list[int], to: int) -> int:
    """The sum of all branches at the resolution of one of them."""
    size = 12.0 / 2**to
    parts = [branches[to]]
    for b, value in enumerate(branches):
        if b < to:  # a strided convolution for each halving
            for step in range(b + 1, to + 1):
                value = graph.chain((0.5, 0.1), 12.0 / 2**step, value, parameters=0.2 * 4**step)
            parts.append(value)
        elif b > to:  # a convolution where it is small, then made larger
            parts.append(graph.add(0.2, size, graph.chain((0.3, 0.1), 12.0 / 2**b, value, parameters=0.1)))
    return graph.add(0.1 * len(parts), size, *parts)


def experts(size: int, seed: int) -> Graph:
    """`size` layers of attention and 16 experts of unequal load, four operators each between dispatch and combine."""
    graph = Graph(random.Random(seed))
    value = graph.add(0.5, 4.0, parameters=60.0)
    for _ in range(size):
        heads = [graph.add(0.9, 4.0, value, parameters=4.0) for _ in range(3)]
        scores = graph.chain((1.0, 0.4), 8.0, graph.add(0.8, 8.0, heads[0], heads[1]))
        mixed = graph.add(1.0, 4.0, graph.add(0.8, 4.0, scores, heads[2]), value, parameters=4.0)
        gate = graph.chain((0.2, 0.1), 0.1, mixed, parameters=0.1)
        shares = [graph.random.uniform(0.4, 1.6) / 16 for _ in range(16)]
        outputs = []
        for share in shares:
            taken = graph.add(4.0 * share, 8.0 * share, mixed, gate)
            outputs.append(graph.chain((12.0 * share, 1.0 * share, 12.0 * share), 16.0 * share, taken, parameters=16.0))
        value = graph.add(0.6, 4.0, *outputs, gate, mixed)
    graph.add(3.0, 0.01, value, parameters=60.0)
    return graph


def unet_like(size: int, seed: int) -> Graph:
    """Four resolutions with `size` blocks each, down and up again; every block down is read by its mirror image."""
    graph = Graph(random.Random(seed))
    value, skips = graph.add(0.1, 1.0), []
    for level in range(4):
        for _ in range(size):
            value = graph.residual((2.0, 0.2, 2.0, 0.2), 16.0 / 2**level, value, parameters=0.2 * 4**level)
            skips.append(value)
        value = graph.add(0.8, 8.0 / 2**level, value, parameters=0.2 * 4**level)
    value = graph.residual((2.0, 0.2, 2.0), 1.0, value, parameters=40.0)
    for level in reversed(range(4)):
        value = graph.add(0.6, 16.0 / 2**level, value, parameters=0.2 * 4**level)
        for _ in range(size):
            joined = graph.add(0.3, 32.0 / 2**level, value, skips.pop())
            value = graph.residual((3.0, 0.2, 2.0, 0.2), 16.0 / 2**level, joined, parameters=0.4 * 4**level)
    graph.add(0.5, 1.0, value, parameters=0.1)
    return graph


FAMILIES: dict[str, Callable[[int, int], Graph]] = {"hrnet": hrnet_like, "experts": experts, "unet": unet_like}
SIZES = {"hrnet": (2, 4, 6), "experts": (4, 8, 12), "unet": (2, 4, 8)}


def as_problem(graph: Graph, stages: int, relayed: bool = False, memory_bytes: float = np.inf) -> Problem:
    """The largest load at 10 GB/s: every value that leaves a stage, and its gradient, once for each stage that has it.

    Args:
        relayed: Values pass through the stages between; otherwise they go directly to each stage that reads them.
        memory_bytes: Limit of each stage, for four times the parameters (gradient and two of the optimizer) and the
            outputs of as many microbatches as 1F1B has in flight, the number of stages behind and itself.
    """
    items = len(graph.inputs)
    readers: list[list[int]] = [[] for _ in range(items)]
    for item, inputs in enumerate(graph.inputs):
        for before in set(inputs):
            readers[before].append(item)
    nets = tuple(Net(item, tuple(found)) for item, found in enumerate(readers) if found)
    seconds = np.array([2 * graph.output_bytes[net.producer] / BYTES_PER_S for net in nets])
    in_flight = np.arange(stages, 0, -1.0)
    saved = np.outer(in_flight, graph.output_bytes) + 4 * np.asarray(graph.parameter_bytes)
    work = np.tile(np.asarray(graph.time_s), (stages, 1))
    return Problem(
        work=work,
        fill=work,
        saved=saved,
        workspace=np.zeros(items),
        nets=nets,
        transfer=np.tile(seconds * relayed, (stages - 1, 1)),
        send=np.zeros((stages - 1, len(nets))),
        receive=np.zeros((stages - 1, len(nets))),
        touch=np.tile(seconds * (not relayed), (stages, 1)),
        users=(),
        state_bytes=np.zeros(0),
        update=np.zeros((stages, 0)),
        sync=np.zeros((stages, 0)),
        process=tuple(range(stages)),
        limits=np.full(stages, memory_bytes),
        repeat=1.0,
        fill_weight=0.0,
        idle=True,
    )
