"""Nested inputs and outputs as plain data: a tree whose leaves are tensor numbers or constants.

A structure is one of (all JSON):

    {"tensor": 3}                               the tensor with that number
    {"constant": value}                         None, bool, int, finite float or str
    {"float": "inf" | "-inf" | "nan"}           a float that JSON has no number for
    {"list": [...]}, {"tuple": [...]}           children in order
    {"dict": [[key, child], ...]}               insertion order kept; keys are constants
    {"object": "package.module:Class", "fields": [[name, child], ...], "base": "dict" | "tuple" | "object" | "sequence"}

An object is a dataclass, a named tuple, a `ModelOutput` or what an operator returns (`torch.return_types.max`, a
"sequence"): rebuilt as its own class where that can be imported, else as `Record`, a dict whose keys are attributes.
"""

from __future__ import annotations

import dataclasses
import importlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

Structure = dict[str, Any]
Unknown = Callable[[str, Any], Structure]


class UnknownStructureError(TypeError):
    """A value is neither a tensor, nor a constant, nor a container that can be rebuilt.

    Attributes:
        path: Where in the nested value it was found.
        kind: Its class.
    """

    def __init__(self, path: str, kind: type) -> None:
        super().__init__(
            f"{path or 'the value'} is a {kind.__module__}.{kind.__qualname__}, which cannot be rebuilt from data"
        )
        self.path = path
        self.kind = kind


class Record(dict):  # type: ignore[type-arg]
    """Stands for an object whose class cannot be imported; fields are keys and attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def encode(
    value: Any, path: str = "", unknown: Callable[[str, Any], Structure] | None = None
) -> tuple[Structure, list[torch.Tensor]]:
    """Split a nested value into its structure and its tensors.

    Args:
        value: Nested dicts, lists, tuples, dataclasses, named tuples and mappings of tensors and constants.
        path: How messages call the value itself.
        unknown: Called with (path, object) for every object that cannot be rebuilt; gives the structure to put for it
            (`omitted` puts None).

    Returns:
        The structure, and the tensors that its numbers stand for (a tensor met twice is listed twice).

    Raises:
        UnknownStructureError: An object cannot be rebuilt and `unknown` is not given.
    """
    tensors: list[torch.Tensor] = []
    return _encode(value, path, tensors, unknown), tensors


def _encode(value: Any, path: str, tensors: list[torch.Tensor], unknown: Unknown | None) -> Structure:
    def child(item: Any, step: str) -> Structure:
        return _encode(item, path + step, tensors, unknown)

    def fields(names: Sequence[str], get: Callable[[str], Any]) -> list[list[Any]]:
        return [[name, child(get(name), f".{name}" if path else name)] for name in names]

    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if value is None or type(value) in (bool, int, str):
        return {"constant": value}
    if type(value) is float:
        return {"constant": value} if math.isfinite(value) else {"float": str(value)}
    if type(value) in (list, tuple):
        return {type(value).__name__: [child(item, f"[{i}]") for i, item in enumerate(value)]}
    kind = type(value)
    if isinstance(value, tuple) and hasattr(kind, "_fields"):
        return {
            "object": _class_path(kind),
            "fields": fields(kind._fields, lambda n: getattr(value, n)),
            "base": "tuple",
        }
    if isinstance(value, tuple) and hasattr(kind, "n_sequence_fields"):
        names = kind.__match_args__
        return {"object": _class_path(kind), "fields": fields(names, lambda n: getattr(value, n)), "base": "sequence"}
    if isinstance(value, Mapping) and all(type(k) in (bool, int, str) for k in value):
        if kind is dict or (not dataclasses.is_dataclass(value) and not _rebuilds_from_keywords(kind)):
            return {"dict": [[k, child(v, f"[{k!r}]" if path else str(k))] for k, v in value.items()]}
        return {"object": _class_path(kind), "fields": fields(list(value), lambda n: value[n]), "base": "dict"}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value) if f.init]
        return {"object": _class_path(kind), "fields": fields(names, lambda n: getattr(value, n)), "base": "object"}
    if unknown is None:
        raise UnknownStructureError(path, kind)
    return unknown(path, value)


def omitted(path: str, value: Any) -> Structure:
    """For `encode`: an object that cannot be rebuilt becomes None."""
    return {"constant": None}


def decode(structure: Structure, tensors: Sequence[Any] | Mapping[int, Any]) -> Any:
    """Rebuild the nested value; the inverse of `encode`.

    Args:
        structure: As given by `encode`.
        tensors: What to put for each tensor number.
    """
    if "tensor" in structure:
        return tensors[structure["tensor"]]
    if "constant" in structure:
        return structure["constant"]
    if "float" in structure:
        return float(structure["float"])
    if "list" in structure:
        return [decode(item, tensors) for item in structure["list"]]
    if "tuple" in structure:
        return tuple(decode(item, tensors) for item in structure["tuple"])
    if "dict" in structure:
        return {key: decode(item, tensors) for key, item in structure["dict"]}
    values = {name: decode(item, tensors) for name, item in structure["fields"]}
    kind = _import_class(structure["object"])
    if kind is None:
        return Record(values)
    return kind(values.values()) if structure["base"] == "sequence" else kind(**values)


def leaves(structure: Structure, path: str = "") -> Iterator[tuple[str, int]]:
    """(path, tensor number) of every tensor of a structure, in order.

    The fields of the outermost object and the keys of the outermost dict stand bare ("logits"), deeper ones as Python
    would write them ("extra[2]['pooled']").
    """
    if "tensor" in structure:
        yield path, structure["tensor"]
    for kind in ("list", "tuple"):
        for i, item in enumerate(structure.get(kind, ())):
            yield from leaves(item, f"{path}[{i}]")
    for key, item in structure.get("dict", ()):
        yield from leaves(item, f"{path}[{key!r}]" if path else str(key))
    for name, item in structure.get("fields", ()):
        yield from leaves(item, f"{path}.{name}" if path else name)


def _class_path(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _rebuilds_from_keywords(kind: type) -> bool:
    """Whether a mapping class is one of named fields, as `ModelOutput` is."""
    return bool(getattr(kind, "__annotations__", None)) and hasattr(kind, "to_tuple")


def _import_class(path: str) -> Any:
    module, _, name = path.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            found = getattr(found, part)
    except (ImportError, AttributeError):
        return None
    return found
