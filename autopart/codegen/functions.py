"""Functions of the runtime that a package's code calls where torch has no operator of its own.

Collectives and operators on shards are nodes of a local graph; a library's operator that plain torch can do as well is
called by its name here, so that a package needs torch alone.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable
from functools import cache
from typing import Any

import torch
from torch import fx

from autopart.runtime import collectives, dispatch, split_operators

# Module of the function -> where a package has it.
MODULES = (collectives, dispatch, split_operators)
PLACES = {module.__name__: module.__name__.removeprefix("autopart.") for module in MODULES}
# Functions that draw random numbers, or change a buffer: they stay where they stand.
IMPURE = frozenset({split_operators.attention, split_operators.batch_norm_of_split_batch, split_operators.dropout})
# Operators of libraries -> the same on plain torch, with the same arguments in the same order.
PLAIN = {"transformers::grouped_mm_fallback": split_operators.grouped_mm}


def is_function(target: Any) -> bool:
    """Whether the target of an operation is a function of the runtime."""
    return getattr(target, "__module__", None) in PLACES


def is_collective(target: Any) -> bool:
    """Whether it exchanges a value between tensor ranks and computes nothing else."""
    return is_function(target) and target.__module__ == collectives.__name__


def called(node: fx.Node) -> Any:
    """What a package calls for a node: its target, or the function that stands for it."""
    if isinstance(node.target, torch._ops.OpOverload):
        return PLAIN.get(node.target._schema.name, node.target)
    return node.target


def argument_names(node: fx.Node) -> list[str]:
    """Names of a node's positional arguments, in the words of what is called."""
    target = called(node)
    if isinstance(target, torch._ops.OpOverload):
        return [a.name for a in target._schema.arguments]
    if is_function(target):
        return list(defaults(target))
    return [str(i) for i in range(len(node.args))]


def imports(targets: Iterable[Any]) -> dict[str, str]:
    """Name -> import statement of every function of the runtime among the targets, in order of name."""
    functions = {target.__name__: PLACES[target.__module__] for target in targets if is_function(target)}
    return {name: f"from {place} import {name}" for name, place in sorted(functions.items())}


@cache
def defaults(function: Any) -> dict[str, Any]:
    """Parameter -> default (`inspect.Parameter.empty` for none) of a function of the runtime."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD}
