"""The stage partition problem: items, nets and shared states over K stages, with nothing of fx in it.

This is what every method of the solver works on, whether it comes from a captured model (`lowering`) or from a
published input (`benchmarks.instances`). An assignment gives each item a stage so that no forward net flows backwards.
Its step time, in seconds, is

    fill_weight * (sum_v fill[s(v), v] + sum_n sum_{b crossed by n} transfer[b, n])  +  max_p load_p

    load_p = sum over the stages s of process p of
             repeat * (sum_{v in s} work[s, v] + transfers of boundaries s - 1 and s + sum_{n torn at s} touch[s, n])
             + sum over the states held in s of update[s, r], and sync[s, r] if another stage holds r too

A net crosses boundary b (between stages b and b + 1) when its producer is at stage b or before and a reader (or the end
of the pipeline) is after it: values for later stages are relayed by every stage between, at `transfer`. It is torn at
stage s when one of its pins (producer and readers) is in s and another is not: what is sent directly from the producer
to each stage that reads it costs `touch` there. Usually one of the two tables is zero. Where transfers are `hidden`
behind the work, a process is as busy as the largest of its work and the transfers over each of its boundaries:

    load_p = max(repeat * work of p, repeat * transfers of b for each boundary b of p) + updates and syncs

The bytes of a process are

    memory_p = sum over its stages s of ( sum_{v in s} saved[s, v] + sum_{r held in s} state_bytes[r]
               + sum_{n crosses s} send[s, n] + sum_{n crosses s - 1} receive[s - 1, n] ) + max_v workspace[v]

and must not exceed `limits[p]`. Every stage holds at least one item, unless stages may be `idle`.

A block of items that are all in stage s may be computed again in backward. That adds again[s, b] to the work and to the
fill of the stage, and takes spared[s, b] off its bytes; the largest peak[b] of the blocks that a process computes again
is added to its bytes, like a workspace. Given an assignment, each process chooses for itself (see `recomputation`).

The usual objectives are choices of two weights: the step time of GPipe and 1F1B (`pipeline.repeats`); the steady state,
max load, is `repeat` 1 and `fill_weight` 0; the latency of one inference is `repeat` 0 and `fill_weight` 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


# Flags of items that are numbers at a time.
FLAGS_AT_A_TIME = 1 << 22


@dataclass(frozen=True)
class Net:
    """A value: the item that makes it and the items that read it (not the producer itself).

    Attributes:
        to_end: The pipeline's last stage has to give it, whoever reads it before.
        backward: It flows from later stages to earlier ones (a gradient between items that unite both directions), so
            it asks for no order; it must not cost a transfer, only a touch.
    """

    producer: int
    readers: tuple[int, ...]
    to_end: bool = False
    backward: bool = False


@dataclass(frozen=True, eq=False)
class Blocks:
    """What backward may compute again.

    Attributes:
        items: Of each block.
        again: Seconds of work and of fill, (stages, blocks).
        spared: Bytes that a stage need not keep, (stages, blocks).
        peak: Bytes that exist while it is computed again, (blocks,).
    """

    items: tuple[tuple[int, ...], ...]
    again: Floats
    spared: Floats
    peak: Floats


@dataclass(frozen=True, eq=False)
class Problem:
    """See the module's docstring. Items are numbered so that every forward net leads from a lower to a higher number.

    Attributes:
        work, fill: Seconds, (stages, items). `work` is paid `repeat` times, `fill` once.
        saved: Bytes an item keeps at a stage, with the microbatches in flight there, (stages, items).
        workspace: Largest bytes that exist only while the item runs, (items,).
        nets: Values; `transfer` seconds, `send` and `receive` bytes, each (stages - 1, nets).
        touch: Seconds that a stage pays for a net that is torn there, (stages, nets).
        users: For each state the items that use it; `state_bytes` (states,), `update` and `sync` (stages, states).
        process: Process of each stage.
        limits: Bytes that each process may use (infinite where unlimited), (processes,).
        repeat: How often the slowest process repeats its work; microbatches - 1 where a process has one stage.
        fill_weight: Weight of the pipeline's filling and draining; 1 over the stages of a process.
        hidden: Whether transfers run beside the work; then there is one stage on a process, and nothing to touch.
        idle: Whether a stage may be empty.
        blocks: What may be computed again; None: nothing.
    """

    work: Floats
    fill: Floats
    saved: Floats
    workspace: Floats
    nets: tuple[Net, ...]
    transfer: Floats
    send: Floats
    receive: Floats
    touch: Floats
    users: tuple[tuple[int, ...], ...]
    state_bytes: Floats
    update: Floats
    sync: Floats
    process: tuple[int, ...]
    limits: Floats
    repeat: float
    fill_weight: float
    hidden: bool = False
    idle: bool = False
    blocks: Blocks | None = None

    @property
    def stages(self) -> int:
        return len(self.process)

    @property
    def items(self) -> int:
        return self.work.shape[1]

    @property
    def processes(self) -> int:
        return len(self.limits)

    @cached_property
    def stages_of_process(self) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(s for s in range(self.stages) if self.process[s] == p) for p in range(self.processes))

    @cached_property
    def uniform(self) -> bool:
        """Whether every stage computes, and every boundary transfers, equally fast."""
        return all(
            bool((table == table[:1]).all()) for table in (self.work, self.fill, self.transfer, self.update, self.sync)
        )

    @cached_property
    def least_fill(self) -> float:
        """Seconds that the items add to the filling of the pipeline at least, each at its fastest, weighted."""
        return self.fill_weight * float(self.fill.min(axis=0).sum())

    @property
    def forward_nets(self) -> Iterator[Net]:
        """The nets that ask for an order."""
        return (net for net in self.nets if not net.backward)

    @cached_property
    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        found: list[set[int]] = [set() for _ in range(self.items)]
        for net in self.forward_nets:
            for reader in net.readers:
                found[reader].add(net.producer)
        return tuple(tuple(sorted(p)) for p in found)

    @cached_property
    def successors(self) -> tuple[tuple[int, ...], ...]:
        found: list[set[int]] = [set() for _ in range(self.items)]
        for net in self.forward_nets:
            found[net.producer].update(net.readers)
        return tuple(tuple(sorted(s)) for s in found)

    @cached_property
    def ancestors(self) -> tuple[int, ...]:
        """For each item the bit set of what must come no later than it, itself included."""
        sets: list[int] = []
        for item in range(self.items):
            bits = 1 << item
            for before in self.predecessors[item]:
                bits |= sets[before]
            sets.append(bits)
        return tuple(sets)

    @cached_property
    def descendants(self) -> tuple[int, ...]:
        """For each item the bit set of what must come no earlier than it, itself included."""
        sets = [0] * self.items
        for item in reversed(range(self.items)):
            bits = 1 << item
            for after in self.successors[item]:
                bits |= sets[after]
            sets[item] = bits
        return tuple(sets)


def membership(sets: Sequence[int], items: int) -> NDArray[np.bool_]:
    """Bit sets of items as rows of flags, (sets, items)."""
    width = (items + 7) // 8
    packed = np.frombuffer(b"".join(bits.to_bytes(width, "little") for bits in sets), dtype=np.uint8)
    return np.unpackbits(packed.reshape(len(sets), width), axis=1, count=items, bitorder="little").astype(bool)


def totals(inside: NDArray[np.bool_], table: Floats) -> Floats:
    """What each set (sets, items) has of each row of a table (rows, items): (rows, sets).

    By blocks of sets: flags as numbers take eight times the memory, which the sets of a large graph do not leave.
    """
    found = np.empty((len(table), len(inside)))
    block = max(1, FLAGS_AT_A_TIME // max(inside.shape[1], 1))
    for start in range(0, len(inside), block):
        found[:, start : start + block] = table @ inside[start : start + block].T.astype(float)
    return found
