"""Codegen: (Graph, Plan) -> package."""

from autopart.codegen.obstacles import obstacle
from autopart.codegen.package import emit

__all__ = ["emit", "obstacle"]
