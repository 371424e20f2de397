"""A model's state under its original names: each process reads its part of a file, all write one together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn

from . import safetensors
from .errors import INPUT_FILE, PackageError
from .interface import Pipeline
from .mesh import Mesh
from .shards import cut, join

Place = tuple[int, str]
"""(stage, name in that stage)"""


class Source(Protocol):
    """Something that gives the tensors of a state_dict by name."""

    def keys(self) -> Any: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str) -> torch.Tensor:
        """A tensor that may lie in the file: what is not looked at is not read."""
        ...


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


def whole_shape(pipeline: Pipeline, name: str, shape: Sequence[int]) -> tuple[int, ...]:
    """The shape of a tensor of the original model, from that of one tensor rank."""
    shard, whole = pipeline.shards.get(name), list(shape)
    if shard is not None:
        whole[shard.dim] = sum(shard.parts)
    return tuple(whole)


def own_part(pipeline: Pipeline, name: str, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """What a tensor rank holds of a tensor of the original model."""
    shard = pipeline.shards.get(name)
    return whole if shard is None else cut(whole, shard.dim, shard.parts, rank, pipeline.tensor)


def load(pipeline: Pipeline, modules: Mapping[int, nn.Module], source: Source, where: str, rank: int) -> None:
    """Copy the weights of this process's stages from a source; of tied names, any one is enough.

    Args:
        where: How messages call the source.
        rank: The tensor rank, which copies its part of each.

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
            found, expected = source.shape(name), whole_shape(pipeline, name, target.shape)
            if found != expected:
                raise PackageError(
                    f"{where}: {name} has shape {list(found)}, the model has {list(expected)}", INPUT_FILE
                )
            tensor = source.read(name)
            if tensor.dtype.is_floating_point != target.dtype.is_floating_point:
                raise PackageError(f"{where}: {name} is {tensor.dtype}, the model has {target.dtype}", INPUT_FILE)
            with torch.no_grad():
                target.copy_(own_part(pipeline, name, tensor, rank))


def save(
    pipeline: Pipeline,
    modules: Mapping[int, nn.Module],
    path: Path,
    place_of_stage: Callable[[int], int],
    mesh: Mesh,
) -> None:
    """Write the whole model under its original names; process 0 writes, the others send it what they hold.

    Called by every process.
    """
    process = mesh.process(mesh.place, mesh.rank)

    def holders(name: str) -> list[int]:
        """The processes that hold a tensor together: all tensor ranks of a stage if it is cut, else the first."""
        processes = mesh.processes(place_of_stage(pipeline.names[name][0]))
        return processes if name in pipeline.shards else processes[:1]

    held = {(s, key): tensor for s, module in modules.items() for key, tensor in module.state_dict().items()}
    mine = {place: (tensor.dtype, tuple(tensor.shape)) for place, tensor in held.items()}
    described: dict[Place, Any] = mine
    if dist.is_initialized():
        parts: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(parts, mine)
        described = {place: what for part in parts for place, what in part.items()}
    if process == 0:

        def fetch(name: str) -> torch.Tensor:
            parts = [_from(other, name) for other in holders(name)]
            shard = pipeline.shards.get(name)
            return parts[0] if shard is None else join(parts, shard.dim, shard.parts)

        def _from(other: int, name: str) -> torch.Tensor:
            place = pipeline.names[name]
            if other == process:
                return held[place].cpu()
            dtype, shape = described[place]
            buffer = torch.empty(shape, dtype=dtype, device=_wire_device())
            dist.recv(buffer, other)
            return buffer.cpu()

        table = {}
        for name, place in pipeline.names.items():
            dtype, shape = described[place]
            table[name] = (dtype, whole_shape(pipeline, name, shape))
        safetensors.write(path, table, fetch)
    else:
        for name, place in pipeline.names.items():
            if process in holders(name):
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
