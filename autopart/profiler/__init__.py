"""Profiler: Graph x Cluster -> Costs, and the prices of layouts, from formulas, and from what was measured."""

from autopart.profiler.analytic import Outcomes, profile, profile_rows
from autopart.profiler.known import Known, known_of
from autopart.profiler.pricing import LayoutPrices

__all__ = ["Known", "LayoutPrices", "Outcomes", "known_of", "profile", "profile_rows"]
