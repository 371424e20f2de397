"""The processes as a grid of pipeline places and tensor ranks: process number = place * ranks + tensor rank.

The tensor ranks of a place are consecutive, so that torchrun puts them on one machine.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .collectives import ProcessRanks, use
from .process import Process


@dataclass(frozen=True)
class Mesh:
    """Where this process stands, and with whom it talks.

    Attributes:
        place, places: Its pipeline place, which holds one or two stages (or all, if it is the only one).
        rank, ranks: Its tensor rank, and the tensor degree.
        timeout: How long its groups wait for a process.
        devices: The grid for torch, with dimensions "pipeline" and "tensor"; None if this process is alone.
    """

    place: int = 0
    places: int = 1
    rank: int = 0
    ranks: int = 1
    timeout: timedelta | None = None
    devices: DeviceMesh | None = None

    @property
    def pipeline(self) -> dist.ProcessGroup | None:
        """The processes of its tensor rank, in the order of places."""
        return None if self.devices is None else self.devices.get_group("pipeline")

    def process(self, place: int, rank: int) -> int:
        """The number of the process that stands there."""
        return place * self.ranks + rank

    def processes(self, place: int) -> list[int]:
        """The processes of a place, in the order of their tensor ranks."""
        return [self.process(place, rank) for rank in range(self.ranks)]

    def across(self, places: Sequence[int]) -> dist.ProcessGroup | None:
        """The processes of this tensor rank in these places; None if this process is not in one of them.

        Called by every process, in the same order.
        """
        return _mine([[self.process(place, rank) for place in places] for rank in range(self.ranks)], self.timeout)


def make_mesh(process: Process, ranks: int) -> Mesh:
    """The mesh of all processes with `ranks` tensor ranks in each place; their collectives go to this process's place.

    Called by every process: making groups is collective.
    """
    if process.count == 1:
        return Mesh()
    timeout = timedelta(seconds=process.timeout_s) if process.timeout_s else None
    grid = torch.arange(process.count).view(-1, ranks)
    # The groups that `init_device_mesh` makes would wait for half an hour, whatever the run's timeout is.
    groups = [_mine(grid.t().tolist(), timeout), _mine(grid.tolist(), timeout)]
    devices = DeviceMesh.from_group(groups, process.device.type, grid, mesh_dim_names=("pipeline", "tensor"))
    use(ProcessRanks(devices.get_group("tensor")))
    place, rank = divmod(process.number, ranks)
    return Mesh(place, process.count // ranks, rank, ranks, timeout, devices)


def _mine(groups: list[list[int]], timeout: timedelta | None) -> Any:
    """The one of these groups that this process is in, or None."""
    if len(groups[0]) == dist.get_world_size():
        return dist.group.WORLD
    group = dist.new_subgroups_by_enumeration(groups, timeout=timeout)[0]
    return group if isinstance(group, dist.ProcessGroup) else None
