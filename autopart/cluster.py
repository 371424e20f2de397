"""Cluster: the devices a plan is made for, and how to write one down.

A person writes a cluster as one of these (`Cluster.parse` reads them all):

- `4` or `"4"`: this machine's GPUs, or the default GPU of the catalogue where there are not so many;
- `"8xH100-80G"`: one machine; `"2x8xA100-80G"`: two machines of eight; `"A100-80G,A100-80G,T4"`: unequal GPUs;
- `["A100-80G", "A100-80G", "T4"]`: the same as a list;
- a path to a cluster file (`autopart.clusterfile`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

from autopart.errors import UsageError

MAX_DEVICES = 65_536


@dataclass(frozen=True)
class Efficiency:
    """What a family of operators reaches of a device's peaks; `profiler/roofline.py` says how it is used.

    Attributes:
        of_rate: Fraction of the peak rate, at large sizes.
        of_bandwidth: Fraction of the memory bandwidth.
        ramp_s: What each kernel takes besides.
        of_cache: The same as `of_bandwidth` for bytes that fit the device's cache; None: as from memory.
    """

    of_rate: float
    of_bandwidth: float
    ramp_s: float
    of_cache: float | None = None


@dataclass(frozen=True)
class Device:
    """One kind of device.

    Attributes:
        name: Catalogue name, "H100-80G".
        memory_bytes: Usable by a program that owns the device.
        flops_per_s: dtype name ("float32", "bfloat16", ...) -> peak dense rate.
        memory_bandwidth_bytes_per_s: Of device memory.
        source: Where the figures are from.
        kind: Device type in torch's words: which kernels run, hence what autograd saves.
        launch_s: Time to start one kernel from eager PyTorch.
        cache_bytes: Last-level cache that a program has to itself; 0: not told apart from memory.
        efficiency: Family of operators -> what was fitted for it; others have the defaults of the kind.
    """

    name: str
    memory_bytes: int
    flops_per_s: Mapping[str, float]
    memory_bandwidth_bytes_per_s: float
    source: str
    kind: Literal["cuda", "cpu"] = "cuda"
    launch_s: float = 5e-6
    cache_bytes: int = 0
    efficiency: Mapping[str, Efficiency] = field(default_factory=dict)


@dataclass(frozen=True)
class CollectiveCost:
    """What was fitted for one collective on a link: time = steps x latency + sent bytes / bandwidth.

    Attributes:
        collective: "all_reduce", "all_gather", "reduce_scatter" or "all_to_all".
        algorithm: How steps grow with the ranks (`sharding/conversions.py`).
        latency_s: Of one step.
        bandwidth_bytes_per_s: At which a rank sends.
    """

    collective: str
    algorithm: Literal["ring", "tree"]
    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True)
class Link:
    """A one-way connection: time of a message is latency + bytes / bandwidth.

    Attributes:
        both_ways_bytes_per_s: Bandwidth of each direction while the other one is in use; None: the same.
        collectives: Those that were measured; others are priced by latency and bandwidth of the link.
    """

    name: str
    latency_s: float
    bandwidth_bytes_per_s: float
    both_ways_bytes_per_s: float | None = None
    collectives: tuple[CollectiveCost, ...] = ()

    def measured(self, collective: str) -> CollectiveCost | None:
        """What was fitted for a collective."""
        return next((cost for cost in self.collectives if cost.collective == collective), None)


@dataclass(frozen=True)
class Cluster:
    """Devices in rank order, grouped into nodes (machines).

    Attributes:
        devices: One entry for each rank.
        nodes: Machine number of each rank.
        intra_node: Link between ranks of one machine.
        inter_node: Link between machines.
        notes: What was assumed when the cluster was read, for the person who reads the plan.
        inside: Link between the ranks of a group, where each device stands for one (see `grouped`).
    """

    devices: tuple[Device, ...]
    nodes: tuple[int, ...]
    intra_node: Link
    inter_node: Link
    notes: tuple[str, ...] = ()
    inside: Link | None = None

    def __post_init__(self) -> None:
        if not self.devices:
            raise UsageError("A cluster needs at least one device.")
        if len(self.devices) != len(self.nodes):
            raise UsageError(f"A cluster of {len(self.devices)} devices has {len(self.nodes)} machine numbers.")
        kinds: dict[str, Device] = {}
        for device in self.devices:
            if kinds.setdefault(device.name, device) != device:
                raise UsageError(f"Two different devices are both called '{device.name}'.")

    def __len__(self) -> int:
        return len(self.devices)

    def link(self, first: int, second: int) -> Link:
        """The link between two ranks."""
        return self.intra_node if self.nodes[first] == self.nodes[second] else self.inter_node

    def grouped(self, size: int) -> Cluster:
        """One device for each group of `size` consecutive ranks: what a pipeline of such groups is placed on.

        Raises:
            UsageError: The ranks cannot be grouped so: they do not divide, or a group has unequal devices.
        """
        if len(self) % size:
            fitting = [n for n in range(1, len(self) + 1) if len(self) % n == 0]
            raise UsageError(
                f"{len(self)} devices cannot be put into groups of {size}",
                f"Use {', '.join(map(str, fitting))}, or name another number of devices.",
            )
        for first in range(0, len(self), size):
            group = self.devices[first : first + size]
            if len({device.name for device in group}) > 1:
                names = ", ".join(device.name for device in group)
                raise UsageError(f"tensors are split evenly over equal devices, and a group of {size} has {names}")
        return replace(self, devices=self.devices[::size], nodes=self.nodes[::size], inside=self.group_link(size))

    def reordered(self, order: Sequence[int]) -> Cluster:
        """The same devices in another order."""
        return replace(self, devices=tuple(self.devices[i] for i in order), nodes=tuple(self.nodes[i] for i in order))

    def group_link(self, size: int) -> Link:
        """The link between `size` consecutive ranks: that between machines if any group of them spans two."""
        groups = [self.nodes[first : first + size] for first in range(0, len(self) - size + 1, size)]
        return self.intra_node if all(len(set(group)) == 1 for group in groups) else self.inter_node

    def __str__(self) -> str:
        machines: dict[int, list[str]] = {}
        for node, device in zip(self.nodes, self.devices, strict=True):
            machines.setdefault(node, []).append(device.name)
        groups = list(machines.values())
        if len({name for group in groups for name in group}) == 1 and len({len(group) for group in groups}) == 1:
            nodes = f"{len(groups)}x" if len(groups) > 1 else ""
            return f"{nodes}{len(groups[0])}x{groups[0][0]}"
        return " | ".join(",".join(group) for group in groups)

    @classmethod
    def parse(cls, spec: Any) -> Cluster:
        """Read a cluster as people write it (see the module's docstring).

        Raises:
            UsageError: Not a cluster, or an unknown device (the nearest names are in the message).
            InputFileError: A cluster file that cannot be read as one.
        """
        if isinstance(spec, Cluster):
            return spec
        if isinstance(spec, bool):
            raise _not_a_cluster(spec)
        if isinstance(spec, int):
            return _local(spec)
        if isinstance(spec, os.PathLike):
            return _read_file(spec)
        if isinstance(spec, str):
            return _parse_text(spec.strip())
        if isinstance(spec, Sequence) and spec and all(isinstance(name, str) for name in spec):
            return _from_groups([list(spec)])
        raise _not_a_cluster(spec)

    def to_data(self) -> dict[str, Any]:
        """Plain data for `plan.json`; `from_data` reads it back to an equal cluster."""
        return {
            "devices": [device.name for device in self.devices],
            "nodes": list(self.nodes),
            "kinds": {device.name: _plain(device) for device in self.devices},
            "intra_node": _plain_link(self.intra_node),
            "inter_node": _plain_link(self.inter_node),
            "notes": list(self.notes),
        }

    @classmethod
    def from_data(cls, data: Any) -> Cluster:
        """The inverse of `to_data`.

        Raises:
            InputFileError: The data is not a cluster; the message names the key.
        """
        from autopart.clusterfile import cluster_from_data

        return cluster_from_data(data)


_DEVICES_OF_ONE_MACHINE = re.compile(r"(?:(?:(\d+)\s*[xX*]\s*)?(\d+)\s*[xX*]\s*)?([A-Za-z0-9][\w\s.\-]*)")


def _parse_text(text: str) -> Cluster:
    if re.fullmatch(r"[+-]?\d+", text):
        return _local(int(text))
    if text.lower().endswith((".yaml", ".yml", ".json")) or (os.sep in text):
        return _read_file(text)
    if "," in text:
        names: list[str] = []
        for part in text.split(","):
            machines, count, name = _counts(part.strip(), text)
            if machines != 1:
                raise UsageError(f"'{text}': a list of devices is one machine; for several write a cluster file.")
            names += [name] * count
        return _from_groups([names])
    machines, count, name = _counts(text, text)
    return _from_groups([[name] * count] * machines)


def _counts(part: str, text: str) -> tuple[int, int, str]:
    match = _DEVICES_OF_ONE_MACHINE.fullmatch(part)
    if match is None:
        raise _not_a_cluster(text)
    machines, count = int(match[1] or 1), int(match[2] or 1)
    if machines < 1 or count < 1:
        raise UsageError(f"'{text}' has no devices; write at least 1.")
    if machines * count > MAX_DEVICES:
        raise UsageError(f"'{text}' has {machines * count:,} devices; at most {MAX_DEVICES:,} are planned for.")
    return machines, count, match[3]


def _from_groups(groups: list[list[str]], notes: Sequence[str] = ()) -> Cluster:
    """A cluster of one group of device names for each machine; unequal devices share the slowest of their links."""
    from autopart.catalogue import find

    found = {name: find(name) for group in groups for name in dict.fromkeys(group)}
    entries = [entry for entry, _ in found.values()]
    return Cluster(
        devices=tuple(found[name][0].device for group in groups for name in group),
        nodes=tuple(number for number, group in enumerate(groups) for _ in group),
        intra_node=min((entry.link for entry in entries), key=lambda link: link.bandwidth_bytes_per_s),
        inter_node=min((entry.network for entry in entries), key=lambda link: link.bandwidth_bytes_per_s),
        notes=(*notes, *(note for _, note in found.values() if note)),
    )


def _local(count: int) -> Cluster:
    """This machine's first `count` GPUs, else as many of the catalogue's default GPU."""
    from autopart.catalogue import DEFAULT_GPU

    if count < 1:
        raise UsageError(f"{count} GPUs are none; write at least 1.")
    if count > MAX_DEVICES:
        raise UsageError(f"{count:,} GPUs are too many; at most {MAX_DEVICES:,} are planned for.")
    import torch

    present = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if present >= count:
        names = [torch.cuda.get_device_name(rank) for rank in range(count)]
        return _from_groups([names], [f"Planned for this machine's GPUs: {', '.join(dict.fromkeys(names))}."])
    note = (
        f"This machine has {present or 'no'} GPU{'' if present == 1 else 's'}: planned for {count} x {DEFAULT_GPU}, "
        f"the default. Name the GPUs to plan for others, for example '{count}xA100-80G'."
    )
    return _from_groups([[DEFAULT_GPU] * count], [note])


def _read_file(path: str | os.PathLike[str]) -> Cluster:
    from autopart.clusterfile import read_cluster_file

    return read_cluster_file(path)


def _plain(device: Device) -> dict[str, Any]:
    efficiency = {family: asdict(fitted) for family, fitted in device.efficiency.items()}
    return {**asdict(device), "flops_per_s": dict(device.flops_per_s), "efficiency": efficiency}


def _plain_link(link: Link) -> dict[str, Any]:
    return {**asdict(link), "collectives": [asdict(cost) for cost in link.collectives]}


def _not_a_cluster(spec: object) -> UsageError:
    return UsageError(
        f"Cannot read {spec!r} as GPUs.",
        "Write a number, '8xH100-80G', '2x8xA100-80G' (machines x GPUs), a list of device names, or a cluster file.",
    )
