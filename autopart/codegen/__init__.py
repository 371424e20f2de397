"""Codegen: (Graph, Plan) -> package."""

from autopart.codegen.obstacles import obstacle
from autopart.codegen.package import emit
from autopart.codegen.recomputed import recomputable

__all__ = ["emit", "obstacle", "recomputable"]
