"""Which dimension of each input holds the rows of the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from autopart.errors import UsageError
from autopart.tracer.call import Call


@dataclass
class BatchDims:
    """Batch dimension of every input, and the sizes.

    Attributes:
        inputs: Dimension of each tensor of the call that holds rows; None for tensors without.
        example_rows: Rows of the example.
        rows: Rows of one microbatch (1 if no input has rows).
    """

    inputs: tuple[int | None, ...]
    example_rows: int
    rows: int
    output_dims: Callable[[Sequence[torch.Tensor]], list[int | None]]
    notes: list[str] = field(default_factory=list)

    def microbatch(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors at the rows of one microbatch: cut, or repeated where the example has too few."""
        return resize(tensors, self.inputs, self.rows)

    def outputs(self, values: Sequence[torch.Tensor]) -> list[int | None]:
        return self.output_dims(values)


def resize(tensors: Sequence[torch.Tensor], dims: Sequence[int | None], rows: int) -> list[torch.Tensor]:
    """Each tensor with `rows` rows: its first ones, repeated from the start where there are too few."""
    found = []
    for tensor, dim in zip(tensors, dims, strict=True):
        if dim is not None and tensor.shape[dim] != rows:
            have = tensor.shape[dim]
            tensor = (
                torch.cat([tensor] * -(-rows // have), dim).narrow(dim, 0, rows)
                if rows > have
                else tensor.narrow(dim, 0, rows)
            )
            tensor = tensor.contiguous()
        found.append(tensor)
    return found


def find_batch_dims(
    model: nn.Module,
    call: Call,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None,
    microbatches: int,
    global_batch: int | None,
    given: Mapping[str, int | None] | None,
    *,
    training: bool,
) -> BatchDims:
    """Batch dimensions of a call (first version: every tensor whose first dimension is the first tensor's)."""
    first = next((t.shape[0] for t in call.tensors if t.dim()), 1)
    dims: list[int | None] = [0 if t.dim() and t.shape[0] == first else None for t in call.tensors]
    total = global_batch or first
    if total % microbatches:
        raise UsageError(f"{microbatches} microbatches do not divide a batch of {total} rows")
    rows = total // microbatches

    def outputs(values: Sequence[torch.Tensor]) -> list[int | None]:
        return [0 if v.dim() and v.shape[0] == rows else None for v in values]

    return BatchDims(tuple(dims), first, rows, outputs)
