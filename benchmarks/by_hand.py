"""What does a step cost where people, or the tools they use, choose the stages?

The zoo's core models at full size on 2, 4 and 8 A100-80G, in pipeline stages: the step time of each way to split (see
`autopart.solver.baselines`) relative to the plan's, all valued by one scorer at the same number of microbatches. Above
1 the plan is faster. A way that finds no split, or one that does not fit in memory, has no number.
"""

from __future__ import annotations

import argparse
from statistics import median
from typing import Any

from autopart.cluster import Cluster
from autopart.zoo import selected
from autopart.zoo_run import run as plan_zoo
from benchmarks.output import parser, show

DEVICES = (2, 4, 8)


def run(options: argparse.Namespace) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """A row for each model and number of devices; then the median and the worst of each way."""
    rows: list[dict[str, Any]] = []
    ratios: dict[str, list[float]] = {}
    for devices in DEVICES:
        for plan in plan_zoo(selected(options.only), Cluster.parse(f"{devices}xA100-80G"), tensor=1):
            row = {"model": plan.name, "devices": devices, "stages": plan.stages, "plan, ms": None, "gap": plan.gap}
            if plan.step_time_s is not None:
                row["plan, ms"] = 1e3 * plan.step_time_s
                for name, time_s in plan.baselines.items():
                    row[name] = None if time_s is None else time_s / plan.step_time_s
                    ratios.setdefault(name, []).extend([] if time_s is None else [time_s / plan.step_time_s])
            rows.append(row | ({"error": plan.error} if plan.error else {}))
            print(f"{plan.name} on {devices}: {plan.error or 'planned'}", flush=True)
    planned = sum(row["plan, ms"] is not None for row in rows)
    summary: dict[str, Any] = {"plans": planned}
    for name, found in ratios.items():
        if found:
            summary[name] = (
                f"median {median(found):.3f}, worst {max(found):.3f}, best {min(found):.3f}; {len(found)} fit"
            )
    return rows, summary


if __name__ == "__main__":
    arguments = parser(__doc__)
    arguments.add_argument("--only", default="core", help="models of the zoo by name or pattern")
    chosen = arguments.parse_args()
    table, facts = run(chosen)
    show(table, chosen.json, facts)
