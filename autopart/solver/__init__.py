"""(Graph, Costs, Cluster, Workload) -> Plan."""

from autopart.solver.solve import solve

__all__ = ["solve"]
