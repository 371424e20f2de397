"""Cluster: the devices a plan is made for, and how to write one down."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Device:
    """One kind of device.

    Attributes:
        name: Catalogue name, "H100-80G".
        memory_bytes: Usable by a program that owns the device.
        flops_per_s: dtype name ("float32", "bfloat16", ...) -> peak dense rate.
        memory_bandwidth_bytes_per_s: Of device memory.
        source: Where the figures are from.
    """

    name: str
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    source: str


@dataclass(frozen=True)
class Link:
    """A one-way connection: time of a message is latency + bytes / bandwidth."""

    name: str
    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class Cluster:
    """Devices in rank order, grouped into nodes (machines).

    Attributes:
        devices: One entry for each rank.
        nodes: Machine number of each rank.
        intra_node: Link between ranks of one machine.
        inter_node: Link between machines.
    """

    devices: tuple[Device, ...]
    nodes: tuple[int, ...]
    intra_node: Link
    inter_node: Link

    def link(self, first: int, second: int) -> Link:
        """The link between two ranks."""
        return self.intra_node if self.nodes[first] == self.nodes[second] else self.inter_node
