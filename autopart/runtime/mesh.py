"""The processes as a grid of pipeline places and tensor ranks: process number = place * ranks + tensor rank.

The tensor ranks of a place are consecutive, so that torchrun puts them on one machine.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from .collectives import ProcessRanks, use
from .process import Process


@dataclass(frozen=True)
class Mesh:
    """Where this process stands, and with whom it talks.

    Attributes:
        place, places: Its pipeline place, which holds one or two stages (or all, if it is the only one).
        rank, ranks: Its tensor rank, and the tensor degree.
        pipeline: The processes of its tensor rank, in the order of places; None if it is alone.
    """

    place: int = 0
    places: int = 1
    rank: int = 0
    ranks: int = 1
    pipeline: dist.ProcessGroup | None = None

    def process(self, place: int, rank: int) -> int:
        """The number of the process that stands there."""
        return place * self.ranks + rank

    def processes(self, place: int) -> list[int]:
        """The processes of a place, in the order of their tensor ranks."""
        return [self.process(place, rank) for rank in range(self.ranks)]


def make_mesh(process: Process, ranks: int) -> Mesh:
    """The mesh of all processes with `ranks` tensor ranks in each place; their collectives go to this process's place.

    Called by every process: making groups is collective.
    """
    if process.count == 1:
        return Mesh()
    places = process.count // ranks
    mesh = init_device_mesh(process.device.type, (places, ranks), mesh_dim_names=("pipeline", "tensor"))
    use(ProcessRanks(mesh.get_group("tensor")))
    place, rank = divmod(process.number, ranks)
    return Mesh(place, places, rank, ranks, mesh.get_group("pipeline"))
