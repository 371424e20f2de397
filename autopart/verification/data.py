"""The batches of a verification: the user's own or random ones, different in every step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopart.errors import UsageError

Flat = dict[str, torch.Tensor]


def make_batches(
    pipeline: Any, runtime_batches: Any, microbatches: int, steps: int, batch: Mapping[str, Any] | None, seed: int
) -> list[Flat]:
    """One global batch for each step, as input name -> tensor.

    Args:
        runtime_batches: The package's `runtime.batches`.
        batch: {"args", "kwargs", "target"} of the first; the others are made from it. None: all are random.
    """
    generator = torch.Generator().manual_seed(seed)
    if batch is None:
        return [runtime_batches.random_batch(pipeline, microbatches, generator) for _ in range(steps)]
    try:
        first = runtime_batches.flatten(dict(batch), pipeline, microbatches)
    except Exception as error:
        raise UsageError(f"the batch does not fit the package: {error}") from error
    specs = {spec.name: spec for spec in pipeline.inputs}
    others = [
        {name: _varied(tensor, specs[name], step, generator) for name, tensor in first.items()}
        for step in range(1, steps)
    ]
    return [first, *others]


def _varied(tensor: torch.Tensor, spec: Any, step: int, generator: torch.Generator) -> torch.Tensor:
    """Other values that are as valid: noise on floats, new integers where their range is known, else other rows."""
    rolled = tensor if spec.batch_dim is None else tensor.roll(step, spec.batch_dim)
    if tensor.is_floating_point():
        spread = tensor.std() if tensor.numel() > 1 else torch.ones(())
        noise = torch.randn(tensor.shape, generator=generator, dtype=tensor.dtype)
        return rolled + noise * spread * 0.3
    if spec.maximum is not None and tensor.dtype != torch.bool:
        # Negative labels mean "ignore"; they stay where they are.
        drawn = torch.randint(spec.maximum, tensor.shape, generator=generator, dtype=tensor.dtype)
        return torch.where(rolled < 0, rolled, drawn)
    return rolled
