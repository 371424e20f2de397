"""Are the best known values of published inputs reached, and proven? How far from the best are plans of wide graphs?

    python -m benchmarks.solver --instances FOLDER [--time-limit S] [--seeds N] [--only PART] [--json FILE]

A row for each input, rule and number of devices: the best known value, ours (from the plan alone, by a scorer that
shares no code with the solver), the proven bound, the gap, seconds, and the method that proved it.

    placements   `msr_*` at their published devices, and on 2 to 8 accelerators without a CPU
    profiles     `pipedream_*` under sum_load, where it is recorded; NASNet also with memory limits
    replicas     `pipedream_*` under PipeDream's rule and `piper_*` under Piper's (`benchmarks.published_splits`)
    wide         generated wide graphs (`benchmarks.wide_graphs`), N seeds, 4 and 8 stages

Exit status 1 if a recorded value is missed by more than 1e-6 (by accelerators alone: 0.1 %), a placement without a CPU
stays open above 0.1 % or takes more than 10 s, a profile stays above 0.1 %, or a wide graph above 0.3 %.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from autopart.solver.problem import Problem
from autopart.solver.score import score
from autopart.solver.search import Answer, search, search_any
from benchmarks import published_splits, wide_graphs
from benchmarks.instance_scorer import graph_load, max_load, sum_load
from benchmarks.instances import MAX_LOAD, SUM_LOAD, Instance, Known, read
from benchmarks.instances import max_load as placement
from benchmarks.instances import sum_load as profile
from benchmarks.output import parser, show

Row = dict[str, Any]

TOLERANCE = 1e-3
EXACT = 1e-6
ACCELERATORS = range(2, 9)
PLACEMENT_SECONDS = 10.0
WIDE_GAP = 3e-3
# Where memory is limited, a device has this share of what the best plan without limits needs.
TIGHT_SHARE = 0.95


def placements(options: argparse.Namespace) -> Iterator[Row]:
    for instance in read(options.instances, "msr_*.json"):
        known = [k for k in instance.known if k.rule == MAX_LOAD]
        published = sorted({(k.accelerators, k.cpus) for k in known if k.cpus})
        for accelerators, cpus in (*published, *((k, 0) for k in ACCELERATORS)):
            problems, item = placement(instance, accelerators, cpus)
            gap = TOLERANCE if cpus == 0 else EXACT
            start = time.perf_counter()
            which, answer = search_any(problems, gap, options.time_limit)
            seconds = time.perf_counter() - start
            where = _by_node(instance, item, answer)
            ours = None
            if where is not None:
                ours = max_load(instance.data, where, accelerators + cpus, which if cpus else None)
            here = [k for k in known if (k.accelerators, k.cpus) == (accelerators, cpus)]
            row = _row(
                instance, MAX_LOAD, f"{accelerators}+{cpus}" if cpus else accelerators, here, ours, answer, seconds
            )
            held = _reached(row, max(gap, EXACT)) and (cpus > 0 or (_closed(row, gap) and seconds <= PLACEMENT_SECONDS))
            yield row | {"held": held}


def profiles(options: argparse.Namespace) -> Iterator[Row]:
    for instance in read(options.instances, "pipedream_*.json"):
        for known in [k for k in instance.known if k.rule == SUM_LOAD]:
            assert known.bandwidth_bytes_per_s is not None
            problem, item = profile(instance, known.accelerators, known.bandwidth_bytes_per_s)
            answer, row = _profile(instance, item, SUM_LOAD, known, problem, options.time_limit)
            yield row | {"held": _closed(row, TOLERANCE) and _reached(row, TOLERANCE)}
            if "nasnet" in instance.name and answer.assignment is not None:
                tight = with_memory(problem, instance, item, answer.assignment)
                _, row = _profile(instance, item, f"{SUM_LOAD}, memory limits", known, tight, options.time_limit)
                yield row | {"known": None, "held": _closed(row, TOLERANCE)}


def _profile(
    instance: Instance, item: Sequence[int], rule: str, known: Known, problem: Problem, time_limit_s: float
) -> tuple[Answer, Row]:
    start = time.perf_counter()
    answer = search(problem, TOLERANCE, time_limit_s)
    seconds = time.perf_counter() - start
    where = _by_node(instance, item, answer)
    assert known.bandwidth_bytes_per_s is not None
    ours = None
    if where is not None:
        ours = sum_load(instance.data, where, known.accelerators, known.bandwidth_bytes_per_s)
    return answer, _row(instance, rule, known.accelerators, [known], ours, answer, seconds)


def with_memory(problem: Problem, instance: Instance, item: Sequence[int], plan: Sequence[int]) -> Problem:
    """Limits that this plan breaks: four times the parameters, and 1F1B's activations, the stages behind and itself."""
    parameters, activations = np.zeros(problem.items), np.zeros(problem.items)
    for node, i in zip(instance.data["nodes"], item, strict=True):
        parameters[i] += 4 * node["param_bytes"]
        activations[i] += node["act_bytes"]
    saved = parameters + np.outer(np.arange(problem.stages, 0, -1.0), activations)
    unlimited = dataclasses.replace(problem, saved=saved)
    limit = TIGHT_SHARE * score(unlimited, plan).memory.max()
    return dataclasses.replace(unlimited, limits=np.full(problem.stages, limit))


def replicas(options: argparse.Namespace) -> Iterator[Row]:
    for file in sorted(options.instances.glob("pi*.json")):
        for row in published_splits.rows_of(file):
            yield {
                "input": row["input"],
                "nodes": "",
                "rule": row["rule"],
                "k": row["devices"],
                "known": row["recorded"],
                "ours": row["ours"],
                "bound": row["ours"] * (1 - row["gap"]),
                "gap": row["gap"],
                "s": row["seconds"],
                "proved by": "dynamic programming over down-sets",
                "held": row["verdict"] != "worse",
            }


def wide(options: argparse.Namespace) -> Iterator[Row]:
    families = list(wide_graphs.FAMILIES)
    for seed in range(options.seeds):
        family = families[seed % len(families)]
        size = wide_graphs.SIZES[family][seed // len(families) % len(wide_graphs.SIZES[family])]
        graph = wide_graphs.FAMILIES[family](size, seed)
        named = Instance(f"{family} {size}, seed {seed}", {"nodes": graph.inputs})
        for stages in (4, 8):
            problem = wide_graphs.as_problem(graph, stages)
            start = time.perf_counter()
            answer = search(problem, TOLERANCE, options.time_limit)
            seconds = time.perf_counter() - start
            assert answer.assignment is not None, "memory is not limited"
            ours = graph_load(
                graph.time_s, graph.output_bytes, graph.inputs, answer.assignment, stages, wide_graphs.BYTES_PER_S
            )
            row = _row(named, SUM_LOAD, stages, [], ours, answer, seconds)
            yield row | {"held": _closed(row, WIDE_GAP)}


PARTS: dict[str, Callable[[argparse.Namespace], Iterator[Row]]] = {
    "placements": placements,
    "profiles": profiles,
    "replicas": replicas,
    "wide": wide,
}


def _by_node(instance: Instance, item: Sequence[int], answer: Answer) -> dict[Any, int] | None:
    """The stage of each node, by its id."""
    if answer.assignment is None:
        return None
    return {node["id"]: answer.assignment[i] for node, i in zip(instance.data["nodes"], item, strict=True)}


def _row(
    instance: Instance,
    rule: str,
    devices: int | str,
    known: Sequence[Known],
    ours: float | None,
    answer: Answer,
    seconds: float,
) -> Row:
    return {
        "input": instance.name,
        "nodes": len(instance.data["nodes"]),
        "rule": rule,
        "k": devices,
        "known": min((k.value for k in known if k.value is not None), default=None),
        "ours": ours,
        "bound": answer.bound,
        "gap": None if ours is None else max(0.0, 1 - answer.bound / ours),
        "s": seconds,
        "proved by": answer.method if answer.stopped_by == "proof" else f"open ({answer.stopped_by})",
    }


def _reached(row: Row, gap: float) -> bool:
    """No worse than the best known value by more than `gap`."""
    return row["known"] is None or (row["ours"] is not None and row["ours"] <= row["known"] * (1 + gap))


def _closed(row: Row, gap: float) -> bool:
    """Proven to this gap; or proven that nothing fits."""
    return row["bound"] == float("inf") if row["ours"] is None else bool(row["gap"] <= gap)


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--instances", type=Path, required=True, help="folder of inputs in schema autopart-bench/1")
    options.add_argument("--time-limit", type=float, default=60.0, metavar="S", help="of each search (60 s)")
    options.add_argument("--seeds", type=int, default=6, metavar="N", help="of wide graphs (6)")
    options.add_argument("--only", choices=list(PARTS), help="one part instead of all")
    arguments = options.parse_args()
    rows: list[Row] = []
    summary: dict[str, Any] = {}
    for name, part in PARTS.items():
        if arguments.only in (None, name):
            own = []
            for row in part(arguments):
                own.append(row)
                print(f"{row['input']}, {row['rule']}, {row['k']}: {row['ours']}, {row['s']:.1f} s", flush=True)
            rows += own
            gaps = [row["gap"] for row in own if row["gap"] is not None]
            summary[name] = (
                f"{sum(row['held'] for row in own)} of {len(own)} hold; largest gap {max(gaps, default=0.0):.3%}, "
                f"slowest {max((row['s'] for row in own), default=0.0):.1f} s"
            )
    show(rows, arguments.json, summary)
    sys.exit(0 if all(row["held"] for row in rows) else 1)


if __name__ == "__main__":
    main()
