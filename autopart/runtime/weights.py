"""A model's state under its original names: each process reads its part of a file, all write one together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from . import safetensors
from .errors import INPUT_FILE, PackageError
from .interface import Pipeline

Place = tuple[int, str]
"""(stage, name in that stage)"""


class Source(Protocol):
    """Something that gives the tensors of a state_dict by name."""

    def keys(self) -> Any: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> torch.Tensor: ...


class DictSource:
    """A state_dict in memory (or mapped into it)."""

    def __init__(self, state: Mapping[str, torch.Tensor]) -> None:
        self.state = state

    def keys(self) -> Any:
        return self.state.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.state[name].shape)

    def read(self, name: str) -> torch.Tensor:
        return self.state[name]


def open_weights(path: str | Path) -> Source:
    """A safetensors file, or a `.pt` file that holds a state_dict, opened without reading its tensors.

    Raises:
        PackageError: It is neither; `.pt` files are only read with `weights_only=True`.
    """
    path = Path(path)
    if not path.is_file():
        raise PackageError(f"{path}: no such file", INPUT_FILE)
    if path.suffix == ".safetensors":
        return safetensors.SafetensorsFile(path)
    try:
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        first_line = next(iter(str(error).splitlines()), type(error).__name__)
        raise PackageError(f"{path}: cannot be read as a state_dict: {first_line}", INPUT_FILE) from error
    if not isinstance(state, Mapping) or not all(isinstance(t, torch.Tensor) for t in state.values()):
        raise PackageError(f"{path}: holds no state_dict (a dict of tensors by name)", INPUT_FILE)
    return DictSource(state)


def original_names(pipeline: Pipeline, stage: int, module: nn.Module) -> dict[str, list[str]]:
    """For each state_dict key of a stage, the keys of the original model that name the same tensor, its own first.

    Raises:
        PackageError: A key has no original: pipeline.py and the stage's code do not belong together.
    """
    by_place: dict[Place, list[str]] = {}
    for original, place in pipeline.names.items():
        by_place.setdefault(place, []).append(original)
    for tie in pipeline.ties:
        shared = [name for place in tie.copies for name in by_place.get(place, ())]
        for place in tie.copies:
            own = by_place.get(place, [])
            by_place[place] = own + [name for name in shared if name not in own]
    found = {}
    for key in module.state_dict():
        # A buffer that several stages only read is held by each under its own name.
        names = by_place.get((stage, key)) or ([key] if key in pipeline.names else [])
        if not names:
            raise PackageError(f"pipeline.py does not say which weight {key} of stage {stage} is")
        found[key] = names
    return found


def load(pipeline: Pipeline, modules: Mapping[int, nn.Module], source: Source, where: str) -> None:
    """Copy the weights of this process's stages from a source; of tied names, any one is enough.

    Args:
        where: How messages call the source.

    Raises:
        PackageError: A weight is missing, unknown to the model, or has another shape; the message names it.
    """
    given = set(source.keys())
    unknown = sorted(given - set(pipeline.names))
    if unknown:
        raise PackageError(f"{where}: {_some(unknown)} not in {pipeline.model}", INPUT_FILE)
    absent = set(pipeline.names) - given
    for group in _groups(pipeline):
        if group & given:
            absent -= group
    if absent:
        raise PackageError(f"{where}: {_some([n for n in pipeline.names if n in absent])} missing", INPUT_FILE)
    for stage, module in modules.items():
        state = module.state_dict(keep_vars=True)
        for key, names in original_names(pipeline, stage, module).items():
            name = next(n for n in names if n in given)
            target = state[key]
            if source.shape(name) != tuple(target.shape):
                raise PackageError(
                    f"{where}: {name} has shape {list(source.shape(name))}, the model has {list(target.shape)}",
                    INPUT_FILE,
                )
            tensor = source.read(name)
            if tensor.dtype.is_floating_point != target.dtype.is_floating_point:
                raise PackageError(f"{where}: {name} is {tensor.dtype}, the model has {target.dtype}", INPUT_FILE)
            with torch.no_grad():
                target.copy_(tensor)


def save(
    pipeline: Pipeline,
    modules: Mapping[int, nn.Module],
    path: Path,
    process_of_stage: Callable[[int], int],
    process: int,
) -> None:
    """Write the whole model under its original names; process 0 writes, the others send it what they hold.

    Called by every process.
    """
    held = {(s, key): tensor for s, module in modules.items() for key, tensor in module.state_dict().items()}
    mine = {place: (tensor.dtype, tuple(tensor.shape)) for place, tensor in held.items()}
    described: dict[Place, Any] = mine
    if dist.is_initialized():
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        described = {place: what for part in parts for place, what in part.items()}
    if process == 0:

        def fetch(name: str) -> torch.Tensor:
            place = pipeline.names[name]
            if place in held:
                return held[place].cpu()
            dtype, shape = described[place]
            buffer = torch.empty(shape, dtype=dtype, device=_wire_device())
            dist.recv(buffer, process_of_stage(place[0]))
            return buffer.cpu()

        safetensors.write(path, {name: described[place] for name, place in pipeline.names.items()}, fetch)
    else:
        for place in pipeline.names.values():
            if place in held and process_of_stage(place[0]) == process:
                dist.send(held[place].contiguous(), 0)


def _wire_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def _groups(pipeline: Pipeline) -> list[set[str]]:
    """Sets of original names that are one tensor."""
    united: dict[Place, set[str]] = {}
    for name, place in pipeline.names.items():
        united.setdefault(place, set()).add(name)
    for tie in pipeline.ties:
        whole = set().union(*(united.get(place, set()) for place in tie.copies))
        for place in tie.copies:
            united[place] = whole
    return list(united.values())


def _some(names: list[str]) -> str:
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return f"{shown} {'is' if len(names) == 1 else 'are'}"
