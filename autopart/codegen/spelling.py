"""Spelling: one call of an operator as a Python expression, by the table in `operators`."""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from typing import Any

import torch

from autopart.codegen.functions import defaults, is_function
from autopart.codegen.operators import TABLE
from autopart.codegen.program import Value

# Arguments that change nothing here, whatever they are.
_IGNORED = {"layout", "pin_memory", "non_blocking", "cudnn_enable", "cudnn_enabled", "generator", "implicit"}
# What torch.nn.functional takes by default where the operator's schema says otherwise or nothing.
_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}
_FUNCTION_DEFAULTS: dict[str, dict[str, Any]] = {
    "aten::batch_norm": {},
    "aten::to.device": {"device": ...},
    "aten::to.dtype_layout": {"device": ...},
    "aten::new_zeros": {"device": ...},
    "aten::new_ones": {"device": ...},
    "aten::new_full": {"device": ...},
    "aten::new_empty": {"device": ...},
    "aten::zeros_like": {"device": ...},
    "aten::ones_like": {"device": ...},
    "aten::full_like": {"device": ...},
    "aten::empty_like": {"device": ...},
    "aten::rand_like": {"device": ...},
    "aten::randn_like": {"device": ...},
}


class Symbol:
    """An argument whose value is only known when the module is built or runs."""


class Argument:
    """One argument: its constant value (or a `Symbol`) and how it is written."""

    def __init__(self, value: Any, code: ast.expr) -> None:
        self.value = value
        self.code = code


Writer = Callable[[str, Any], Argument]


def spell(target: Any, arguments: dict[str, Any], write: Writer) -> ast.expr:
    """The expression that calls `target`, an operator or a function of the runtime.

    Args:
        arguments: Argument name -> value, as captured.
        write: (argument name, value) -> how it is written; called once for each argument, in order.
    """
    written = {name: write(name, value) for name, value in arguments.items()}
    if is_function(target):
        return _function(target, written, arguments)
    schema = target._schema
    qualified = schema.name + ("." + schema.overload_name if schema.overload_name else "")
    special = _SPECIAL.get(schema.name)
    if special is not None:
        found = special(written, arguments)
        if found is not None:
            return found
    defaults = {a.name: a.default_value for a in schema.arguments if a.has_default_value()}
    ignored = _IGNORED | {n for n, v in _FUNCTION_DEFAULTS.get(qualified, {}).items() if v is ...}
    needed = {
        name: argument
        for name, argument in written.items()
        if name not in ignored and not (name in defaults and _same(argument.value, defaults[name]))
    }
    if "reduction" in needed and needed["reduction"].value in _REDUCTIONS:
        name = _REDUCTIONS[needed["reduction"].value]
        needed["reduction"] = Argument(name, ast.Constant(name))
    templates = () if _has_gaps(arguments) else TABLE.get(qualified) or TABLE.get(schema.name) or ()
    for template in templates:
        if needed.keys() <= _names(template):
            return _fill(_parsed(template), needed)
    return _raw(target, written)


def _has_gaps(arguments: dict[str, Any]) -> bool:
    """Whether a list of tensors leaves places out (`x[:, i] = y`), which torch's functions and methods do not take."""
    lists = [value for value in arguments.values() if isinstance(value, (list, tuple))]
    return any(item is None for items in lists for item in items)


def _function(target: Any, written: dict[str, Argument], captured: dict[str, Any]) -> ast.expr:
    """split(x, dim=1): tensors by position, everything behind the first constant by name."""
    usual = defaults(target)
    positional: list[ast.expr] = []
    keywords: list[ast.keyword] = []
    for place, (name, argument) in enumerate(written.items()):
        if name in usual and _same(argument.value, usual[name]):
            continue
        if isinstance(captured[name], Value) and len(positional) == place:
            positional.append(argument.code)
        else:
            keywords.append(ast.keyword(name, argument.code))
    return ast.Call(ast.Name(target.__name__, ast.Load()), positional, keywords)


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and value == default


@cache
def _parsed(template: str) -> ast.expr:
    return ast.parse(template, mode="eval").body


@cache
def _names(template: str) -> frozenset[str]:
    return frozenset(n.id for n in ast.walk(_parsed(template)) if isinstance(n, ast.Name)) - {"torch", "F"}


def _fill(node: ast.expr, given: dict[str, Argument]) -> ast.expr:
    """Put the arguments into a template; what is not given is left out."""
    if isinstance(node, ast.Name):
        return given[node.id].code if node.id in given else node
    if isinstance(node, ast.Call):
        positional: list[ast.expr] = []
        keywords: list[ast.keyword] = []
        for arg in node.args:
            starred = isinstance(arg, ast.Starred)
            name = arg.value.id if starred else arg.id  # type: ignore[attr-defined]
            if name not in given:
                continue
            code = given[name].code
            if starred:
                # No sizes at all is a size, too: `x.reshape(())` is a scalar, `x.reshape()` an error.
                written = code.elts or [ast.Tuple([], ast.Load())] if isinstance(code, ast.List) else None
                positional += written or [ast.Starred(code, ast.Load())]
            elif len(positional) < node.args.index(arg):
                keywords.append(ast.keyword(name, code))
            else:
                positional.append(code)
        for keyword in node.keywords:
            if isinstance(keyword.value, ast.Constant):
                keywords.append(keyword)
            elif keyword.value.id in given:  # type: ignore[attr-defined]
                keywords.append(ast.keyword(keyword.arg, given[keyword.value.id].code))  # type: ignore[attr-defined]
        return ast.Call(_fill(node.func, given), positional, keywords)
    if isinstance(node, ast.Attribute):
        return ast.Attribute(_fill(node.value, given), node.attr, ast.Load())
    if isinstance(node, ast.BinOp):
        return ast.BinOp(_fill(node.left, given), node.op, _fill(node.right, given))
    if isinstance(node, ast.UnaryOp):
        return ast.UnaryOp(node.op, _fill(node.operand, given))
    assert isinstance(node, ast.Compare), ast.dump(node)
    return ast.Compare(_fill(node.left, given), node.ops, [_fill(c, given) for c in node.comparators])


def _raw(target: torch._ops.OpOverload, written: dict[str, Argument]) -> ast.expr:
    schema = target._schema
    keyword_only = {a.name for a in schema.arguments if a.kwarg_only}
    namespace, _, name = schema.name.partition("::")
    function = f"torch.ops.{namespace}.{name}.{schema.overload_name or 'default'}"
    order = [a.name for a in schema.arguments if a.name in written]
    positional, keywords = [], []
    for place, argument in enumerate(order):
        gap = place >= len(schema.arguments) or schema.arguments[place].name != argument
        if gap or argument in keyword_only:
            keywords.append(ast.keyword(argument, written[argument].code))
        else:
            positional.append(written[argument].code)
    return ast.Call(ast.parse(function, mode="eval").body, positional, keywords)


def _slice(a: dict[str, Argument], captured: dict[str, Any]) -> ast.expr | None:
    """x[:, 1:3]"""
    dim = a["dim"].value if "dim" in a else 0
    if not isinstance(dim, int):
        return None
    start = None if "start" not in a or a["start"].value in (0, None) else a["start"].code
    end = None if "end" not in a or _is_end(a["end"].value) else a["end"].code
    step = None if "step" not in a or a["step"].value == 1 else a["step"].code
    return _subscript(a["self"].code, dim, captured["self"].tensor.dim(), ast.Slice(start, end, step))


def _is_end(value: Any) -> bool:
    return value is None or (isinstance(value, int) and value >= 2**62)


def _select(a: dict[str, Argument], captured: dict[str, Any]) -> ast.expr | None:
    """x[:, 0]"""
    dim = a["dim"].value
    if not isinstance(dim, int):
        return None
    return _subscript(a["self"].code, dim, captured["self"].tensor.dim(), a["index"].code)


def _subscript(value: ast.expr, dim: int, rank: int, index: ast.expr) -> ast.expr:
    """Counted from the front, or from the back behind an ellipsis where that is shorter."""
    everything: ast.expr = ast.Slice(None, None, None)
    before = dim if dim >= 0 else dim + rank
    after = rank - 1 - before
    parts = [everything] * before + [index]
    if before > after + 1:
        parts = [ast.Constant(...), index, *[everything] * after]
    return ast.Subscript(value, parts[0] if len(parts) == 1 else ast.Tuple(parts, ast.Load()), ast.Load())


def _index(a: dict[str, Argument], captured: dict[str, Any]) -> ast.expr | None:
    """x[mask] or x[:, i, j]"""
    code = a["indices"].code
    if not isinstance(code, ast.List) or any(i is not None and i.tensor.dim() == 0 for i in captured["indices"]):
        return None  # an index without dimensions would be read as a number
    parts: list[ast.expr] = [
        ast.Slice(None, None, None) if isinstance(e, ast.Constant) and e.value is None else e for e in code.elts
    ]
    return ast.Subscript(a["self"].code, parts[0] if len(parts) == 1 else ast.Tuple(parts, ast.Load()), ast.Load())


_SPECIAL: dict[str, Callable[[dict[str, Argument], dict[str, Any]], ast.expr | None]] = {
    "aten::slice": _slice,
    "aten::select": _select,
    "aten::index": _index,
}
