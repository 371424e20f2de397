"""Tensors that a package must hold by value: constants of the code, and buffers that no `state_dict` carries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from autopart.codegen.modules import Holding
from autopart.graph import Graph, StateEntry
from autopart.runtime.shards import cut
from autopart.sharding import LocalGraph

Constant = torch.Tensor | list[torch.Tensor]
"""What a package holds of a constant: the tensor, or what each tensor rank has of it."""

CONSTANTS_MODULE = '''# Written by autopart; see README.md.
"""Tensors that are part of the model but not of its state_dict: read from constants.pt when a stage is built."""

from pathlib import Path

import torch
from torch import nn

from runtime.collectives import group


@torch.no_grad()
def fill_constants(stage: nn.Module) -> None:
    """Give the constants and buffers of a stage their values; weights that are loaded later replace what they name.

    Raises:
        RuntimeError: A value is missing: the model had none when the package was written.
    """
    values = torch.load(Path(__file__).with_name("constants.pt"), weights_only=True)
    for name, tensor in [*stage.named_buffers(remove_duplicate=False), *stage.named_parameters(remove_duplicate=False)]:
        if name in values:
            value = values[name]
            tensor.copy_(value[group().rank] if isinstance(value, list) else value)  # a list: one for each tensor rank
    missing = {name for name, _ in stage.named_buffers()} - set(stage.state_dict()) - set(values)
    if missing:
        raise RuntimeError(f"{min(missing)} has no value: the model was on the meta device when it was captured")
'''


def held_by_value(graph: Graph, holding: Holding) -> dict[str, StateEntry]:
    """Name in the stages -> entry of everything that weights and initial draws leave open."""
    found: dict[str, StateEntry] = {}
    for names in holding.names:
        for name, entry in names.items():
            rule = graph.initialization.get(entry.key)
            by_value = not entry.persistent or rule is None or rule[0] == "data"
            if by_value and (entry.kind != "parameter" or rule is not None):
                found[name] = entry
    return found


def values(graph: Graph, entries: Mapping[str, StateEntry]) -> dict[str, Constant]:
    """The tensors themselves, as far as they have values."""
    copies: dict[str, Constant | None] = {}
    for key in dict.fromkeys(entry.key for entry in entries.values()):
        copies[key] = _value(graph.state[key], graph.initialization.get(key))
        if isinstance(graph, LocalGraph) and (split := graph.shards[key]) is not None:
            whole = _value(graph.whole.state[key], graph.initialization.get(key))
            ranks = range(graph.tensor)
            copies[key] = whole if whole is None else [cut(whole, split.dim, split.parts, r, len(ranks)) for r in ranks]
    found = {name: copies[entry.key] for name, entry in entries.items()}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _value(entry: StateEntry, rule: Any) -> torch.Tensor | None:
    tensor = entry.tensor
    if tensor.device.type != "meta":
        return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
    if rule is not None and rule[0] == "data" and len(rule) > 1:
        return torch.tensor(rule[1], dtype=tensor.dtype).reshape(tensor.shape)
    if rule is not None and rule[0] == "constant":
        return torch.full(tensor.shape, rule[1], dtype=tensor.dtype)
    return None
