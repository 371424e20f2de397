"""Profiler: Graph x Cluster -> Costs, and the prices of layouts, from formulas alone (no device needed)."""

from autopart.profiler.analytic import Outcomes, profile, profile_rows
from autopart.profiler.pricing import LayoutPrices

__all__ = ["LayoutPrices", "Outcomes", "profile", "profile_rows"]
