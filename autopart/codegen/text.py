"""Text: statements as lines, with comments, and the blocks that modes and contexts need."""

from __future__ import annotations

import ast
from typing import Any

import torch

from autopart.codegen.names import text
from autopart.codegen.program import Context

WIDTH = 120
# Room for indentation and "  # ".
MARGIN = 20


class Writer:
    """Collects statements, with `if self.training:` and `with` blocks round those that need them."""

    def __init__(self, ambient: Context) -> None:
        self.ambient = ambient
        self.blocks: list[tuple[str, Context, list[str]]] = []

    def write(self, code: list[ast.stmt], mode: str, context: Context, comment: str | None) -> None:
        lines = [
            line for statement in code for line in _with_comment(statement, comment if statement is code[-1] else None)
        ]
        if self.blocks and self.blocks[-1][:2] == (mode, context):
            self.blocks[-1][2].extend(lines)
        else:
            self.blocks.append((mode, context, lines))

    def finish(self) -> list[str]:
        out: list[str] = []
        previous = ("both", self.ambient)
        for mode, context, lines in self.blocks:
            head, indent = self._contexts(context)
            if head:
                lines = [head] + [indent + line for line in lines]
            if mode == "training":
                lines = ["if self.training:"] + ["    " + line for line in lines]
            elif mode == "evaluation":
                opener = (
                    "else:"
                    if previous[0] == "training" and previous[1] == context == self.ambient
                    else "if not self.training:"
                )
                lines = [opener] + ["    " + line for line in lines]
            out += lines
            previous = (mode, context)
        return out

    def _contexts(self, context: Context) -> tuple[str, str]:
        if context == self.ambient:
            return "", ""
        grad, autocast = context
        managers = [] if grad or not self.ambient[0] else ["torch.no_grad()"]
        if autocast != self.ambient[1]:
            managers += [f"torch.autocast({device!a}, dtype={dtype})" for device, dtype in autocast]
        if not managers:
            return "", ""
        return f"with {', '.join(managers)}:", "    "


def _with_comment(statement: ast.stmt, comment: str | None) -> list[str]:
    lines = ast.unparse(ast.fix_missing_locations(statement)).split("\n")
    if comment is None:
        return lines
    if isinstance(statement, ast.For):
        *head, last = lines
        return [*head, *(f"    {line}" for line in _commented([last.strip()], comment))]
    return _commented(lines, comment)


def _commented(lines: list[str], comment: str) -> list[str]:
    """The comment at the end of a short line, else above it."""
    if len(lines) == 1 and len(lines[0]) + len(comment) + MARGIN <= WIDTH:
        return [f"{lines[0]}  # {comment}"]
    return [f"# {comment}", *lines]


def constant(value: Any) -> ast.expr:
    """How a constant of a captured graph is written."""
    if isinstance(value, float):
        if value != value or value in (float("inf"), float("-inf")):
            return ast.Call(ast.Name("float", ast.Load()), [ast.Constant(str(value))], [])
        for dtype in (torch.float32, torch.bfloat16, torch.float16):
            if value == torch.finfo(dtype).min:
                return ast.parse(f"torch.finfo({dtype}).min", mode="eval").body
    if isinstance(value, int | float) and not isinstance(value, bool) and value < 0:
        return ast.UnaryOp(ast.USub(), ast.Constant(-value))
    if isinstance(value, str):
        return text(value)
    if isinstance(value, torch.dtype | torch.layout | torch.memory_format):
        return ast.parse(str(value), mode="eval").body
    if isinstance(value, tuple | list):
        parts = [constant(v) for v in value]
        return ast.Tuple(parts, ast.Load()) if isinstance(value, tuple) else ast.List(parts, ast.Load())
    if value is None or isinstance(value, bool | int | float | complex):
        return ast.Constant(value)
    raise TypeError(f"cannot write a {type(value).__name__} as code")
