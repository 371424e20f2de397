"""Opaque calls: code of the user's that was not captured, and runs in the package as it is."""

from __future__ import annotations

import ast

from autopart.codegen.program import Op
from autopart.errors import CaptureError
from autopart.graph import Graph


class OpaqueCalls:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def expression(self, op: Op, arguments: list[ast.expr]) -> ast.expr:
        raise CaptureError(f"{op.target}: opaque calls cannot be written yet")
