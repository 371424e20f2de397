"""(Graph, Costs, Cluster, Workload) -> Plan; and, for one tensor degree, -> layouts."""

from autopart.solver.baselines import by_hand
from autopart.solver.given_layouts import priced
from autopart.solver.layouts import LayoutChoice, choose_layouts
from autopart.solver.lowering import RESERVE_SHARE, lower, usable_bytes
from autopart.solver.solve import first_value, solve

__all__ = [
    "RESERVE_SHARE",
    "LayoutChoice",
    "by_hand",
    "choose_layouts",
    "first_value",
    "lower",
    "priced",
    "solve",
    "usable_bytes",
]
