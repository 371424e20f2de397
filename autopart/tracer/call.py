"""The call that is exported: flat tensors in, flat tensors out, loss included; what is nested stays on our side."""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autopart.errors import UsageError
from autopart.runtime.structure import Structure, UnknownStructureError, decode, encode, leaves, omitted

# Stands for a call without a target, since None is a target too.
NO_TARGET = object()

# The name of the loss where nothing else is given.
STAND_IN = "stand-in (sum over floating outputs of the mean of squares)"


@dataclass(frozen=True)
class Call:
    """An example call as data.

    Attributes:
        structure: Structure of (args, kwargs[, target]).
        tensors: Its tensors, in order.
        paths: Where each stands: "args[0]", "kwargs['labels']", "target".
        names: A Python identifier for each, close to the argument's name.
    """

    structure: Structure
    tensors: tuple[torch.Tensor, ...]
    paths: tuple[str, ...]
    names: tuple[str, ...]

    def with_tensors(self, tensors: Sequence[torch.Tensor]) -> Call:
        return replace(self, tensors=tuple(tensors))


def read_call(model: nn.Module, args: Any, kwargs: Mapping[str, Any], target: Any = NO_TARGET) -> Call:
    """Flatten an example call.

    Raises:
        UsageError: An argument does not fit `forward`, or is of a class that cannot be taken apart; it is named.
    """
    if isinstance(args, torch.Tensor):
        args = (args,)
    try:
        bound = inspect.signature(model.forward).bind(*args, **kwargs)
    except TypeError as error:
        raise UsageError(
            f"the example inputs do not fit {type(model).__name__}.forward: {error}",
            "Pass example_inputs=(tensor, ...) and example_kwargs={'name': tensor, ...} as you would call the model.",
        ) from None
    parts = [_encode_part(tuple(args), "args"), _encode_part(dict(kwargs), "kwargs")]
    if target is not NO_TARGET:
        parts.append(_encode_part(target, "target"))
    tensors: list[torch.Tensor] = []
    items = []
    for structure, found in parts:
        items.append(_renumber(structure, len(tensors)))
        tensors += found
    structure = {"tuple": items}
    roots = ("args", "kwargs", "target")
    paths = [path for root, item in zip(roots, items, strict=False) for path, _ in leaves(item, root)]
    # What was made in inference mode cannot be used in training.
    tensors = [t.clone() if t.is_inference() else t for t in tensors]
    return Call(structure, tuple(tensors), tuple(paths), _names(paths, list(bound.arguments), model))


def _encode_part(value: Any, root: str) -> tuple[Structure, list[torch.Tensor]]:
    try:
        return encode(value, root)
    except UnknownStructureError as error:
        hint = "Pass tensors, numbers, strings, None, and dicts, lists, tuples or dataclasses of them."
        if issubclass(error.kind, nn.Module):
            hint = "Register the module as a submodule of the model instead of passing it."
        raise UsageError(
            f"the example input {error.path} is a {error.kind.__qualname__}, which cannot be captured", hint
        ) from None


def _renumber(structure: Structure, offset: int) -> Structure:
    """The same structure with its tensor numbers raised by `offset`."""
    if "tensor" in structure:
        return {"tensor": structure["tensor"] + offset}
    for kind in ("list", "tuple"):
        if kind in structure:
            return {kind: [_renumber(item, offset) for item in structure[kind]]}
    for kind in ("dict", "fields"):
        if kind in structure:
            return {**structure, kind: [[key, _renumber(item, offset)] for key, item in structure[kind]]}
    return structure


def _names(paths: Sequence[str], arguments: Sequence[str], model: nn.Module) -> tuple[str, ...]:
    """`args[1]['mask'][0]` becomes the name of the second argument, then its steps: `batch_mask_0`."""
    parameters = list(inspect.signature(model.forward).parameters.values())
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    taken: set[str] = set()
    names = []
    for path in paths:
        root, *steps = re.findall(r"\w+", path)
        if root == "args":
            index = int(steps[0])
            root = positional[index] if index < len(positional) else f"input_{index}"
            steps = steps[1:]
        elif root == "kwargs":
            root, *steps = steps
        name = re.sub(r"\W", "_", "_".join((root, *steps)))
        if not name.isidentifier() or keyword.iskeyword(name):
            name = f"input_{name}"
        base, count = name, 1
        while name in taken:
            name, count = f"{base}_{count}", count + 1
        taken.add(name)
        names.append(name)
    return tuple(names)


@dataclass
class Recording:
    """What one run of the flat call found out; kept outside the modules, whose attributes export restores."""

    result: Structure | None = None
    paths: list[str] = field(default_factory=list)
    loss: int | None = None
    loss_name: str | None = None
    reassigned: list[str] = field(default_factory=list)
    omitted: dict[str, str] = field(default_factory=dict)
    copied_inputs: list[str] = field(default_factory=list)
    error: Exception | None = None

    def sentences(self) -> list[str]:
        """For the person who reads the plan."""
        found = [
            f"the result's {path} ({kind}) is not given back by the package" for path, kind in self.omitted.items()
        ]
        return found + [
            f"forward changes the input {n!r}; the package changes a copy of it" for n in self.copied_inputs
        ]


class FlatCall(nn.Module):
    """`forward(*tensors)` runs the model on the rebuilt arguments; returns all tensors of its result, and the loss."""

    def __init__(
        self,
        model: nn.Module,
        structure: Structure,
        recording: Recording,
        *,
        training: bool,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None,
        around: Callable[[], AbstractContextManager[Any]] = nullcontext,
    ) -> None:
        super().__init__()
        self.m = model
        self._structure = structure
        self._recording = recording
        self._training = training
        self._loss_fn = loss_fn
        self._around = around

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        args, kwargs, *target = decode(self._structure, tensors)
        buffers = {name: (owner, own, value) for name, owner, own, value in _buffers(self.m)}
        with self._around():
            output = self.m(*args, **kwargs)
            flat = self._flatten(output, target[0] if target else None)
        return (*flat, *self._reassigned(buffers))

    def _flatten(self, output: Any, target: Any) -> list[torch.Tensor]:
        record = self._recording
        record.omitted.clear()

        def omit(path: str, value: Any) -> Structure:
            record.omitted[path] = type(value).__qualname__
            return omitted(path, value)

        record.result, flat = encode(output, "", omit)
        record.paths = [path or "output" for path, _ in leaves(record.result)]
        if not self._training:
            return flat
        try:
            record.loss, record.loss_name, loss = choose_loss(output, record, flat, self._loss_fn, target)
        except UsageError as error:
            record.error = error
            raise
        except Exception:
            # A model that returns something else in evaluation mode may not suit its loss function then.
            if self.training:
                raise
            return flat
        if loss is not None:
            flat.append(loss)
            record.paths.append("loss")
        return flat

    def _reassigned(self, buffers: Mapping[str, tuple[nn.Module, str, torch.Tensor]]) -> list[torch.Tensor]:
        """Values of buffers that forward replaced (`self.buffer = ...`); the buffers themselves are put back."""
        values = []
        self._recording.reassigned = []
        for name, (owner, own, before) in buffers.items():
            after = owner._buffers.get(own)
            if after is not before and after is not None:
                owner._buffers[own] = before
                self._recording.reassigned.append(name)
                values.append(after)
        return values


def _buffers(model: nn.Module) -> list[tuple[str, nn.Module, str, torch.Tensor]]:
    return [
        (f"{prefix}.{name}" if prefix else name, module, name, value)
        for prefix, module in model.named_modules()
        for name, value in module._buffers.items()
        if value is not None
    ]


def choose_loss(
    output: Any,
    record: Recording,
    flat: Sequence[torch.Tensor],
    loss_fn: Callable[[Any, Any], torch.Tensor] | None,
    target: Any,
) -> tuple[int, str, torch.Tensor | None]:
    """The scalar that is trained on: `loss_fn`, else the model's own loss, else the stand-in.

    Returns:
        Its index among the outputs, its name, and the tensor where it is not already an output.
    """
    if loss_fn is not None:
        loss = loss_fn(output, target)
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1 or not loss.is_floating_point():
            what = (
                f"a tensor of shape {tuple(loss.shape)}"
                if isinstance(loss, torch.Tensor)
                else f"a {type(loss).__name__}"
            )
            raise UsageError(f"loss_fn(output, target) returned {what}; it must return one floating number")
        return len(flat), "loss_fn", loss.reshape(())
    for index, path in enumerate(record.paths):
        own = path == "loss" or (index == 0 and path in ("output", "[0]"))
        if own and flat[index].dim() == 0 and flat[index].is_floating_point():
            return index, path, None
    floating = [t for t in flat if t.is_floating_point()]
    if not floating:
        raise UsageError(
            "the model returns no floating tensor that a loss could be made of",
            "Pass loss_fn, or plan with mode='inference'.",
        )
    return len(flat), STAND_IN, stand_in_loss(floating)


def stand_in_loss(floating: Sequence[torch.Tensor]) -> torch.Tensor:
    """Sum over the floating outputs of the mean of their squares: what is trained on when nothing else is given."""
    loss = floating[0].square().mean()
    for output in floating[1:]:
        loss = loss + output.square().mean()
    return loss
