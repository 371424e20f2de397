"""Random initial weights: drawn per name and whole, so that they do not depend on how the model is split."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .errors import PackageError
from .interface import Pipeline
from .weights import original_names, own_part, whole_shape

Rule = tuple[Any, ...]
"""("constant", value), ("normal", mean, standard deviation), ("uniform", low, high), ("data", values row by row)"""

DRAWS: dict[str, Callable[..., torch.Tensor]] = {
    "constant": lambda t, generator, value: t.fill_(value),
    "normal": lambda t, generator, mean, std: t.normal_(mean, std, generator=generator),
    "uniform": lambda t, generator, low, high: t.uniform_(low, high, generator=generator),
    "data": lambda t, generator, values: t.copy_(torch.tensor(values, dtype=t.dtype).reshape(t.shape)),
}


def initialize(pipeline: Pipeline, modules: Mapping[int, nn.Module], seed: int, rank: int) -> None:
    """Draw the weights of these stages as the package's table says; copies of tied parameters get the same numbers.

    Args:
        rank: The tensor rank, which keeps its part of each.

    Raises:
        PackageError: The table says that nobody knows how to draw one.
    """
    position = {name: i for i, name in enumerate(pipeline.names)}
    for stage, module in modules.items():
        state = module.state_dict(keep_vars=True)
        for key, names in original_names(pipeline, stage, module).items():
            name = min(names, key=position.__getitem__)
            rule = pipeline.initialization.get(name)
            if rule is None:
                continue
            if rule[0] not in DRAWS:
                raise PackageError(f"how {name} starts is not known to this package: give --weights")
            digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)
            with torch.no_grad():
                # Drawn on the CPU in single precision, so that the device and dtype of the run do not matter.
                exact = rule[0] == "data" and not state[key].dtype.is_floating_point
                shape = whole_shape(pipeline, name, state[key].shape)
                drawn = torch.empty(shape, dtype=state[key].dtype if exact else torch.float32)
                DRAWS[rule[0]](drawn, generator, *rule[1:])
                state[key].copy_(own_part(pipeline, name, drawn, rank))
