"""One parameter in several stages: the gradients of its copies are summed, so that the copies stay equal.

Each copy gets the gradient of its own uses; the gradient of the parameter is their sum. Equal gradients and equal
optimizer states keep the copies equal bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from torch import nn

from .interface import Pipeline


class Ties:
    """The tied parameters of this process.

    Args:
        pipeline: The package's table.
        modules: The emitted stages of this process, by index.
        process_of_stage: Process that holds a stage; used to find with whom a parameter is shared.
    """

    def __init__(
        self, pipeline: Pipeline, modules: Mapping[int, nn.Module], process_of_stage: Callable[[int], int]
    ) -> None:
        groups: dict[tuple[int, ...], dist.ProcessGroup | None] = {}
        self._shared: list[tuple[list[nn.Parameter], dist.ProcessGroup | None]] = []
        for tie in pipeline.ties:
            processes = tuple(sorted({process_of_stage(stage) for stage, _ in tie.copies}))
            if processes not in groups:
                # Every process makes every group, in the order of the table: making one is collective.
                groups[processes] = _group(processes)
            mine = [modules[s].get_parameter(name) for s, name in tie.copies if s in modules]
            if mine and mine[0].requires_grad:
                self._shared.append((mine, groups[processes]))

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


def _group(processes: tuple[int, ...]) -> dist.ProcessGroup | None:
    """The group of these processes; None where there is nobody to talk to, or this process is not one of them."""
    group = dist.new_group(list(processes)) if len(processes) > 1 else None
    return group if isinstance(group, dist.ProcessGroup) else None
