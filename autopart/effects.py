"""What a node changes besides making its value: tensors in place, the random state, user code's own state."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

# Operators that change arguments without saying so in their schema: name -> (condition argument, changed arguments).
HIDDEN_MUTATIONS: dict[str, tuple[str, tuple[str, ...]]] = {
    "aten::batch_norm": ("training", ("running_mean", "running_var")),
    "aten::instance_norm": ("use_input_stats", ("running_mean", "running_var")),
}
# Operators that draw random numbers only when their `train` or `training` argument is true, or p is not 0.
DROPOUTS = {
    "aten::dropout",
    "aten::alpha_dropout",
    "aten::feature_dropout",
    "aten::feature_alpha_dropout",
    "aten::native_dropout",
}


def arguments(node: fx.Node) -> dict[str, Any]:
    """Arguments of an operator by the names of its schema, defaults included."""
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return dict(enumerate(node.args))  # type: ignore[arg-type]
    return named(schema, node.args, node.kwargs)


def named(schema: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments by the names of a schema, defaults included."""
    found = {}
    for i, argument in enumerate(schema.arguments):
        if i < len(args) and not argument.kwarg_only:
            found[argument.name] = args[i]
        elif argument.name in kwargs:
            found[argument.name] = kwargs[argument.name]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found


def mutated(node: fx.Node) -> list[fx.Node]:
    """The arguments that a node changes in place."""
    if node.op == "call_module":
        return [node.args[0][i] for i in node.meta.get("mutates", ())]  # type: ignore[index,misc]
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return []
    given = arguments(node)
    names: list[str] = []
    if schema.is_mutable:
        names += [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    if schema.name in HIDDEN_MUTATIONS:
        condition, changed = HIDDEN_MUTATIONS[schema.name]
        if given.get(condition):
            names += changed
    found = []
    for name in names:
        value = given.get(name)
        found += [v for v in (value if isinstance(value, (list, tuple)) else [value]) if isinstance(v, fx.Node)]
    return found


def draws_random_numbers(node: fx.Node) -> bool:
    """Whether running the node moves the random state."""
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    if target._schema.name in DROPOUTS:
        given = arguments(node)
        return bool(given.get("train", True)) and given.get("p", 1.0) != 0.0
    if target._schema.name == "aten::scaled_dot_product_attention":
        return arguments(node).get("dropout_p", 0.0) != 0.0
    return True


def has_effect(node: fx.Node) -> bool:
    """Whether a node must stay although nobody reads its value."""
    return node.op in ("call_module", "placeholder", "output") or bool(mutated(node)) or draws_random_numbers(node)
