"""Work: what the stages of one process need for one step, and what they leave behind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import torch


@dataclass
class Work:
    """One step.

    Attributes:
        inputs: For each microbatch, input name -> tensor.
        seed, step: Part of the key of every random stream.
        loss_scale: What the loss is multiplied by before its backward: 1 / microbatches makes gradients the mean.
        wanted: Names of the values to keep from the last stage.
        last: Index of the last stage.
        kept: For each microbatch, the wanted values, detached.
    """

    inputs: list[dict[str, torch.Tensor]]
    seed: int
    step: int
    loss_scale: float
    wanted: tuple[str, ...]
    last: int
    kept: list[dict[str, torch.Tensor]] = field(init=False)

    def __post_init__(self) -> None:
        self.kept = [{} for _ in self.inputs]

    def keep(self, stage: int, microbatch: int, known: Mapping[str, torch.Tensor]) -> None:
        """Keep the wanted values of a microbatch that has passed the last stage."""
        if stage == self.last:
            here = {**self.inputs[microbatch], **known}
            # A relayed value lies in a receive buffer, which the next step overwrites.
            self.kept[microbatch] = {name: here[name].detach().clone() for name in self.wanted}
