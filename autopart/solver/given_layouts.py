"""The cost of layouts that were chosen in another way: by hand, or at random."""

from __future__ import annotations

import time

from autopart.cluster import Cluster
from autopart.errors import UsageError
from autopart.graph import Graph
from autopart.sharding import Choice, Layout, R, Strategy
from autopart.solver.layout_problem import LayoutProblem, Prices, Site
from autopart.solver.layout_value import value_of
from autopart.solver.layouts import LayoutChoice, block_layouts


def priced(
    graph: Graph, prices: Prices, cluster: Cluster, t: int, choice: Choice, *, optimizer: str = "adamw"
) -> LayoutChoice:
    """What a given choice costs on t ranks, with one microbatch in flight; nothing is proven of it.

    Raises:
        UsageError: The cluster has fewer than t devices, or the choice is not legal: the message names the node.
    """
    start = time.monotonic()
    problem = LayoutProblem(graph, prices, cluster, t, optimizer=optimizer, tie=False)
    value = value_of(problem, [_option(site, choice) for site in problem.sites])
    return LayoutChoice(
        tensor=t,
        strategies=choice.strategies,
        state=choice.state,
        value=value,
        lower_bound_s=0.0,
        gap=1.0,
        status="feasible",
        seconds=time.monotonic() - start,
        stopped_by="given",
        variables=0,
        blocks=block_layouts(graph, choice, value, t),
        program=problem.program,
    )


def _option(site: Site, choice: Choice) -> int:
    """Which option of a site (of one node) the choice takes."""
    (node,) = site.nodes
    held = choice.state.get(str(node.target), R) if node.op == "get_attr" else R
    wanted = choice.strategies.get(node.name, held)
    for k, (pick,) in enumerate(site.picks):
        if _same(pick, wanted):
            return k
    raise UsageError(f"{node.name} cannot be laid out as {wanted}")


def _same(pick: Strategy | Layout, wanted: Strategy | Layout) -> bool:
    if isinstance(pick, Strategy) and isinstance(wanted, Strategy):
        return pick.key == wanted.key
    return pick == wanted
