"""Codegen: (Graph, Plan) -> package."""

from autopart.codegen.package import emit

__all__ = ["emit"]
