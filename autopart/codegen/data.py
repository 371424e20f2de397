"""Tensors that a package must hold by value: constants of the code, and buffers that no `state_dict` carries."""

from __future__ import annotations

import torch

from autopart.codegen.modules import Holding
from autopart.graph import Graph, StateEntry

CONSTANTS_MODULE = '''# Written by autopart; see README.md.
"""Tensors that are part of the model but not of its state_dict: read from constants.pt when a stage is built."""

from pathlib import Path

import torch
from torch import nn


@torch.no_grad()
def fill_constants(stage: nn.Module) -> None:
    """Give the constants and buffers of a stage their values; weights that are loaded later replace what they name.

    Raises:
        RuntimeError: A value is missing: the model had none when the package was written.
    """
    values = torch.load(Path(__file__).with_name("constants.pt"), weights_only=True)
    for name, tensor in [*stage.named_buffers(remove_duplicate=False), *stage.named_parameters(remove_duplicate=False)]:
        if name in values:
            tensor.copy_(values[name])
    missing = {name for name, _ in stage.named_buffers()} - set(stage.state_dict()) - set(values)
    if missing:
        raise RuntimeError(f"{min(missing)} has no value: the model was on the meta device when it was captured")
'''

# What torch.nn.BatchNorm builds rightly by itself.
_STATISTICS = {"running_mean", "running_var", "num_batches_tracked"}


def held_by_value(graph: Graph, holding: Holding) -> dict[str, StateEntry]:
    """Name in the stages -> entry of everything that weights and initial draws leave open."""
    found: dict[str, StateEntry] = {}
    for names in holding.names:
        for name, entry in names.items():
            rule = graph.initialization.get(entry.key)
            by_value = entry.kind == "constant" or not entry.persistent or (rule is not None and rule[0] == "data")
            if rule is None and entry.kind == "buffer" and name.rpartition(".")[2] not in _STATISTICS:
                by_value = True
            if by_value:
                found[name] = entry
    return found


def values(entries: dict[str, StateEntry]) -> dict[str, torch.Tensor]:
    """The tensors themselves, as far as they have values."""
    kept: dict[str, torch.Tensor] = {}
    copies: dict[str, torch.Tensor] = {}
    for name, entry in entries.items():
        if entry.tensor.device.type != "meta":
            if entry.key not in copies:
                copies[entry.key] = entry.tensor.detach().cpu().clone(memory_format=torch.contiguous_format)
            kept[name] = copies[entry.key]
    return kept
