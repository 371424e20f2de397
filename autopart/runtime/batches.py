"""A global batch: reading it, checking it against the package, cutting it into microbatches, joining results."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from .errors import INPUT_FILE, PackageError
from .interface import Input, Pipeline
from .structure import encode, omitted

Batch = dict[str, Any]
"""{"args": tuple, "kwargs": dict, "target": anything}"""


def load_batches(path: str | Path, pipeline: Pipeline, microbatches: int) -> list[dict[str, torch.Tensor]]:
    """The global batches of a file written with `torch.save`, each as input name -> tensor.

    Raises:
        PackageError: The file cannot be read, or a batch is not what the package was made for.
    """
    try:
        batches = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:
        raise PackageError(
            f"{path}: cannot be read with weights_only=True: {_first_line(error)}", INPUT_FILE
        ) from error
    if not isinstance(batches, list) or not batches or not all(isinstance(b, dict) for b in batches):
        raise PackageError(
            f'{path}: holds {type(batches).__name__}, expected a list of {{"args": ..., "kwargs": ..., "target": ...}}',
            INPUT_FILE,
        )
    found = []
    for number, batch in enumerate(batches):
        try:
            found.append(flatten(batch, pipeline, microbatches))
        except PackageError as error:
            raise PackageError(f"{path}: batch {number}: {error}", INPUT_FILE) from None
    return found


def flatten(batch: Batch, pipeline: Pipeline, microbatches: int) -> dict[str, torch.Tensor]:
    """Input name -> tensor of one global batch, checked against the package's inputs.

    Raises:
        PackageError: An input is missing, or has another dtype, shape or number of rows; the message names it.
    """
    unknown = set(batch) - {"args", "kwargs", "target"}
    if unknown:
        raise PackageError(f"unknown key {min(map(str, unknown))!r}; a batch has args, kwargs and target")
    _check_constants(batch, pipeline)
    return {spec.name: _checked(_find(batch, spec), spec, microbatches) for spec in pipeline.inputs}


def random_batch(pipeline: Pipeline, microbatches: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A global batch of the captured shapes: normal floats, integers below their maximum, true masks."""
    found = {}
    for spec in pipeline.inputs:
        shape = list(global_shape(spec, microbatches))
        if spec.dtype.is_floating_point or spec.dtype.is_complex:
            found[spec.name] = torch.randn(shape, dtype=spec.dtype, generator=generator)
        elif spec.dtype == torch.bool or spec.maximum is None:
            # Without a known range an integer is a mask more often than not, and one is valid for both.
            found[spec.name] = torch.ones(shape, dtype=spec.dtype)
        else:
            found[spec.name] = torch.randint(spec.maximum, shape, dtype=spec.dtype, generator=generator)
    return found


def global_shape(spec: Input, microbatches: int) -> tuple[int, ...]:
    """The shape of a whole batch's tensor, where `spec.shape` is that of one microbatch."""
    return tuple(n * microbatches if d == spec.batch_dim else n for d, n in enumerate(spec.shape))


def cut(flat: dict[str, torch.Tensor], pipeline: Pipeline, microbatches: int) -> list[dict[str, torch.Tensor]]:
    """The inputs of each microbatch: equal slices along the batch dimension; whole tensors where there is none."""
    dims = {spec.name: spec.batch_dim for spec in pipeline.inputs}
    cuts: list[dict[str, torch.Tensor]] = [{} for _ in range(microbatches)]
    for name, tensor in flat.items():
        dim = dims[name]
        pieces = [tensor] * microbatches if dim is None else torch.tensor_split(tensor, microbatches, dim)
        for piece, target in zip(pieces, cuts, strict=True):
            target[name] = piece
    return cuts


def join(pieces: list[torch.Tensor], batch_dim: int | None) -> torch.Tensor:
    """One output of a whole batch from those of its microbatches.

    Without a batch dimension: the mean of floating scalars (a loss), the common value of what does not depend on the
    microbatch, and otherwise all of them, stacked along a new first dimension.
    """
    if batch_dim is not None:
        return torch.cat(pieces, batch_dim)
    if pieces[0].dim() == 0 and pieces[0].is_floating_point():
        return torch.stack(pieces).mean()
    if all(torch.equal(pieces[0], piece) for piece in pieces[1:]):
        return pieces[0]
    return torch.stack(pieces)


def _check_constants(batch: Batch, pipeline: Pipeline) -> None:
    """What is not a tensor is written into the package's code: a batch may leave it out, but not say otherwise."""
    roots = ("args", "kwargs", "target")
    captured = dict(zip(roots, pipeline.call.get("tuple", ()), strict=False))
    made_with = {path: value for root, part in captured.items() for path, value in _leaves(part, root)}
    for root in roots:
        part = encode(batch.get(root), root, omitted)[0]
        for path, value in _leaves(part, root):
            if value is None or value == made_with.get(path):
                continue
            if value == TENSOR:
                if path not in {spec.path for spec in pipeline.inputs}:
                    raise PackageError(f"{path} is a tensor that this package does not take")
            elif made_with.get(path) != TENSOR:
                raise PackageError(f"{path} is {value!r}, this package was made with {made_with.get(path)!r}")


TENSOR = ("tensor",)


def _leaves(structure: Mapping[str, Any], path: str) -> Iterator[tuple[str, Any]]:
    """(path, constant or TENSOR) of every leaf of a structure."""
    if "tensor" in structure:
        yield path, TENSOR
    elif "constant" in structure or "float" in structure:
        yield path, structure.get("constant", structure.get("float"))
    for i, item in enumerate(structure.get("list", structure.get("tuple", ()))):
        yield from _leaves(item, f"{path}[{i}]")
    for key, item in structure.get("dict", ()):
        yield from _leaves(item, f"{path}[{key!r}]")
    for name, item in structure.get("fields", ()):
        yield from _leaves(item, f"{path}.{name}")


def _find(batch: Batch, spec: Input) -> Any:
    """Follow a path such as "args[1]['mask'][0]" or "target.labels" into a batch."""
    return _follow(ast.parse(spec.path, mode="eval").body, batch, spec)


def _follow(step: ast.expr, batch: Batch, spec: Input) -> Any:
    try:
        match step:
            case ast.Name(id=name):
                return batch[name]
            case ast.Subscript(value=inner, slice=ast.Constant(value=key)):
                return _follow(inner, batch, spec)[key]
            case ast.Attribute(value=inner, attr=key):
                parent = _follow(inner, batch, spec)
                return parent[key] if isinstance(parent, dict) else getattr(parent, key)
    except (KeyError, IndexError, AttributeError, TypeError):
        raise PackageError(f"{spec.path} is missing") from None
    raise PackageError(f"pipeline.py: {spec.path!r} is not the path of an input")


def _checked(tensor: Any, spec: Input, microbatches: int) -> torch.Tensor:
    if not isinstance(tensor, torch.Tensor):
        raise PackageError(f"{spec.path} is a {type(tensor).__name__}, expected a tensor")
    if tensor.is_floating_point() and spec.dtype.is_floating_point:
        tensor = tensor.to(spec.dtype)
    if tensor.dtype != spec.dtype:
        raise PackageError(f"{spec.path} is {tensor.dtype}, this package takes {spec.dtype}")
    expected = global_shape(spec, microbatches)
    if tuple(tensor.shape) == expected:
        return tensor
    dim, shape = spec.batch_dim, tuple(tensor.shape)
    if (
        dim is None
        or len(shape) != len(expected)
        or shape[:dim] + shape[dim + 1 :] != expected[:dim] + expected[dim + 1 :]
    ):
        raise PackageError(f"{spec.path} has shape {list(shape)}, this package takes {list(expected)}")
    rows = spec.shape[dim]
    advice = f"give {microbatches * rows} rows"
    if shape[dim] and shape[dim] % rows == 0:
        advice += f", or --microbatches {shape[dim] // rows}"
    raise PackageError(
        f"{spec.path} has {shape[dim]} rows, this package runs {microbatches} microbatches of {rows}: {advice}"
    )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)
