"""Profiler: Graph x Cluster -> Costs, from formulas alone (no device needed)."""

from autopart.profiler.analytic import profile

__all__ = ["profile"]
