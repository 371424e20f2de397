"""Names: Python identifiers for values and classes, taken from the user's own source where it gave one.

Names of modules and parameters are the user's data. They reach code only as checked identifiers or as constants.
"""

from __future__ import annotations

import ast
import keyword
import re
from functools import lru_cache

from torch import nn

RESERVED = (
    frozenset(keyword.kwlist)
    | frozenset(keyword.softkwlist)
    | {"torch", "nn", "F", "self", "super", "range", "getattr", "float", "str", "checkpoint", "math", "map"}
)

_FRAME = re.compile(r'^\s*File "(?P<file>[^"\n]*)", line (?P<line>\d+), in (?P<function>\S+)\n(?P<source>[^\n]*)', re.M)
_TARGET = re.compile(
    r"^\s*(?P<targets>[A-Za-z_]\w*(?:\s*,\s*[A-Za-z_]\w*)*)\s*(?::[^=()]+)?(?:[-+*/@|&]|//|\*\*)?=(?!=)"
)


def is_identifier(name: str) -> bool:
    """Whether `name` can stand in code as it is, and means itself there (Python normalises identifiers to NFKC)."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("__")


def identifier(text: str, default: str = "value") -> str:
    """An identifier close to `text`."""
    name = re.sub(r"\W+", "_", text, flags=re.ASCII).strip("_")
    if not name or name[0].isdigit():
        name = f"{default}_{name}" if name else default
    return name + "_" if name in RESERVED else name


def unique(name: str, taken: set[str] | frozenset[str]) -> str:
    """`name`, or `name_2`, `name_3`, ...: the first that is not taken."""
    candidate, number = name, 1
    while candidate in taken:
        number += 1
        candidate = f"{name}_{number}"
    return candidate


@lru_cache(maxsize=65536)
def source_lines(stack_trace: str) -> tuple[tuple[str, str], ...]:
    """(place, source line) of each call of a module in a stack trace, outermost first."""
    found = []
    for match in _FRAME.finditer(stack_trace):
        found.append((f"{match['file']}:{match['line']}", match["source"].strip()))
    return tuple(found)


def assigned_name(source: str, index: int | None = None) -> str | None:
    """The variable that a source line assigns to; for several results, the one at `index`."""
    targets = _targets(source)
    if len(targets) > 1:
        targets = targets[index : index + 1] if index is not None else ()
    return next((name for name in targets if _is_usable(name)), None)


def assigned_names(source: str) -> list[str]:
    """The variables that a source line assigns to."""
    return [name for name in _targets(source) if _is_usable(name)]


@lru_cache(maxsize=65536)
def _targets(source: str) -> tuple[str, ...]:
    match = _TARGET.match(source)
    return tuple(t.strip() for t in match["targets"].split(",")) if match else ()


def _is_usable(name: str) -> bool:
    return is_identifier(name) and name not in RESERVED and bool(name.strip("_"))


def attribute(owner: ast.expr, name: str) -> ast.expr:
    """`owner.name` or, for what is no identifier or hidden by a method of every module, a call that finds it."""
    if hasattr(nn.Module, name):
        return ast.Call(ast.Attribute(owner, "__getattr__", ast.Load()), [text(name)], [])
    if is_identifier(name):
        return ast.Attribute(owner, name, ast.Load())
    return ast.Call(ast.Name("getattr", ast.Load()), [owner, text(name)], [])


def text(value: str) -> ast.expr:
    """A string constant, spelled in ASCII so that no character of it can mean something to the parser."""
    return ast.Name(ascii(value), ast.Load())
