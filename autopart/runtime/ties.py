"""One parameter in several stages: the gradients of its copies are summed, so that the copies stay equal.

Each copy gets the gradient of its own uses; the gradient of the parameter is their sum. Equal gradients and equal
optimizer states keep the copies equal bit for bit. All copies are cut alike among tensor ranks, so each rank sums its
own part.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from .interface import Pipeline
from .mesh import Mesh


class Ties:
    """The tied parameters of this process.

    Args:
        pipeline: The package's table.
        modules: The emitted stages of this process, by index.
        place_of_stage: Pipeline place of a stage; used to find with whom a parameter is shared.
        mesh: This process among the others.
    """

    def __init__(
        self, pipeline: Pipeline, modules: Mapping[int, nn.Module], place_of_stage: Callable[[int], int], mesh: Mesh
    ) -> None:
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._shared: list[tuple[list[nn.Parameter], dist.ProcessGroup | None]] = []
        for tie in pipeline.ties:
            places = tuple(sorted({place_of_stage(stage) for stage, _ in tie.copies}))
            if places not in groups:
                # Every process makes every group, in the order of the table: making one is collective.
                groups[places] = mesh.across(places) if len(places) > 1 else None
            mine = [modules[s].get_parameter(name) for s, name in tie.copies if s in modules]
            if mine and mine[0].requires_grad:
                self._shared.append((mine, groups[places]))

    def take_gradients(self) -> list[list[torch.Tensor | None]]:
        """Put aside the gradients of earlier steps, which are sums already; `sum_gradients` adds them back."""
        earlier: list[list[torch.Tensor | None]] = []
        for copies, _ in self._shared:
            earlier.append([p.grad for p in copies])
            for parameter in copies:
                parameter.grad = None
        return earlier

    def sum_gradients(self, earlier: list[list[torch.Tensor | None]]) -> None:
        """Give every copy the sum over all copies, in the order of the stages; None where no copy has a gradient."""
        for (copies, group), before in zip(self._shared, earlier, strict=True):
            gradients = [p.grad for p in copies if p.grad is not None]
            total = gradients[0].clone() if gradients else torch.zeros_like(copies[0])
            for gradient in gradients[1:]:
                total += gradient
            present = torch.tensor([len(gradients)], device=total.device)
            if group is not None:
                dist.all_reduce(present, group=group)
                dist.all_reduce(total, group=group)
            if not present.item():
                continue
            for parameter, old in zip(copies, before, strict=True):
                parameter.grad = total.clone() if old is None else old + total
