"""Why no plan fits, and the smallest change that would make one fit."""

from __future__ import annotations

from autopart.cluster import Cluster
from autopart.costs import Costs
from autopart.errors import InfeasibleError
from autopart.graph import Graph
from autopart.solver.lowering import Lowered
from autopart.units import format_bytes
from autopart.workload import Workload


def explain(graph: Graph, costs: Costs, cluster: Cluster, workload: Workload, lowered: Lowered) -> InfeasibleError:
    """The error to raise when it is proven that `lowered` has no assignment that fits."""
    problem = lowered.problem
    return InfeasibleError(
        f"{graph.name} does not fit on {problem.processes} devices with {format_bytes(problem.limits.min())} usable"
    )
