"""The state table: every parameter, buffer and constant of a model, with tied names united by storage."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from torch import nn

from autopart.errors import CaptureError
from autopart.graph import StateEntry
from autopart.torch_private import FakeTensor
from autopart.tracer.errors import Uncapturable

Identity = tuple[object, ...]


def identity(tensor: torch.Tensor) -> Identity:
    """What two names of one tensor have in common: the same elements of one storage (on meta all addresses are 0)."""
    if tensor.layout is not torch.strided:
        return (id(tensor),)
    storage = tensor.untyped_storage()._cdata
    return (storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride(), tensor.dtype)


def registered(model: nn.Module) -> Iterator[tuple[str, nn.Module, str, Literal["parameter", "buffer"], torch.Tensor]]:
    """(full name, owner, own name, kind, tensor) of all parameters and buffers, aliases too, in `state_dict` order."""
    for prefix, module in model.named_modules(remove_duplicate=False):
        prefix = f"{prefix}." if prefix else ""
        for name, parameter in module._parameters.items():
            if parameter is not None:
                yield prefix + name, module, name, "parameter", parameter
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield prefix + name, module, name, "buffer", buffer


@dataclass
class StateTable:
    """The state entries under construction; captures add constants and mark what they use."""

    entries: dict[str, StateEntry] = field(default_factory=dict)
    key_of_name: dict[str, str] = field(default_factory=dict)
    _key_of_tensor: dict[Identity, str] = field(default_factory=dict)
    _attributes: dict[Identity, str] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module) -> StateTable:
        """Read all registered state of a model.

        Raises:
            CaptureError: Two parameters overlap in memory without being the same tensor, or a parameter has hooks.
        """
        table = cls()
        for name, owner, own, kind, tensor in registered(model):
            persistent = kind == "parameter" or own not in owner._non_persistent_buffers_set
            table._add(name, kind, persistent, tensor)
        table._refuse_overlaps()
        table._refuse_hooks()
        for prefix, module in model.named_modules():
            for name, value in vars(module).items():
                if isinstance(value, torch.Tensor):
                    table._attributes[identity(value)] = f"{prefix}.{name}" if prefix else name
        return table

    def _add(self, name: str, kind: Literal["parameter", "buffer"], persistent: bool, tensor: torch.Tensor) -> None:
        mark = identity(tensor) if tensor.numel() else (id(tensor),)
        key = self._key_of_tensor.get(mark)
        if key is None:
            key = self._key_of_tensor[mark] = f"t{len(self.entries)}"
            self.entries[key] = StateEntry(key, (name,), kind, persistent, tensor, used=False)
        else:
            entry = self.entries[key]
            self.entries[key] = replace(entry, names=(*entry.names, name), persistent=entry.persistent or persistent)
        self.key_of_name[name] = key

    def _refuse_overlaps(self) -> None:
        ranges: dict[int, list[tuple[int, int, StateEntry]]] = {}
        for entry in self.entries.values():
            if entry.kind == "parameter" and entry.tensor.layout is torch.strided and entry.tensor.numel():
                steps = zip(entry.tensor.shape, entry.tensor.stride(), strict=True)
                first = entry.tensor.storage_offset() * entry.tensor.element_size()
                length = (sum((n - 1) * s for n, s in steps) + 1) * entry.tensor.element_size()
                ranges.setdefault(entry.tensor.untyped_storage()._cdata, []).append(
                    (int(first), int(first + length), entry)
                )
        for found in ranges.values():
            found.sort(key=lambda r: r[:2])
            for (_, end, one), (start, _, other) in itertools.pairwise(found):
                if start < end:
                    one, other = sorted((one, other), key=lambda e: int(e.key[1:]))
                    raise CaptureError(
                        f"parameters {one.name!r} and {other.name!r} share memory without being the same tensor",
                        "Tie them by assigning one Parameter to both names, or give each its own memory (.clone()).",
                    )

    def _refuse_hooks(self) -> None:
        for entry in self.entries.values():
            if entry.kind != "parameter":
                continue
            hooks = getattr(entry.tensor, "_backward_hooks", None)
            after = getattr(entry.tensor, "_post_accumulate_grad_hooks", None)
            if hooks or after:
                raise CaptureError(
                    f"parameter {entry.name!r} has a gradient hook, which a package cannot carry",
                    "Remove the hook before partitioning and apply it in your training loop.",
                )

    def constant(self, tensor: torch.Tensor) -> str:
        """Key of a lifted constant; equal constants of the two captures share one entry.

        Raises:
            Uncapturable: It has no values, because it was made in an earlier run without values.
        """
        if isinstance(tensor, FakeTensor):
            raise Uncapturable(
                None, "a tensor made in one run is kept for the next, outside the model (a global cache)"
            )
        mark = identity(tensor)
        if mark in self._key_of_tensor:
            return self._key_of_tensor[mark]
        for key, entry in self.entries.items():
            if entry.kind == "constant" and _same_values(entry.tensor, tensor):
                return key
        key = f"t{len(self.entries)}"
        count = sum(e.kind == "constant" for e in self.entries.values())
        name = self._attributes.get(mark, f"constant_{count}")
        self.entries[key] = StateEntry(key, (name,), "constant", False, tensor, used=False)
        self._key_of_tensor[mark] = key
        return key

    def use(self, key: str) -> None:
        self.entries[key] = replace(self.entries[key], used=True)

    def use_below(self, path: str) -> None:
        """Mark the state of a module that is kept whole."""
        for key, entry in self.entries.items():
            if any(name.startswith(f"{path}.") for name in entry.names):
                self.use(key)


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype or one.device != other.device or one.device.type == "meta":
        return False
    return torch.equal(one.detach(), other.detach()) and one.stride() == other.stride()
